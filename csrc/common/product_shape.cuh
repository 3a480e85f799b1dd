// One example's weight gradient on the device, G[r, o] = sum_t x[r, t] g[o, t] over its positions t: what linear layers
// and convolutions have in common. A row r of the (never formed) unfolded input is a channel and a tap; it sees
// position t at t * stride + tap * dilation - padding. A linear layer has one tap, and its positions are the pixels.
//
// This file says where values lie; product_tile.cuh computes tiles of G, product_kernels.cuh squares and adds them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "common/launch.h"
#include "common/reduce.h"

namespace dpk {

// Division of numbers below 2^31 by a fixed one: the multiplier is 2^32 (2^shift / divisor - 1), rounded up.
struct Division {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  Division() = default;
  explicit Division(int64_t by) : divisor(static_cast<uint32_t>(by)) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor) / divisor + 1);
  }
  DPK_HOST_DEVICE int quotient(int n) const {
    const auto u = static_cast<uint32_t>(n);
    return static_cast<int>((static_cast<uint32_t>(uint64_t{u} * multiplier >> 32) + u) >> shift);
  }
  DPK_HOST_DEVICE int remainder(int n) const { return n - quotient(n) * static_cast<int>(divisor); }
};

// How far apart the channels, pixels and examples of an operand lie.
struct ProductLayout {
  int64_t channel, pixel, example;
};

struct ProductShape {
  int64_t batch = 0;
  int groups = 1, channels = 0, outputs = 0;  // channels and outputs of a group
  int in[3] = {1, 1, 1}, out[3] = {1, 1, 1};
  int kernel[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, padding[3] = {0, 0, 0}, dilation[3] = {1, 1, 1};
  ProductLayout input{}, output{};
  bool half = false;  // whether 16-bit values are halves, not bfloat16
  bool tf32 = false;  // whether floats may be rounded to tf32
  // Made by finish().
  int taps = 1, positions = 1, rows = 0;  // rows of a group
  int map[3] = {1, 1, 1};                 // what taps see of a channel, padding included
  int reach = 0;                          // pixels of that map between the first and the last tap
  Division out_height, out_width, kernel_height, kernel_width, map_height, map_width, by_taps, by_channels;

  void finish() {
    const auto product = [](const int (&n)[3]) {
      const double size = double{1} * n[0] * n[1] * n[2];
      if (size >= 2147483647.) throw std::runtime_error("a map of 2^31 pixels or more is not supported");
      return n[0] * n[1] * n[2];
    };
    for (int i = 0; i < 3; ++i) {
      const double size = (out[i] - 1.) * stride[i] + (kernel[i] - 1.) * dilation[i] + 1;
      if (size >= 2147483647.) throw std::runtime_error("a map of 2^31 pixels or more is not supported");
      map[i] = std::max(1, static_cast<int>(size));
    }
    taps = product(kernel);
    positions = product(out);
    product(in);
    product(map);
    if (double{1} * taps * channels >= 2147483647. - 64)
      throw std::runtime_error("a weight of 2^31 inputs or more to an output is not supported");
    rows = taps * channels;
    reach = flat((kernel[0] - 1) * dilation[0], (kernel[1] - 1) * dilation[1], (kernel[2] - 1) * dilation[2]);
    const auto division = [](int n) { return Division(std::max(1, n)); };
    out_height = division(out[1]);
    out_width = division(out[2]);
    kernel_height = division(kernel[1]);
    kernel_width = division(kernel[2]);
    map_height = division(map[1]);
    map_width = division(map[2]);
    by_taps = division(taps);
    by_channels = division(channels);
  }
  DPK_HOST_DEVICE int flat(int d, int h, int w) const { return (d * map[1] + h) * map[2] + w; }
  int64_t all_outputs() const { return int64_t{groups} * outputs; }
  int64_t entries() const { return all_outputs() * rows; }  // of G, over all groups
};

// A value of 16 bits, of which ProductShape::half says what they mean: kernels on tensor cores know how values are
// stored and learn how to read them, which halves their number.
struct Bits16 {
  uint16_t bits;
};
template <typename T>
using Stored = std::conditional_t<sizeof(T) == 2, Bits16, T>;

template <typename T>
__device__ __forceinline__ acc_t<T> read_value(const ProductShape& s, T x) {
  if constexpr (std::is_same_v<T, Bits16>)
    return s.half ? widen(half{x.bits}) : widen(bfloat16{x.bits});
  else
    return x;
}

struct Coordinates {
  int d, h, w;
};

__device__ __forceinline__ Coordinates split(int n, const Division& height, const Division& width) {
  const int line = width.quotient(n), plane = height.quotient(line);
  return {plane, line - plane * static_cast<int>(height.divisor), n - line * static_cast<int>(width.divisor)};
}

// In the padded map: of a position seen by the first tap, and of a tap.
__device__ __forceinline__ Coordinates position_at(const ProductShape& s, int t) {
  const Coordinates c = split(t, s.out_height, s.out_width);
  return {c.d * s.stride[0], c.h * s.stride[1], c.w * s.stride[2]};
}
__device__ __forceinline__ Coordinates tap_at(const ProductShape& s, int tap) {
  const Coordinates c = split(tap, s.kernel_height, s.kernel_width);
  return {c.d * s.dilation[0], c.h * s.dilation[1], c.w * s.dilation[2]};
}

// A pixel of the channel's map, or -1 in the padding.
__device__ __forceinline__ int pixel_at(const ProductShape& s, int d, int h, int w) {
  d -= s.padding[0];
  h -= s.padding[1];
  w -= s.padding[2];
  const bool inside = static_cast<unsigned>(d) < static_cast<unsigned>(s.in[0]) &&
                      static_cast<unsigned>(h) < static_cast<unsigned>(s.in[1]) &&
                      static_cast<unsigned>(w) < static_cast<unsigned>(s.in[2]);
  return inside ? (d * s.in[1] + h) * s.in[2] + w : -1;
}

// G[channel, tap; output] of one example over the positions begin <= t < end, in double: products of floats are exact.
// All lanes of a warp call it together and get the same number.
template <typename T>
__device__ __forceinline__ double example_entry(const ProductShape& s, const T* input, const T* output_grads, int group,
                                                int output, int channel, int tap, int begin, int end) {
  const Coordinates k = tap_at(s, tap);
  const T* x = input + (int64_t{group} * s.channels + channel) * s.input.channel;
  const T* g = output_grads + (int64_t{group} * s.outputs + output) * s.output.channel;
  double sum = 0;
  for (int t = begin + static_cast<int>(threadIdx.x % kWarp); t < end; t += static_cast<int>(kWarp)) {
    const Coordinates p = position_at(s, t);
    const int pixel = pixel_at(s, p.d + k.d, p.h + k.h, p.w + k.w);
    if (pixel >= 0)
      sum = fma(static_cast<double>(read_value(s, x[pixel * s.input.pixel])),
                static_cast<double>(read_value(s, g[t * s.output.pixel])), sum);
  }
  return warp_sum(sum);
}

}  // namespace dpk
