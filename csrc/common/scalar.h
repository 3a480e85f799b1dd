// The 16-bit floating-point types of tensors, as bridges name them: bits alone, with exact conversion to float and
// conversion from float rounded to nearest, ties to even. Every compiler sees the same two types, so a launcher has one
// name for nvcc and for the C++ compiler of the bindings.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace dpk {

struct bfloat16 {
  uint16_t bits;
};

struct half {
  uint16_t bits;
};

struct tf32 {};  // no type of tensors: float as tensor cores read it, with 10 bits of fraction

// The type in which values of T are computed with.
template <typename T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <typename T>
using acc_t = typename Accumulate<T>::type;

template <typename To, typename From>
DPK_HOST_DEVICE inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// The value of x in acc_t<T>.
DPK_HOST_DEVICE inline float widen(float x) { return x; }
DPK_HOST_DEVICE inline double widen(double x) { return x; }
DPK_HOST_DEVICE inline float widen(bfloat16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
DPK_HOST_DEVICE inline float widen(half x) {
#ifdef __CUDA_ARCH__
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  const uint32_t magnitude = x.bits & 0x7fff, sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const float finite = bit_cast<float>(magnitude << 13) * 0x1p112f;  // moves the exponent's bias, subnormals included
  const uint32_t wide = magnitude < 0x7c00 ? bit_cast<uint32_t>(finite) : 0x7f800000 | magnitude << 13;
  return bit_cast<float>(sign | wide);
#endif
}

template <typename T>
DPK_HOST_DEVICE inline T narrow(acc_t<T> x) {
  return x;
}

template <>
DPK_HOST_DEVICE inline bfloat16 narrow<bfloat16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <>
DPK_HOST_DEVICE inline half narrow<half>(float x) {
#ifdef __CUDA_ARCH__
  half narrowed;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrowed.bits) : "f"(x));
  return narrowed;
#else
  const uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t to;
  if (magnitude > 0x7f800000) {
    to = 0x7fff;  // as the device's conversion
  } else if (magnitude >= bit_cast<uint32_t>(65520.f)) {
    to = 0x7c00;
  } else if (magnitude < bit_cast<uint32_t>(0x1p-14f)) {  // a unit of 0.5 is 2^-24, as of a subnormal half
    to = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
  } else {
    to = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  }
  return {static_cast<uint16_t>(sign | to)};
#endif
}

}  // namespace dpk
