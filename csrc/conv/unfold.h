// The operands of a direct product for a block of channels and outputs of one example. Included by conv_cpu.cpp inside
// namespace dpk::DPK_ISA.

template <typename T, typename A>
inline void copy_line(const T* from, int64_t from_stride, A* to, int64_t to_stride, int64_t n) {
  if (from_stride != 1 || to_stride != 1) {
    for (int64_t i = 0; i < n; ++i) to[i * to_stride] = static_cast<A>(from[i * from_stride]);
  } else if (std::is_same_v<T, A> && n >= 4) {  // by fours, the last of which may overlap
    for (int64_t i = 0; i < n - 4; i += 4) std::memcpy(to + i, from + i, 4 * sizeof(A));
    std::memcpy(to + n - 4, from + n - 4, 4 * sizeof(A));
  } else {
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<A>(from[i]);
  }
}

template <typename T, typename A>
class Unfold {
 public:
  static constexpr int64_t kNear = 1 << 13;  // values within which lines far apart do not drive each other out of L1
  const ConvShape& s;
  const ConvDirectMap map;
  const bool own;
  std::vector<int64_t> offsets;      // [positions]
  std::vector<int64_t> row_offsets;  // [most channels of a block * taps, and a tile more, which repeats the last]

  Unfold(const ConvShape& shape, int64_t channels) : s(shape), map(shape), own(own_channels(shape)) {
    const int64_t pixel_stride = own ? channels * kPanel<A> : 1, channel_stride = own ? kPanel<A> : map.pixels();
    for (int64_t d = 0; d < s.out[0]; ++d)
      for (int64_t h = 0; h < s.out[1]; ++h)
        for (int64_t w = 0; w < s.out[2]; ++w)
          offsets.push_back(map.pixel(d * map.stride[0], h * map.stride[1], w * map.stride[2]) * pixel_stride);
    for (int64_t c = 0; c < channels; ++c)
      for (int64_t d = 0; d < s.kernel[0]; ++d)
        for (int64_t h = 0; h < s.kernel[1]; ++h)
          for (int64_t w = 0; w < s.kernel[2]; ++w)
            row_offsets.push_back(map.pixel(d * s.dilation[0], h * s.dilation[1], w * s.dilation[2]) * pixel_stride +
                                  c * channel_stride);
    row_offsets.resize(row_offsets.size() + kTileRows, row_offsets.back());
  }

  int64_t input_size(int64_t channels) const { return map.pixels() * channels * (own ? kPanel<A> : 1); }
  int64_t output_size(int64_t outputs) const {
    return (outputs + kPanel<A> - 1) / kPanel<A> * kPanel<A> * s.positions();
  }

  // The map of each channel of a block from an example's input [in_channels, *in]. Only pixels inside the padding are
  // written: the buffer starts out zero and keeps the same layout.
  void pack_input(const T* x, const ConvLayout& layout, const ConvBlock& block, A* to) const {
    if (layout.channel == 1 && !own) {
      const T* from = x + block.group * s.group_in() + block.channel;
      return map.each_line(s, [&](int64_t pixel, int64_t source) {
        transpose(from + source * layout.pixel, map.line(), block.channels, map.step[2] * layout.pixel, to + pixel,
                  map.pixels());
      });
    }
    for (int64_t o = 0; o < (own ? block.outputs : 1); ++o) {
      const int64_t group = own ? (block.output + o) / s.group_out() : block.group;
      for (int64_t c = 0; c < block.channels; ++c) {
        const T* from = x + (group * s.group_in() + block.channel + c) * layout.channel;
        if (own)
          pack_map(from, layout.pixel, to + c * kPanel<A> + o, block.channels * kPanel<A>);
        else
          pack_map(from, layout.pixel, to + c * map.pixels(), 1);
      }
    }
  }

  static int64_t panel_width(int64_t outputs, int64_t first) {
    return outputs - first <= kLanes<A> ? kLanes<A> : kPanel<A>;
  }

  // Where tiles read the output gradients of a block. The outputs of a panel lie next to each other.
  struct Panels {
    const A* values;
    int64_t output;    // from one output to the next, over a whole number of panels
    int64_t position;  // from one position to the next; 0: the width of the panel
  };

  // Of an example's output gradients [out_channels, positions]: these themselves where they lie so, or packed to
  // `buffer` [positions, outputs of the panel] for each panel; outputs beyond the last are zero.
  Panels panels(const T* g, const ConvLayout& layout, const ConvBlock& block, A* buffer) const {
    const int64_t positions = s.positions();
    if constexpr (std::is_same_v<T, A>)
      if (layout.channel == 1 && block.outputs % kLanes<A> == 0 && std::min(positions, kDepth) * layout.pixel <= kNear)
        return {g + block.output, 1, layout.pixel};
    for (int64_t first = 0; first < block.outputs; first += kPanel<A>) {
      const int64_t used = std::min(kPanel<A>, block.outputs - first), width = panel_width(block.outputs, first);
      A* panel = buffer + first * positions;
      const T* from = g + (block.output + first) * layout.channel;
      if (layout.channel == 1)
        for (int64_t t = 0; t < positions; ++t) copy_line(from + t * layout.pixel, 1, panel + t * width, 1, used);
      else
        transpose(from, used, positions, positions, panel, width);
      for (int64_t t = 0; t < (used < width ? positions : 0); ++t)
        std::fill(panel + t * width + used, panel + (t + 1) * width, A(0));
    }
    return {buffer, positions, 0};
  }

  // finish(values): the gradient of rows row <= r < row + kTileRows and outputs output <= o < output + panel_width of
  // the block, [kTileRows, panel_width], rows and outputs beyond the last included. Pieces of kDepth positions
  // accumulate in A and join in double, before anything else: they may be large and cancel.
  template <typename Finish>
  void tile(const A* x, const Panels& g, const ConvBlock& block, int64_t row, int64_t output, Finish finish) const {
    const int64_t width = panel_width(block.outputs, output), stride = g.position ? g.position : width;
    const A* panel = g.values + output * g.output;
    alignas(64) A values[kTile<A>];
    if (s.positions() <= kDepth) {
      product(x, panel, stride, width, row, 0, s.positions(), values);
      return finish(values);
    }
    alignas(64) double sum[kTile<A>] = {};
    for (int64_t first = 0; first < s.positions(); first += kDepth) {
      product(x, panel, stride, width, row, first, std::min(kDepth, s.positions() - first), values);
      for (int64_t i = 0; i < kTileRows * width; i += kLanes<double>)
        store<double>(sum + i, load<double>(sum + i) + load_double(values + i));
    }
    finish(sum);
  }

 private:
  // One channel's map, from pixels that lie `from_stride` apart to pixels `to_stride` apart.
  void pack_map(const T* from, int64_t from_stride, A* to, int64_t to_stride) const {
    map.each_line(s, [&](int64_t pixel, int64_t source) {
      copy_line(from + source * from_stride, map.step[2] * from_stride, to + pixel * to_stride, to_stride, map.line());
    });
  }

  void product(const A* x, const A* panel, int64_t stride, int64_t width, int64_t row, int64_t first, int64_t depth,
               A* values) const {
    const auto tile = width == kPanel<A> ? own ? &tile_product<A, kTileVecs, true> : &tile_product<A, kTileVecs, false>
                      : own              ? &tile_product<A, 1, true>
                                         : &tile_product<A, 1, false>;
    tile(x, row_offsets.data() + row, offsets.data() + first, panel + first * stride, stride, depth, values);
  }
};

// The largest magnitude of n values, NaN aside.
template <typename T>
inline double largest(const T* p, int64_t n) {
  Vec<T> most = {};
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) {
    const Vec<T> x = load<T>(p + i), magnitude = x < 0 ? -x : x;
    most = magnitude > most ? magnitude : most;
  }
  T result = 0;
  for (int64_t l = 0; l < kLanes<T>; ++l) result = std::max(result, most[l]);
  for (; i < n; ++i) result = std::max(result, std::abs(p[i]));
  return static_cast<double>(result);
}

// Whether sums over positions of products, the largest of them `product`, could leave the range of T. Such an example
// is computed in double, in norms and sums alike.
template <typename T>
inline bool leaves_range(double product, int64_t positions) {
  return std::is_same_v<T, float> && product != 0 && !(1e-30 < product && product * positions < 1e37);
}
