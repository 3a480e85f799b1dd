// Clipping: an example's weight from its squared norms, and norms and weighted sums of stored per-example gradients.
#pragma once

#include <cstdint>

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
};

template <typename T>
struct RowSumParams {
  const T* const* rows;   // [kept] pointers to [size]
  const double* weights;  // [kept]
  double* sum;            // [size]
  int64_t kept, size;
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

}  // namespace dpk
