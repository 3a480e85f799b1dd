// What every *_torch.cpp needs of PyTorch's stable ABI. No other file of csrc includes torch.
#pragma once

// Torch's own templates for lists leave parameters unused.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#pragma GCC diagnostic pop

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>

#include "common/exact_normal.h"
#include "common/rng.h"
#include "common/scalar.h"

// A binding is compiled for the library of each device: _C holds the schemas and the CPU's implementations, _C_cuda,
// compiled with USE_CUDA, the same operators on CUDA.
#if defined(USE_CUDA)
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#define DPK_DEVICE CUDA
#define DPK_SCHEMAS(m) [[maybe_unused]] static void schemas(torch::stable::detail::StableLibrary& m)
#else
#define DPK_DEVICE CPU
#define DPK_SCHEMAS(m) STABLE_TORCH_LIBRARY_FRAGMENT(dpkernels, m)
#endif
#define DPK_IMPLEMENTATIONS(m) STABLE_TORCH_LIBRARY_IMPL(dpkernels, DPK_DEVICE, m)

struct CUstream_st;  // a CUDA stream is a pointer to it

namespace dpk {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <typename T>
T* mutable_data(Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

inline Tensor empty_double(const Tensor& like, std::initializer_list<int64_t> sizes) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.begin(), sizes.size()),
                                  ScalarType::Double);
}

// While it lives, the device of `t` is the current one.
#if defined(USE_CUDA)
class OnDevice {
 public:
  explicit OnDevice(const Tensor& t) : guard_(t.get_device_index()) {}

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

inline bool on_device(const Tensor& t) {
  return t.is_cuda() && t.get_device_index() == torch::stable::accelerator::getCurrentDeviceIndex();
}

// What kernels are launched on.
inline CUstream_st* current_stream() {
  void* stream;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_get_current_cuda_stream(torch::stable::accelerator::getCurrentDeviceIndex(), &stream));
  return static_cast<CUstream_st*>(stream);
}
#else
class OnDevice {
 public:
  explicit OnDevice(const Tensor&) {}
};

inline bool on_device(const Tensor& t) { return t.is_cpu(); }
#endif

// The wrappers in dpkernels/ops raise the errors that users see; these checks keep a direct call of an operator from
// reading out of bounds.
inline void check_kind(const Tensor& t, const char* name, int64_t dim, ScalarType type) {
  STD_TORCH_CHECK(on_device(t), name, " must be on the device of the other arguments");
  STD_TORCH_CHECK(t.dim() == dim, name, " must have ", dim, " dimensions, got ", t.dim());
  STD_TORCH_CHECK(t.scalar_type() == type, name, " has an unexpected dtype");
}

inline void check_input(const Tensor& t, const char* name, int64_t dim, ScalarType type) {
  check_kind(t, name, dim, type);
  STD_TORCH_CHECK(t.is_contiguous(), name, " must be contiguous");
}

inline void check_size(bool equal, const char* what) { STD_TORCH_CHECK(equal, "sizes do not match: ", what); }

// Calls f(T{}) for the types that the kernels know on this device. On the CPU the wrappers widen half precision; on
// CUDA only what reads stored gradients takes float64.
enum class Wide { kOnCpu, kEverywhere };
template <Wide kWide = Wide::kOnCpu, typename F>
void for_dtype(const Tensor& t, F f) {
  const ScalarType type = t.scalar_type();
  if (type == ScalarType::Float) return f(float{});
#if defined(USE_CUDA)
  if (type == ScalarType::BFloat16) return f(bfloat16{});
  if (type == ScalarType::Half) return f(half{});
  constexpr bool kTakesDouble = kWide == Wide::kEverywhere;
#else
  constexpr bool kTakesDouble = true;
#endif
  if constexpr (kTakesDouble)
    if (type == ScalarType::Double) return f(double{});
  STD_TORCH_CHECK(false, "dtype must be float32 or float64 on the CPU, float32, bfloat16 or float16 on CUDA",
                  kTakesDouble ? ", or float64" : "");
}

// What values of T are computed with: acc_t<T> of common/scalar.h.
inline ScalarType acc_type(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// f(begin, end) over [0, n) on torch's threads, in pieces of about `work` operations each unit of n costs.
template <typename F>
void parallel(int64_t n, int64_t work, F f) {
  if (n == 0) return;
  constexpr int64_t kWorthAThread = 1 << 15;
  torch::stable::parallel_for(0, n, std::max<int64_t>(1, kWorthAThread / std::max<int64_t>(1, work)), f);
}

// Runs an operator on the device of this library: cpu(begin, end) over [0, n) as `parallel`, or cuda(stream). Both are
// generic lambdas, so that the one for the other device is not compiled.
template <typename Cpu, typename Cuda>
void run([[maybe_unused]] int64_t n, [[maybe_unused]] int64_t work, [[maybe_unused]] Cpu cpu,
         [[maybe_unused]] Cuda cuda) {
#if defined(USE_CUDA)
  cuda(current_stream());
#else
  parallel(n, work, cpu);
#endif
}

// A random stream from an operator's arguments; key: uint8 [32], its words in little-endian order (RFC 8439, 2.3). A
// key on another device than the CPU is left to the kernels, and stays 0 here.
inline Stream stream_of(const Tensor& key, int64_t domain, int64_t step) {
  STD_TORCH_CHECK(key.dim() == 1 && key.size(0) == 32 && key.scalar_type() == ScalarType::Byte && key.is_contiguous(),
                  "key must be 32 contiguous bytes");
  STD_TORCH_CHECK(0 <= domain && domain < kExtensionDomain, "domain must be in [0, 2^31), got ", domain);
  STD_TORCH_CHECK(step >= 0, "step must not be negative, got ", step);
  Stream stream{{}, static_cast<uint32_t>(domain), static_cast<uint64_t>(step)};
  for (int i = 0; key.is_cpu() && i < 32; ++i)
    stream.key[i / 4] |= static_cast<uint32_t>(data<uint8_t>(key)[i]) << (i % 4 * 8);
  return stream;
}

inline void check_stream_range(int64_t offset, int64_t count) {
  STD_TORCH_CHECK(0 <= offset && 0 <= count && offset <= kMaxStreamWords && count <= kMaxStreamWords - offset,
                  "a stream has 2^35 values, asked for ", count, " from ", offset);
}

inline void check_grid(double noise_std, double grid) {
  int exponent;
  STD_TORCH_CHECK(std::frexp(grid, &exponent) == 0.5 && -199 <= exponent && exponent <= 200,
                  "grid must be a power of two in [2^-200, 2^199], got ", grid);
  STD_TORCH_CHECK(0 < noise_std && noise_std <= kMaxGridScale * grid, "noise_std must be in (0, 2^40 grid], got ",
                  noise_std);
}

}  // namespace dpk
