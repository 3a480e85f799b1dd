// Selected entries of per-example weight gradients on the device:
//
//   G[b, n] = sum_t g[b, o, t] x[b, c, t stride + k dilation - padding]   for the n-th selected entry (o, c, k)
//
// A block has an example and a run of entries, and a team of threads an entry at a time: of 32, 8 or 1 threads by the
// number of positions, which its threads take in turn, so that they read side by side. A thread steps through positions
// without dividing. Entries in ascending order share their output's gradient and neighbouring channels in the L1 cache.
// Bytes: two values a product from the caches, each operand once from memory, the result written once.
//
// Each entry is summed by one team in one order: products fused in float (double for double) over at most kRun
// positions of a thread, then in double. The same bits whatever other entries or examples are computed.
#include "common/launch.h"
#include "common/reduce.h"
#include "sparse/sparse.h"

namespace dpk {
namespace {

constexpr int kThreads = 256;
constexpr int kEach = 4;  // entries of a team: a thread's first position is worked out once for them
constexpr int kRun = 64;  // positions that a thread adds up before they join in double

__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }

// A position of the output map, and how far apart a thread's positions are.
struct Walk {
  int64_t at[3], step[3];

  __device__ __forceinline__ Walk(const ConvShape& s, int64_t first, int64_t apart) {
    const int64_t line = s.out[2], plane = s.out[1] * s.out[2];
    at[0] = first / plane, at[1] = first / line % s.out[1], at[2] = first % line;
    step[0] = apart / plane, step[1] = apart / line % s.out[1], step[2] = apart % line;
  }

  __device__ __forceinline__ void advance(const ConvShape& s) {
#pragma unroll
    for (int i = 2; i >= 0; --i) {
      at[i] += step[i];
      if (i > 0 && at[i] >= s.out[i]) {
        at[i] -= s.out[i];
        ++at[i - 1];
      }
    }
  }
};

// Blocks: [batch * ceil(selected / (teams * kEach))].
template <int kTeam, typename T>
__global__ void __launch_bounds__(kThreads) sparse_gradients_kernel(SparseParams<T> q, int64_t blocks) {
  constexpr int kTeams = kThreads / kTeam;
  const ConvShape& s = q.shape;
  const int64_t b = blockIdx.x / blocks, first = blockIdx.x % blocks * kTeams * kEach + threadIdx.x / kTeam;
  const int64_t lane = threadIdx.x % kTeam, positions = s.positions();
  const Walk start(s, lane, kTeam);
  for (int e = 0; e < kEach; ++e) {
    const int64_t n = first + e * kTeams;
    double sum = 0;
    if (n < q.selected) {
      const int64_t entry = q.entries[n], output = entry / s.rows(), row = entry % s.rows(), tap = row % s.taps();
      const int64_t channel = output / s.group_out() * s.group_in() + row / s.taps();
      const T* x = q.input + b * s.in_channels * s.pixels() + channel * q.input_layout.channel;
      const T* g = q.output_grads + b * s.out_channels * positions + output * q.output_layout.channel;
      const int64_t shift[3] = {tap / (s.kernel[1] * s.kernel[2]) * s.dilation[0] - s.padding[0],
                                tap / s.kernel[2] % s.kernel[1] * s.dilation[1] - s.padding[1],
                                tap % s.kernel[2] * s.dilation[2] - s.padding[2]};
      Walk walk = start;
      for (int64_t t = lane; t < positions;) {
        acc_t<T> run = 0;
        for (int u = 0; u < kRun && t < positions; ++u, t += kTeam) {
          bool inside = true;
          int64_t pixel = 0;
#pragma unroll
          for (int i = 0; i < 3; ++i) {
            const int64_t line = walk.at[i] * s.stride[i] + shift[i];
            inside &= 0 <= line && line < s.in[i];
            pixel = pixel * s.in[i] + line;
          }
          if (inside) run = fused(widen(g[t * q.output_layout.pixel]), widen(x[pixel * q.input_layout.pixel]), run);
          walk.advance(s);
        }
        sum += static_cast<double>(run);
      }
    }
    sum = warp_sum<kTeam>(sum);
    if (lane == 0 && n < q.selected) q.gradients[b * q.selected + n] = static_cast<acc_t<T>>(sum);
  }
}

template <int kTeam, typename T>
void launch_teams(const SparseParams<T>& q, CUstream_st* stream) {
  const int64_t blocks = ceil_div(q.selected, kThreads / kTeam * kEach);
  DPK_LAUNCH((sparse_gradients_kernel<kTeam, T>), q.shape.batch * blocks, kThreads, 0, stream, q, blocks);
}

}  // namespace

template <typename T>
void sparse_gradients_cuda(const SparseParams<T>& q, CUstream_st* stream) {
  if (q.shape.positions() < 8)
    launch_teams<1>(q, stream);
  else if (q.shape.positions() < 128)
    launch_teams<8>(q, stream);
  else
    launch_teams<32>(q, stream);
}

template void sparse_gradients_cuda(const SparseParams<float>&, CUstream_st*);
template void sparse_gradients_cuda(const SparseParams<double>&, CUstream_st*);
template void sparse_gradients_cuda(const SparseParams<bfloat16>&, CUstream_st*);
template void sparse_gradients_cuda(const SparseParams<half>&, CUstream_st*);

}  // namespace dpk
