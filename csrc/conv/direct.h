// Squared norm of one example's weight gradient by computing the gradient, tile by tile, and squaring it on the spot.
// Included by conv_cpu.cpp inside namespace dpk::DPK_ISA.

template <typename T, typename A>
class DirectNorm {
 public:
  explicit DirectNorm(const ConvShape& shape)
      : s(shape),
        unfold(shape, shape.group_in()),
        outputs(unfold.own ? std::min(kPanel<A>, s.out_channels) : s.group_out()),
        input(unfold.input_size(s.group_in())),
        grads(unfold.output_size(outputs)),
        totals(s.positions() > kDepth ? tiles(outputs) * kTile<A> : 0) {}

  // x: [in_channels, *in], g: [out_channels, *out]; stored: [rows, out_channels] or null, receives the gradient, and
  // the norm is then of what is stored.
  double squared(const T* x, const T* g, T* stored) {
    double sum = 0;
    for (int64_t output = 0; output < s.out_channels; output += outputs) {
      const ConvBlock block{output / s.group_out(), 0, s.group_in(), output,
                            std::min(outputs, s.out_channels - output)};
      unfold.pack_input(x, block, input.data());
      unfold.pack_output(g, block, grads.data());
      sum += block_squared(block, stored ? stored + output : nullptr);
    }
    return sum;
  }

  // Each value errs by at most this times sum_t |g_t| |x_t|.
  static double error(int64_t positions) { return unit_roundoff<A>() * (std::min(positions, kDepth) + 4); }

 private:
  int64_t tiles(int64_t n) const { return (s.rows() + kTileRows - 1) / kTileRows * ((n + kPanel<A> - 1) / kPanel<A>); }

  double block_squared(const ConvBlock& block, T* stored) {
    double sum = 0;
    for (int64_t first = 0; first < s.positions(); first += kDepth) {
      const int64_t depth = std::min(kDepth, s.positions() - first);
      const bool last = first + depth == s.positions();
      double* total = totals.data();
      for (int64_t output = 0; output < block.outputs; output += kPanel<A>)
        for (int64_t row = 0; row < s.rows(); row += kTileRows) {
          A values[kTile<A>];
          unfold.product(input.data(), grads.data(), block, row, output, first, depth, values);
          if (totals.empty()) {
            sum += tile_squared(values, block, row, output, stored);
            continue;
          }
          for (int64_t i = 0; i < kTile<A>; i += kLanes<double>) {
            const Vec<double> part = load_double(values + i);
            store<double>(total + i, first == 0 ? part : load<double>(total + i) + part);
          }
          if (last) sum += tile_squared(total, block, row, output, stored);
          total += kTile<A>;
        }
    }
    return sum;
  }

  // Stores a tile and squares what is stored.
  template <typename V>
  double tile_squared(V* values, const ConvBlock& block, int64_t row, int64_t output, T* stored) const {
    const int64_t rows = std::min(kTileRows, s.rows() - row), used = std::min(kPanel<A>, block.outputs - output);
    const int64_t width = unfold.panel_width(block.outputs, output);
    if (stored)
      for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < used; ++j)
          values[i * width + j] = stored[(row + i) * s.out_channels + output + j] =
              static_cast<T>(values[i * width + j]);
    if (used == width) return sum_of_squares(values, rows * width);
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) sum += sum_of_squares(values + i * width, used);
    return sum;
  }

  const ConvShape& s;
  const Unfold<T, A> unfold;
  const int64_t outputs;  // of a block
  std::vector<A> input, grads;
  std::vector<double> totals;  // where positions come in several pieces
};
