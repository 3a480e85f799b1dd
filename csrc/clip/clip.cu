// Clipping on the device; the formulas, and why they hold in floating point, are clip_cpu.cpp's. All read their input
// once and are bound by memory. Each sum has one order, which the sizes alone decide.
//
// Factors: a thread for each example, over the parts in order. Row norms: a block for each part of a row, then a thread
// for each row. Row sums: threads as [8 rows, 32 columns]; each adds every eighth row of its column.
#include <limits>

#include "clip/clip.h"
#include "common/launch.h"
#include "common/reduce.h"

namespace dpk {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 32;  // a warp reads whole lines
constexpr int kRows = kThreads / kColumns;
constexpr double kEpsilon = std::numeric_limits<double>::epsilon();
constexpr double kLargest = std::numeric_limits<double>::max();

// As many parts as the 4 KiB of a kernel's parameters hold.
struct Parts {
  static constexpr int kMost = 496;
  const double* squared_norms[kMost];
  int count;
};

__global__ void __launch_bounds__(kThreads)
    clip_factors_kernel(Parts parts, ClipFactorParams q, int64_t batch, bool first, bool last) {
  const int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (b >= batch) return;
  double sum = first ? 0 : q.norms[b];
  for (int k = 0; k < parts.count; ++k) sum += parts.squared_norms[k][b];
  if (!last) {
    q.norms[b] = sum;
    return;
  }
  const double upward = 1 + (static_cast<double>(q.parts) + 4) * kEpsilon, downward = 1 - 4 * kEpsilon;
  const double captured = sqrt(sum * upward), norm = q.loss_scale * captured;
  q.norms[b] = norm;
  q.weights[b] = norm <= kLargest ? fmin(q.loss_scale, q.max_grad_norm / captured * downward) : 0;
}

// A thread's sum errs by a unit for each term, of which it has this many; those of lanes, warps and splits by one each.
inline double row_norm_upward(int64_t size, int64_t splits) {
  const int64_t terms = ceil_div(ceil_div(size, splits), kThreads) + 5 + kThreads / 32 + splits + 4;
  return 1 + static_cast<double>(terms) * kEpsilon;
}

// Blocks: [batch, splits].
template <typename T>
__global__ void __launch_bounds__(kThreads)
    row_squared_norms_kernel(RowNormParams<T> q, int64_t splits, double upward) {
  DPK_SHARED(double, scratch, kThreads / 32);
  const int64_t b = blockIdx.x, split = blockIdx.y, length = ceil_div(q.size, splits);
  const int64_t end = min(q.size, (split + 1) * length);
  double sum = 0;
#pragma unroll 4
  for (int64_t i = split * length + threadIdx.x; i < end; i += kThreads) {
    const double x = static_cast<double>(widen(q.per_example[b * q.size + i]));
    sum = fma(x, x, sum);
  }
  sum = block_sum<kThreads>(sum, scratch);
  if (threadIdx.x) return;
  if (splits == 1)
    q.squared_norms[b] = upward * sum;
  else
    q.partials[b * splits + split] = sum;
}

__global__ void __launch_bounds__(kThreads)
    row_partials_kernel(const double* partials, double* squared_norms, int64_t batch, int64_t splits, double upward) {
  const int64_t b = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (b >= batch) return;
  double sum = 0;
  for (int64_t s = 0; s < splits; ++s) sum += partials[b * splits + s];
  squared_norms[b] = upward * sum;
}

// Blocks: [size / kColumns].
template <typename T>
__global__ void __launch_bounds__(kThreads) weighted_row_sum_kernel(DenseRowSumParams<T> q) {
  DPK_SHARED(double, sums, kThreads);
  const int64_t column = threadIdx.x % kColumns, i = int64_t{blockIdx.x} * kColumns + column;
  double sum = 0;
  if (i < q.size) {
#pragma unroll 4
    for (int64_t b = threadIdx.x / kColumns; b < q.batch; b += kRows)
      if (const double weight = q.weights[b]; weight != 0)
        sum = fma(weight, static_cast<double>(widen(q.per_example[b * q.size + i])), sum);
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= kColumns || i >= q.size) return;
  for (int r = 1; r < kRows; ++r) sum += sums[r * kColumns + column];
  q.sum[i] = sum;
}

}  // namespace

void clip_factors_cuda(const ClipFactorParams& q, int64_t batch, CUstream_st* stream) {
  for (int64_t k = 0; k < q.parts; k += Parts::kMost) {
    Parts parts{{}, static_cast<int>(std::min<int64_t>(q.parts - k, Parts::kMost))};
    std::copy_n(q.squared_norms + k, parts.count, parts.squared_norms);
    DPK_LAUNCH(clip_factors_kernel, ceil_div(batch, kThreads), kThreads, 0, stream, parts, q, batch, k == 0,
               k + parts.count == q.parts);
  }
}

template <typename T>
void row_squared_norms_cuda(const RowNormParams<T>& q, int64_t batch, CUstream_st* stream) {
  const int64_t splits = row_norm_splits(q.size);
  const double upward = row_norm_upward(q.size, splits);
  DPK_LAUNCH(row_squared_norms_kernel<T>, Grid(batch, splits), kThreads, 0, stream, q, splits, upward);
  if (splits > 1)
    DPK_LAUNCH(row_partials_kernel, ceil_div(batch, kThreads), kThreads, 0, stream, q.partials, q.squared_norms, batch,
               splits, upward);
}

template <typename T>
void weighted_row_sum_cuda(const DenseRowSumParams<T>& q, CUstream_st* stream) {
  DPK_LAUNCH(weighted_row_sum_kernel<T>, ceil_div(q.size, kColumns), kThreads, 0, stream, q);
}

template void row_squared_norms_cuda(const RowNormParams<float>&, int64_t, CUstream_st*);
template void row_squared_norms_cuda(const RowNormParams<double>&, int64_t, CUstream_st*);
template void row_squared_norms_cuda(const RowNormParams<bfloat16>&, int64_t, CUstream_st*);
template void row_squared_norms_cuda(const RowNormParams<half>&, int64_t, CUstream_st*);
template void weighted_row_sum_cuda(const DenseRowSumParams<float>&, CUstream_st*);
template void weighted_row_sum_cuda(const DenseRowSumParams<double>&, CUstream_st*);
template void weighted_row_sum_cuda(const DenseRowSumParams<bfloat16>&, CUstream_st*);
template void weighted_row_sum_cuda(const DenseRowSumParams<half>&, CUstream_st*);

}  // namespace dpk
