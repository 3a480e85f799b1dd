// Linear layers on the device.
//
// Norms, one position: ||a||^2 ||g||^2, a warp for each example, both operands read once.
// Norms, several: tiles of each example's gradient on tensor cores, squared where they are
// (common/product_kernels.cuh), or pairs of positions where these are fewer (common/product_gram.cuh): a linear layer
// is a convolution with one tap whose pixels are the positions, channels last.
//
// Sums, one position: one product over the batch in double, in which products of two floats are exact; an example adds
// one number to each entry, so nothing of it can cancel. 2 batch in_features out_features operations in double.
// Sums, several: the same tiles as the norms, weighted and added in double.
//
// Forward of a layer with few outputs: its cost is reading the activations, and ||a||^2 is taken from the same read.
#include "common/product_kernels.cuh"
#include "linear/linear.h"

namespace dpk {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <typename T, typename P>
ProductShape shape_of(const P& q, int64_t batch) {
  ProductShape s;
  s.half = std::is_same_v<T, half>;
  s.tf32 = q.tf32;
  s.batch = batch;
  s.channels = static_cast<int>(q.in_features);
  s.outputs = static_cast<int>(q.out_features);
  s.in[2] = s.out[2] = static_cast<int>(q.positions);
  s.input = {1, q.in_features, q.positions * q.in_features};
  s.output = {1, q.out_features, q.positions * q.out_features};
  s.finish();
  return s;
}

// Whether pairs of positions are cheaper: in products, positions in fragments of 16.
template <typename T>
bool takes_gram(const ProductShape& s) {
  constexpr double kOverhead = 1.5;  // folding chains
  const double side = static_cast<double>(ceil_div(s.positions, 16)) * 16, p = s.rows, d = s.outputs;
  return !std::is_same_v<T, double> && gram_fits(s) && kOverhead * side * (p + d) < p * d;
}

// The sum of squares of n values, in every lane.
template <typename T>
__device__ __forceinline__ double squared_norm(const T* x, int64_t n) {
  double sum = 0;
  for (int64_t i = threadIdx.x % kWarp; i < n; i += kWarp) {
    const double value = static_cast<double>(widen(x[i]));
    sum = fma(value, value, sum);
  }
  return warp_sum(sum);
}

// A warp for each example, of one position.
template <typename T>
__global__ void __launch_bounds__(kThreads) outer_norms_kernel(LinearNormParams<T> q, int64_t batch) {
  const int64_t b = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (b >= batch) return;
  // Squares of doubles leave their range; squares of floats do not.
  constexpr double kLost = std::is_same_v<T, double> ? 0x1p-1022 : 0;
  const double p = static_cast<double>(q.in_features), d = static_cast<double>(q.out_features);
  const double g = squared_norm(q.output_grads + b * q.out_features, q.out_features) + d * kLost;
  const double a = q.weight ? squared_norm(q.activations + b * q.in_features, q.in_features) + p * kLost : 0;
  // Chains of sums, and the roundings of what the sum adds.
  const double rounding = 1 + ((p + d) / kWarp + 32) * 0x1p-53;
  if (threadIdx.x % kWarp == 0) q.squared_norms[b] = ((q.weight ? a * g : 0) + (q.bias ? g : 0)) * rounding;
}

constexpr int kTile = 64, kDepth = 16;  // of the sums' blocks: kTile x kTile entries, kDepth examples at a time

int64_t outer_tiles(int64_t in_features, int64_t out_features) {
  return ceil_div(in_features, kTile) * ceil_div(out_features, kTile);
}

int64_t outer_slices(int64_t batch, int64_t in_features, int64_t out_features) {
  constexpr int64_t kBlocks = 528;
  return std::clamp<int64_t>(kBlocks / std::max<int64_t>(1, outer_tiles(in_features, out_features)), 1,
                             std::max<int64_t>(1, batch / (2 * kDepth)));
}

// sums [slices, out_features, in_features] of weights[b] g[b] a[b]^T. Blocks: [slices * tiles]; a thread adds up four
// outputs and two times two inputs.
template <typename T>
__global__ void __launch_bounds__(kThreads) outer_sums_kernel(LinearSumParams<T> q, double* sums, int64_t slices) {
  constexpr int kPitch = kTile + 2;
  DPK_SHARED(double, a, kDepth* kPitch);
  DPK_SHARED(double, g, kDepth* kPitch);
  const int64_t p = q.in_features, d = q.out_features, across = ceil_div(p, kTile);
  const int64_t tiles = across * ceil_div(d, kTile), slice = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const int64_t input = tile % across * kTile, output = tile / across * kTile;
  const int64_t begin = slice * q.batch / slices, end = (slice + 1) * q.batch / slices;
  const int column = threadIdx.x % kTile, x = threadIdx.x % 16, y = threadIdx.x / 16;
  double total[4][4] = {};
  for (int64_t b0 = begin; b0 < end; b0 += kDepth) {
#pragma unroll
    for (int k = threadIdx.x / kTile; k < kDepth; k += kThreads / kTile) {
      const int64_t b = b0 + k;
      const double weight = b < end ? q.weights[b] : 0;
      const bool has_a = weight != 0 && input + column < p, has_g = weight != 0 && output + column < d;
      a[k * kPitch + column] = has_a ? static_cast<double>(widen(q.activations[b * p + input + column])) : 0;
      g[k * kPitch + column] = has_g ? weight * static_cast<double>(widen(q.output_grads[b * d + output + column])) : 0;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      const Shared<const double2> left = shared_cast<const double2>(shared_slice(g, k * kPitch, kTile));
      const Shared<const double2> right = shared_cast<const double2>(shared_slice(a, k * kPitch, kTile));
      const double2 g0 = left[2 * y], g1 = left[2 * y + 1], a0 = right[x], a1 = right[x + 16];
      const double gs[4] = {g0.x, g0.y, g1.x, g1.y}, as[4] = {a0.x, a0.y, a1.x, a1.y};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) total[i][j] = fma(gs[i], as[j], total[i][j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t o = output + 4 * y + i, r = input + j / 2 * 32 + 2 * x + j % 2;
      if (o < d && r < p) sums[(slice * d + o) * p + r] = total[i][j];
    }
}

constexpr int kForwardRows = 4, kForwardOutputs = 4;  // of a warp's pass over the inputs
constexpr int kForwardRun = 128;                      // products that a lane sums in float

// A warp for kForwardRows rows.
template <typename T>
__global__ void __launch_bounds__(kThreads) linear_forward_kernel(LinearForwardParams<T> q, int64_t rows) {
  const int64_t row = (int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kForwardRows;
  if (row >= rows) return;
  const int lane = threadIdx.x % kWarp;
  const int64_t p = q.in_features, d = q.out_features, left = min(rows - row, int64_t{kForwardRows});
  for (int64_t r = 0; r < left; ++r) {
    const double square = squared_norm(q.activations + (row + r) * p, p);
    if (lane == 0) q.squared_rows[row + r] = square;
  }
  for (int64_t j0 = 0; j0 < d; j0 += kForwardOutputs) {
    acc_t<T> totals[kForwardRows][kForwardOutputs] = {};
    double wide[kForwardRows][kForwardOutputs] = {};
    int64_t k = lane;
    while (k < p) {
      for (int step = 0; step < kForwardRun && k < p; ++step, k += kWarp) {
        acc_t<T> w[kForwardOutputs];
#pragma unroll
        for (int j = 0; j < kForwardOutputs; ++j) w[j] = widen(q.weight[min(j0 + j, d - 1) * p + k]);
#pragma unroll
        for (int r = 0; r < kForwardRows; ++r) {
          const acc_t<T> a = widen(q.activations[min(row + r, rows - 1) * p + k]);
#pragma unroll
          for (int j = 0; j < kForwardOutputs; ++j) totals[r][j] = fma(a, w[j], totals[r][j]);
        }
      }
#pragma unroll
      for (int r = 0; r < kForwardRows; ++r)
#pragma unroll
        for (int j = 0; j < kForwardOutputs; ++j) {
          wide[r][j] += static_cast<double>(totals[r][j]);
          totals[r][j] = 0;
        }
    }
#pragma unroll
    for (int r = 0; r < kForwardRows; ++r)
#pragma unroll
      for (int j = 0; j < kForwardOutputs; ++j) {
        const double sum = warp_sum(wide[r][j]);
        if (lane || r >= left || j0 + j >= d) continue;
        const double bias = q.bias ? static_cast<double>(widen(q.bias[j0 + j])) : 0;
        q.outputs[(row + r) * d + j0 + j] = narrow<T>(static_cast<acc_t<T>>(sum + bias));
      }
  }
}

}  // namespace

template <typename T>
int64_t linear_norm_scratch(const LinearNormParams<T>& q, int64_t batch) {
  if (q.positions == 1) return 0;
  const int64_t norms = q.weight ? product_norm_scratch<T>(shape_of<T>(q, batch)) : 0;
  return norms + (q.bias ? batch * q.out_features : 0);
}

template <typename T>
int64_t linear_sum_scratch(const LinearSumParams<T>& q) {
  const int64_t slices = !q.weight_sum      ? 1
                         : q.positions == 1 ? outer_slices(q.batch, q.in_features, q.out_features)
                                            : product_slices<T>(shape_of<T>(q, q.batch));
  const int64_t sums = slices > 1 ? slices * q.in_features * q.out_features : 0;
  return sums + (q.bias_sum ? q.batch * q.out_features : 0);
}

template <typename T>
void linear_forward_cuda(const LinearForwardParams<T>& q, int64_t rows, CUstream_st* stream) {
  DPK_LAUNCH(linear_forward_kernel<T>, ceil_div(rows, kWarps * kForwardRows), kThreads, 0, stream, q, rows);
}

template <typename T>
void linear_squared_norms_cuda(const LinearNormParams<T>& q, int64_t batch, CUstream_st* stream) {
  if (q.positions == 1) {
    DPK_LAUNCH(outer_norms_kernel<T>, ceil_div(batch, kWarps), kThreads, 0, stream, q, batch);
    return;
  }
  const ProductShape s = shape_of<T>(q, batch);
  const bool gram = q.weight && takes_gram<T>(s);
  double* bias_grads = q.scratch + (q.weight ? product_norm_scratch<T>(s) : 0);
  if (q.weight)
    launch_product_norms<true>(s, q.activations, q.output_grads, static_cast<acc_t<T>*>(nullptr), gram, q.scratch,
                               stream);
  if (q.bias)
    launch_position_sums(q.output_grads, s.output, batch, q.out_features, q.positions, nullptr, bias_grads, stream);
  launch_finish_norms<T>(s, q.weight ? q.scratch : nullptr, gram, q.bias ? bias_grads : nullptr, q.out_features,
                         q.squared_norms, stream);
}

template <typename T>
void linear_clipped_sums_cuda(const LinearSumParams<T>& q, CUstream_st* stream) {
  const ProductShape s = shape_of<T>(q, q.batch);
  double* bias_grads = q.scratch;
  double* sums = q.scratch + (q.bias_sum ? q.batch * q.out_features : 0);
  if (q.weight_sum && q.positions == 1) {
    const int64_t slices = outer_slices(q.batch, q.in_features, q.out_features);
    const int64_t entries = q.in_features * q.out_features;
    double* to = slices > 1 ? sums : q.weight_sum;
    DPK_LAUNCH(outer_sums_kernel<T>, slices * outer_tiles(q.in_features, q.out_features), kThreads, 0, stream, q, to,
               slices);
    if (slices > 1) launch_add_slices(sums, q.weight_sum, slices, entries, stream);
  } else if (q.weight_sum) {
    launch_product_sums<true>(s, q.activations, q.output_grads, q.weights, sums, q.weight_sum, stream);
  }
  if (q.bias_sum) {
    launch_position_sums(q.output_grads, s.output, q.batch, q.out_features, q.positions, q.weights, bias_grads, stream);
    launch_weighted_rows(bias_grads, q.weights, q.bias_sum, q.batch, q.out_features, stream);
  }
}

#define DPK_LINEAR_INSTANCES(T)                                                               \
  template int64_t linear_norm_scratch(const LinearNormParams<T>&, int64_t);                  \
  template int64_t linear_sum_scratch(const LinearSumParams<T>&);                             \
  template void linear_forward_cuda(const LinearForwardParams<T>&, int64_t, CUstream_st*);    \
  template void linear_squared_norms_cuda(const LinearNormParams<T>&, int64_t, CUstream_st*); \
  template void linear_clipped_sums_cuda(const LinearSumParams<T>&, CUstream_st*);
DPK_LINEAR_INSTANCES(float)
DPK_LINEAR_INSTANCES(double)
DPK_LINEAR_INSTANCES(bfloat16)
DPK_LINEAR_INSTANCES(half)
#undef DPK_LINEAR_INSTANCES

}  // namespace dpk
