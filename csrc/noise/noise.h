// Random words and Gaussian noise from a ChaCha20 stream (common/rng.h).
#pragma once

#include <cstdint>

#include "common/rng.h"

struct CUstream_st;  // a CUDA stream is a pointer to it

namespace dpk {

template <typename T>
struct StreamParams {
  Stream stream;
  int64_t offset, count;  // the indices offset <= i < offset + count
  double scale;           // of integers: the standard deviation in units of the grid
  double unit;            // what an integer is multiplied with: the grid
  T* out;                 // [count]
};

// All three fill the values whose indices lie in the groups begin <= g < end, counted from that of `offset`.
inline int64_t stream_groups(int64_t offset, int64_t count) {
  return count == 0 ? 0 : (offset + count - 1) / kGroupWords - offset / kGroupWords + 1;
}
void random_bits_cpu(const StreamParams<int64_t>& params, int64_t begin, int64_t end);
void gaussian_cpu(const StreamParams<double>& params, int64_t begin, int64_t end);
void grid_gaussian_cpu(const StreamParams<double>& params, int64_t begin, int64_t end);

// The whole range on the device. device_key: null, or a key on the device that stands for that of params.stream: 32
// bytes, its words in little-endian order.
void random_bits_cuda(const StreamParams<int64_t>& params, const uint8_t* device_key, CUstream_st* stream);
void gaussian_cuda(const StreamParams<double>& params, const uint8_t* device_key, CUstream_st* stream);
void grid_gaussian_cuda(const StreamParams<double>& params, const uint8_t* device_key, CUstream_st* stream);

// Pairs of normals from given words, for tests: what vector code and what double-double make of them.
struct BoxMullerParams {
  const uint64_t* words;  // [pairs, 4]: n, m, x, y of common/exact_normal.h
  double* exact;          // [pairs, 2, 2]: both normals as high and low parts
  double* fast;           // [pairs, 2]; NaN where vector code leaves the pair to double-double
};
void box_muller_cpu(const BoxMullerParams& params, int64_t begin, int64_t end);

}  // namespace dpk
