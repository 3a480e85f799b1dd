// The normals of one group of a stream in vector lanes (definition: common/exact_normal.h). Included by a kernel body
// inside namespace dpk::DPK_ISA, after common/simd.h and common/simd_keystream.h.

using Bits = Vec<uint64_t>;
using Doubles = Vec<double>;

static inline Doubles multiply_add(Doubles a, Doubles b, Doubles c) { return a * b + c; }

#include "common/normal_series.h"

static inline Doubles as_doubles(Bits x) { return (Doubles)x; }
static inline Bits as_bits(Doubles x) { return (Bits)x; }

// One bit per lane: the top bits.
static inline unsigned top_bits(Bits x) {
#if !DPK_INTRINSICS
  unsigned bits = 0;
  for (int64_t l = 0; l < kLanes<double>; ++l) bits |= static_cast<unsigned>(x[l] >> 63) << l;
  return bits;
#elif DPK_VECTOR_BYTES == 64
  return _mm512_movepi64_mask((__m512i)x);
#elif DPK_VECTOR_BYTES == 32
  return _mm256_movemask_pd((__m256d)x);
#else
  return _mm_movemask_pd((__m128d)x);
#endif
}

// a where the top bit of mask is 0, else b.
static inline Doubles choose_by_top_bit(Bits mask, Doubles a, Doubles b) {
#if DPK_INTRINSICS && DPK_VECTOR_BYTES == 64
  return _mm512_mask_blend_pd(_mm512_movepi64_mask((__m512i)mask), a, b);
#elif DPK_INTRINSICS && DPK_VECTOR_BYTES == 32
  return _mm256_blendv_pd(a, b, (__m256d)mask);
#else
  const Bits all = Bits{} - (mask >> 63);
  return as_doubles((as_bits(a) & ~all) | (as_bits(b) & all));
#endif
}

static inline Doubles magnitude(Doubles x) { return as_doubles(as_bits(x) & ~(uint64_t{1} << 63)); }

// The nearest integer, |x| < 2^51.
static inline Doubles nearest(Doubles x) {
  constexpr double kShift = 0x1.8p52;
  return (x + kShift) - kShift;
}

// x / 2^64 rounded to double: halves of 32 bits become the low bits of doubles whose exponent makes them their value.
static inline Doubles unit_interval(Bits x) {
  const Doubles low = as_doubles((x & 0xffffffff) | as_bits(Doubles{} + 0x1p-12));
  const Doubles high = as_doubles(x >> 32 | as_bits(Doubles{} + 0x1p20));
  return (high - (0x1p20 + 0x1p-12)) + low;
}

// -2 log(u) for u in [2^-64, 1]. With u = 2^k m, sqrt(1/2) <= m < sqrt(2), log(m) is a series in (m - 1) / (m + 1).
static inline Doubles minus_two_log(Doubles u) {
  constexpr uint64_t kRootHalf = 0x3fe6a09e667f3bcd, kOne = 0x3ff0000000000000, kMantissa = 0x000fffffffffffff;
  constexpr double kTwoTo52 = 0x1p52;
  const Bits shifted = as_bits(u) + (kOne - kRootHalf);
  const Doubles k = as_doubles(shifted >> 52 | as_bits(Doubles{} + kTwoTo52)) - (kTwoTo52 + 1023);
  const Doubles m = as_doubles((shifted & kMantissa) + kRootHalf);
  const Doubles s = (m - 1.0) / (m + 1.0), z = s * s;
  const Doubles s4 = s * -4.0;
  return k * -0x1.62e42fefa39efp+0 + (s4 + s4 * z * log_series(z));
}

// Lanes whose error may exceed kFastError.
static inline Bits outside_fast_range(Doubles radius2) {
  return (Bits)((radius2 < kLowestRadius2) | (radius2 > kHighestRadius2));
}

// The radius times the cosine and sine of the angle that m encodes.
static inline void polar(Doubles radius, Bits m, Doubles& first, Doubles& second) {
  const Doubles t = as_doubles(m << 2 >> 12 | as_bits(Doubles{} + 1.0)) - 1.5, z = t * t;
  const Bits top = Bits{} + (uint64_t{1} << 63);
  const Doubles a = as_doubles(as_bits(radius * cosine_series(z)) ^ (m & top)), b = radius * (sine_series(z) * t);
  first = choose_by_top_bit(m << 1, a, b);
  second = choose_by_top_bit(m << 1, b, a);
}

// The normals of a group, or their integers at `scale` > 0. Radii first: two short loops overlap better than a long
// one.
template <bool kGrid>
static inline void group_normals(const Stream& stream, int64_t group, double scale, double* out) {
  constexpr int64_t kStep = kLanes<double>;
  uint64_t words[kGroupWords];
  double radii[kGroupWords / 2];
  group_words(stream, group, words);
  for (int64_t i = 0; i < kGroupWords / 2; i += kStep)
    store<double>(radii + i, minus_two_log(unit_interval(load<uint64_t>(words + i / kGroupBlocks * kGroupBlocks + i))));
  const double boundary = 0.5 - kFastError * scale;
  for (int64_t i = 0; i < kGroupWords / 2; i += kStep) {
    const int64_t at = i / kGroupBlocks * kGroupBlocks + i;
    const Doubles radius2 = load<double>(radii + i);
    Bits slow = outside_fast_range(radius2);
    Doubles first, second;
    polar(vector_sqrt<double>(radius2), load<uint64_t>(words + at + kGroupBlocks), first, second);
    if (kGrid) {
      const Doubles x = first * scale, y = second * scale;
      first = nearest(x), second = nearest(y);
      slow |= (Bits)((magnitude(x - first) > boundary) | (magnitude(y - second) > boundary));
    }
    store<double>(out + at, first);
    store<double>(out + at + kGroupBlocks, second);
    if (const unsigned lanes = top_bits(slow); __builtin_expect(lanes != 0, 0))
      for (int64_t l = 0; l < kStep; ++l)
        if (lanes >> l & 1)
          exact_pair(stream, group * (kGroupWords / 2) + i + l, kGrid ? scale : 0, out[at + l],
                     out[at + kGroupBlocks + l]);
  }
}
