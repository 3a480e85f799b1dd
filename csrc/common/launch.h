// What a .cu file is written in. nvcc reads it as CUDA; a C++ compiler reads it as the machine of simt/, which runs the
// same kernels on a CPU and watches them. csrc/README.md says what a kernel may do.
//
//   Shared<T>                             a pointer to shared memory: s[i], s + i
//   DPK_SHARED(T, name, count)            an array in static shared memory
//   DPK_DYNAMIC_SHARED(T, name)           the dynamic shared memory
//   shared_slice(s, begin, count)         s + begin with bounds of its own
//   shared_cast<T>(s)                     the same memory as elements of another type
//   copy_async<bytes>(to, from, valid)    4, 8 or 16 bytes from global to shared memory in the background, zeros unless
//                                         valid; in groups closed by copy_async_commit()
//   copy_async_wait<n>()                  until all but the last n groups of this thread have landed
//   DPK_LAUNCH(kernel, grid, block, shared_bytes, stream, arguments...)
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "common/host_device.h"
#include "common/scalar.h"

#ifdef __CUDACC__
#include <cuda_pipeline_primitives.h>
#include <cuda_runtime.h>
#else
#include "simt/simt.h"
struct CUstream_st;  // a CUDA stream is a pointer to it
#endif

namespace dpk {

constexpr unsigned kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Numbers of blocks. A grid without blocks launches nothing.
struct Grid {
  int64_t x, y, z;
  Grid(int64_t x, int64_t y = 1, int64_t z = 1) : x(x), y(y), z(z) {}
};
constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1, kMaxGridYZ = (1 << 16) - 1;

DPK_HOST_DEVICE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether there is anything to launch; raises where the grid is too large.
inline bool check_grid(const char* kernel, const Grid& grid) {
  if (grid.x < 0 || grid.x > kMaxGridX || grid.y < 0 || grid.y > kMaxGridYZ || grid.z < 0 || grid.z > kMaxGridYZ)
    throw std::runtime_error(std::string(kernel) + ": a grid of " + std::to_string(grid.x) + " x " +
                             std::to_string(grid.y) + " x " + std::to_string(grid.z) +
                             " blocks is outside of [0, 2^31) x [0, 2^16) x [0, 2^16)");
  return grid.x && grid.y && grid.z;
}

#ifdef __CUDACC__

template <typename T>
using Shared = T*;

#define DPK_SHARED(T, name, count) __shared__ __align__(16) T name[count]
#define DPK_DYNAMIC_SHARED(T, name)                                   \
  extern __shared__ __align__(16) unsigned char dpk_dynamic_shared[]; \
  const ::dpk::Shared<T> name = reinterpret_cast<T*>(dpk_dynamic_shared)

template <typename T>
__device__ __forceinline__ Shared<T> shared_slice(T* s, int64_t begin, int64_t) {
  return s + begin;
}
template <typename To, typename T>
__device__ __forceinline__ Shared<To> shared_cast(T* s) {
  return reinterpret_cast<To*>(s);
}

template <int kBytes, typename T>
__device__ __forceinline__ void copy_async(T* to, const T* from, bool valid = true) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  __pipeline_memcpy_async(to, from, kBytes, valid ? 0 : kBytes);
}
__device__ __forceinline__ void copy_async_commit() { __pipeline_commit(); }
template <int kGroups>
__device__ __forceinline__ void copy_async_wait() {
  __pipeline_wait_prior(kGroups);
}

template <typename... P, typename... A>
void launch(const char* name, void (*kernel)(P...), Grid grid, dim3 block, size_t shared_bytes, CUstream_st* stream,
            A&&... arguments) {
  if (!check_grid(name, grid)) return;
  const auto check = [&](cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
  };
  const void* function = reinterpret_cast<const void*>(kernel);
  constexpr size_t kWithoutAsking = 48 << 10;
  if (shared_bytes > kWithoutAsking)
    check(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  std::tuple<P...> values(std::forward<A>(arguments)...);
  std::apply(
      [&](auto&... value) {
        void* pointers[] = {const_cast<void*>(static_cast<const void*>(&value))..., nullptr};
        const dim3 blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
        check(cudaLaunchKernel(function, blocks, block, pointers, shared_bytes, stream));
      },
      values);
}

#else

template <typename T>
using Shared = simt::Shared<T>;

// A block's own array for each declaration, as with __shared__: the address of `site` tells declarations apart.
#define DPK_SHARED(T, name, count)   \
  static const char name##_site = 0; \
  const ::dpk::Shared<T> name(::dpk::simt::shared_memory.place(&name##_site, sizeof(T) * (count)), sizeof(T) * (count))
#define DPK_DYNAMIC_SHARED(T, name) const ::dpk::Shared<T> name(0, ::dpk::simt::shared_memory.dynamic_bytes())

template <typename T>
Shared<T> shared_slice(const Shared<T>& s, int64_t begin, int64_t count, simt::Where where = simt::Where::current()) {
  return s.slice(begin, count, where);
}
template <typename To, typename T>
Shared<To> shared_cast(const Shared<T>& s) {
  return s.template cast<To>();
}

template <int kBytes, typename T>
void copy_async(const Shared<T>& to, const T* from, bool valid = true, simt::Where where = simt::Where::current()) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  simt::copy_async(to.offset({0, where}, kBytes, kBytes), kBytes, valid ? from : nullptr, where);
}
inline void copy_async_commit() { ++simt::machine.self->groups; }
template <unsigned kGroups>
void copy_async_wait() {
  simt::copy_async_wait(kGroups);
}

template <typename... P, typename... A>
void launch(const char* name, void (*kernel)(P...), Grid grid, dim3 block, size_t shared_bytes, CUstream_st*,
            A&&... arguments) {
  if (!check_grid(name, grid)) return;
  const std::tuple<P...> values(std::forward<A>(arguments)...);
  simt::machine.launch(name,
                       {static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z)},
                       block, shared_bytes, [&] { std::apply(kernel, values); });
}

#endif

// kernel is a function; parentheses around it where template arguments hold commas.
#define DPK_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  ::dpk::launch(#kernel, kernel, grid, block, shared_bytes, stream, __VA_ARGS__)

}  // namespace dpk
