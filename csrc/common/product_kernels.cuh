// Kernels over the tiles of product_tile.cuh.
//
//   norms   a block owns a tile of one example, squares its sums where they are, stores them if asked, and writes two
//           partial sums; a warp per example adds these up
//   sums    a block owns a tile and a slice of the batch; it adds weight times the very same numbers, in double, one
//           example after the other; slices are added up in order
// Therefore a norm is of what is added, whatever the precision of the products. Only joining pieces of positions rounds
// differently, in double: that is bounded by the pieces' norms and raises the norm.
//
// Where the outputs of a group are few (depthwise), and in float64, a warp owns an entry of G instead.
#pragma once

#include "common/product_gram.cuh"

namespace dpk {
namespace {

constexpr int kEntryThreads = 256, kEntriesOfBlock = 256;
constexpr int kEntryWarps = kEntryThreads / 32;

template <typename T>
bool product_by_entry(const ProductShape& s) {
  return std::is_same_v<T, double> || (s.groups > 1 && s.outputs <= 4 && s.channels <= 16);
}

// Partial norms of an example: pairs of the square and of the sum of the pieces' squares.
template <typename T>
int64_t product_partials(const ProductShape& s) {
  return product_by_entry<T>(s) ? ceil_div(s.entries(), kEntriesOfBlock) : ProductTiles(s).count(s);
}

// How many sums in float are joined in double.
template <typename T>
int product_pieces(const ProductShape& s) {
  return product_by_entry<T>(s) ? 1 : static_cast<int>(ceil_div(s.positions, kPiece));
}

// Of the batch in a sum, by the shape alone: three blocks for each multiprocessor of an H100, all of them resident.
template <typename T>
int64_t product_slices(const ProductShape& s) {
  constexpr int64_t kBlocks = 3 * 132, kExamples = 4;
  const int64_t most = std::max<int64_t>(1, s.batch / kExamples);
  return std::clamp<int64_t>(kBlocks / std::max<int64_t>(1, product_partials<T>(s)), 1, most);
}

// Tiles need up to 168 registers: three blocks of 128 threads on a multiprocessor, or six of 64.
template <typename T, int kM, bool kLast>
__global__ void __launch_bounds__(64 * kM, 6 / kM)
    product_norms_kernel(const ProductShape s, const ProductTiles tiles, const T* input, const T* output_grads,
                         acc_t<T>* stored, const double* done, double* partials) {
  using Tile = ProductTile<T, kM, 2, kLast>;
  using Sizes = TileSizes<kM, 2, kLast>;
  DPK_SHARED(float, shared, 2 * Sizes::kStage);
  DPK_SHARED(int, table, Sizes::kTable);
  DPK_SHARED(double, scratch, 2 * Sizes::kThreads / 32);
  const int64_t count = int64_t{s.groups} * tiles.tiles_m * tiles.tiles_n, b = blockIdx.x / count;
  if (done && done[b] >= 0) return;
  const Tile tile(s, tiles, input, output_grads, blockIdx.x % count, shared, table);
  double values[Tile::kValues] = {}, squares[2] = {};
  tile.run(b, b + 1, nullptr, [&](int v, double x, int64_t) {
    values[v] += x;
    squares[1] = fma(x, x, squares[1]);
  });
  const int64_t outputs = int64_t{s.groups} * s.outputs;
#pragma unroll
  for (int v = 0; v < Tile::kValues; ++v) {
    if (!tile.valid(v)) continue;
    double x = values[v];
    if (stored) {
      const float kept = static_cast<float>(x);
      const int64_t row = b * s.rows + tile.weight_row(tile.row(v));
      stored[row * outputs + int64_t{tile.group()} * s.outputs + tile.output(v)] = kept;
      x = static_cast<double>(kept);
    }
    squares[0] = fma(x, x, squares[0]);
  }
  block_sums<Sizes::kThreads>(squares, scratch);
  if (threadIdx.x < 2) partials[2 * int64_t{blockIdx.x} + threadIdx.x] = threadIdx.x ? squares[1] : squares[0];
}

template <typename T, int kM, bool kLast>
__global__ void __launch_bounds__(64 * kM, 6 / kM)
    product_sums_kernel(const ProductShape s, const ProductTiles tiles, const T* input, const T* output_grads,
                        const double* weights, double* sums, int64_t slices) {
  using Tile = ProductTile<T, kM, 2, kLast>;
  using Sizes = TileSizes<kM, 2, kLast>;
  DPK_SHARED(float, shared, 2 * Sizes::kStage);
  DPK_SHARED(int, table, Sizes::kTable);
  const int64_t count = int64_t{s.groups} * tiles.tiles_m * tiles.tiles_n, slice = blockIdx.x / count;
  const Tile tile(s, tiles, input, output_grads, blockIdx.x % count, shared, table);
  double totals[Tile::kValues] = {};
  tile.run(slice * s.batch / slices, (slice + 1) * s.batch / slices, weights,
           [&](int v, double x, int64_t b) { totals[v] = fma(weights[b], x, totals[v]); });
  const int64_t first = (slice * s.groups + tile.group()) * s.outputs;
#pragma unroll
  for (int v = 0; v < Tile::kValues; ++v)
    if (tile.valid(v)) sums[(first + tile.output(v)) * s.rows + tile.weight_row(tile.row(v))] = totals[v];
}

struct ProductEntry {
  int group, output, channel, tap;
  int64_t row, column;  // in [rows, all outputs]

  __device__ ProductEntry(const ProductShape& s, int64_t index) {
    column = index / s.rows;
    row = index % s.rows;
    group = static_cast<int>(column / s.outputs);
    output = static_cast<int>(column % s.outputs);
    channel = s.by_taps.quotient(static_cast<int>(row));
    tap = s.by_taps.remainder(static_cast<int>(row));
  }
};

// Blocks: [batch * chunks of entries].
template <typename T>
__global__ void __launch_bounds__(kEntryThreads, 2)
    entry_norms_kernel(const ProductShape s, const T* input, const T* output_grads, acc_t<T>* stored,
                       double* partials) {
  DPK_SHARED(double, scratch, kEntryWarps);
  const int64_t entries = int64_t{s.groups} * s.outputs * s.rows, chunks = ceil_div(entries, kEntriesOfBlock);
  const int64_t b = blockIdx.x / chunks, begin = blockIdx.x % chunks * kEntriesOfBlock;
  const int64_t end = min(begin + kEntriesOfBlock, entries);
  const T *x = input + b * s.input.example, *g = output_grads + b * s.output.example;
  double square = 0;
  for (int64_t e = begin + threadIdx.x / kWarp; e < end; e += kEntryWarps) {
    const ProductEntry at(s, e);
    double value = example_entry(s, x, g, at.group, at.output, at.channel, at.tap, 0, s.positions);
    if (stored) {
      const acc_t<T> kept = static_cast<acc_t<T>>(value);
      if (threadIdx.x % kWarp == 0) stored[(b * s.rows + at.row) * s.groups * s.outputs + at.column] = kept;
      value = static_cast<double>(kept);
    }
    square = fma(value, value, square);
  }
  square = block_sum<kEntryThreads>(threadIdx.x % kWarp == 0 ? square : 0., scratch);
  if (threadIdx.x < 2) partials[2 * int64_t{blockIdx.x} + threadIdx.x] = square;
}

// Blocks: [slices * chunks of entries].
template <typename T>
__global__ void __launch_bounds__(kEntryThreads, 2)
    entry_sums_kernel(const ProductShape s, const T* input, const T* output_grads, const double* weights, double* sums,
                      int64_t slices) {
  const int64_t entries = int64_t{s.groups} * s.outputs * s.rows, chunks = ceil_div(entries, kEntriesOfBlock);
  const int64_t slice = blockIdx.x / chunks, begin = blockIdx.x % chunks * kEntriesOfBlock;
  const int64_t end = min(begin + kEntriesOfBlock, entries);
  for (int64_t e = begin + threadIdx.x / kWarp; e < end; e += kEntryWarps) {
    const ProductEntry at(s, e);
    double total = 0;
    for (int64_t b = slice * s.batch / slices; b < (slice + 1) * s.batch / slices; ++b) {
      if (weights[b] == 0) continue;
      const T *x = input + b * s.input.example, *g = output_grads + b * s.output.example;
      total = fma(weights[b], example_entry(s, x, g, at.group, at.output, at.channel, at.tap, 0, s.positions), total);
    }
    if (threadIdx.x % kWarp == 0) sums[slice * entries + e] = total;
  }
}

// sums [slices, count] -> total [count], in order.
__global__ void __launch_bounds__(kEntryThreads)
    add_slices_kernel(const double* sums, double* total, int64_t slices, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kEntryThreads + threadIdx.x;
  if (i >= count) return;
  double sum = sums[i];
  for (int64_t slice = 1; slice < slices; ++slice) sum += sums[slice * count + i];
  total[i] = sum;
}

// squared_norms[b] = done[b] where that is not negative, or else the example's partials, raised by their roundings,
// plus its bias gradients' squares. A warp for each example. partials [batch, count, 2] and bias_grads [batch,
// channels], or null.
__global__ void __launch_bounds__(kEntryThreads)
    finish_norms_kernel(const double* done, const double* partials, int64_t count, int pieces, const double* bias_grads,
                        int64_t channels, double* squared_norms, int64_t batch) {
  const int64_t b = int64_t{blockIdx.x} * kEntryWarps + threadIdx.x / kWarp;
  if (b >= batch) return;
  const int lane = threadIdx.x % kWarp;
  constexpr double kUnit = 0x1p-53;
  double square = 0, parts = 0, bias = 0;
  const bool is_done = done && done[b] >= 0;
  for (int64_t i = lane; partials && !is_done && i < count; i += kWarp) {
    square += partials[2 * (b * count + i)];
    parts += partials[2 * (b * count + i) + 1];
  }
  for (int64_t c = lane; bias_grads && c < channels; c += kWarp)
    bias = fma(bias_grads[b * channels + c], bias_grads[b * channels + c], bias);
  square = warp_sum(square);
  parts = warp_sum(parts);
  bias = warp_sum(bias);
  if (lane) return;
  const double terms = 128 + static_cast<double>(count) / kWarp;  // of the longest chain of sums
  const double joined = pieces > 1 ? 2 * (pieces + 4) * kUnit * sqrt(pieces * parts) : 0;
  const double norm = sqrt(square * (1 + terms * kUnit)) + joined;
  const double weight = is_done ? done[b] : norm * norm * (1 + 4 * kUnit);
  squared_norms[b] = weight + bias * (1 + (static_cast<double>(channels) / kWarp + 16) * kUnit);
}

// Sums over positions, in double: source [batch, channels, positions] in its layout -> grads [batch, channels]. A
// group of kTeam lanes for each; lanes lie along what lies side by side. Examples of weight 0 are left out.
template <int kTeam, typename T>
__global__ void __launch_bounds__(kEntryThreads)
    position_sums_kernel(const T* source, ProductLayout layout, int64_t channels, int64_t positions,
                         const double* weights, double* grads, int64_t count) {
  constexpr int kTeams = kEntryThreads / kTeam;
  const int64_t i = int64_t{blockIdx.x} * kTeams + threadIdx.x / kTeam, b = i / channels;
  const bool valid = i < count && !(weights && weights[b] == 0);
  double sum = 0;
  if (valid) {
    const T* at = source + b * layout.example + i % channels * layout.channel;
    for (int64_t t = threadIdx.x % kTeam; t < positions; t += kTeam)
      sum += static_cast<double>(widen(at[t * layout.pixel]));
  }
  sum = warp_sum<kTeam>(sum);
  if (valid && threadIdx.x % kTeam == 0) grads[i] = sum;
}

constexpr int kBiasColumns = 32, kBiasRows = kEntryThreads / kBiasColumns;

// sum[c] = sum_b weights[b] grads[b, c]. Threads: [kBiasRows, kBiasColumns].
__global__ void __launch_bounds__(kEntryThreads)
    weighted_rows_kernel(const double* grads, const double* weights, double* sum, int64_t batch, int64_t channels) {
  DPK_SHARED(double, shared, kEntryThreads);
  const int column = threadIdx.x % kBiasColumns;
  const int64_t c = int64_t{blockIdx.x} * kBiasColumns + column;
  double total = 0;
  if (c < channels)
    for (int64_t b = threadIdx.x / kBiasColumns; b < batch; b += kBiasRows)
      if (weights[b] != 0) total = fma(weights[b], grads[b * channels + c], total);
  shared[threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.x >= kBiasColumns || c >= channels) return;
  for (int r = 1; r < kBiasRows; ++r) total += shared[r * kBiasColumns + column];
  sum[c] = total;
}

void launch_add_slices(const double* sums, double* total, int64_t slices, int64_t count, CUstream_st* stream) {
  DPK_LAUNCH(add_slices_kernel, ceil_div(count, kEntryThreads), kEntryThreads, 0, stream, sums, total, slices, count);
}

// Numbers of doubles that norms need to work in: one of each example, and the partial norms.
template <typename T>
int64_t product_norm_scratch(const ProductShape& s) {
  return s.batch * (1 + 2 * product_partials<T>(s));
}

template <typename T>
const Stored<T>* as_stored(const T* values) {
  return reinterpret_cast<const Stored<T>*>(values);
}

// Norms of every example's weight gradient for launch_finish_norms. stored: [batch, rows, all outputs] or null. gram:
// by pairs of positions, where that does not cancel.
template <bool kLastOnly, typename T>
void launch_product_norms(const ProductShape& s, const T* input, const T* output_grads, acc_t<T>* stored, bool gram,
                          double* scratch, CUstream_st* stream) {
  using S = Stored<T>;
  const S *x = as_stored(input), *g = as_stored(output_grads);
  double* partials = scratch + s.batch;
  const int64_t blocks = s.batch * product_partials<T>(s);
  if (product_by_entry<T>(s)) {
    DPK_LAUNCH(entry_norms_kernel<S>, blocks, kEntryThreads, 0, stream, s, x, g, stored, partials);
    return;
  }
  if constexpr (!std::is_same_v<T, double>) {
    const double* done = gram ? scratch : nullptr;
    if (gram) DPK_LAUNCH(gram_norms_kernel<S>, s.batch, kGramThreads, 0, stream, s, x, g, scratch);
    const ProductTiles tiles(s, x, g);
    for_tile<kLastOnly>(tiles, [&](auto m, auto last) {
      DPK_LAUNCH((product_norms_kernel<S, m.value, last.value>), blocks, 64 * m.value, 0, stream, s, tiles, x, g,
                 stored, done, partials);
    });
  }
}

// Sums over the batch of weights[b] times its gradient. scratch: [product_slices, all outputs, rows], not read where
// there is one slice; total: [all outputs, rows].
template <bool kLastOnly, typename T>
void launch_product_sums(const ProductShape& s, const T* input, const T* output_grads, const double* weights,
                         double* scratch, double* total, CUstream_st* stream) {
  using S = Stored<T>;
  const S *x = as_stored(input), *g = as_stored(output_grads);
  const int64_t slices = product_slices<T>(s), blocks = slices * product_partials<T>(s);
  double* sums = slices > 1 ? scratch : total;
  if (product_by_entry<T>(s)) {
    DPK_LAUNCH(entry_sums_kernel<S>, blocks, kEntryThreads, 0, stream, s, x, g, weights, sums, slices);
  } else if constexpr (!std::is_same_v<T, double>) {
    const ProductTiles tiles(s, x, g);
    for_tile<kLastOnly>(tiles, [&](auto m, auto last) {
      DPK_LAUNCH((product_sums_kernel<S, m.value, last.value>), blocks, 64 * m.value, 0, stream, s, tiles, x, g,
                 weights, sums, slices);
    });
  }
  if (slices > 1) launch_add_slices(scratch, total, slices, s.entries(), stream);
}

// scratch: of launch_product_norms, or null where the weight does not count. bias_grads [batch, channels], or null.
template <typename T>
void launch_finish_norms(const ProductShape& s, const double* scratch, bool gram, const double* bias_grads,
                         int64_t channels, double* squared_norms, CUstream_st* stream) {
  DPK_LAUNCH(finish_norms_kernel, ceil_div(s.batch, kEntryWarps), kEntryThreads, 0, stream, gram ? scratch : nullptr,
             scratch ? scratch + s.batch : nullptr, product_partials<T>(s), product_pieces<T>(s), bias_grads, channels,
             squared_norms, s.batch);
}

// grads [batch, channels]: bias gradients of the examples with weights other than 0 (all, if null).
template <typename T>
void launch_position_sums(const T* source, const ProductLayout& layout, int64_t batch, int64_t channels,
                          int64_t positions, const double* weights, double* grads, CUstream_st* stream) {
  const int64_t count = batch * channels;
  if (layout.pixel == 1 && positions > 1)
    DPK_LAUNCH((position_sums_kernel<32, T>), ceil_div(count, kEntryThreads / 32), kEntryThreads, 0, stream, source,
               layout, channels, positions, weights, grads, count);
  else
    DPK_LAUNCH((position_sums_kernel<1, T>), ceil_div(count, kEntryThreads), kEntryThreads, 0, stream, source, layout,
               channels, positions, weights, grads, count);
}

// sum [channels]: weighted sum of the bias gradients.
void launch_weighted_rows(const double* grads, const double* weights, double* sum, int64_t batch, int64_t channels,
                          CUstream_st* stream) {
  DPK_LAUNCH(weighted_rows_kernel, ceil_div(channels, kBiasColumns), kEntryThreads, 0, stream, grads, weights, sum,
             batch, channels);
}

}  // namespace
}  // namespace dpk
