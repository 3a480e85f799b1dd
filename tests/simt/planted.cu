#include <type_traits>

#include "common/launch.h"
#include "common/mma.h"
#include "planted.h"

namespace dpk {
namespace {

constexpr int kThreads = 64;
constexpr int kRows = kThreads / 2, kTile = (kRows + 8) * 16;  // of a; numbers in a tile of both

__global__ void __launch_bounds__(64) staged_kernel(StagedParams q, Planted planted) {
  const float* x = q.x;
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
  if (planted == Planted::kMisaligned) tile[t] = reinterpret_cast<const float4*>(x + t % 4)->x;
  if (planted == Planted::kOverflow) tile[t] = static_cast<float>(static_cast<int>(t + q.size) * (1 << 30));
  float sum = tile[t ^ 32] + (planted == Planted::kPartial ? __shfl_xor_sync(0xffffu, 0.f, 1) : 0.f);
  if (planted != Planted::kNoTrailingBarrier) __syncthreads();
  tile[t] = sum;
  __syncwarp();
  sum = tile[t] + tile[t ^ 1];
  sum += __shfl_down_sync(kAllLanes, 0.f, 1);
  if (planted == Planted::kInput) const_cast<float*>(x)[at + t] = 0;
  if (t % 2 == 0) q.sums[(at + t + (planted == Planted::kGlobal ? kThreads : 0)) / 2] = sum;
  if (planted == Planted::kDivergent && t < 32) __syncthreads();
}

// Dynamic shared memory: 2560 bytes. A warp for each 16 rows of a. Tiles of 16 numbers' depth are copied
// asynchronously, double buffered.
__global__ void __launch_bounds__(64) tiles_kernel(TilesParams q, Planted planted) {
  DPK_DYNAMIC_SHARED(bfloat16, memory);
  const int t = threadIdx.x, warp = t / 32;
  const auto load = [&](int step) {
    const Shared<bfloat16> tile = shared_slice(memory, step % 2 * kTile, kTile);
    copy_async<16>(tile + t * 8, q.a + (t / 2 * q.depth + step * 16 + t % 2 * 8));
    if (t < 16) copy_async<16>(tile + (kRows * 16 + t * 8), q.b + (t / 2 * q.depth + step * 16 + t % 2 * 8));
    if (planted != Planted::kUncommitted) copy_async_commit();
  };
  float d[4] = {};
  load(0);
  for (int step = 0; step < q.depth / 16; ++step) {
    if (step + 1 < q.depth / 16) {
      load(step + 1);
      if (planted != Planted::kNoWait) copy_async_wait<1>();
    } else {
      copy_async_wait<0>();
    }
    if (planted != Planted::kNoBarrier) __syncthreads();
    const Shared<const uint32_t> pairs = shared_cast<const uint32_t>(shared_slice(memory, step % 2 * kTile, kTile));
    uint32_t left[4], right[2];
    mma_load_a(left, pairs + warp * 16 * 8, 8);
    mma_load_b(right, pairs + kRows * 8, 8);
    mma<bfloat16>(d, left, right);
    if (planted != Planted::kNoTrailingBarrier) __syncthreads();
  }
  for (int i = 0; i < 4; ++i) q.product[(warp * 16 + mma_row(i)) * 8 + mma_column(i)] = d[i];
}

template <typename T>
__global__ void __launch_bounds__(64) product_kernel(ProductParams q) {
  float d[4] = {};
  uint32_t left[4], right[2];
  const auto registers = [](const float* from, int64_t stride) {
    if constexpr (std::is_same_v<T, tf32>)
      return to_tf32(from[0]);
    else
      return pack(narrow<T>(from[0]), narrow<T>(from[stride]));
  };
  constexpr int kDepth = kMmaDepth<T>;
  for (int i = 0; i < 4; ++i) left[i] = registers(q.a + (mma_a_row(i) * kDepth + mma_a_depth<T>(i)), 1);
  for (int i = 0; i < 2; ++i) right[i] = registers(q.b + (mma_b_depth<T>(i) * 8 + mma_b_column()), 8);
  mma<T>(d, left, right);
  for (int i = 0; i < 4; ++i) q.product[mma_row(i) * 8 + mma_column(i)] = d[i];
}

__global__ void __launch_bounds__(64) intrinsics_kernel(IntrinsicsParams q) {
  const int* x = q.x;
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
  const auto put = [&](int value) { q.out[row++ * 64 + t] = value; };
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

void staged_cuda(const StagedParams& q, Planted planted, CUstream_st* stream) {
  DPK_LAUNCH(staged_kernel, q.size / kThreads, kThreads, 0, stream, q, planted);
}

void tiles_cuda(const TilesParams& q, Planted planted, CUstream_st* stream) {
  DPK_LAUNCH(tiles_kernel, 1, kThreads, 2 * kTile * sizeof(bfloat16), stream, q, planted);
}

template <typename T>
void product_cuda(const ProductParams& q, CUstream_st* stream) {
  DPK_LAUNCH(product_kernel<T>, 1, 32, 0, stream, q);
}

void intrinsics_cuda(const IntrinsicsParams& q, CUstream_st* stream) {
  DPK_LAUNCH(intrinsics_kernel, 1, 64, 0, stream, q);
}

template void product_cuda<tf32>(const ProductParams&, CUstream_st*);
template void product_cuda<bfloat16>(const ProductParams&, CUstream_st*);
template void product_cuda<half>(const ProductParams&, CUstream_st*);

}  // namespace dpk
