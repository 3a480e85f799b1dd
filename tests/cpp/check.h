// Checks for the C++ tests: each prints what failed and goes on; main returns how it ended.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "common/isa.h"

namespace check {

inline int& failures() {
  static int count = 0;
  return count;
}

inline void report(bool holds, const char* what, const char* file, int line) {
  if (holds) return;
  ++failures();
  std::printf("%s:%d [%s]: %s does not hold\n", file, line, dpk::kIsaNames[static_cast<int>(dpk::active_isa().load())],
              what);
}

// |got - want| <= tolerance * max(1, |want|); a NaN never passes.
inline void report_close(double got, double want, double tolerance, const char* what, const char* file, int line) {
  if (std::fabs(got - want) <= tolerance * std::fmax(1., std::fabs(want))) return;
  ++failures();
  std::printf("%s:%d [%s]: %s is %.17g, expected %.17g\n", file, line,
              dpk::kIsaNames[static_cast<int>(dpk::active_isa().load())], what, got, want);
}

// Runs f under every instruction set of this CPU, the narrowest first.
template <typename F>
void for_each_isa(F f) {
  const dpk::Isa widest = dpk::widest_isa();
  for (int isa = 0; isa <= static_cast<int>(widest); ++isa) {
    dpk::active_isa() = static_cast<dpk::Isa>(isa);
    f();
  }
  dpk::active_isa() = widest;
}

// n values of the normal distribution; the same ones for the same seed.
template <typename T>
std::vector<T> normal(int64_t n, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<double> distribution;
  std::vector<T> values(n);
  for (T& value : values) value = static_cast<T>(distribution(engine));
  return values;
}

inline int result() {
  if (failures()) std::printf("%d failed\n", failures());
  return failures() != 0;
}

}  // namespace check

#define CHECK(condition) ::check::report((condition), #condition, __FILE__, __LINE__)
#define CHECK_CLOSE(got, want, tolerance) ::check::report_close((got), (want), (tolerance), #got, __FILE__, __LINE__)
