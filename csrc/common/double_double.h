// Numbers as unevaluated sums of two doubles, |low| <= ulp(high) / 2: about 105 bits (Dekker 1971). Plain scalar code
// for host and device; a compiler may contract a product and a sum to an FMA here, but must not reassociate.
#pragma once

#include <cmath>

#include "common/rng.h"

namespace dpk {

struct DoubleDouble {
  double high, low;
};

// a + b where |a| >= |b| or a == 0.
DPK_HOST_DEVICE inline DoubleDouble quick_sum(double a, double b) {
  const double s = a + b;
  return {s, b - (s - a)};
}

DPK_HOST_DEVICE inline DoubleDouble exact_sum(double a, double b) {
  const double s = a + b, t = s - a;
  return {s, (a - (s - t)) + (b - t)};
}

DPK_HOST_DEVICE inline DoubleDouble operator-(DoubleDouble a) { return {-a.high, -a.low}; }

DPK_HOST_DEVICE inline DoubleDouble operator+(DoubleDouble a, DoubleDouble b) {
  const DoubleDouble high = exact_sum(a.high, b.high), low = exact_sum(a.low, b.low);
  const DoubleDouble s = quick_sum(high.high, high.low + low.high);
  return quick_sum(s.high, s.low + low.low);
}

DPK_HOST_DEVICE inline DoubleDouble operator*(DoubleDouble a, DoubleDouble b) {
  const double p = a.high * b.high;
  return quick_sum(p, std::fma(a.high, b.high, -p) + (a.high * b.low + a.low * b.high));
}

DPK_HOST_DEVICE inline DoubleDouble operator*(DoubleDouble a, double b) { return a * DoubleDouble{b, 0}; }

DPK_HOST_DEVICE inline DoubleDouble operator/(DoubleDouble a, double b) {
  const double q = a.high / b;
  const DoubleDouble rest = a + -(DoubleDouble{q, 0} * b);
  return quick_sum(q, rest.high / b);
}

DPK_HOST_DEVICE inline DoubleDouble square_root(DoubleDouble a) {
  const double s = std::sqrt(a.high);
  if (s == 0) return {0, 0};
  const DoubleDouble rest = a + -(DoubleDouble{s, 0} * DoubleDouble{s, 0});
  return quick_sum(s, rest.high / (2 * s));
}

// exp(x) for |x| < 1/2, from its series: 0.5^24 / 24! < 2^-103.
DPK_HOST_DEVICE inline DoubleDouble exponential(DoubleDouble x) {
  DoubleDouble sum{1, 0};
  for (int n = 24; n > 0; --n) sum = DoubleDouble{1, 0} + sum * x / n;
  return sum;
}

// log(x) for normal x > 0: with x = 2^k m and y the logarithm of m in double, log(m) = y + log(1 + e) where
// e = m exp(-y) - 1 is about 2^-53, so that e - e^2 / 2 suffices.
DPK_HOST_DEVICE inline DoubleDouble logarithm(DoubleDouble x) {
  constexpr DoubleDouble kLogTwo{0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56};
  int k;
  const double m = std::frexp(x.high, &k);
  const bool low_half = m < 0.70710678118654752;
  const double scale = low_half ? 2 : 1;
  k -= low_half;
  const DoubleDouble mantissa{m * scale, std::ldexp(x.low, -k)};
  const double y = std::log(mantissa.high);
  const DoubleDouble e = mantissa * exponential({-y, 0}) + DoubleDouble{-1, 0};
  return kLogTwo * k + (DoubleDouble{y, 0} + (e + DoubleDouble{-e.high * e.high / 2, 0}));
}

// sin and cos of x pi / 2 for |x| <= 1/2, from their series: (pi / 4)^28 / 28! < 2^-107.
DPK_HOST_DEVICE inline void sine_cosine(DoubleDouble x, DoubleDouble& sine, DoubleDouble& cosine) {
  constexpr DoubleDouble kHalfPi{0x1.921fb54442d18p+0, 0x1.1a62633145c07p-54};
  const DoubleDouble angle = x * kHalfPi, minus_square = -(angle * angle), one{1, 0};
  sine = cosine = one;
  for (int n = 26; n > 0; n -= 2) {
    cosine = one + minus_square * cosine / (n * (n - 1));
    sine = one + minus_square * sine / (n * (n + 1));
  }
  sine = sine * angle;
}

}  // namespace dpk
