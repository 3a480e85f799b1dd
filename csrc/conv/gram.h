// Squared norm of one example's weight gradient from products of pairs of positions:
//
//   ||sum_t g_t x_t^T||^2 = sum_{t,u} (g_t . g_u) (x_t . x_u),   x_t . x_u = sum_k P[t stride + k, u stride + k]
//
// with P the Gram matrix of raw pixels: no unfold. Taps that agree modulo the stride see the same pixels, one phase of
// the padded map; within a phase positions are one pixel apart whatever the stride, and each tap is a shift. Included
// by conv_cpu.cpp inside namespace dpk::DPK_ISA.

struct GramForm {
  double squared;
  double magnitude;  // S = sum_t ||g_t|| ||x_t||; of several groups the root of the sum of squares
};

template <typename T, typename A>
class GramNorm {
 public:
  GramNorm(const ConvShape& shape, const ConvLayout& input, const ConvLayout& output_grads)
      : s(shape),
        input_layout(input),
        output_layout(output_grads),
        phases(conv_phases(s)),
        output_gram(s.positions() * padded(s.positions())),
        diagonal(s.positions()) {
    int64_t columns = s.positions(), grid = 0;
    for (const ConvPhase& phase : phases) {
      columns = std::max(columns, phase.inside());
      grid = std::max(grid, phase.pixels());
    }
    for (int64_t c = 0; c < std::max(s.group_in(), s.group_out()); ++c) depth_offsets.push_back(c * kPanel<A>);
    panels.resize(padded(columns) * std::max(s.group_in(), s.group_out()));
    inside_gram.resize(columns * padded(columns));
    pixel_gram.resize(grid * grid);
  }

  GramForm squared(const T* x, const T* g) {
    GramForm result{0, 0};
    for (int64_t group = 0; group < s.groups; ++group) {
      pack(g + group * s.group_out() * output_layout.channel, output_layout, s.group_out(), s.positions());
      gram(s.group_out(), s.positions(), s.out[2], output_gram.data());
      std::fill(diagonal.begin(), diagonal.end(), 0.);
      for (const ConvPhase& phase : phases)
        result.squared += phase_squared(phase, x + group * s.group_in() * input_layout.channel);
      double magnitude = 0;
      for (int64_t t = 0; t < s.positions(); ++t)
        magnitude +=
            std::sqrt(diagonal[t]) * std::sqrt(static_cast<double>(output_gram[t * padded(s.positions()) + t]));
      result.magnitude = std::hypot(result.magnitude, magnitude);
    }
    return result;
  }

  // The squared norm errs by at most this times magnitude^2: both Gram matrices, the shift-sum, the last product.
  static double error(const ConvShape& s) {
    const auto chain = [](int64_t n) { return std::min(n, kDepth) + n / kDepth + 1; };
    return unit_roundoff<A>() * (chain(s.group_in()) + chain(s.group_out()) + s.taps() + 4);
  }

 private:
  static int64_t padded(int64_t n) { return (n + kPanel<A> - 1) / kPanel<A> * kPanel<A>; }

  // Panels [channels, columns of the panel] of a matrix [channels, columns], zero beyond the last column.
  void pack(const T* from, const ConvLayout& layout, int64_t channels, int64_t columns) {
    A* to = panels.data();
    for (int64_t first = 0; first < columns; first += kPanel<A>, to += channels * kPanel<A>) {
      const T* part = from + first * layout.pixel;
      const int64_t used = std::min(kPanel<A>, columns - first);
      if (layout.channel == 1)
        transpose(part, used, channels, layout.pixel, to, kPanel<A>);
      else
        for (int64_t c = 0; c < channels; ++c) copy_line(part + c * layout.channel, 1, to + c * kPanel<A>, 1, used);
      for (int64_t c = 0; c < (used < kPanel<A> ? channels : 0); ++c)
        std::fill(to + c * kPanel<A> + used, to + (c + 1) * kPanel<A>, A(0));
    }
  }

  // to[i, j] = sum_c panels[c, i] * panels[c, j] for the columns j up to the end of row i's line of `line` points:
  // pairs of one line in both orders, of different lines in one.
  void gram(int64_t channels, int64_t columns, int64_t line, A* to) const {
    const int64_t stride = padded(columns);
    for (int64_t i = 0; i < columns; i += kTileRows) {
      const int64_t rows = std::min(kTileRows, columns - i), end = ((i + rows - 1) / line + 1) * line;
      int64_t row_offsets[kTileRows];
      for (int64_t r = 0; r < kTileRows; ++r) {
        const int64_t column = std::min(i + r, columns - 1);
        row_offsets[r] = column / kPanel<A> * kPanel<A> * channels + column % kPanel<A>;
      }
      for (int64_t j = 0; j < end; j += kPanel<A>)
        for (int64_t c = 0; c < channels; c += kDepth) {
          alignas(64) A values[kTile<A>];
          const A* panel = panels.data() + j * channels + c * kPanel<A>;
          tile_product<A, kTileVecs, false>(panels.data(), row_offsets, depth_offsets.data() + c, panel, kPanel<A>,
                                            std::min(kDepth, channels - c), values);
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t v = 0; v < kPanel<A>; v += kLanes<A>) {
              A* cell = to + (i + r) * stride + j + v;
              const Vec<A> sum = load<A>(values + r * kPanel<A> + v);
              store<A>(cell, c == 0 ? sum : load<A>(cell) + sum);
            }
        }
    }
  }

  // The Gram matrix of a phase's pixels. Those in the padding are zero and left out of the product.
  void phase_gram(const ConvPhase& phase, const T* x) {
    const int64_t columns = phase.inside(), line = phase.line(), grid = phase.pixels();
    std::vector<int64_t> starts;  // of the lines inside the padding
    if (columns == s.pixels()) {  // the whole map
      phase.each_line(s, [&](int64_t pixel, int64_t) { starts.push_back(pixel); });
      pack(x, input_layout, s.group_in(), columns);
    } else {
      inside.resize(s.group_in() * columns);
      phase.each_line(s, [&](int64_t pixel, int64_t source) {
        T* to = inside.data() + starts.size() * line;
        for (int64_t c = 0; c < s.group_in(); ++c)
          copy_line(x + c * input_layout.channel + source * input_layout.pixel, phase.step[2] * input_layout.pixel,
                    to + c * columns, 1, line);
        starts.push_back(pixel);
      });
      pack(inside.data(), {columns, 1}, s.group_in(), columns);
    }
    gram(s.group_in(), columns, line, inside_gram.data());
    std::fill_n(pixel_gram.data(), grid * grid, A(0));
    for (int64_t i = 0; i < columns; ++i) {
      A* row = pixel_gram.data() + (starts[i / line] + i % line) * grid;
      for (int64_t j = 0; j <= i / line; ++j)
        copy_line(inside_gram.data() + i * padded(columns) + j * line, 1, row + starts[j], 1, line);
    }
  }

  // sum_{t,u} (g_t . g_u) sum_shift P[t + shift, u + shift], and the phase's part of every ||x_t||^2.
  double phase_squared(const ConvPhase& phase, const T* x) {
    phase_gram(phase, x);
    const int64_t stride = phase.pixels(), width = s.out[2];
    const auto at = [&](int64_t line) {  // first grid point of a line of positions
      return (line / s.out[1] * phase.size[1] + line % s.out[1]) * phase.size[2];
    };
    double sum = 0;
    for (int64_t line = 0; line < s.out[0] * s.out[1]; ++line)
      for (int64_t w = 0; w < width; ++w) {
        const int64_t t = line * width + w;
        const A* pixel_row = pixel_gram.data() + (at(line) + w) * stride;
        for (int64_t shift : phase.shifts) diagonal[t] += pixel_row[shift * stride + shift + at(line) + w];
        for (int64_t other = 0; other <= line; ++other) {
          const A* g = output_gram.data() + t * padded(s.positions()) + other * width;
          sum += (other < line ? 2 : 1) * line_sum(phase, pixel_row + at(other), g, stride);
        }
      }
    return sum;
  }

  // sum_u g[u] sum_shift p[shift * stride + shift + u] over one line of positions u.
  double line_sum(const ConvPhase& phase, const A* p, const A* g, int64_t stride) const {
    Vec<double> total = {};
    double sum = 0;
    int64_t u = 0;
    for (; u + kLanes<A> <= s.out[2]; u += kLanes<A>) {
      Vec<A> x = {};
      for (int64_t shift : phase.shifts) x += load<A>(p + shift * (stride + 1) + u);
      alignas(64) A products[kLanes<A>];
      store<A>(products, x * load<A>(g + u));
      for (int64_t l = 0; l < kLanes<A>; l += kLanes<double>) total += load_double(products + l);
    }
    for (; u < s.out[2]; ++u) {
      A x = 0;
      for (int64_t shift : phase.shifts) x += p[shift * (stride + 1) + u];
      sum += static_cast<double>(x) * static_cast<double>(g[u]);
    }
    return sum + lane_sum<double>(total);
  }

  const ConvShape& s;
  const ConvLayout input_layout, output_layout;
  const std::vector<ConvPhase> phases;
  std::vector<T> inside;                           // [channels, pixels of a phase inside the padding]
  Buffer<A> panels;                                // of either operand
  Buffer<A> output_gram, inside_gram, pixel_gram;  // of positions; of the pixels inside the padding; of all pixels
  std::vector<double> diagonal;                    // ||x_t||^2
  std::vector<int64_t> depth_offsets;              // of a channel in its panel
};
