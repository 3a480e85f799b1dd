// Squared norms of an example's weight gradient (product_shape.cuh) from pairs of positions, for small maps of many
// channels:
//   ||G||^2 = sum_{t, t'} A[t, t'] B[t, t'],   A[t, t'] = sum_taps P[pixel(t, tap), pixel(t', tap)],
//   P = x^T x over the pixels of the map, B = g^T g over the positions.
// A block owns an example and computes P and B, at most 64 x 64, on tensor cores; P goes through shared memory to be
// summed over taps. Operations: 2 (pixels^2 channels + positions^2 outputs) and positions^2 taps reads of shared
// memory, instead of 2 positions rows outputs. Both operands are read once.
//
// Such a sum cancels, and its rounding must not make a norm too small. With S = sum_t ||x_t|| ||g_t|| (x_t the unfolded
// input), an error of e_A ||x_t|| ||x_t'|| in A and of e_B ||g_t|| ||g_t'|| in B err by (e_A + e_B) S^2 in the square.
// Products of 32 channels are one chain on tensor cores, n products of depth 8, each of which errs by 10 * 2^-23 of the
// terms' magnitudes (mma.h); float32 split into two tf32 numbers loses 3 * 2^-22; chains and taps are added in float.
// The clipped sum rounds too: the norm is raised by what its tiles can err. Where the term is more than 1% of the
// square, or numbers leave the range of float, the example is marked, and the direct kernel computes its norm.
#pragma once

#include "common/product_tile.cuh"

namespace dpk {
namespace {

constexpr int kGramSide = 64, kGramThreads = 128, kGramDepth = 32;
constexpr int kGramPitch = kGramSide + 8, kGramDepthPitch = kGramDepth + 4;  // fragments read 32 different banks
constexpr int kGramStage = kGramDepth * kGramPitch;
static_assert(kGramStage == kGramSide * kGramDepthPitch);

inline bool gram_fits(const ProductShape& s) {
  return s.groups == 1 && s.positions > 0 && s.positions <= kGramSide &&
         int64_t{s.in[0]} * s.in[1] * s.in[2] <= kGramSide;
}

// A warp's part of m^T m for an operand m [channels, side], 32 x 32 of up to 64 x 64.
template <typename T>
class Gram {
 public:
  float sums[kFragmentsM][kFragmentsN][4] = {};

  static __device__ __forceinline__ int row(int v) { return threadIdx.x / 64 * 32 + v / 16 * 16 + mma_row(v % 4); }
  static __device__ __forceinline__ int column(int v) {
    return threadIdx.x / 32 % 2 * 32 + v / 4 % kFragmentsN * 8 + mma_column(v % 4);
  }
  __device__ __forceinline__ float value(int v) const { return sums[v / 16][v / 4 % kFragmentsN][v % 4]; }

  // shared: two stages.
  __device__ __forceinline__ Gram(const ProductShape& s, Shared<float> shared, const T* operand,
                                  const ProductLayout& layout, int channels, int side) {
    const bool last = layout.channel == 1;
    stage(s, shared_slice(shared, 0, kGramStage), operand, layout, channels, side, 0);
    copy_async_commit();
    for (int from = 0, buffer = 0; from < channels; from += kGramDepth, buffer ^= 1) {
      if (from + kGramDepth < channels)
        stage(s, shared_slice(shared, (buffer ^ 1) * kGramStage, kGramStage), operand, layout, channels, side,
              from + kGramDepth);
      copy_async_commit();
      copy_async_wait<1>();
      __syncthreads();
      multiply(std::is_same_v<T, float> && !s.tf32, shared_slice(shared, buffer * kGramStage, kGramStage),
               last ? 1 : kGramPitch, last ? kGramDepthPitch : 1, channels - from, side);
      __syncthreads();
    }
  }

 private:
  // [channel, side], or [side, channel] where channels are last.
  static __device__ __forceinline__ void stage(const ProductShape& s, Shared<float> to, const T* operand,
                                               const ProductLayout& layout, int channels, int side, int from) {
    if (layout.channel == 1) {
      const int c = threadIdx.x % kGramDepth;
      const T* at = operand + (from + c);
#pragma unroll 4
      for (int u = threadIdx.x / kGramDepth; u < kGramSide; u += kGramThreads / kGramDepth)
        copy_values<1>(s, to + (u * kGramDepthPitch + c), at + u * layout.pixel, from + c < channels && u < side);
    } else {
      const int u = threadIdx.x % kGramSide;
      const T* at = operand + from * layout.channel + u * layout.pixel;
#pragma unroll 4
      for (int c = threadIdx.x / kGramSide; c < kGramDepth; c += kGramThreads / kGramSide)
        copy_values<1>(s, to + (c * kGramPitch + u), at + c * layout.channel, from + c < channels && u < side);
    }
  }

  __device__ __forceinline__ void multiply(bool split, Shared<const float> m, int depth_stride, int side_stride,
                                           int count, int side) {
    const int row0 = threadIdx.x / 64 * 32, column0 = threadIdx.x / 32 % 2 * 32;
    const int used_m = (side - row0 + 15) / 16, used_n = (side - column0 + 7) / 8;
    float part[kFragmentsM][kFragmentsN][4] = {};
#pragma unroll
    for (int step = 0; step < kGramDepth; step += 8) {
      if (step >= count) break;
      uint32_t high[kFragmentsM][4], low[kFragmentsM][4];
#pragma unroll
      for (int f = 0; f < kFragmentsM; ++f)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          tf32_parts(split,
                     m[(step + mma_a_depth<tf32>(i)) * depth_stride + (row0 + f * 16 + mma_a_row(i)) * side_stride],
                     high[f][i], low[f][i]);
#pragma unroll
      for (int n = 0; n < kFragmentsN; ++n) {
        if (n >= used_n) break;
        uint32_t right[2], right_low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          tf32_parts(split,
                     m[(step + mma_b_depth<tf32>(i)) * depth_stride + (column0 + n * 8 + mma_b_column()) * side_stride],
                     right[i], right_low[i]);
#pragma unroll
        for (int f = 0; f < kFragmentsM; ++f) {
          if (f >= used_m) break;
          split_product(split, part[f][n], high[f], low[f], right, right_low);
        }
      }
    }
#pragma unroll
    for (int v = 0; v < 32; ++v) sums[v / 16][v / 4 % kFragmentsN][v % 4] += part[v / 16][v / 4 % kFragmentsN][v % 4];
  }
};

// squares[b]: the squared norm, raised, or -1 where it must be computed directly. Blocks: [batch].
template <typename T>
__global__ void __launch_bounds__(kGramThreads, 3)
    gram_norms_kernel(const ProductShape s, const T* input, const T* output_grads, double* squares) {
  DPK_SHARED(float, stages, 2 * kGramStage);
  DPK_SHARED(float, pixels, kGramSide* kGramPitch);
  DPK_SHARED(int, table, 2 * kGramSide);
  DPK_SHARED(double, scratch, 4 * kGramThreads / 32);
  const int64_t b = blockIdx.x;
  {
    const Gram<T> gram(s, stages, input + b * s.input.example, s.input, s.channels, s.in[0] * s.in[1] * s.in[2]);
#pragma unroll
    for (int v = 0; v < 32; ++v) pixels[gram.row(v) * kGramPitch + gram.column(v)] = gram.value(v);
  }
  const Gram<T> gram(s, stages, output_grads + b * s.output.example, s.output, s.outputs, s.positions);
  __syncthreads();

  float shifted[32] = {};  // A, where gram holds B
  for (int tap = 0; tap < s.taps; ++tap) {
    const Shared<int> seen = shared_slice(table, tap % 2 * kGramSide, kGramSide);
    if (threadIdx.x < kGramSide) {
      const Coordinates k = tap_at(s, tap), c = position_at(s, min(static_cast<int>(threadIdx.x), s.positions - 1));
      seen[threadIdx.x] = pixel_at(s, c.d + k.d, c.h + k.h, c.w + k.w);
    }
    __syncthreads();
#pragma unroll
    for (int f = 0; f < 2 * kFragmentsM; ++f) {
      const int left = seen[gram.row(f / 2 * 16 + f % 2 * 2)];
      if (left < 0) continue;
#pragma unroll
      for (int n = 0; n < 2 * kFragmentsN; ++n) {
        const int v = f / 2 * 16 + n / 2 * 4 + f % 2 * 2 + n % 2, right = seen[gram.column(v)];
        if (right >= 0) shifted[v] += pixels[left * kGramPitch + right];
      }
    }
  }

  double sums[4] = {};  // square, S, traces of A and B
#pragma unroll
  for (int v = 0; v < 32; ++v) {
    if (gram.row(v) >= s.positions || gram.column(v) >= s.positions) continue;
    const double x = static_cast<double>(shifted[v]), g = static_cast<double>(gram.value(v));
    sums[0] = fma(x, g, sums[0]);
    if (gram.row(v) != gram.column(v)) continue;
    sums[1] += sqrt(x * g);
    sums[2] += x;
    sums[3] += g;
  }
  block_sums<kGramThreads>(sums, scratch);
  if (threadIdx.x) return;
  const bool split = std::is_same_v<T, float> && !s.tf32;
  const double product = (split ? 3 : 1) * 10 * 0x1p-23, parts = split ? 0x1p-20 : 0;
  const double magnitude = 1.01 * sums[1], side = s.positions;
  const double chains = 2 * (4 * product + parts) +
                        (ceil_div(s.channels, kGramDepth) + s.taps + ceil_div(s.outputs, kGramDepth) + 4) * 0x1p-24;
  const double lost = 0x1p-122 * (static_cast<double>(s.rows) + s.outputs) * side * (1 + sums[2]) * (1 + sums[3]);
  const double term = 1.01 * chains * magnitude * magnitude + lost;
  const double added = (ceil_div(s.positions, 8) * product + parts) * magnitude;  // of the clipped sum
  const double norm = (sqrt(sums[0] + term) + added) * (1 + 1e-12);
  squares[b] = term <= 0.01 * sums[0] && norm < 1e150 ? norm * norm : -1;
}

}  // namespace
}  // namespace dpk
