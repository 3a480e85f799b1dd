// Affine normalization: y = weight * xhat + bias with xhat = (x - mean) * rstd, so the gradient of one example is, for
// each channel, the sum over its positions of g xhat for the weight and of g for the bias. The layer's own backward
// needs the same sums, so one operator yields both: the input's gradient and the per-example parameter gradients, which
// are small enough to be kept.
#pragma once

#include <cstdint>

#include "common/scalar.h"

struct CUstream_st;  // a CUDA stream is a pointer to it

namespace dpk {

// Statistics of a group of channels of one example (group and instance norm), or given from outside (batch norm in eval
// mode, as many groups as channels).
template <typename T>
struct GroupNormParams {
  const T* x;             // [batch, channels, spatial]
  const T* output_grads;  // [batch, channels, spatial]
  const acc_t<T>* mean;   // [batch, groups]
  const acc_t<T>* rstd;   // [batch, groups]
  const T* weight;        // [channels], or null for ones
  T* input_grads;         // [batch, channels, spatial], or null
  double* weight_grads;   // [batch, channels]
  double* bias_grads;     // [batch, channels]
  int64_t channels, groups, spatial;
  bool fixed;  // the statistics do not depend on x
};

// Statistics of each position over its features (layer norm, and RMS norm, which subtracts no mean).
template <typename T>
struct LayerNormParams {
  const T* x;             // [batch, positions, features]
  const T* output_grads;  // [batch, positions, features]
  const acc_t<T>* mean;   // [batch, positions], or null for RMS norm
  const acc_t<T>* rstd;   // [batch, positions]
  const T* weight;        // [features], or null for ones
  T* input_grads;         // [batch, positions, features], or null
  double* weight_grads;   // [batch, features]
  double* bias_grads;     // [batch, features]
  int64_t positions, features;
};

// (example, group) pairs begin <= task < end, of batch * groups in all.
template <typename T>
void group_norm_backward_cpu(const GroupNormParams<T>& params, int64_t begin, int64_t end);

// Examples begin <= b < end of maps that lie with their channels last: x, output_grads and input_grads are
// [batch, spatial, channels].
template <typename T>
void group_norm_last_backward_cpu(const GroupNormParams<T>& params, int64_t begin, int64_t end);

// Examples begin <= b < end.
template <typename T>
void layer_norm_backward_cpu(const LayerNormParams<T>& params, int64_t begin, int64_t end);

// The whole batch on the device. T: float, bfloat16, half.
template <typename T>
void group_norm_backward_cuda(const GroupNormParams<T>& params, int64_t batch, CUstream_st* stream);
template <typename T>
void layer_norm_backward_cuda(const LayerNormParams<T>& params, int64_t batch, CUstream_st* stream);

}  // namespace dpk
