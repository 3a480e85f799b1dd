// Matrix products of one warp on tensor cores: d += a b with d [16, 8], a [16, depth], b [depth, 8] spread over the
// lanes as PTX documents for mma.m16n8k8 (tf32) and mma.m16n8k16 (bf16, f16), all "row.col" with float accumulators.
//
// A register of a or b holds one tf32 number, or two neighbours along the depth, the first in the low half.
//   d[i]   row mma_row(i)                    column mma_column(i)
//   a[i]   row mma_a_row(i)                  depth  mma_a_depth<T>(i) (and the next)
//   b[i]   depth mma_b_depth<T>(i) (and the next)   column mma_b_column()
//
// In words of 32 bits a tile of a is [16, 8] and one of b, with the depth along its rows, [8, 8], whatever T:
// mma_load_a and mma_load_b take them from shared memory, `stride` words from row to row; rows start at multiples of 16
// bytes. A stride of 4 more than a multiple of 8 keeps the rows in different banks.
//
// Accuracy: products are exact; the hardware aligns them and the accumulator to the largest and keeps 24 bits of it, so
// a product of depth k errs by at most (k + 2) 2^-23 (|d| + sum_l |a_l b_l|). A norm carries that upward.
#pragma once

#include <type_traits>

#include "common/launch.h"

#ifndef __CUDACC__
#include "simt/matrix.h"
#endif

namespace dpk {

template <typename T>
constexpr int kMmaDepth = 16;
template <>
constexpr int kMmaDepth<tf32> = 8;

__device__ __forceinline__ int mma_row(int i) { return threadIdx.x % 32 / 4 + i / 2 * 8; }
__device__ __forceinline__ int mma_column(int i) { return threadIdx.x % 4 * 2 + i % 2; }
__device__ __forceinline__ int mma_a_row(int i) { return threadIdx.x % 32 / 4 + i % 2 * 8; }
template <typename T>
__device__ __forceinline__ int mma_a_depth(int i) {
  return threadIdx.x % 4 * (kMmaDepth<T> / 8) + i / 2 * (kMmaDepth<T> / 2);
}
template <typename T>
__device__ __forceinline__ int mma_b_depth(int i) {
  return threadIdx.x % 4 * (kMmaDepth<T> / 8) + i * (kMmaDepth<T> / 2);
}
__device__ __forceinline__ int mma_b_column() { return threadIdx.x % 32 / 4; }

// The register of a or b for x, rounded to nearest, ties away from zero.
__device__ __forceinline__ uint32_t to_tf32(float x) {
#ifdef __CUDACC__
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
#else
  const uint32_t bits = bit_cast<uint32_t>(x);
  return (bits & 0x7f800000) == 0x7f800000 ? bits : (bits + 0x1000) & 0xffffe000;
#endif
}

// The register of a or b for two neighbours along the depth.
template <typename T>
__device__ __forceinline__ uint32_t pack(T first, T second) {
  return first.bits | static_cast<uint32_t>(second.bits) << 16;
}

// Registers of a tile in shared memory, by all 32 lanes together: a row's address comes from one lane each.
__device__ __forceinline__ void mma_load_a(uint32_t (&a)[4], const Shared<const uint32_t>& tile, int stride) {
  const int lane = threadIdx.x % 32, from = lane % 16 * stride + lane / 16 * 4;
#ifdef __CUDACC__
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(tile + from));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
#else
  tile.offset(from, 16, 16);  // checks what this lane would read
  for (int i = 0; i < 4; ++i) a[i] = tile[mma_a_row(i) * stride + lane % 4 + i / 2 * 4];
#endif
}

__device__ __forceinline__ void mma_load_b(uint32_t (&b)[2], const Shared<const uint32_t>& tile, int stride) {
  const int lane = threadIdx.x % 32, from = lane % 8 * stride + lane / 8 % 2 * 4;
#ifdef __CUDACC__
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(tile + from));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(b[0]), "=r"(b[1])
               : "r"(address)
               : "memory");
#else
  tile.offset(from, 16, 16);
  for (int i = 0; i < 2; ++i) b[i] = tile[mma_b_column() * stride + lane % 4 + i * 4];
#endif
}

// All 32 lanes call it together. It does not order memory.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef __CUDACC__
#define DPK_MMA(shape, type)                                                          \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." type "." type                \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  if constexpr (std::is_same_v<T, tf32>)
    DPK_MMA("m16n8k8", "tf32");
  else if constexpr (std::is_same_v<T, bfloat16>)
    DPK_MMA("m16n8k16", "bf16");
  else
    DPK_MMA("m16n8k16", "f16");
#undef DPK_MMA
#else
  if constexpr (std::is_same_v<T, tf32>)
    simt::matrix_product<8>(d, a, b, [](uint32_t bits, int) { return bit_cast<float>(bits & 0xffffe000); });
  else
    simt::matrix_product<16>(
        d, a, b, [](uint32_t bits, int second) { return widen(T{static_cast<uint16_t>(second ? bits >> 16 : bits)}); });
#endif
}

}  // namespace dpk
