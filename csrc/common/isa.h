// Which instruction set the CPU kernels run: the widest that this build holds and this CPU executes, unless a test asks
// for less.
#pragma once

#include <atomic>

namespace dpk {

enum class Isa : int { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

constexpr const char* kIsaNames[] = {"baseline", "avx2", "avx512"};

inline Isa widest_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  // x86-64-v4 and x86-64-v3 as far as the kernels use them.
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd"))
    return Isa::kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

inline std::atomic<Isa>& active_isa() {
  static std::atomic<Isa> isa{widest_isa()};
  return isa;
}

}  // namespace dpk

// Calls the body of FUNCTION that was compiled for the active instruction set; for use inside namespace dpk.
#if defined(__x86_64__)
#define DPK_DISPATCH(FUNCTION, ...)                              \
  switch (::dpk::active_isa().load(std::memory_order_relaxed)) { \
    case ::dpk::Isa::kAvx512:                                    \
      return avx512::FUNCTION(__VA_ARGS__);                      \
    case ::dpk::Isa::kAvx2:                                      \
      return avx2::FUNCTION(__VA_ARGS__);                        \
    default:                                                     \
      return baseline::FUNCTION(__VA_ARGS__);                    \
  }
#else
#define DPK_DISPATCH(FUNCTION, ...) return baseline::FUNCTION(__VA_ARGS__)
#endif
