// Linear layers: y_t = W a_t + b, so the gradient of one example is sum_t g_t a_t^T for the weight and sum_t g_t for
// the bias.
#pragma once

#include <cstdint>

#include "common/scalar.h"

struct CUstream_st;  // a CUDA stream is a pointer to it

namespace dpk {

template <typename T>
struct LinearNormParams {
  const T* activations;   // [batch, positions, in_features]
  const T* output_grads;  // [batch, positions, out_features]
  double* squared_norms;  // [batch]
  int64_t positions, in_features, out_features;
  bool weight, bias;  // which parameters count
  // Of the device alone:
  double* scratch = nullptr;  // [linear_norm_scratch(*this, batch)]
  bool tf32 = false;          // floats may be rounded to tf32
};

template <typename T>
struct LinearSumParams {
  const T* activations;   // [batch, positions, in_features]
  const T* output_grads;  // [batch, positions, out_features]
  const double* weights;  // [batch]; an example of weight 0 is skipped
  double* weight_sum;     // [out_features, in_features] or null
  double* bias_sum;       // [out_features] or null
  int64_t batch, positions, in_features, out_features;
  // Of the device alone:
  double* scratch = nullptr;  // [linear_sum_scratch(*this)]
  bool tf32 = false;          // floats may be rounded to tf32
};

template <typename T>
struct LinearForwardParams {
  const T* activations;  // [rows, in_features]
  const T* weight;       // [out_features, in_features]
  const T* bias;         // [out_features] or null
  T* outputs;            // [rows, out_features]
  double* squared_rows;  // [rows], squared norms of the activations
  int64_t in_features, out_features;
};

// Outputs and squared row norms of the rows begin <= r < end, from one read of the activations.
template <typename T>
void linear_forward_cpu(const LinearForwardParams<T>& params, int64_t begin, int64_t end);

// Squared gradient norms of the examples begin <= b < end: never below that of what the sums add.
template <typename T>
void linear_squared_norms_cpu(const LinearNormParams<T>& params, int64_t begin, int64_t end);

// Clipped sums for the tasks begin <= task < end, of linear_sum_tasks in all.
template <typename T>
void linear_clipped_sums_cpu(const LinearSumParams<T>& params, int64_t begin, int64_t end);

int64_t linear_sum_tasks(int64_t in_features, int64_t out_features);

// The whole batch on the device. T: float, double, bfloat16, half. A norm is never below that of what the sum adds if
// both are told the same of tf32.
template <typename T>
void linear_forward_cuda(const LinearForwardParams<T>& params, int64_t rows, CUstream_st* stream);
template <typename T>
void linear_squared_norms_cuda(const LinearNormParams<T>& params, int64_t batch, CUstream_st* stream);
template <typename T>
void linear_clipped_sums_cuda(const LinearSumParams<T>& params, CUstream_st* stream);

// Numbers of doubles that they need to work in.
template <typename T>
int64_t linear_norm_scratch(const LinearNormParams<T>& params, int64_t batch);
template <typename T>
int64_t linear_sum_scratch(const LinearSumParams<T>& params);

}  // namespace dpk
