// Squared norm of one example's weight gradient by computing the gradient, tile by tile, and squaring it on the spot.
// Included by conv_cpu.cpp inside namespace dpk::DPK_ISA.

template <typename T, typename A>
class DirectNorm {
 public:
  DirectNorm(const ConvShape& shape, const ConvLayout& inputs, const ConvLayout& output_grads)
      : s(shape),
        input_layout(inputs),
        output_layout(output_grads),
        unfold(shape, shape.group_in()),
        outputs(unfold.own ? std::min(kPanel<A>, s.out_channels) : s.group_out()),
        input(unfold.input_size(s.group_in())),
        grads(unfold.output_size(outputs)) {}

  // x: [in_channels, *in], g: [out_channels, *out], in the layouts of the batch; stored: [rows, out_channels] or null,
  // receives the gradient, and the norm is then of what is stored.
  double squared(const T* x, const T* g, T* stored) {
    Squares sum;
    for (int64_t output = 0; output < s.out_channels; output += outputs) {
      const ConvBlock block{output / s.group_out(), 0, s.group_in(), output,
                            std::min(outputs, s.out_channels - output)};
      unfold.pack_input(x, input_layout, block, input.data());
      const auto panels = unfold.panels(g, output_layout, block, grads.data());
      for (int64_t o = 0; o < block.outputs; o += kPanel<A>)
        for (int64_t row = 0; row < s.rows(); row += kTileRows)
          unfold.tile(input.data(), panels, block, row, o, [&](auto* values) {
            const int64_t width = unfold.panel_width(block.outputs, o), used = std::min(width, block.outputs - o);
            const int64_t rows = std::min(kTileRows, s.rows() - row);
            if (stored)
              for (int64_t i = 0; i < rows; ++i)
                keep(values + i * width, used, stored + (row + i) * s.out_channels + output + o);
            sum.add(values, rows * width);  // beyond `used` output gradients are zero
          });
    }
    return sum.total();
  }

  // Each value errs by at most this times sum_t |g_t| |x_t|.
  static double error(int64_t positions) { return unit_roundoff<A>() * (std::min(positions, kDepth) + 4); }

  // The sum of squares, whatever A, errs by at most this times itself: roundings on a square's way through its tile,
  // all tiles and the lanes.
  static double square_error(const ConvShape& s) {
    const auto parts = [](int64_t n, int64_t part) { return (n + part - 1) / part; };
    const int64_t panels =
        own_channels(s) ? parts(s.out_channels, kPanel<double>) : s.groups * parts(s.group_out(), kPanel<double>);
    const int64_t tiles = panels * parts(s.rows(), kTileRows);
    return unit_roundoff<double>() * (kTile<float> / kLanes<double> + tiles + kLanes<double>);
  }

 private:
  // Sum of squares in double of whole vectors.
  class Squares {
   public:
    template <typename V>
    void add(const V* p, int64_t n) {
      Vec<double> chains[kChains] = {};
      int64_t i = 0;
      for (; i + kChains * kLanes<double> <= n; i += kChains * kLanes<double>) {
        DPK_UNROLL
        for (int64_t u = 0; u < kChains; ++u) {
          const Vec<double> x = load_double(p + i + u * kLanes<double>);
          chains[u] += x * x;
        }
      }
      for (; i < n; i += kLanes<double>) {
        const Vec<double> x = load_double(p + i);
        chains[0] += x * x;
      }
      lanes += (chains[0] + chains[1]) + (chains[2] + chains[3]);
    }
    double total() const { return lane_sum<double>(lanes); }

   private:
    static constexpr int64_t kChains = 4;
    Vec<double> lanes = {};
  };

  // Copies values to where they are stored, and rounds them as they are there.
  template <typename V>
  static void keep(V* values, int64_t n, T* to) {
    if constexpr (std::is_same_v<V, T>) {
      if (n == kPanel<A>)
        std::memcpy(to, values, kPanel<A> * sizeof(T));
      else
        std::copy_n(values, n, to);
    } else {
      for (int64_t j = 0; j < n; ++j) values[j] = to[j] = static_cast<T>(values[j]);
    }
  }

  const ConvShape& s;
  const ConvLayout input_layout, output_layout;
  const Unfold<T, A> unfold;
  const int64_t outputs;  // of a block
  Buffer<A> input, grads;
};
