// The matrix product of a warp, as the least accurate of the tensor cores that we know computes it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "simt/machine.h"

namespace dpk::simt {

// The sum of n terms, aligned to the largest and cut 24 bits below its leading one, at the end cut to float.
inline float cut_sum(const double* terms, int n) {
  double largest = 0, sum = 0;
  for (int i = 0; i < n; ++i) {
    largest = std::max(largest, std::abs(terms[i]));
    sum += terms[i];
  }
  if (!std::isfinite(sum) || largest == 0) return static_cast<float>(sum);
  int exponent;
  std::frexp(largest, &exponent);
  const double unit = std::ldexp(1, exponent - 24), inverse = 1 / unit;
  int64_t units = 0;
  for (int i = 0; i < n; ++i) units += static_cast<int64_t>(terms[i] * inverse);
  const double cut = static_cast<double>(units) * unit;
  const float result = static_cast<float>(cut);
  return std::abs(static_cast<double>(result)) > std::abs(cut) && std::isfinite(result) ? std::nextafter(result, 0.f)
                                                                                        : result;
}

// d += a b; value(bits, i) is the i-th number in a register. The layout is that of common/mma.h, turned round.
template <int kDepth, typename F>
void matrix_product(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], F value,
                    const Where& where = Where::current()) {
  struct Registers {
    uint32_t a[4], b[2];
  };
  const auto given = exchange(0xffffffffu, Registers{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, where);
  constexpr unsigned kPacked = kDepth / 8;  // numbers in a register
  const unsigned lane = machine.self->lane;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = lane / 4, upper = i / 2, column = lane % 4 * 2 + i % 2;
    double terms[kDepth + 1];
    for (unsigned k = 0; k < kDepth; ++k) {
      const unsigned holder = k % (kDepth / 2) / kPacked, part = k / (kDepth / 2), number = k % kPacked;
      const double left = value(given[row * 4 + holder].a[upper + 2 * part], number);
      const double right = value(given[column * 4 + holder].b[part], number);
      terms[k] = left * right;
    }
    terms[kDepth] = d[i];
    d[i] = cut_sum(terms, kDepth + 1);
  }
}

}  // namespace dpk::simt
