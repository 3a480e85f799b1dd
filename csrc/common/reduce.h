// Sums over lanes and threads of a block, for float and double. Always added in one order: the same values give the
// same bits.
#pragma once

#include "common/launch.h"

namespace dpk {

// The sum over each segment of kWidth lanes, in every one of its lanes.
template <int kWidth = 32, typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int bits = kWidth / 2; bits > 0; bits /= 2) value += __shfl_xor_sync(kAllLanes, value, bits);
  return value;
}

// Replaces each of the values by its sum over the block of kThreads, in every thread. scratch: kThreads / 32 * kValues
// elements, free before and after (it ends with a barrier).
template <int kThreads, int kValues, typename T>
__device__ __forceinline__ void block_sums(T (&values)[kValues], Shared<T> scratch) {
  constexpr int kWarps = kThreads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    const T sum = warp_sum(values[v]);
    if (lane == 0) scratch[v * kWarps + warp] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < kValues; ++v) {
    T sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += scratch[v * kWarps + w];
    values[v] = sum;
  }
  __syncthreads();
}

template <int kThreads, typename T>
__device__ __forceinline__ T block_sum(T value, Shared<T> scratch) {
  T values[1] = {value};
  block_sums<kThreads>(values, scratch);
  return values[0];
}

}  // namespace dpk
