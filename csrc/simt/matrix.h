// The matrix product of a warp, as the least accurate of the tensor cores that we know computes it.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "simt/machine.h"

namespace dpk::simt {

// The sum of products of floats: aligned to the largest, of which 24 bits are kept, and at the end cut to float.
template <int kTerms>
float cut_sum(const double (&terms)[kTerms]) {
  constexpr uint64_t kInfinity = uint64_t{0x7ff} << 52;
  uint64_t largest = 0;
  for (const double term : terms) largest = std::max(largest, std::bit_cast<uint64_t>(std::abs(term)));
  if (largest == 0) return 0;
  if (largest >= kInfinity) {
    double sum = 0;
    for (const double term : terms) sum += term;
    return static_cast<float>(sum);
  }
  const uint64_t exponent = largest >> 52, bias = 1023;
  const double unit = std::bit_cast<double>((exponent - 23) << 52);
  const double inverse = std::bit_cast<double>((2 * bias + 23 - exponent) << 52);
  int64_t units = 0;
  for (const double term : terms) units += static_cast<int64_t>(term * inverse);
  const double cut = static_cast<double>(units) * unit;
  const float result = static_cast<float>(cut);
  const bool away = std::abs(static_cast<double>(result)) > std::abs(cut) && !std::isinf(result);
  return away ? std::nextafter(result, 0.f) : result;
}

// d += a b; value(bits, i) is the i-th number in a register. The layout is that of common/mma.h, turned round.
template <int kDepth, typename F>
void matrix_product(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], F value,
                    const Where& where = Where::current()) {
  struct Registers {
    uint32_t a[4], b[2];
  };
  const auto given = exchange(0xffffffffu, Registers{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, where);
  constexpr unsigned kHolders = 4, kPacked = kDepth / 8;  // lanes that hold a row or column; numbers in a register
  const unsigned row = machine.self->lane / 4, column = machine.self->lane % 4 * 2;
  double left[2][kDepth], right[2][kDepth];  // this lane's rows of a and columns of b
  for (unsigned holder = 0; holder < kHolders; ++holder) {
    const Registers rows = given[row * 4 + holder];
    const Registers columns[] = {given[column * 4 + holder], given[column * 4 + 4 + holder]};
    for (unsigned part = 0; part < 2; ++part)
      for (unsigned number = 0; number < kPacked; ++number)
        for (unsigned i = 0; i < 2; ++i) {
          const unsigned k = part * kDepth / 2 + holder * kPacked + number;
          left[i][k] = value(rows.a[i + 2 * part], number);
          right[i][k] = value(columns[i].b[part], number);
        }
  }
  for (unsigned i = 0; i < 4; ++i) {
    double terms[kDepth + 1];
    for (unsigned k = 0; k < kDepth; ++k) terms[k] = left[i / 2][k] * right[i % 2][k];
    terms[kDepth] = d[i];
    d[i] = cut_sum(terms);
  }
}

}  // namespace dpk::simt
