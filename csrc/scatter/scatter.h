// The scattering transform of order two: order 0, 1 and 2 of every image plane (Bruna & Mallat 2013).
#pragma once

#include <cstdint>

#include "common/host_device.h"

struct CUstream_st;  // a CUDA stream is a pointer to it

namespace dpk {

constexpr int64_t kMaxScatterScales = 16;

// H = padded_height, W = padded_width, both multiples of 2^scales. Resolution r has H >> r by W >> r pixels. Wavelets
// are numbered by scale j and angle, n = j * angles + angle; those of resolution r are real Fourier transforms of the
// first order (r = 0: all) and of the second (j > r), `first` being the smallest j among them.
template <typename T>
struct ScatterParams {
  const T* images;  // [planes, height, width]
  // For each of the scales, pointers to
  const T* wavelets[kMaxScatterScales];  // [(scales - first) * angles, H >> r, W >> r]
  const T* rows[kMaxScatterScales];      // [out_height, H >> r]: low pass, subsampling and cropping of columns
  const T* columns[kMaxScatterScales];   // [out_width, W >> r]: the same of rows
  const int64_t* row_source;             // [H] the row of the image that a padded row repeats
  const int64_t* column_source;          // [W]
  T* features;                           // [planes, scatter_channels, out_height, out_width]
  int64_t planes, height, width, padded_height, padded_width, out_height, out_width, scales, angles;
};

// Order 0, then a channel for each wavelet, then one for each pair of wavelets of increasing scale.
DPK_HOST_DEVICE constexpr int64_t scatter_channels(int64_t scales, int64_t angles) {
  return 1 + scales * angles + scales * (scales - 1) / 2 * angles * angles;
}

// The smallest scale among the wavelets of resolution r.
DPK_HOST_DEVICE constexpr int64_t scatter_first(int64_t resolution) { return resolution == 0 ? 0 : resolution + 1; }

// Features of the groups begin <= g < end of kScatterGroup planes each.
constexpr int64_t kScatterGroup = 16;  // fills the widest vector of floats
template <typename T>
void scatter_cpu(const ScatterParams<T>& params, int64_t begin, int64_t end);

// The whole batch on the device. T: float, double. A plane's work fits into kScatterSharedBytes of shared memory, or
// the launch is refused.
constexpr int64_t kScatterSharedBytes = 163 << 10;  // of a block of sm_80
template <typename T>
int64_t scatter_shared_bytes(const ScatterParams<T>& params);
template <typename T>
void scatter_cuda(const ScatterParams<T>& params, CUstream_st* stream);

}  // namespace dpk
