// Standard normals by Box and Muller (1958), defined to 128 bits: what a normal of a stream is.
//
// The pair p of a stream belongs to the indices i = 32 (p / 16) + p % 16 and i + 16. With the words n of the first, m
// of the second, and two extension words x, y of the pair,
//
//   u = (n + (x + 1/2) / 2^64) / 2^64                      uniform on (0, 1)
//   t = ((m mod 2^62) + y / 2^64) / 2^62 - 1/2             uniform on [-1/2, 1/2)
//   (a, b) = sqrt(-2 log u) (+-cos(t pi / 2), sin(t pi / 2))   minus if bit 63 of m is set
//
// and the normals at i and i + 16 are (a, b), or (b, a) if bit 62 of m is set. The radius reaches 13.4.
//
// A normal times `scale` rounded to the nearest integer is what noise on a grid needs. Vector code decides nearly all
// of them from n and m in double, and leaves here those within its error bound of a boundary between two integers. So
// the integers are those of the definition on every machine, except where even double-double cannot. The values here
// err by less than E = kExactError on average over the radius, so an integer differs from that of an ideal normal with
// a probability of at most 2 (scale + 1) E: the total-variation error per value, below 10^-9 for 10^11 values at a
// scale of 2^30. (That u and t end after 128 bits counts far less.)
#pragma once

#include "common/double_double.h"
#include "common/rng.h"

namespace dpk {

constexpr double kExactError = 0x1p-100;
constexpr double kMaxGridScale = 0x1p40;  // beyond, vector code would leave too many integers to double-double

// (high + low / 2^64) / 2^64
DPK_HOST_DEVICE inline DoubleDouble fixed_point(uint64_t high, uint64_t low) {
  const uint64_t mask = 0xffffffff;
  return exact_sum(static_cast<double>(high >> 32) * 0x1p-32, static_cast<double>(high & mask) * 0x1p-64) +
         exact_sum(static_cast<double>(low >> 32) * 0x1p-96, (static_cast<double>(low & mask) + 0.5) * 0x1p-128);
}

DPK_HOST_DEVICE inline void exact_box_muller(uint64_t n, uint64_t m, uint64_t x, uint64_t y, DoubleDouble& first,
                                             DoubleDouble& second) {
  DoubleDouble sine, cosine;
  sine_cosine(fixed_point(m << 2 | y >> 62, y << 2) + DoubleDouble{-0.5, 0}, sine, cosine);
  const DoubleDouble radius = square_root(logarithm(fixed_point(n, x)) * -2);
  const DoubleDouble a = radius * (m >> 63 ? -cosine : cosine), b = radius * sine;
  const bool swap = m >> 62 & 1;
  first = swap ? b : a, second = swap ? a : b;
}

DPK_HOST_DEVICE inline void exact_normals(const Stream& stream, int64_t pair, DoubleDouble& first,
                                          DoubleDouble& second) {
  const int64_t index = pair / 16 * 32 + pair % 16;
  uint64_t extension[2];
  extension_words(stream, pair, extension);
  exact_box_muller(random_word(stream, index), random_word(stream, index + 16), extension[0], extension[1], first,
                   second);
}

DPK_HOST_DEVICE inline double nearest_integer(DoubleDouble x) {
  const double k = std::floor(x.high + 0.5), rest = x.high - k + x.low;
  return rest > 0.5 ? k + 1 : rest < -0.5 ? k - 1 : k;
}

// The normals of a pair of indices, or the integers of `scale` times them where scale > 0.
DPK_HOST_DEVICE __attribute__((noinline)) inline void exact_pair(const Stream& stream, int64_t pair, double scale,
                                                                 double& first, double& second) {
  DoubleDouble a, b;
  exact_normals(stream, pair, a, b);
  first = scale > 0 ? nearest_integer(a * scale) : a.high;
  second = scale > 0 ? nearest_integer(b * scale) : b.high;
}

}  // namespace dpk
