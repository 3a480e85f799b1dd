// The arithmetic that CUDA adds to C++: operations with a stated rounding, and bits.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <tuple>

namespace dpk::simt {

// f of the operands as T, rounded by `mode`; the compiler may not move it out of where that mode holds.
template <typename T, typename F, typename... A>
auto rounded(int mode, F f, A... operands) {
  std::array<T, sizeof...(A)> x{static_cast<T>(operands)...};
  const int before = std::fegetround();
  std::fesetround(mode);
  asm volatile("" : "+m"(x));
  auto result = std::apply(f, x);
  asm volatile("" : "+m"(result));
  std::fesetround(before);
  return result;
}

}  // namespace dpk::simt

#define DPK_SIMT_ROUNDED(name, T, operation)                      \
  template <typename... A>                                        \
  auto name##n(A... a) {                                          \
    return dpk::simt::rounded<T>(FE_TONEAREST, operation, a...);  \
  }                                                               \
  template <typename... A>                                        \
  auto name##u(A... a) {                                          \
    return dpk::simt::rounded<T>(FE_UPWARD, operation, a...);     \
  }                                                               \
  template <typename... A>                                        \
  auto name##d(A... a) {                                          \
    return dpk::simt::rounded<T>(FE_DOWNWARD, operation, a...);   \
  }                                                               \
  template <typename... A>                                        \
  auto name##z(A... a) {                                          \
    return dpk::simt::rounded<T>(FE_TOWARDZERO, operation, a...); \
  }
DPK_SIMT_ROUNDED(__fadd_r, float, [](float a, float b) { return a + b; })
DPK_SIMT_ROUNDED(__fmul_r, float, [](float a, float b) { return a * b; })
DPK_SIMT_ROUNDED(__fdiv_r, float, [](float a, float b) { return a / b; })
DPK_SIMT_ROUNDED(__fmaf_r, float, [](float a, float b, float c) { return std::fma(a, b, c); })
DPK_SIMT_ROUNDED(__fsqrt_r, float, [](float a) { return std::sqrt(a); })
DPK_SIMT_ROUNDED(__double2float_r, double, [](double a) { return static_cast<float>(a); })
DPK_SIMT_ROUNDED(__dadd_r, double, [](double a, double b) { return a + b; })
DPK_SIMT_ROUNDED(__dmul_r, double, [](double a, double b) { return a * b; })
DPK_SIMT_ROUNDED(__ddiv_r, double, [](double a, double b) { return a / b; })
DPK_SIMT_ROUNDED(__fma_r, double, [](double a, double b, double c) { return std::fma(a, b, c); })
DPK_SIMT_ROUNDED(__dsqrt_r, double, [](double a) { return std::sqrt(a); })
#undef DPK_SIMT_ROUNDED

template <typename T>
T __ldg(const T* from) {
  return *from;
}
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<unsigned long long>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  __extension__ using uint128 = unsigned __int128;
  return static_cast<unsigned long long>(static_cast<uint128>(a) * b >> 64);
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((uint64_t{high} << 32 | low) << (shift & 31)) >> 32);
}
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline double cospi(double x) { return std::cos(x * 3.14159265358979323846); }
inline double sinpi(double x) { return std::sin(x * 3.14159265358979323846); }

using std::fma;  // of floats too: C knows it of doubles alone
using std::max;
using std::min;
using std::sqrt;
