// Small kernels with a fault that a caller plants: what the machine must find. With fault "none" each is right.
//
// staged: [n] -> [n / 2], sums of neighbours through shared memory. tiles: the product a b^T of two bfloat16 matrices,
// one warp for each 16 columns of a, tiles of both copied asynchronously, double buffered. exact: one product by mma.
#include <algorithm>
#include <string>

#include "common/launch.h"
#include "common/mma.h"
#include "common/reduce.h"
#include "simt/binding.h"

namespace dpk {
namespace {

enum class Planted {
  kNone,
  kNoBarrier,          // before what other threads wrote is read
  kNoTrailingBarrier,  // before what others still read is written again
  kNoWait,             // for an asynchronous copy
  kUncommitted,        // copy: its group is never closed
  kDivergent,          // one warp returns instead of waiting at a barrier
  kTwoBarriers,        // half of a block waits at one barrier, half at another
  kExited,             // a lane returns before a shuffle
  kBeyond,             // the last element of a tile is one too far
  kGlobal,             // so is that of the output
  kInput,              // an input is written
  kUnwritten,          // shared memory is read before it was written
  kPartial,            // a shuffle of half a warp
};

constexpr int kThreads = 64;

__global__ void staged_kernel(const float* x, float* sums, Planted planted) {
  DPK_SHARED(float, tile, kThreads);
  const unsigned t = threadIdx.x;
  const int64_t at = int64_t{blockIdx.x} * kThreads;
  if (planted != Planted::kUnwritten || t != 3) tile[t + (planted == Planted::kBeyond)] = x[at + t];
  if (planted == Planted::kTwoBarriers) {
    if (t < 32)
      __syncthreads();
    else
      __syncthreads();
  } else if (planted != Planted::kNoBarrier) {
    __syncthreads();
  }
  if (planted == Planted::kExited && t == 40) return;
  float sum = tile[t ^ 32] + (planted == Planted::kPartial ? __shfl_xor_sync(0xffffu, 0.f, 1) : 0.f);
  if (planted != Planted::kNoTrailingBarrier) __syncthreads();
  tile[t] = sum;
  __syncwarp();
  sum = tile[t] + tile[t ^ 1];
  sum += __shfl_down_sync(kAllLanes, 0.f, 1);
  if (planted == Planted::kInput) const_cast<float*>(x)[at + t] = 0;
  if (t % 2 == 0) sums[(at + t + (planted == Planted::kGlobal ? kThreads : 0)) / 2] = sum;
  if (planted == Planted::kDivergent && t < 32) __syncthreads();
}

// a [16 * warps, depth], b [8, depth], product [16 * warps, 8]; depth a multiple of 16.
__global__ void tiles_kernel(const bfloat16* a, const bfloat16* b, float* product, int depth, Planted planted) {
  DPK_DYNAMIC_SHARED(bfloat16, memory);
  constexpr int kRows = kThreads / 2;  // of a
  constexpr int kTile = (kRows + 8) * 16;
  const int t = threadIdx.x, warp = t / 32;
  const auto load = [&](int step) {
    const Shared<bfloat16> tile = shared_slice(memory, step % 2 * kTile, kTile);
    copy_async<16>(tile + t * 8, a + (t / 2 * depth + step * 16 + t % 2 * 8));
    if (t < 16) copy_async<16>(tile + (kRows * 16 + t * 8), b + (t / 2 * depth + step * 16 + t % 2 * 8));
    if (planted != Planted::kUncommitted) copy_async_commit();
  };
  float d[4] = {};
  load(0);
  for (int step = 0; step < depth / 16; ++step) {
    if (step + 1 < depth / 16) {
      load(step + 1);
      if (planted != Planted::kNoWait) copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    if (planted != Planted::kNoBarrier) __syncthreads();
    const Shared<const uint32_t> pairs = shared_cast<const uint32_t>(shared_slice(memory, step % 2 * kTile, kTile));
    uint32_t left[4], right[2];
    for (int i = 0; i < 4; ++i) left[i] = pairs[((warp * 16 + mma_a_row(i)) * 16 + mma_a_depth<bfloat16>(i)) / 2];
    for (int i = 0; i < 2; ++i) right[i] = pairs[((kRows + mma_b_column()) * 16 + mma_b_depth<bfloat16>(i)) / 2];
    mma<bfloat16>(d, left, right);
    if (planted != Planted::kNoTrailingBarrier) __syncthreads();
  }
  for (int i = 0; i < 4; ++i) product[(warp * 16 + mma_row(i)) * 8 + mma_column(i)] = d[i];
}

// a [16, depth], b [depth, 8], product [16, 8], of one warp.
template <typename T>
__global__ void product_kernel(const float* a, const float* b, float* product) {
  float d[4] = {};
  uint32_t left[4], right[2];
  const auto registers = [](const float* from, int64_t stride) {
    if constexpr (std::is_same_v<T, tf32>)
      return to_tf32(from[0]);
    else
      return pack(narrow<T>(from[0]), narrow<T>(from[stride]));
  };
  constexpr int kDepth = kMmaDepth<T>;
  for (int i = 0; i < 4; ++i) left[i] = registers(a + (mma_a_row(i) * kDepth + mma_a_depth<T>(i)), 1);
  for (int i = 0; i < 2; ++i) right[i] = registers(b + (mma_b_depth<T>(i) * 8 + mma_b_column()), 8);
  mma<T>(d, left, right);
  for (int i = 0; i < 4; ++i) product[mma_row(i) * 8 + mma_column(i)] = d[i];
}

// Every intrinsic of warps and blocks, by its definition: x [64] -> out [10, 64].
__global__ void intrinsics_kernel(const int* x, int* out) {
  DPK_SHARED(int, total, 2);
  const int t = threadIdx.x;
  if (t == 0) {
    total[0] = 0;
    total[1] = 0;
  }
  __syncthreads();
  atomicAdd(total + 0, x[t]);
  atomicMax(total + 1, x[t]);
  __syncthreads();
  int row = 0;
  const auto put = [&](int value) { out[row++ * 64 + t] = value; };
  put(total[0]);
  put(total[1]);
  put(__shfl_sync(kAllLanes, x[t], 5));
  put(__shfl_sync(kAllLanes, x[t], 1, 8));
  put(__shfl_up_sync(kAllLanes, x[t], 3, 16));
  put(__shfl_down_sync(kAllLanes, x[t], 2, 8));
  put(__shfl_xor_sync(kAllLanes, x[t], 4));
  put(static_cast<int>(__ballot_sync(kAllLanes, x[t] > 0)));
  put(__syncthreads_count(x[t] > 0));
  put(__any_sync(kAllLanes, x[t] > 90) + 2 * __all_sync(kAllLanes, x[t] > -50));
}

}  // namespace

namespace simt {
namespace {

const std::map<std::string, Planted> kFaults{{"none", Planted::kNone},
                                             {"no barrier", Planted::kNoBarrier},
                                             {"no trailing barrier", Planted::kNoTrailingBarrier},
                                             {"no wait", Planted::kNoWait},
                                             {"uncommitted", Planted::kUncommitted},
                                             {"divergent", Planted::kDivergent},
                                             {"two barriers", Planted::kTwoBarriers},
                                             {"exited", Planted::kExited},
                                             {"beyond", Planted::kBeyond},
                                             {"global", Planted::kGlobal},
                                             {"input", Planted::kInput},
                                             {"unwritten", Planted::kUnwritten},
                                             {"partial", Planted::kPartial}};

py::object staged(const py::array& x, const std::string& fault, const std::string& schedule) {
  Call call(schedule);
  const auto* in = call.input<float>(x);
  auto* out = call.output<float>({x.size() / 2});
  DPK_LAUNCH(staged_kernel, x.size() / kThreads, kThreads, 0, call.stream(), in, out, kFaults.at(fault));
  return call.result();
}

py::object tiles(const py::array& a, const py::array& b, const std::string& fault, const std::string& schedule) {
  Call call(schedule);
  const auto *left = call.input<bfloat16>(a), *right = call.input<bfloat16>(b);
  auto* out = call.output<float>({32, 8});
  constexpr size_t kBytes = 2 * (32 + 8) * 16 * sizeof(bfloat16);
  DPK_LAUNCH(tiles_kernel, 1, kThreads, kBytes, call.stream(), left, right, out, static_cast<int>(a.shape(1)),
             kFaults.at(fault));
  return call.result();
}

template <typename T>
py::object product(const py::array& a, const py::array& b, const std::string& schedule) {
  Call call(schedule);
  const auto *left = call.input<float>(a), *right = call.input<float>(b);
  DPK_LAUNCH(product_kernel<T>, 1, 32, 0, call.stream(), left, right, call.output<float>({16, 8}));
  return call.result();
}

py::object intrinsics(const py::array& x, const std::string& schedule) {
  Call call(schedule);
  const auto* in = call.input<int>(x);
  DPK_LAUNCH(intrinsics_kernel, 1, 64, 0, call.stream(), in, call.output<int>({10, 64}));
  return call.result();
}

const Family planted([](py::module_& m) {
  m.def("planted_staged", staged, py::arg("x"), py::arg("fault"), py::arg("schedule"));
  m.def("planted_tiles", tiles, py::arg("a"), py::arg("b"), py::arg("fault"), py::arg("schedule"));
  m.def("product_tf32", product<tf32>, py::arg("a"), py::arg("b"), py::arg("schedule"));
  m.def("product_bfloat16", product<bfloat16>, py::arg("a"), py::arg("b"), py::arg("schedule"));
  m.def("product_half", product<half>, py::arg("a"), py::arg("b"), py::arg("schedule"));
  m.def("intrinsics", intrinsics, py::arg("x"), py::arg("schedule"));
  // Of common/scalar.h, for every bit pattern.
  m.def("widen_half", [](uint16_t bits) { return widen(half{bits}); });
  m.def("narrow_half", [](float x) { return narrow<half>(x).bits; });
  m.def("narrow_bfloat16", [](float x) { return narrow<bfloat16>(x).bits; });
});

}  // namespace
}  // namespace simt
}  // namespace dpk
