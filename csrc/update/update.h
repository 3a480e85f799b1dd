// From clipped sums to parameters in one pass: noise, mean, and the optimizer's update.
#pragma once

#include <cstdint>

#include "common/rng.h"

struct CUstream_st;  // a CUDA stream is a pointer to it

namespace dpk {

enum class UpdateRule { kMean, kSgd, kAdam };

// What values that are neither double nor float are; on the device alone.
enum class Narrow : uint8_t { kNot, kBfloat16, kHalf };

// One parameter; its values are double if `wide`, else float or `narrow`. Unused pointers are null.
struct UpdateTensor {
  void* parameter;       // [size]; for kMean what receives the noised mean
  const double* sum;     // [size], the clipped sum
  void* first_moment;    // [size], momentum buffer or running mean
  void* second_moment;   // [size], running mean of squares
  void* largest_second;  // [size], its maximum so far (AMSGrad)
  int64_t begin, end;    // indices of its values among all of this step, and in the noise's stream
  double rate;           // learning rate; for Adam divided by 1 - beta1^t
  double decay;          // weight decay added to the gradient
  double shrink;         // what the parameter is multiplied with first: decoupled weight decay
  double keep_first;     // momentum or beta1
  double add_first;      // 1 - dampening or 1 - beta1
  double keep_second;    // beta2
  double second_unbias;  // 1 / sqrt(1 - beta2^t)
  double epsilon;
  bool wide, nesterov, overwrite_first;  // the last: the momentum buffer starts as the gradient
  Narrow narrow = Narrow::kNot;
};

struct UpdateParams {
  const UpdateTensor* tensors;  // [count], in the order of their indices
  int64_t count;
  UpdateRule rule;
  double denominator;
  Stream stream;
  double noise_std, grid;  // noise_std 0: neither noise nor rounding
};

// Updates the values whose indices lie in the groups of kGroupWords begin <= g < end.
void update_cpu(const UpdateParams& params, int64_t begin, int64_t end);

// Updates all values on the device. `tensors` is read on the host, before this returns; its pointers are the device's.
void update_cuda(const UpdateParams& params, CUstream_st* stream);

}  // namespace dpk
