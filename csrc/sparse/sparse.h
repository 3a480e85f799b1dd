// Selected entries of the weight gradients of a convolution, of every example:
//   G[b, n] = sum_t g[b, o, t] x[b, c, t stride + k dilation - padding]   for the n-th selected entry (o, c, k),
// a product of two dense operands sampled where the mask of the weight is set. A linear layer is a convolution of one
// tap over its positions. Norms and clipped sums are those of stored gradients (clip/), so of these very numbers.
#pragma once

#include <cstdint>

#include "common/conv_shape.h"
#include "common/scalar.h"

struct CUstream_st;  // a CUDA stream is a pointer to it

namespace dpk {

template <typename T>
struct SparseParams {
  ConvShape shape;
  const T* input;         // [batch, in_channels, *in]
  const T* output_grads;  // [batch, out_channels, *out]
  ConvLayout input_layout, output_layout;
  const int64_t* entries;  // [selected], each of [0, out_channels * rows), in the flattened weight [out_channels, rows]
  int64_t selected;
  acc_t<T>* gradients;  // [batch, selected]
};

// Gradients of the examples begin <= b < end. Whatever other examples or entries are asked for, the bits are the same.
template <typename T>
void sparse_gradients_cpu(const SparseParams<T>& params, int64_t begin, int64_t end);

// The whole batch on the device. T: float, double, bfloat16, half.
template <typename T>
void sparse_gradients_cuda(const SparseParams<T>& params, CUstream_st* stream);

}  // namespace dpk
