// Tiles of an example's product (product_shape.cuh) on tensor cores.
//
// A block of kM x kN warps owns 32 kM outputs and 32 kN rows of G; a warp 32 of each, as 2 x 4 fragments. Positions
// come in chunks of kChunk that are copied to shared memory asynchronously, each while the one before is multiplied:
//   channels first   outputs as [output, position]; of the input a slab, the stretch of each channel's padded map that
//                    the chunk's positions see through all taps, in which a row's value at a position lies at the row's
//                    offset plus the position's. Where a slab is larger than the unfolded rows, those: [row, position].
//   channels last    [position, output] and [position, row], rows ordered by tap and then channel: 16 bytes at a time.
// Shared memory holds floats. Every product is one of tf32 numbers: 16-bit values are such numbers; float32 is split
// into two (three products, together right to 3 * 2^-22) unless tf32 is asked for.
//
// Loads per 32 positions and 64 x 64 tile of a 3 x 3 convolution with 32 x 32 maps: 2048 output gradients in 512 copies
// and 832 inputs, for 2 * 2^17 operations; fragments are read from shared memory in 16 words per 8 (24) products.
//
// Sums run in float for kPiece positions and then in double. A warp whose sums are not all finite computes them again
// in double, so that nothing overflows that need not.
#pragma once

#include "common/mma.h"
#include "common/product_shape.cuh"

namespace dpk {

constexpr int kChunk = 32;   // positions copied at a time
constexpr int kPiece = 512;  // positions that are summed in float: 64 products, one after the other
constexpr int kFragmentsM = 2, kFragmentsN = 4;

template <int kM, int kN, bool kLast>
struct TileSizes {
  static constexpr int kOutputs = 32 * kM, kRows = 32 * kN, kThreads = 32 * kM * kN;
  // Pitches at which the lanes of a fragment read 32 different banks.
  static constexpr int kPitch = kChunk + 4, kOutputPitch = kOutputs + 8, kRowPitch = kRows + 8;
  static constexpr int kOutputFloats = kLast ? kChunk * kOutputPitch : kOutputs * kPitch;
  static constexpr int kInputFloats = kLast ? kChunk * kRowPitch : kRows * kPitch + kChunk;  // and offsets behind
  static constexpr int kStage = kOutputFloats + kInputFloats, kTable = 4 * kRows + 4;
};

// How the host asks for tiles.
struct ProductTiles {
  int tiles_m, tiles_n;  // of a group
  bool wide;             // 2 x 2 warps; else 1 x 2
  bool channels_last;
  int slab;                            // pixels of a channel in a slab; 0: rows are unfolded in shared memory
  bool input_vectors, output_vectors;  // copies of four elements

  template <typename T>
  ProductTiles(const ProductShape& s, const T* input, const T* output_grads) : ProductTiles(s) {
    const auto aligned = [](const T* p, std::initializer_list<int64_t> strides) {
      bool result = reinterpret_cast<uintptr_t>(p) % (4 * sizeof(T)) == 0;
      for (int64_t stride : strides) result &= stride % 4 == 0;
      return result;
    };
    input_vectors =
        channels_last && s.input.channel == 1 && aligned(input, {s.channels, s.input.pixel, s.input.example});
    output_vectors =
        channels_last ? s.output.channel == 1 && aligned(output_grads, {s.outputs, s.output.pixel, s.output.example})
                      : s.output.pixel == 1 && aligned(output_grads, {s.positions, s.output.channel, s.output.example});
  }
  // What depends on the shape alone.
  explicit ProductTiles(const ProductShape& s)
      : wide(s.outputs > 32),
        channels_last(s.input.channel == 1),
        slab(0),
        input_vectors(false),
        output_vectors(false) {
    tiles_m = static_cast<int>(ceil_div(s.outputs, wide ? 64 : 32));
    tiles_n = static_cast<int>(ceil_div(s.rows, 64));
    if (channels_last || s.taps == 1) return;
    // A chunk's positions cross at most so many ends of lines and planes.
    const int64_t lines = std::min<int64_t>(ceil_div(kChunk - 1, s.out[2]), int64_t{s.out[1]} * s.out[0] - 1);
    const int64_t planes = std::min<int64_t>(ceil_div(kChunk - 1, int64_t{s.out[1]} * s.out[2]), s.out[0] - 1);
    const int64_t line = int64_t{s.stride[1]} * s.map[2] - int64_t{s.out[2] - 1} * s.stride[2];
    const int64_t plane = int64_t{s.stride[0]} * s.map[1] * s.map[2] - int64_t{s.out[1] - 1} * s.stride[1] * s.map[2] -
                          s.stride[1] * int64_t{s.map[2]};
    const int64_t length = int64_t{kChunk - 1} * s.stride[2] + lines * std::max<int64_t>(0, line) +
                           planes * std::max<int64_t>(0, plane) + s.reach + 1;
    const int64_t channels = std::min<int64_t>(s.channels, (64 - 2) / s.taps + 2);
    constexpr int64_t kFits = TileSizes<1, 2, false>::kInputFloats - kChunk;
    if (length * channels > kFits) return;
    const int64_t spread = length + (36 - length % 32) % 32;  // channels four banks apart
    slab = static_cast<int>(spread * channels <= kFits ? spread : length);
  }
  int64_t count(const ProductShape& s) const { return int64_t{s.groups} * tiles_m * tiles_n; }
};

// f(outputs / 32, channels last) with constants for the kernel that serves these tiles; kLastOnly: channels are.
template <bool kLastOnly, typename F>
void for_tile(const ProductTiles& tiles, F f) {
  const auto layout = [&](auto m) {
    if constexpr (!kLastOnly)
      if (!tiles.channels_last) return f(m, std::false_type());
    f(m, std::true_type());
  };
  if (tiles.wide)
    layout(std::integral_constant<int, 2>());
  else
    layout(std::integral_constant<int, 1>());
}

// kCount numbers that lie side by side, from global to shared memory, as floats; zeros unless valid. Asynchronous for
// floats.
template <int kCount, typename T>
__device__ __forceinline__ void copy_values(const ProductShape& s, const Shared<float>& to, const T* from, bool valid) {
  if constexpr (std::is_same_v<T, float>) {
    copy_async<4 * kCount>(to, from, valid);
  } else if constexpr (kCount == 1) {
    to[0] = valid ? read_value(s, *from) : 0.f;
  } else {
    const uint2 four = valid ? *reinterpret_cast<const uint2*>(from) : make_uint2(0, 0);
    const auto number = [&](uint32_t pair, int shift) {
      return read_value(s, T{static_cast<uint16_t>(pair >> shift)});
    };
    shared_cast<float4>(to)[0] =
        make_float4(number(four.x, 0), number(four.x, 16), number(four.y, 0), number(four.y, 16));
  }
}

// x as one tf32 number, rounded, or as the sum of two. Values of 16 bits are such numbers.
__device__ __forceinline__ void tf32_parts(bool split, float x, uint32_t& high, uint32_t& low) {
  high = to_tf32(x);
  if (split) low = to_tf32(x - bit_cast<float>(high));
}

// sums += a b
__device__ __forceinline__ void split_product(bool split, float (&sums)[4], const uint32_t (&high)[4],
                                              const uint32_t (&low)[4], const uint32_t (&right)[2],
                                              const uint32_t (&right_low)[2]) {
  if (split) {
    mma<tf32>(sums, low, right);
    mma<tf32>(sums, high, right_low);
  }
  mma<tf32>(sums, high, right);
}

// The tile `index` of count(), and one example's part of it after the other. All threads of a block go through it
// together.
template <typename T, int kM, int kN, bool kLast>
class ProductTile {
  using Sizes = TileSizes<kM, kN, kLast>;

 public:
  static constexpr int kValues = kFragmentsM * kFragmentsN * 4;  // of a thread

  // shared: two stages. table: kTable numbers.
  __device__ __forceinline__ ProductTile(const ProductShape& shape, const ProductTiles& tiles, const T* input,
                                         const T* output_grads, int64_t index, Shared<float> shared, Shared<int> table)
      : s(shape),
        t(tiles),
        shared_(shared),
        table_(table),
        place_(shared_slice(table, 4 * Sizes::kRows, 4)),
        input_(input),
        output_(output_grads) {
    const int in_group = t.tiles_m * t.tiles_n, tile = static_cast<int>(index % in_group);
    const int first_output = tile % t.tiles_m * Sizes::kOutputs, first_row = tile / t.tiles_m * Sizes::kRows;
    const int lane = threadIdx.x % kWarp;
    if (threadIdx.x == 0) {
      place_[0] = static_cast<int>(index / in_group);
      place_[1] = first_output;
      place_[2] = first_row;
      place_[3] = s.by_taps.quotient(first_row);
    }
    used_m_ = (s.outputs - first_output - warp_output() + 15) / 16;
    used_n_ = (s.rows - first_row - warp_row() + 7) / 8;
    for (int r = threadIdx.x; r < Sizes::kRows; r += Sizes::kThreads) {
      const int row = min(first_row + r, s.rows - 1);
      const Coordinates k = tap_at(s, tap_of(row));
      table_[4 * r] = channel_of(row);
      table_[4 * r + 1] = k.d;
      table_[4 * r + 2] = k.h;
      table_[4 * r + 3] = k.w;
    }
    if constexpr (!kLast) {
      const int first_channel = s.by_taps.quotient(first_row);
      for (int n = 0; n < kFragmentsN; ++n) {
        const int r = warp_row() + n * 8 + lane / 4, row = min(first_row + r, s.rows - 1);
        const Coordinates k = tap_at(s, tap_of(row));
        row_offset_[n] =
            t.slab ? (channel_of(row) - first_channel) * t.slab + s.flat(k.d, k.h, k.w) : r * Sizes::kPitch;
      }
    }
    __syncthreads();
  }

  // Of a thread's value v: its output and its row, counted within the group, and whether there is such an entry.
  __device__ __forceinline__ int output(int v) const {
    return first_output() + warp_output() + v / 16 * 16 + mma_row(v % 4);
  }
  __device__ __forceinline__ int row(int v) const {
    return first_row() + warp_row() + v / 4 % kFragmentsN * 8 + mma_column(v % 4);
  }
  __device__ __forceinline__ bool valid(int v) const { return output(v) < s.outputs && row(v) < s.rows; }
  // Where the entry lies in [rows]: taps of a channel follow each other.
  __device__ __forceinline__ int weight_row(int row) const { return channel_of(row) * s.taps + tap_of(row); }

  // fold(v, value, example) for each of the thread's values and each piece of the examples begin <= b < end with
  // weights other than 0 (all, if null). A value is a float or, of a piece that was computed again, a double.
  template <typename Fold>
  __device__ __forceinline__ void run(int64_t begin, int64_t end, const double* weights, Fold fold) const {
    const int count = static_cast<int>(end - begin);
    const auto next = [&](int b) {
      while (weights && b < count && weights[begin + b] == 0) ++b;
      return b;
    };
    int b = next(0);
    if (b >= count || s.positions == 0) return;
    float sums[kFragmentsM][kFragmentsN][4] = {};
    stage(begin + b, 0, 0);
    copy_async_commit();
    int from = 0;
    for (int buffer = 0; b < count; buffer ^= 1) {
      const bool last = from + kChunk >= s.positions;
      const int following = last ? next(b + 1) : b, then = last ? 0 : from + kChunk;
      if (following < count) stage(begin + following, then, buffer ^ 1);
      copy_async_commit();
      copy_async_wait<1>();
      __syncthreads();
      multiply(buffer, min(kChunk, s.positions - from), sums);
      __syncthreads();
      if (then % kPiece == 0) settle(begin + b, from / kPiece * kPiece, min(from + kChunk, s.positions), sums, fold);
      b = following;
      from = then;
    }
  }

  __device__ __forceinline__ int group() const { return place_[0]; }

 private:
  const ProductShape& s;
  const ProductTiles& t;
  const Shared<float> shared_;
  const Shared<int> table_;
  const Shared<int> place_;  // of the tile: read where it is needed, since registers are scarce
  const T* input_;
  const T* output_;
  int used_m_, used_n_;  // fragments that hold entries
  int row_offset_[kFragmentsN] = {};

  __device__ __forceinline__ int first_output() const { return place_[1]; }
  __device__ __forceinline__ int first_row() const { return place_[2]; }
  __device__ __forceinline__ int first_channel() const { return place_[3]; }
  static __device__ __forceinline__ int warp_output() { return threadIdx.x / kWarp / kN * 32; }
  static __device__ __forceinline__ int warp_row() { return threadIdx.x / kWarp % kN * 32; }

  __device__ __forceinline__ int tap_of(int row) const {
    return kLast ? s.by_channels.quotient(row) : s.by_taps.remainder(row);
  }
  __device__ __forceinline__ int channel_of(int row) const {
    return kLast ? s.by_channels.remainder(row) : s.by_taps.quotient(row);
  }

  // Starts the copies of the positions from <= t < from + kChunk of an example; zeros where there is nothing.
  __device__ __forceinline__ void stage(int64_t b, int from, int buffer) const {
    const Shared<float> g = shared_slice(shared_, buffer * Sizes::kStage, Sizes::kOutputFloats);
    const Shared<float> x = shared_slice(shared_, buffer * Sizes::kStage + Sizes::kOutputFloats, Sizes::kInputFloats);
    stage_outputs(
        g, output_ + b * s.output.example + (int64_t{group()} * s.outputs + first_output()) * s.output.channel, from);
    const T* input = input_ + b * s.input.example + int64_t{group()} * s.channels * s.input.channel;
    if constexpr (kLast) {
      if (t.input_vectors)
        stage_last<4>(x, input, from);
      else
        stage_last<1>(x, input, from);
    } else {
      if (t.slab)
        stage_slab(x, input, from);
      else
        stage_rows(x, input, from);
    }
  }

  __device__ __forceinline__ void stage_outputs(Shared<float> g, const T* source, int from) const {
    const int outputs = s.outputs - first_output(), left = s.positions - from;
    if constexpr (kLast) {
      const auto copy = [&](auto count) {
        constexpr int kCount = decltype(count)::value, kAcross = Sizes::kOutputs / kCount;
        const int o = threadIdx.x % kAcross * kCount;
        const T* at = source + o * s.output.channel;
#pragma unroll 4
        for (int p = threadIdx.x / kAcross; p < kChunk; p += Sizes::kThreads / kAcross)
          copy_values<kCount>(s, g + (p * Sizes::kOutputPitch + o), at + (from + p) * s.output.pixel,
                              o < outputs && p < left);
      };
      if (t.output_vectors)
        copy(std::integral_constant<int, 4>());
      else
        copy(std::integral_constant<int, 1>());
    } else {
      const auto copy = [&](auto count) {
        constexpr int kCount = decltype(count)::value, kAcross = kChunk / kCount;
        const int p = threadIdx.x % kAcross * kCount;
        const T* at = source + (from + p) * s.output.pixel;
#pragma unroll 4
        for (int o = threadIdx.x / kAcross; o < Sizes::kOutputs; o += Sizes::kThreads / kAcross)
          copy_values<kCount>(s, g + (o * Sizes::kPitch + p), at + o * s.output.channel, o < outputs && p < left);
      };
      if (t.output_vectors)
        copy(std::integral_constant<int, 4>());
      else
        copy(std::integral_constant<int, 1>());
    }
  }

  template <int kCount>
  __device__ __forceinline__ void stage_last(Shared<float> x, const T* source, int from) const {
    constexpr int kAcross = Sizes::kRows / kCount;
    const int r = threadIdx.x % kAcross * kCount;
    const int channel = table_[4 * r], d = table_[4 * r + 1], h = table_[4 * r + 2], w = table_[4 * r + 3];
    const T* at = source + channel * s.input.channel;
#pragma unroll 4
    for (int p = threadIdx.x / kAcross; p < kChunk; p += Sizes::kThreads / kAcross) {
      const Coordinates c = position_at(s, min(from + p, s.positions - 1));
      const int pixel = pixel_at(s, c.d + d, c.h + h, c.w + w);
      const bool valid = pixel >= 0 && first_row() + r < s.rows && from + p < s.positions;
      copy_values<kCount>(s, x + (p * Sizes::kRowPitch + r), at + (valid ? pixel : 0) * s.input.pixel, valid);
    }
  }

  __device__ __forceinline__ void stage_rows(Shared<float> x, const T* source, int from) const {
    const int p = threadIdx.x % kChunk;
    const Coordinates c = position_at(s, min(from + p, s.positions - 1));
#pragma unroll 2
    for (int r = threadIdx.x / kChunk; r < Sizes::kRows; r += Sizes::kThreads / kChunk) {
      const int channel = table_[4 * r], d = table_[4 * r + 1], h = table_[4 * r + 2], w = table_[4 * r + 3];
      const int pixel = pixel_at(s, c.d + d, c.h + h, c.w + w);
      const bool valid = pixel >= 0 && first_row() + r < s.rows && from + p < s.positions;
      copy_values<1>(s, x + (r * Sizes::kPitch + p),
                     source + channel * s.input.channel + (valid ? pixel : 0) * s.input.pixel, valid);
    }
    if (threadIdx.x < kChunk) offsets(x)[p] = p;
  }

  __device__ __forceinline__ void stage_slab(Shared<float> x, const T* source, int from) const {
    const Coordinates begin = position_at(s, from), end = position_at(s, min(from + kChunk, s.positions) - 1);
    const int start = s.flat(begin.d, begin.h, begin.w);
    const int pixels = s.flat(end.d, end.h, end.w) - start + s.reach + 1;
    const int channels = s.by_taps.quotient(min(first_row() + Sizes::kRows, s.rows) - 1) - first_channel() + 1;
#pragma unroll 1
    for (int i = threadIdx.x; i < pixels; i += Sizes::kThreads) {
      const Coordinates c = split(start + i, s.map_height, s.map_width);
      const int pixel = pixel_at(s, c.d, c.h, c.w);
      const T* at = source + first_channel() * s.input.channel + (pixel < 0 ? 0 : pixel) * s.input.pixel;
#pragma unroll 2
      for (int k = 0; k < channels; ++k) copy_values<1>(s, x + (k * t.slab + i), at + k * s.input.channel, pixel >= 0);
    }
    // Behind the last position, its own values again: outputs are zero there.
    if (threadIdx.x < kChunk) {
      const Coordinates c = position_at(s, min(from + static_cast<int>(threadIdx.x), s.positions - 1));
      offsets(x)[threadIdx.x] = s.flat(c.d, c.h, c.w) - start;
    }
  }

  // Of the chunk's positions, behind the input.
  static __device__ __forceinline__ Shared<int> offsets(Shared<float> x) {
    return shared_cast<int>(shared_slice(x, Sizes::kInputFloats - kChunk, kChunk));
  }

  // Adds the products of the first `count` positions of a stage.
  __device__ __forceinline__ void multiply(int buffer, int count, float (&sums)[kFragmentsM][kFragmentsN][4]) const {
    const Shared<const float> g = shared_slice(shared_, buffer * Sizes::kStage, Sizes::kOutputFloats);
    const Shared<float> x = shared_slice(shared_, buffer * Sizes::kStage + Sizes::kOutputFloats, Sizes::kInputFloats);
    const int lane = threadIdx.x % kWarp;
    const bool split = std::is_same_v<T, float> && !s.tf32;
#pragma unroll
    for (int step = 0; step < kChunk; step += 8) {
      if (step >= count) break;
      uint32_t high[kFragmentsM][4], low[kFragmentsM][4];
#pragma unroll
      for (int m = 0; m < kFragmentsM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int o = warp_output() + m * 16 + mma_a_row(i), p = step + mma_a_depth<tf32>(i);
          tf32_parts(split, g[kLast ? p * Sizes::kOutputPitch + o : o * Sizes::kPitch + p], high[m][i], low[m][i]);
        }
      int at[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int p = step + mma_b_depth<tf32>(i);
        at[i] = kLast ? p * Sizes::kRowPitch + warp_row() + lane / 4 : static_cast<int>(offsets(x)[p]);
      }
#pragma unroll
      for (int n = 0; n < kFragmentsN; ++n) {
        if (n >= used_n_) break;
        uint32_t right[2], right_low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i)
          tf32_parts(split, x[kLast ? at[i] + n * 8 : row_offset_[n] + at[i]], right[i], right_low[i]);
#pragma unroll
        for (int m = 0; m < kFragmentsM; ++m) {
          if (m >= used_m_) break;
          split_product(split, sums[m][n], high[m], low[m], right, right_low);
        }
      }
    }
  }

  // Hands on a piece's sums and clears them.
  template <typename Fold>
  __device__ __forceinline__ void settle(int64_t b, int begin, int end, float (&sums)[kFragmentsM][kFragmentsN][4],
                                         Fold fold) const {
    bool finite = true;
#pragma unroll
    for (int v = 0; v < kValues; ++v) finite &= fabsf(sums[v / 16][v / 4 % kFragmentsN][v % 4]) <= 3.402823466e38f;
    if (__all_sync(kAllLanes, finite)) {
#pragma unroll
      for (int v = 0; v < kValues; ++v) fold(v, static_cast<double>(sums[v / 16][v / 4 % kFragmentsN][v % 4]), b);
    } else {
      again(b, begin, end, fold);
    }
#pragma unroll
    for (int v = 0; v < kValues; ++v) sums[v / 16][v / 4 % kFragmentsN][v % 4] = 0;
  }

  // The warp's entries in double, one after the other: each lane finds those of all lanes and keeps its own.
  template <typename Fold>
  __device__ __forceinline__ void again(int64_t b, int begin, int end, Fold fold) const {
    const T *x = input_ + b * s.input.example, *g = output_ + b * s.output.example;
#pragma unroll 1
    for (int value = 0; value < kValues; ++value) {
      double mine = 0;
#pragma unroll 1
      for (int lane = 0; lane < static_cast<int>(kWarp); ++lane) {
        const int o = __shfl_sync(kAllLanes, output(value), lane), r = __shfl_sync(kAllLanes, row(value), lane);
        if (o >= s.outputs || r >= s.rows) continue;
        const double sum = example_entry(s, x, g, group(), o, channel_of(r), tap_of(r), begin, end);
        if (lane == static_cast<int>(threadIdx.x % kWarp)) mine = sum;
      }
#pragma unroll
      for (int v = 0; v < kValues; ++v)
        if (v == value) fold(v, mine, b);
    }
  }
};

}  // namespace dpk
