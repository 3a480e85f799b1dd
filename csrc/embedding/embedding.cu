// Embeddings on the device. The formulas are embedding_cpu.cpp's:
//
//   squared norms   embedding: sum_v ||sum_{t: v_t = v} g_t||^2     bag: ||g||^2 sum_v (sum_{t: v_t = v} s_t)^2
//   clipped sums    w_b times each of these rows, added over the examples
//
// A block sorts the positions of an example by index (Batcher 1968; in shared memory where they fit) and writes the
// order, in which equal indices lie side by side; then its warps take runs of equal indices in turn. For the clipped
// sums a block owns rows and columns of the table: it looks up which part of each example's order lies in its rows and
// adds the examples one after another. Each element is added to by one thread, in the order of examples: the same bits
// however the grid is cut, and no atomics. A row that nearly all examples share is the longest chain of additions.
//
// Sums over a run are in double and in the order of positions, in both. Bytes: each output gradient once, indices and
// order about three times, the table written once and each of its sums read and written through the caches.
#include "common/launch.h"
#include "common/reduce.h"
#include "embedding/embedding.h"

namespace dpk {
namespace {

constexpr int kThreads = 128;            // of a block that has an example: sorting needs many barriers
constexpr int kSumThreads = 256;         // of a block that has a part of the table: as many examples at a time
constexpr int kSortedInShared = 4096;    // positions: 32 KiB of keys
constexpr int64_t kSumBlocks = 4 * 132;  // row blocks times column blocks: a few for each multiprocessor
constexpr int64_t kSkipped = INT64_MAX;  // the key of a position that contributes nothing: behind all others

// Sorts n keys by the threads of the block; those behind n count as infinite. Each step compares disjoint pairs.
template <typename Keys>
__device__ __forceinline__ void sort_keys(Keys keys, int64_t n) {
  int64_t padded = 1;
  while (padded < n) padded *= 2;
  const auto order_pair = [&](int64_t i, int64_t j) {
    if (j >= n) return;
    const int64_t a = keys[i], b = keys[j];
    if (a > b) keys[i] = b, keys[j] = a;
  };
  for (int64_t size = 2; size <= padded; size *= 2) {
    // Two sorted halves: the second is met in reverse, after which each half needs ordinary steps.
    for (int64_t p = threadIdx.x; p < padded / 2; p += kThreads) {
      const int64_t at = p / (size / 2) * size, o = p % (size / 2);
      order_pair(at + o, at + size - 1 - o);
    }
    __syncthreads();
    for (int64_t step = size / 4; step > 0; step /= 2) {
      for (int64_t p = threadIdx.x; p < padded / 2; p += kThreads) {
        const int64_t i = p / step * 2 * step + p % step;
        order_pair(i, i + step);
      }
      __syncthreads();
    }
  }
}

// Writes the positions of example b that contribute, by index and then position, and then -1.
template <bool kShared, typename T>
__device__ __forceinline__ void sort_positions(const EmbeddingParams<T>& q, int64_t b) {
  DPK_DYNAMIC_SHARED(int64_t, memory);
  const int64_t n = q.positions;
  const int64_t* indices = q.indices + b * n;
  int64_t* order = q.order + b * n;
  const auto sort_in = [&](auto keys) {
    for (int64_t t = threadIdx.x; t < n; t += kThreads) {
      const int64_t index = indices[t];
      const bool skipped = index == q.padding_idx || (q.scales && q.scales[b * n + t] == 0);
      keys[t] = skipped ? kSkipped : index * n + t;
    }
    __syncthreads();
    sort_keys(keys, n);
    for (int64_t t = threadIdx.x; t < n; t += kThreads) {
      const int64_t key = keys[t];
      order[t] = key == kSkipped ? -1 : key % n;
    }
    __syncthreads();
  };
  if constexpr (kShared)
    sort_in(memory);
  else
    sort_in(order);
}

// The end of the run of equal indices that starts at `first`, below `limit`.
__device__ __forceinline__ int64_t run_end(const int64_t* indices, const int64_t* order, int64_t first, int64_t limit) {
  const int64_t index = indices[order[first]];
  int64_t last = first + 1;
  while (last < limit && order[last] >= 0 && indices[order[last]] == index) ++last;
  return last;
}

__device__ __forceinline__ bool starts_run(const int64_t* indices, const int64_t* order, int64_t i) {
  return i == 0 || indices[order[i - 1]] != indices[order[i]];
}

// One column of the sum over a run of output gradients.
template <typename T>
__device__ __forceinline__ double sum_column(const EmbeddingParams<T>& q, const T* g, const int64_t* run, int64_t count,
                                             int64_t column) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(widen(g[run[i] * q.dim + column]));
  return sum;
}

__device__ __forceinline__ double sum_scales(const double* scales, const int64_t* run, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += scales[run[i]];
  return sum;
}

// Blocks: [batch]. Dynamic shared memory: 32768 bytes where keys are sorted there.
template <bool kShared, typename T>
__global__ void __launch_bounds__(kThreads) embedding_squared_norms_kernel(EmbeddingParams<T> q) {
  constexpr int kWarps = kThreads / kWarp;
  DPK_SHARED(double, scratch, 2 * kWarps);
  const int64_t b = blockIdx.x, n = q.positions;
  sort_positions<kShared>(q, b);
  const int64_t* indices = q.indices + b * n;
  const int64_t* order = q.order + b * n;
  const T* g = q.output_grads + (q.scales ? b : b * n) * q.dim;
  double sums[2] = {};  // of squares: over runs, and of a bag's output gradient
  if (q.scales) {
    for (int64_t i = threadIdx.x; i < n && order[i] >= 0; i += kThreads) {
      if (!starts_run(indices, order, i)) continue;
      const double scale = sum_scales(q.scales + b * n, order + i, run_end(indices, order, i, n) - i);
      sums[0] = fma(scale, scale, sums[0]);
    }
    for (int64_t c = threadIdx.x; c < q.dim; c += kThreads) {
      const double x = static_cast<double>(widen(g[c]));
      sums[1] = fma(x, x, sums[1]);
    }
  } else {
    for (int64_t i = threadIdx.x / kWarp; i < n && order[i] >= 0; i += kWarps) {
      if (!starts_run(indices, order, i)) continue;
      const int64_t count = run_end(indices, order, i, n) - i;
#pragma unroll 4
      for (int64_t c = threadIdx.x % kWarp; c < q.dim; c += kWarp) {
        const double x = sum_column(q, g, order + i, count, c);
        sums[0] = fma(x, x, sums[0]);
      }
    }
  }
  block_sums<kThreads>(sums, scratch);
  if (threadIdx.x != 0) return;
  // As on the CPU: a bag of nothing but padding has no gradient; squares that vanish must not hide the other factor.
  constexpr double kLeast = 0x1p-1022;
  const bool bag = q.scales && n > 0 && order[0] >= 0;
  q.result[b] =
      bag ? (sums[0] + static_cast<double>(n) * kLeast) * (sums[1] + static_cast<double>(q.dim) * kLeast) : sums[0];
}

// Blocks: [batch]. Dynamic shared memory: 32768 bytes where keys are sorted there.
template <bool kShared, typename T>
__global__ void __launch_bounds__(kThreads) embedding_order_kernel(EmbeddingParams<T> q) {
  sort_positions<kShared>(q, blockIdx.x);
}

// The first place of an example's order whose index is at least `row`.
__device__ __forceinline__ int64_t lower_bound(const int64_t* indices, const int64_t* order, int64_t n, int64_t row) {
  int64_t first = 0;
  while (n > 0) {
    const int64_t half = n / 2, position = order[first + half];
    const bool below = position >= 0 && indices[position] < row;
    first = below ? first + half + 1 : first;
    n = below ? n - half - 1 : half;
  }
  return first;
}

// Blocks: [table rows / block_rows, columns / kTeam]. A team has each of its rows' columns in a thread.
template <int kTeam, typename T>
__global__ void __launch_bounds__(kSumThreads) embedding_clipped_sums_kernel(EmbeddingParams<T> q, int64_t block_rows) {
  constexpr int kTeams = kSumThreads / kTeam;
  DPK_SHARED(int64_t, firsts, kSumThreads);
  DPK_SHARED(int64_t, lasts, kSumThreads);
  const int64_t row0 = blockIdx.x * block_rows, row1 = min(row0 + block_rows, q.num_embeddings), n = q.positions;
  const int64_t column = int64_t{blockIdx.y} * kTeam + threadIdx.x % kTeam, team = threadIdx.x / kTeam;
  const bool valid = column < q.dim;
  if (valid)
    for (int64_t v = row0 + team; v < row1; v += kTeams) q.result[v * q.dim + column] = 0;
  for (int64_t b0 = 0; b0 < q.batch; b0 += kSumThreads) {
    const int64_t own = b0 + threadIdx.x;
    const bool used = own < q.batch && q.weights[own] != 0;
    firsts[threadIdx.x] = used ? lower_bound(q.indices + own * n, q.order + own * n, n, row0) : 0;
    lasts[threadIdx.x] = used ? lower_bound(q.indices + own * n, q.order + own * n, n, row1) : 0;
    __syncthreads();
    for (int64_t b = b0; b < min(b0 + kSumThreads, q.batch); ++b) {
      const int64_t last = lasts[b - b0];
      const int64_t* indices = q.indices + b * n;
      const int64_t* order = q.order + b * n;
      for (int64_t i = firsts[b - b0], end; i < last; i = end) {
        end = run_end(indices, order, i, last);
        const int64_t v = indices[order[i]];
        if ((v - row0) % kTeams != team || !valid) continue;
        double* to = q.result + v * q.dim + column;
        if (q.scales)
          *to = fma(q.weights[b] * sum_scales(q.scales + b * n, order + i, end - i),
                    static_cast<double>(widen(q.output_grads[b * q.dim + column])), *to);
        else
          *to = fma(q.weights[b], sum_column(q, q.output_grads + b * n * q.dim, order + i, end - i, column), *to);
      }
    }
    __syncthreads();
  }
}

template <int kTeam, typename T>
void launch_sums(const EmbeddingParams<T>& q, CUstream_st* stream) {
  const int64_t columns = ceil_div(q.dim, kTeam);
  if (columns == 0) return;
  const int64_t block_rows = max(ceil_div(q.num_embeddings * columns, kSumBlocks), int64_t{kSumThreads / kTeam});
  DPK_LAUNCH((embedding_clipped_sums_kernel<kTeam, T>), Grid(ceil_div(q.num_embeddings, block_rows), columns),
             kSumThreads, 0, stream, q, block_rows);
}

}  // namespace

template <typename T>
void embedding_squared_norms_cuda(const EmbeddingParams<T>& q, CUstream_st* stream) {
  if (q.positions <= kSortedInShared)
    DPK_LAUNCH((embedding_squared_norms_kernel<true, T>), q.batch, kThreads, q.positions * sizeof(int64_t), stream, q);
  else
    DPK_LAUNCH((embedding_squared_norms_kernel<false, T>), q.batch, kThreads, 0, stream, q);
}

template <typename T>
void embedding_clipped_sums_cuda(const EmbeddingParams<T>& q, CUstream_st* stream) {
  if (q.positions <= kSortedInShared)
    DPK_LAUNCH((embedding_order_kernel<true, T>), q.batch, kThreads, q.positions * sizeof(int64_t), stream, q);
  else
    DPK_LAUNCH((embedding_order_kernel<false, T>), q.batch, kThreads, 0, stream, q);
  q.dim <= kWarp ? launch_sums<32>(q, stream) : launch_sums<128>(q, stream);
}

template void embedding_squared_norms_cuda(const EmbeddingParams<float>&, CUstream_st*);
template void embedding_squared_norms_cuda(const EmbeddingParams<bfloat16>&, CUstream_st*);
template void embedding_squared_norms_cuda(const EmbeddingParams<half>&, CUstream_st*);
template void embedding_clipped_sums_cuda(const EmbeddingParams<float>&, CUstream_st*);
template void embedding_clipped_sums_cuda(const EmbeddingParams<bfloat16>&, CUstream_st*);
template void embedding_clipped_sums_cuda(const EmbeddingParams<half>&, CUstream_st*);

}  // namespace dpk
