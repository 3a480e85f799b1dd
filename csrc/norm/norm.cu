// Normalization layers on the device. The formula is norm_cpu.cpp's:
//   dx = rstd (gamma g - sum(gamma g) / n - xhat sum(gamma g xhat) / n),   xhat = (x - mean) rstd
//
// Group norm: a block for each group of an example, in which a team of threads sums each channel. x and g are read from
// memory once, and from the caches when dx is written. Layer norm: teams sum rows and write dx; in a second kernel the
// threads of a block sum columns, which reads x and g again. Bytes: 3 (group) or 5 (layer) times the input's.
//
// A thread sums kRun terms in float and these in double, teams and blocks in double: the sums are as good as the CPU's.
#include "common/launch.h"
#include "common/reduce.h"
#include "norm/norm.h"

namespace dpk {
namespace {

constexpr int kThreads = 256;  // eight warps: enough to hide latency, with registers to spare
constexpr int kBlocks = 6;     // on a multiprocessor: 40 registers a thread; left to itself ptxas spills to fit eight
constexpr int kRun = 16;       // terms summed in float
constexpr int kColumns = 32;   // features of a block of the column sums: a warp reads one line
constexpr int kRows = kThreads / kColumns;

// Replaces both values by their sums over the team: a part of a warp, a warp, or the block.
template <int kTeam>
__device__ __forceinline__ void team_sums(double (&values)[2], Shared<double> scratch) {
  if constexpr (kTeam == kThreads) {
    block_sums<kThreads>(values, scratch);
  } else {
    values[0] = warp_sum<kTeam>(values[0]);
    values[1] = warp_sum<kTeam>(values[1]);
  }
}

// This thread's share of the sums of g xhat and of g, times gamma, over n values that lie side by side.
template <int kTeam, typename T, typename Gamma>
__device__ __forceinline__ void add_share(double (&sums)[2], const T* x, const T* g, int64_t n, float mean, float rstd,
                                          Gamma gamma) {
  for (int64_t i = threadIdx.x % kTeam; i < n;) {
    float scaled = 0, plain = 0;
    for (int u = 0; u < kRun && i < n; ++u, i += kTeam) {
      const float y = gamma(i) * widen(g[i]);
      scaled = fmaf(y, (widen(x[i]) - mean) * rstd, scaled);
      plain += y;
    }
    sums[0] += static_cast<double>(scaled);
    sums[1] += static_cast<double>(plain);
  }
}

template <typename T>
__device__ __forceinline__ float weight_of(const T* weight, int64_t i) {
  return weight ? widen(weight[i]) : 1.f;
}

// Blocks: [batch * groups].
template <int kTeam, typename T>
__global__ void __launch_bounds__(kThreads, kBlocks) group_norm_backward_kernel(GroupNormParams<T> q) {
  DPK_SHARED(double, scratch, 2 * kThreads / 32);
  constexpr int kTeams = kThreads / kTeam;
  const int64_t task = blockIdx.x, width = q.channels / q.groups;  // channels of a group
  const int64_t first_channel = task % q.groups * width, first = task * width * q.spatial;
  const float mean = q.mean[task], rstd = q.rstd[task];
  const int team = threadIdx.x / kTeam;
  const bool leads = threadIdx.x % kTeam == 0;

  double total[2] = {};  // of gamma g xhat and of gamma g, over the group; held by each team's first thread
  for (int64_t c0 = 0; c0 < width; c0 += kTeams) {  // all threads take part in every sum
    const int64_t c = c0 + team, at = first + c * q.spatial;
    double sums[2] = {};
    if (c < width)
      add_share<kTeam>(sums, q.x + at, q.output_grads + at, q.spatial, mean, rstd, [](int64_t) { return 1.f; });
    team_sums<kTeam>(sums, scratch);
    if (leads && c < width) {
      q.weight_grads[task * width + c] = sums[0];
      q.bias_grads[task * width + c] = sums[1];
      const double gamma = static_cast<double>(weight_of(q.weight, first_channel + c));
      total[0] = fma(sums[0], gamma, total[0]);
      total[1] = fma(sums[1], gamma, total[1]);
    }
  }
  if (!q.input_grads) return;
  block_sums<kThreads>(total, scratch);
  const double factor = static_cast<double>(rstd) / static_cast<double>(width * q.spatial);
  const float slope = q.fixed ? 0.f : static_cast<float>(factor * total[0]);
  const float offset = q.fixed ? 0.f : static_cast<float>(factor * total[1]);
  for (int64_t c = team; c < width; c += kTeams) {
    const float scale = rstd * weight_of(q.weight, first_channel + c);
    const int64_t at = first + c * q.spatial;
    for (int64_t i = at + threadIdx.x % kTeam; i < at + q.spatial; i += kTeam) {
      const float xhat = q.fixed ? 0.f : (widen(q.x[i]) - mean) * rstd;
      q.input_grads[i] = narrow<T>(fmaf(-slope, xhat, fmaf(scale, widen(q.output_grads[i]), -offset)));
    }
  }
}

// Blocks: [rows / teams]. rows = batch * positions.
template <int kTeam, typename T>
__global__ void __launch_bounds__(kThreads) layer_norm_input_kernel(LayerNormParams<T> q, int64_t rows) {
  DPK_SHARED(double, scratch, 2 * kThreads / 32);
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kTeam) + threadIdx.x / kTeam, n = q.features;
  const bool valid = row < rows;
  const T* x = q.x + row * n;
  const T* g = q.output_grads + row * n;
  const float mean = valid && q.mean ? q.mean[row] : 0.f, rstd = valid ? q.rstd[row] : 0.f;
  double sums[2] = {};
  if (valid) add_share<kTeam>(sums, x, g, n, mean, rstd, [&](int64_t i) { return weight_of(q.weight, i); });
  team_sums<kTeam>(sums, scratch);
  if (!valid) return;
  const double factor = static_cast<double>(rstd) / static_cast<double>(n);
  const float slope = static_cast<float>(factor * sums[0]);
  const float offset = q.mean ? static_cast<float>(factor * sums[1]) : 0.f;
  for (int64_t i = threadIdx.x % kTeam; i < n; i += kTeam) {
    const float xhat = (widen(x[i]) - mean) * rstd;
    const float y = weight_of(q.weight, i) * widen(g[i]);
    q.input_grads[row * n + i] = narrow<T>(fmaf(-slope, xhat, fmaf(rstd, y, -offset)));
  }
}

// Blocks: [batch, features / kColumns]. Threads: [kRows, kColumns]; each sums every kRows-th position of its feature.
template <typename T>
__global__ void __launch_bounds__(kThreads) layer_norm_columns_kernel(LayerNormParams<T> q) {
  DPK_SHARED(double, sums, 2 * kThreads);
  const int64_t b = blockIdx.x;
  const int64_t column = threadIdx.x % kColumns, f = int64_t{blockIdx.y} * kColumns + column;
  double scaled = 0, plain = 0;
  if (f < q.features) {
    for (int64_t t = threadIdx.x / kColumns; t < q.positions;) {
      float run_scaled = 0, run_plain = 0;
      for (int u = 0; u < kRun && t < q.positions; ++u, t += kRows) {
        const int64_t row = b * q.positions + t, i = row * q.features + f;
        const float y = widen(q.output_grads[i]);
        run_scaled = fmaf(y, (widen(q.x[i]) - (q.mean ? q.mean[row] : 0.f)) * q.rstd[row], run_scaled);
        run_plain += y;
      }
      scaled += static_cast<double>(run_scaled);
      plain += static_cast<double>(run_plain);
    }
  }
  sums[threadIdx.x] = scaled;
  sums[kThreads + threadIdx.x] = plain;
  __syncthreads();
  if (threadIdx.x >= kColumns || f >= q.features) return;
  for (int r = 1; r < kRows; ++r) {
    scaled += sums[r * kColumns + column];
    plain += sums[kThreads + r * kColumns + column];
  }
  q.weight_grads[b * q.features + f] = scaled;
  q.bias_grads[b * q.features + f] = plain;
}

}  // namespace

template <typename T>
void group_norm_backward_cuda(const GroupNormParams<T>& q, int64_t batch, CUstream_st* stream) {
  // Small maps leave most of a warp idle, and few channels leave most of a block idle.
  if (q.spatial <= 16)
    DPK_LAUNCH((group_norm_backward_kernel<8, T>), batch * q.groups, kThreads, 0, stream, q);
  else if (q.spatial < 1024 || q.channels / q.groups >= kThreads / 32)
    DPK_LAUNCH((group_norm_backward_kernel<32, T>), batch * q.groups, kThreads, 0, stream, q);
  else
    DPK_LAUNCH((group_norm_backward_kernel<kThreads, T>), batch * q.groups, kThreads, 0, stream, q);
}

template <typename T>
void layer_norm_backward_cuda(const LayerNormParams<T>& q, int64_t batch, CUstream_st* stream) {
  const int64_t rows = batch * q.positions;
  if (q.input_grads) {
    if (q.features <= 1024)
      DPK_LAUNCH((layer_norm_input_kernel<32, T>), ceil_div(rows, kThreads / 32), kThreads, 0, stream, q, rows);
    else
      DPK_LAUNCH((layer_norm_input_kernel<kThreads, T>), rows, kThreads, 0, stream, q, rows);
  }
  DPK_LAUNCH(layer_norm_columns_kernel<T>, Grid(batch, ceil_div(q.features, kColumns)), kThreads, 0, stream, q);
}

template void group_norm_backward_cuda(const GroupNormParams<float>&, int64_t, CUstream_st*);
template void group_norm_backward_cuda(const GroupNormParams<bfloat16>&, int64_t, CUstream_st*);
template void group_norm_backward_cuda(const GroupNormParams<half>&, int64_t, CUstream_st*);
template void layer_norm_backward_cuda(const LayerNormParams<float>&, int64_t, CUstream_st*);
template void layer_norm_backward_cuda(const LayerNormParams<bfloat16>&, int64_t, CUstream_st*);
template void layer_norm_backward_cuda(const LayerNormParams<half>&, int64_t, CUstream_st*);

}  // namespace dpk
