// The normals of two groups of a stream by a warp (definition: common/exact_normal.h). Included by a .cu file.
//
// Each lane computes a ChaCha20 block, which holds both words of four pairs. Pairs that double cannot decide, one in
// 10^4 at ordinary scales and one in 16 at the largest, are first listed for the whole warp and then computed side by
// side, so that a lane with such a pair does not stop the others once for each.
#pragma once

#include "common/exact_normal.h"
#include "common/launch.h"

namespace dpk {
namespace {

DPK_HOST_DEVICE inline double multiply_add(double a, double b, double c) { return fma(a, b, c); }

#include "common/normal_series.h"

constexpr int kWarpGroups = 2;
constexpr int kWarpValues = kWarpGroups * kGroupWords;
constexpr int kWarpPairs = kWarpValues / 2;

// -2 log(u) for u in [2^-64, 1].
__device__ __forceinline__ double minus_two_log(double u) {
  constexpr uint64_t kRootHalf = 0x3fe6a09e667f3bcd, kOne = 0x3ff0000000000000, kMantissa = 0x000fffffffffffff;
  const uint64_t shifted = bit_cast<uint64_t>(u) + (kOne - kRootHalf);
  const double k = static_cast<double>(static_cast<int>(shifted >> 52) - 1023);
  const double m = bit_cast<double>((shifted & kMantissa) + kRootHalf);
  const double s = (m - 1.0) / (m + 1.0), z = s * s, s4 = s * -4.0;
  return fma(k, -0x1.62e42fefa39efp+0, fma(s4 * z, log_series(z), s4));
}

// The normals of a pair, or their integers at `scale`, from its words; false where double cannot decide them.
template <bool kGrid>
__device__ __forceinline__ bool fast_pair(uint64_t n, uint64_t m, double scale, double& first, double& second) {
  const double radius2 = minus_two_log(static_cast<double>(n) * 0x1p-64);
  const double radius = sqrt(radius2);
  const double t = bit_cast<double>(m << 2 >> 12 | bit_cast<uint64_t>(1.0)) - 1.5, z = t * t;
  const double a = bit_cast<double>(bit_cast<uint64_t>(radius * cosine_series(z)) ^ (m >> 63 << 63));
  const double b = radius * (sine_series(z) * t);
  const bool swap = m >> 62 & 1;
  first = swap ? b : a, second = swap ? a : b;
  bool decided = radius2 >= kLowestRadius2 && radius2 <= kHighestRadius2;
  if (kGrid) {
    constexpr double kShift = 0x1.8p52;
    const double boundary = 0.5 - kFastError * scale, x = first * scale, y = second * scale;
    first = (x + kShift) - kShift, second = (y + kShift) - kShift;
    decided = decided && fabs(x - first) <= boundary && fabs(y - second) <= boundary;
  }
  return decided;
}

// exact_pair, with its results in registers. Not inlined: it is rare, and would take registers from what is not.
struct Pair {
  double first, second;
};
template <bool kGrid>
__device__ __attribute__((noinline)) Pair slow_pair(Stream stream, int64_t pair, double scale) {
  DoubleDouble a, b;
  exact_normals(stream, pair, a, b);
  if (kGrid) return {nearest_integer(a * scale), nearest_integer(b * scale)};
  return {a.high, b.high};
}

// Writes the normals of the groups `group` and `group` + 1, or their integers at `scale`, in the order of their
// indices. All lanes of the warp call it, and all may read then. values: [kWarpValues], listed: [kWarpPairs], of this
// warp.
template <bool kGrid>
__device__ __forceinline__ void warp_normals(const Stream& stream, int64_t group, double scale, Shared<double> values,
                                             Shared<uint16_t> listed) {
  const unsigned lane = threadIdx.x % kWarp;
  // Pair j of a lane's block lies in words 2 j and 2 j + 1.
  const auto index_of = [](unsigned from, unsigned j) {
    return from / kGroupBlocks * kGroupWords + 2 * kGroupBlocks * j + from % kGroupBlocks;
  };
  uint32_t block[16];
  chacha20_block(stream, stream.domain, static_cast<uint32_t>(group * kGroupBlocks + lane), block);
  unsigned count = 0;
#pragma unroll
  for (unsigned j = 0; j < 4; ++j) {
    double first, second;
    const bool slow =
        !fast_pair<kGrid>(word_of_block(block, 2 * j), word_of_block(block, 2 * j + 1), scale, first, second);
    const int64_t at = index_of(lane, j);
    values[at] = first;
    values[at + kGroupBlocks] = second;
    const unsigned votes = __ballot_sync(kAllLanes, slow);
    if (slow) listed[count + __popc(votes & ((1u << lane) - 1))] = static_cast<uint16_t>(j * kWarp + lane);
    count += __popc(votes);
  }
  __syncwarp();
  for (unsigned i = lane; i < count; i += kWarp) {
    const unsigned which = listed[i], from = which % kWarp, j = which / kWarp;
    const int64_t pair = (group + from / kGroupBlocks) * (kGroupWords / 2) + kGroupBlocks * j + from % kGroupBlocks;
    const Pair exact = slow_pair<kGrid>(stream, pair, scale);
    const int64_t at = index_of(from, j);
    values[at] = exact.first;
    values[at + kGroupBlocks] = exact.second;
  }
  __syncwarp();
}

}  // namespace
}  // namespace dpk
