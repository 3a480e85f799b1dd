// CUDA's vocabulary on the machine: what a kernel's source finds when a C++ compiler reads it. Blocks are whole warps,
// and operations of a warp name all of its lanes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simt/arithmetic.h"
#include "simt/machine.h"
#include "simt/shared.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (::dpk::simt::machine.self->index)
#define blockIdx (::dpk::simt::machine.block_index)
#define blockDim (::dpk::simt::machine.block_size)
#define gridDim (::dpk::simt::machine.grid_size)
constexpr int warpSize = 32;

// Vector types and their makers.
#define DPK_SIMT_VECTORS(T, name, alignment)                 \
  struct alignas(sizeof(T) * 2) name##2 { T x, y; };         \
  struct alignas(alignment) name##4 { T x, y, z, w; };       \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
DPK_SIMT_VECTORS(float, float, 16)
DPK_SIMT_VECTORS(double, double, 16)
DPK_SIMT_VECTORS(int, int, 16)
DPK_SIMT_VECTORS(unsigned, uint, 16)
DPK_SIMT_VECTORS(unsigned short, ushort, 8)
#undef DPK_SIMT_VECTORS

// Barriers, and votes of a block.
inline void __syncthreads(dpk::simt::Where where = dpk::simt::Where::current()) {
  dpk::simt::machine.wait(dpk::simt::State::kBlockBarrier, where);
}
inline int __syncthreads_count(int predicate, dpk::simt::Where where = dpk::simt::Where::current()) {
  dpk::simt::machine.counted += predicate != 0;
  dpk::simt::machine.wait(dpk::simt::State::kBlockBarrier, where);
  return static_cast<int>(dpk::simt::machine.count);
}
inline int __syncthreads_or(int predicate, dpk::simt::Where where = dpk::simt::Where::current()) {
  return __syncthreads_count(predicate, where) != 0;
}
inline int __syncthreads_and(int predicate, dpk::simt::Where where = dpk::simt::Where::current()) {
  return __syncthreads_count(!predicate, where) == 0;
}
inline void __syncwarp(uint32_t mask = 0xffffffffu, dpk::simt::Where where = dpk::simt::Where::current()) {
  if (mask != 0xffffffffu) dpk::simt::machine.fault("__syncwarp must name all 32 lanes in its mask", where);
  dpk::simt::machine.wait(dpk::simt::State::kWarpBarrier, where);
}
inline void __threadfence() {}  // blocks run one after another
inline void __threadfence_block() {}

// Shuffles. A lane reads within its segment of `width` lanes; beyond it, its own value.
template <typename T>
T __shfl_sync(uint32_t mask, T value, int lane, int width = 32, dpk::simt::Where where = dpk::simt::Where::current()) {
  const int self = static_cast<int>(dpk::simt::machine.self->lane);
  return dpk::simt::exchange(mask, value, where)[self / width * width + lane % width];
}
template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32,
                  dpk::simt::Where where = dpk::simt::Where::current()) {
  const int self = static_cast<int>(dpk::simt::machine.self->lane), from = self ^ bits;
  // A lane may read earlier segments but none behind its own.
  return dpk::simt::exchange(mask, value, where)[from < (self / width + 1) * width ? from : self];
}
template <typename T>
T __shfl_down_sync(uint32_t mask, T value, unsigned by, int width = 32,
                   dpk::simt::Where where = dpk::simt::Where::current()) {
  const int self = static_cast<int>(dpk::simt::machine.self->lane), from = self + static_cast<int>(by);
  return dpk::simt::exchange(mask, value, where)[from / width == self / width ? from : self];
}
template <typename T>
T __shfl_up_sync(uint32_t mask, T value, unsigned by, int width = 32,
                 dpk::simt::Where where = dpk::simt::Where::current()) {
  const int self = static_cast<int>(dpk::simt::machine.self->lane), from = self - static_cast<int>(by);
  return dpk::simt::exchange(mask, value, where)[from >= self / width * width ? from : self];
}

// Votes of a warp.
inline unsigned __ballot_sync(uint32_t mask, int predicate, dpk::simt::Where where = dpk::simt::Where::current()) {
  const auto given = dpk::simt::exchange(mask, predicate != 0, where);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane) votes |= static_cast<unsigned>(given[lane]) << lane;
  return votes;
}
inline int __any_sync(uint32_t mask, int predicate, dpk::simt::Where where = dpk::simt::Where::current()) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(uint32_t mask, int predicate, dpk::simt::Where where = dpk::simt::Where::current()) {
  return __ballot_sync(mask, predicate, where) == 0xffffffffu;
}
template <typename T>
unsigned __match_any_sync(uint32_t mask, T value, dpk::simt::Where where = dpk::simt::Where::current()) {
  const auto given = dpk::simt::exchange(mask, value, where);
  unsigned equal = 0;
  for (unsigned lane = 0; lane < 32; ++lane) equal |= static_cast<unsigned>(given[lane] == value) << lane;
  return equal;
}

// Atomic operations: on global memory by pointer, on shared memory by view (s + i). Fibers do not preempt each other.
#define DPK_SIMT_ATOMIC(name, after)                                    \
  template <typename T>                                                 \
  T name(T* to, std::type_identity_t<T> value) {                        \
    const T before = *to;                                               \
    *to = after;                                                        \
    return before;                                                      \
  }                                                                     \
  template <typename T>                                                 \
  T name(const dpk::simt::Shared<T>& to, std::type_identity_t<T> value, \
         dpk::simt::Where where = dpk::simt::Where::current()) {        \
    return to.atomic([&](T before) -> T { return after; }, where);      \
  }
DPK_SIMT_ATOMIC(atomicAdd, before + value)
DPK_SIMT_ATOMIC(atomicMax, std::max(before, value))
DPK_SIMT_ATOMIC(atomicMin, std::min(before, value))
DPK_SIMT_ATOMIC(atomicExch, value)
DPK_SIMT_ATOMIC(atomicOr, before | value)
#undef DPK_SIMT_ATOMIC
template <typename T>
T atomicCAS(T* to, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  const T before = *to;
  if (before == expected) *to = value;
  return before;
}
