// Clipping: an example's weight from its squared norms, and norms and weighted sums of stored per-example gradients.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/scalar.h"

struct CUstream_st;  // a CUDA stream is a pointer to it

namespace dpk {

struct ClipFactorParams {
  const double* const* squared_norms;  // [parts] pointers to [batch]
  double* weights;                     // [batch]
  double* norms;                       // [batch]
  int64_t parts;
  double max_grad_norm;  // may be infinite
  double loss_scale;
};

template <typename T>
struct RowNormParams {
  const T* per_example;   // [batch, size]
  double* squared_norms;  // [batch]
  int64_t size;
  double* partials = nullptr;  // [batch, row_norm_splits(size)], scratch memory of the device
};

// Parts of a long row that blocks of the device sum beside each other.
inline int64_t row_norm_splits(int64_t size) {
  constexpr int64_t kWorthABlock = 1 << 16, kMost = 1024;
  return std::clamp<int64_t>(size / kWorthABlock, 1, kMost);
}

template <typename T>
struct RowSumParams {
  const T* const* rows;   // [kept] pointers to [size]
  const double* weights;  // [kept]
  double* sum;            // [size]
  int64_t kept, size;
};

// On the device, where weights are known to kernels alone.
template <typename T>
struct DenseRowSumParams {
  const T* per_example;   // [batch, size]
  const double* weights;  // [batch]; rows of weight 0 are skipped
  double* sum;            // [size]
  int64_t batch, size;
};

// Weights and norms of the examples begin <= b < end.
void clip_factors_cpu(const ClipFactorParams& params, int64_t begin, int64_t end);

// Squared norms of the rows begin <= b < end, rounded upward.
template <typename T>
void row_squared_norms_cpu(const RowNormParams<T>& params, int64_t begin, int64_t end);

// The blocks begin <= k < end of kRowSumBlock columns each of the weighted sum.
constexpr int64_t kRowSumBlock = 1024;  // 8 KiB of sums stay in the first-level cache while all rows pass
template <typename T>
void weighted_row_sum_cpu(const RowSumParams<T>& params, int64_t begin, int64_t end);

// The same on the device. squared_norms is read before the launch: an array of the host of pointers of the device.
// T: float, double, bfloat16, half.
void clip_factors_cuda(const ClipFactorParams& params, int64_t batch, CUstream_st* stream);
template <typename T>
void row_squared_norms_cuda(const RowNormParams<T>& params, int64_t batch, CUstream_st* stream);
template <typename T>
void weighted_row_sum_cuda(const DenseRowSumParams<T>& params, CUstream_st* stream);

}  // namespace dpk
