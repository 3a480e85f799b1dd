// Convolutions in three spatial dimensions (fewer are lifted):
//   y[o, t] = sum_{c, k} W[o, c, k] x[c, t stride + k dilation - padding],
// so the weight gradient of one example is
//   G[o, c, k] = sum_t g[o, t] x[c, t stride + k dilation - padding].
// A transposed convolution is the same with the roles of input and output gradient swapped.
#pragma once

#include <cstdint>

#include "common/conv_shape.h"
#include "common/scalar.h"

struct CUstream_st;  // a CUDA stream is a pointer to it

namespace dpk {

// How a squared norm is computed.
enum class ConvStrategy : int64_t {
  kAuto = 0,    // the cheaper way by the device's cost model in plan.h
  kDirect = 1,  // the gradient itself, tile by tile
  kGram = 2,    // products of pairs of positions
};

template <typename T>
struct ConvNormParams {
  ConvShape shape;
  const T* input;         // [batch, in_channels, *in]; null: the weight does not count
  const T* output_grads;  // [batch, out_channels, *out]
  ConvLayout input_layout, output_layout;
  const T* bias_source;  // [batch, bias_channels, bias_positions]; null: the bias does not count
  ConvLayout bias_layout;
  int64_t bias_channels, bias_positions;
  double* squared_norms;   // [batch]
  acc_t<T>* weight_grads;  // [batch, rows, out_channels] or null; the norm is then of these very numbers
  double* bias_grads;      // [batch, bias_channels]
  ConvStrategy strategy;   // on the CPU, not kAuto
  // Of the device alone:
  double* scratch = nullptr;  // [conv_norm_scratch(*this)]
  bool tf32 = false;          // floats may be rounded to tf32
};

template <typename T>
struct ConvSumParams {
  ConvShape shape;
  const T* input;         // [batch, in_channels, *in]
  const T* output_grads;  // [batch, out_channels, *out]
  ConvLayout input_layout, output_layout;
  const double* weights;  // [batch]; an example of weight 0 is skipped
  const bool* wide;       // [batch]; accumulated in double: from conv_wide_examples_cpu
  double* partial_sums;   // [slices, out_channels, rows]
  // Of the device alone, which needs no `wide` and takes [conv_sum_scratch(*this)] partial sums:
  double* sum = nullptr;  // [out_channels, rows]
  bool tf32 = false;      // floats may be rounded to tf32
};

template <typename T>
struct ConvBiasSumParams {
  const T* source;  // [batch, channels, positions]
  ConvLayout layout;
  const double* weights;  // [batch]; an example of weight 0 is skipped
  double* sum;            // [channels]
  int64_t batch, channels, positions;
  double* scratch = nullptr;  // [batch, channels], of the device alone
};

// Squared gradient norms of the examples begin <= b < end, never below those of what the clipped sums add.
template <typename T>
void conv_squared_norms_cpu(const ConvNormParams<T>& params, int64_t begin, int64_t end);

// Which of the examples begin <= b < end hold values whose products could leave the range of T.
template <typename T>
void conv_wide_examples_cpu(const ConvSumParams<T>& params, bool* wide, int64_t begin, int64_t end);

// Clipped sums for the tasks begin <= task < end, one for each block and slice of ConvSumGrid (plan.h). The sum over
// slices is the result.
template <typename T>
void conv_clipped_sums_cpu(const ConvSumParams<T>& params, int64_t begin, int64_t end);

// Clipped sums of the bias gradient for the channels begin <= c < end.
template <typename T>
void conv_bias_sums_cpu(const ConvBiasSumParams<T>& params, int64_t begin, int64_t end);

// The whole batch on the device. T: float, double, bfloat16, half. A norm is never below that of what the sum adds if
// both are told the same of tf32.
template <typename T>
void conv_squared_norms_cuda(const ConvNormParams<T>& params, CUstream_st* stream);
template <typename T>
void conv_clipped_sums_cuda(const ConvSumParams<T>& params, CUstream_st* stream);
template <typename T>
void conv_bias_sums_cuda(const ConvBiasSumParams<T>& params, CUstream_st* stream);

// Numbers of doubles that they need to work in.
template <typename T>
int64_t conv_norm_scratch(const ConvNormParams<T>& params);
template <typename T>
int64_t conv_sum_scratch(const ConvSumParams<T>& params);

}  // namespace dpk
