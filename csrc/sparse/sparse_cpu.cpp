// Selected entries of per-example weight gradients on the CPU, with an example in each vector lane: an entry is then a
// sum over positions of products of two vectors, with no sum across lanes, for any strides and however small the map.
//
// A block of examples is packed, [channels, pixels, lanes], slab by slab of positions, and entries are taken in chunks,
// by input channel within a chunk, so that what is read again lies in the caches. Products accumulate in T over the
// positions of a slab, at most kDepth, one after the other, and slabs in double; four entries at a time. Bytes: each
// operand read, written and read once; then two vectors a product from the caches.
#include "sparse/sparse.h"

#define DPK_BODY "sparse/sparse_cpu.cpp"
#include "common/each_isa.h"

#ifdef DPK_ISA

namespace dpk::DPK_ISA {
namespace {

#include "common/simd.h"
#include "common/simd_transpose.h"

constexpr int64_t kDepth = 256;  // positions of a slab
constexpr int64_t kTogether = 4;
constexpr int64_t kChunk = 4096;  // entries whose results stay in the caches until they are written

// A box of positions, and the pixels that taps see from there.
struct Slab {
  ConvMap map;
  int64_t first[3], size[3];     // positions
  std::vector<int64_t> offsets;  // [positions], in pixels of the map
  std::vector<int64_t> taps;     // [taps]

  Slab(const ConvShape& s, const int64_t (&from)[3], const int64_t (&most)[3]) {
    int64_t apart[3];  // pixels between positions; a single tap sees no others
    for (int i = 0; i < 3; ++i) {
      first[i] = from[i];
      size[i] = std::min(most[i], s.out[i] - from[i]);
      apart[i] = s.kernel[i] == 1 ? 1 : s.stride[i];
      map.set(s, i, (size[i] - 1) * apart[i] + (s.kernel[i] - 1) * s.dilation[i] + 1, first[i] * s.stride[i],
              s.stride[i] / apart[i]);
    }
    for (int64_t d = 0; d < size[0]; ++d)
      for (int64_t h = 0; h < size[1]; ++h)
        for (int64_t w = 0; w < size[2]; ++w) offsets.push_back(map.pixel(d * apart[0], h * apart[1], w * apart[2]));
    for (int64_t d = 0; d < s.kernel[0]; ++d)
      for (int64_t h = 0; h < s.kernel[1]; ++h)
        for (int64_t w = 0; w < s.kernel[2]; ++w)
          taps.push_back(map.pixel(d * s.dilation[0], h * s.dilation[1], w * s.dilation[2]));
  }

  int64_t positions() const { return offsets.size(); }

  // f(position of the slab, position of the whole map, how many) for runs of positions that lie side by side in both.
  template <typename F>
  void each_run(const ConvShape& s, F f) const {
    const bool lines = size[2] == s.out[2], planes = lines && size[1] == s.out[1];  // whole
    const int64_t run = planes ? positions() : lines ? size[1] * size[2] : size[2];
    for (int64_t t = 0; t < positions(); t += run) {
      const int64_t d = t / (size[1] * size[2]), h = t / size[2] % size[1];
      f(t, ((first[0] + d) * s.out[1] + first[1] + h) * s.out[2] + first[2], run);
    }
  }
};

std::vector<Slab> slabs_of(const ConvShape& s) {
  int64_t most[3];
  for (int64_t i = 2, left = kDepth; i >= 0; --i) {
    most[i] = std::clamp<int64_t>(left, 1, s.out[i]);
    left /= most[i];
  }
  std::vector<Slab> slabs;
  int64_t at[3];
  for (at[0] = 0; at[0] < s.out[0]; at[0] += most[0])
    for (at[1] = 0; at[1] < s.out[1]; at[1] += most[1])
      for (at[2] = 0; at[2] < s.out[2]; at[2] += most[2]) slabs.emplace_back(s, at, most);
  return slabs;
}

struct Entry {
  int32_t input, output, tap;
  int32_t place;  // within its chunk
};

// values[e, :] = sum_t x[e][offsets[t], :] g[e][t, :]. Not inlined: amid a caller's variables some accumulators would
// live in memory.
template <typename T>
[[gnu::noinline]] void products(const T* const (&x)[kTogether], const T* const (&g)[kTogether], const int64_t* offsets,
                                int64_t positions, Vec<T> (&values)[kTogether]) {
  Vec<T> acc[kTogether] = {};
  for (int64_t t = 0; t < positions; ++t) {
    const int64_t offset = offsets[t] * kLanes<T>, at = t * kLanes<T>;
    for (int64_t e = 0; e < kTogether; ++e) acc[e] += load<T>(x[e] + offset) * load<T>(g[e] + at);
  }
  for (int64_t e = 0; e < kTogether; ++e) values[e] = acc[e];
}

template <typename T>
class Gradients {
 public:
  explicit Gradients(const SparseParams<T>& params)
      : q(params),
        s(params.shape),
        slabs(slabs_of(s)),
        input_used(s.in_channels),
        output_used(s.out_channels),
        grads(s.out_channels * slabs.front().positions() * kLanes<T>),
        results(slabs.size() == 1 ? std::min(kChunk, q.selected) * kLanes<T> : 0),
        total(slabs.size() == 1 ? 0 : q.selected * kLanes<T>) {
    int64_t pixels = 0;
    for (const Slab& slab : slabs) pixels = std::max(pixels, slab.map.pixels());
    input.resize(s.in_channels * pixels * kLanes<T>);
    entries.resize(q.selected);
    for (int64_t first = 0; first < q.selected; first += kChunk)
      read_chunk(first, std::min(kChunk, q.selected - first));
    for (const Entry& e : entries) input_used[e.input] = output_used[e.output] = true;
  }

  // Of the examples b <= i < b + count, at most kLanes.
  void compute(int64_t b, int64_t count) {
    if (!total.empty()) std::fill(total.begin(), total.end(), 0.);
    for (const Slab& slab : slabs) {
      pack_input(slab, b, count);
      pack_grads(slab, b, count);
      for (int64_t first = 0; first < q.selected; first += kChunk) {
        const int64_t size = std::min(kChunk, q.selected - first);
        for (int64_t n = first; n < first + size; n += kTogether)
          add(slab, first, n, std::min(kTogether, first + size - n));
        if (total.empty()) write(results.data(), b, count, first, size);
      }
    }
    if (!total.empty()) write(total.data(), b, count, 0, q.selected);
  }

 private:
  // The entries first <= n < first + size by input channel: its pixels are then near for all of them.
  void read_chunk(int64_t first, int64_t size) {
    // Quotients of integers below 2^50, without a division.
    const double row = 1. / static_cast<double>(s.rows()), tap = 1. / static_cast<double>(s.taps());
    std::vector<Entry> read(size);
    std::vector<int32_t> begin(s.in_channels + 1);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t entry = q.entries[first + i];
      const int64_t output = static_cast<int64_t>((static_cast<double>(entry) + 0.5) * row);
      const int64_t rest = entry - output * s.rows();
      int64_t channel = static_cast<int64_t>((static_cast<double>(rest) + 0.5) * tap);
      const int64_t of_tap = rest - channel * s.taps();
      if (s.groups > 1) channel += output / s.group_out() * s.group_in();
      read[i] = {static_cast<int32_t>(channel), static_cast<int32_t>(output), static_cast<int32_t>(of_tap),
                 static_cast<int32_t>(i)};
      ++begin[channel + 1];
    }
    for (int64_t c = 0; c < s.in_channels; ++c) begin[c + 1] += begin[c];
    for (int64_t i = 0; i < size; ++i) entries[first + begin[read[i].input]++] = read[i];
  }

  void pack_input(const Slab& slab, int64_t b, int64_t count) {
    const ConvMap& map = slab.map;
    const int64_t example = s.in_channels * s.pixels(), pixels = map.pixels();
    if (slabs.size() > 1 && map.inside() < pixels) std::fill(input.begin(), input.end(), T(0));
    const T* x = q.input + b * example;
    const auto lines = [&](auto f) {  // f(from, to) for each line of the first channel
      map.each_line(s, [&](int64_t pixel, int64_t source) {
        f(x + source * q.input_layout.pixel, input.data() + pixel * kLanes<T>);
      });
    };
    const int64_t step = map.step[2] * q.input_layout.pixel;
    if (q.input_layout.channel == 1)
      return lines([&](const T* from, T* to) {
        for (int64_t i = 0; i < map.line(); ++i)
          transpose(from + i * step, count, s.in_channels, example, to + i * kLanes<T>, pixels * kLanes<T>);
      });
    for (int64_t c = 0; c < s.in_channels; ++c)
      if (input_used[c])
        lines([&](const T* from, T* to) {
          pack_line(from + c * q.input_layout.channel, count, map.line(), step, example, to + c * pixels * kLanes<T>);
        });
  }

  void pack_grads(const Slab& slab, int64_t b, int64_t count) {
    const int64_t example = s.out_channels * s.positions(), positions = slab.positions();
    const auto runs = [&](auto f) {  // f(from, to, how many) for each run of positions of the first output
      slab.each_run(s, [&](int64_t t, int64_t source, int64_t run) {
        f(q.output_grads + b * example + source * q.output_layout.pixel, grads.data() + t * kLanes<T>, run);
      });
    };
    if (q.output_layout.channel == 1)
      return runs([&](const T* from, T* to, int64_t run) {
        for (int64_t i = 0; i < run; ++i)
          transpose(from + i * q.output_layout.pixel, count, s.out_channels, example, to + i * kLanes<T>,
                    positions * kLanes<T>);
      });
    for (int64_t o = 0; o < s.out_channels; ++o)
      if (output_used[o])
        runs([&](const T* from, T* to, int64_t run) {
          pack_line(from + o * q.output_layout.channel, count, run, q.output_layout.pixel, example,
                    to + o * positions * kLanes<T>);
        });
  }

  // A line of n pixels that lie `step` apart, of `count` examples.
  static void pack_line(const T* from, int64_t count, int64_t n, int64_t step, int64_t example, T* to) {
    if (step == 1) return transpose(from, count, n, example, to, kLanes<T>);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t lane = 0; lane < count; ++lane) to[i * kLanes<T> + lane] = from[lane * example + i * step];
  }

  // The entries n <= i < n + count of the chunk that begins at `first`, at most kTogether of them.
  void add(const Slab& slab, int64_t first, int64_t n, int64_t count) {
    const int64_t pixels = slab.map.pixels();
    const T *x[kTogether], *g[kTogether];
    for (int64_t i = 0; i < kTogether; ++i) {  // beyond the last it is repeated
      const Entry& e = entries[n + std::min(i, count - 1)];
      x[i] = input.data() + (e.input * pixels + slab.taps[e.tap]) * kLanes<T>;
      g[i] = grads.data() + e.output * slab.positions() * kLanes<T>;
    }
    Vec<T> values[kTogether];
    products(x, g, slab.offsets.data(), slab.positions(), values);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = entries[n + i].place;
      if (total.empty()) {
        store<T>(results.data() + place * kLanes<T>, values[i]);
        continue;
      }
      double* to = total.data() + (first + place) * kLanes<T>;
      T lanes[kLanes<T>];
      store<T>(lanes, values[i]);
      for (int64_t l = 0; l < kLanes<T>; l += kLanes<double>)
        store<double>(to + l, load<double>(to + l) + load_double(lanes + l));
    }
  }

  template <typename V>
  void write(const V* values, int64_t b, int64_t count, int64_t first, int64_t size) const {
    transpose(values, size, count, kLanes<T>, q.gradients + b * q.selected + first, q.selected);
  }

  const SparseParams<T>& q;
  const ConvShape& s;
  const std::vector<Slab> slabs;
  std::vector<Entry> entries;
  std::vector<bool> input_used, output_used;
  std::vector<T> input, grads;  // of a slab: [channels, pixels, lanes], [channels, positions, lanes]
  std::vector<T> results;       // [entries of a chunk, lanes], of a single slab
  std::vector<double> total;    // [selected, lanes], of several slabs
};

template <typename T>
void gradients(const SparseParams<T>& q, int64_t begin, int64_t end) {
  if (begin == end || q.selected == 0) return;
  Gradients<T> gradients(q);
  for (int64_t b = begin; b < end; b += kLanes<T>) gradients.compute(b, std::min(kLanes<T>, end - b));
}

}  // namespace

void run(const SparseParams<float>& q, int64_t begin, int64_t end) { gradients(q, begin, end); }
void run(const SparseParams<double>& q, int64_t begin, int64_t end) { gradients(q, begin, end); }

}  // namespace dpk::DPK_ISA

#else

namespace dpk {

template <typename T>
void sparse_gradients_cpu(const SparseParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(run, params, begin, end);
}

template void sparse_gradients_cpu(const SparseParams<float>&, int64_t, int64_t);
template void sparse_gradients_cpu(const SparseParams<double>&, int64_t, int64_t);

}  // namespace dpk

#endif
