// Squared norm of one example's weight gradient from products of pairs of positions:
//
//   ||sum_t g_t x_t^T||^2 = sum_{t,u} (g_t . g_u) (x_t . x_u),   x_t . x_u = sum_k P[t stride + k, u stride + k]
//
// with P the Gram matrix of raw padded pixels: no unfold. Taps that agree modulo the stride see the same pixels, one
// phase of the padded map; within a phase positions are one pixel apart whatever the stride, and each tap is a shift.
// Included by conv_cpu.cpp inside namespace dpk::DPK_ISA.

struct GramForm {
  double squared;
  double magnitude;  // S = sum_t ||g_t|| ||x_t||; of several groups the root of the sum of squares
};

template <typename T, typename A>
class GramNorm {
 public:
  explicit GramNorm(const ConvShape& shape)
      : s(shape), output_gram(padded(s.positions()) * s.positions()), diagonal(s.positions()) {
    int64_t most = 0;
    for (int64_t d = 0; d < s.stride[0]; ++d)
      for (int64_t h = 0; h < s.stride[1]; ++h)
        for (int64_t w = 0; w < s.stride[2]; ++w)
          if (Phase phase(s, {d, h, w}); !phase.shifts.empty()) phases.push_back(std::move(phase));
    for (const Phase& phase : phases) most = std::max(most, static_cast<int64_t>(phase.pixels.size()));
    pixel_gram.resize(most * padded(most));
    for (int64_t k = 0; k < std::max(s.group_in(), s.group_out()); ++k) depth_offsets.push_back(k * kPanel<A>);
    panels.resize(std::max(padded(most) * s.group_in(), padded(s.positions()) * s.group_out()));
  }

  GramForm squared(const T* x, const T* g) {
    GramForm result{0, 0};
    for (int64_t group = 0; group < s.groups; ++group) {
      const T* from = g + group * s.group_out() * s.positions();
      pack(s.group_out(), s.positions(), [&](int64_t c, int64_t t) { return from[c * s.positions() + t]; });
      gram(s.group_out(), s.positions(), s.out[2], output_gram);
      std::fill(diagonal.begin(), diagonal.end(), 0.);
      for (const Phase& phase : phases) result.squared += phase_squared(phase, x + group * s.group_in() * s.pixels());
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
  // The pixels that taps congruent to `residue` modulo the stride read.
  struct Phase {
    int64_t size[3];              // of the grid of pixels
    std::vector<int64_t> pixels;  // source of each grid point within a channel; -1 in the padding
    std::vector<int64_t> shifts;  // of each tap within the grid

    Phase(const ConvShape& s, const std::array<int64_t, 3>& residue) {
      std::vector<int64_t> tap[3];  // shift of each tap of the phase
      for (int i = 0; i < 3; ++i) {
        for (int64_t k = 0; k < s.kernel[i]; ++k)
          if (k * s.dilation[i] % s.stride[i] == residue[i]) tap[i].push_back(k * s.dilation[i] / s.stride[i]);
        if (tap[i].empty()) return;
        size[i] = s.out[i] + tap[i].back();
      }
      for (int64_t d : tap[0])
        for (int64_t h : tap[1])
          for (int64_t w : tap[2]) shifts.push_back((d * size[1] + h) * size[2] + w);
      const auto source = [&](int i, int64_t at) {
        const int64_t pixel = at * s.stride[i] + residue[i] - s.padding[i];
        return 0 <= pixel && pixel < s.in[i] ? pixel : -1;
      };
      for (int64_t d = 0; d < size[0]; ++d)
        for (int64_t h = 0; h < size[1]; ++h)
          for (int64_t w = 0; w < size[2]; ++w) {
            const int64_t z = source(0, d), y = source(1, h), x = source(2, w);
            pixels.push_back(z < 0 || y < 0 || x < 0 ? -1 : (z * s.in[1] + y) * s.in[2] + x);
          }
    }
  };

  static int64_t padded(int64_t n) { return (n + kPanel<A> - 1) / kPanel<A> * kPanel<A>; }

  // Panels [channels, columns of the panel] of a matrix [channels, columns].
  template <typename Value>
  void pack(int64_t channels, int64_t columns, Value value) {
    A* to = panels.data();
    for (int64_t first = 0; first < columns; first += kPanel<A>)
      for (int64_t c = 0; c < channels; ++c, to += kPanel<A>)
        for (int64_t j = 0; j < kPanel<A>; ++j)
          to[j] = first + j < columns ? static_cast<A>(value(c, first + j)) : A(0);
  }

  // to[i, j] = sum_c panels[c, i] * panels[c, j] for the columns j up to the end of row i's line of `line` points:
  // pairs of one line in both orders, of different lines in one.
  void gram(int64_t channels, int64_t columns, int64_t line, std::vector<A>& to) const {
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
          A values[kTile<A>];
          const A* panel = panels.data() + j * channels + c * kPanel<A>;
          tile_product<A, kTileVecs, false>(panels.data(), row_offsets, depth_offsets.data() + c, panel,
                                            std::min(kDepth, channels - c), values);
          for (int64_t r = 0; r < rows; ++r)
            for (int64_t v = 0; v < kPanel<A>; v += kLanes<A>) {
              A* cell = to.data() + (i + r) * stride + j + v;
              const Vec<A> sum = load<A>(values + r * kPanel<A> + v);
              store<A>(cell, c == 0 ? sum : load<A>(cell) + sum);
            }
        }
    }
  }

  // sum_{t,u} (g_t . g_u) sum_shift P[t + shift, u + shift], and the phase's part of every ||x_t||^2.
  double phase_squared(const Phase& phase, const T* x) {
    const int64_t grid = phase.pixels.size(), stride = padded(grid), width = s.out[2];
    pack(s.group_in(), grid,
         [&](int64_t c, int64_t q) { return phase.pixels[q] < 0 ? T(0) : x[c * s.pixels() + phase.pixels[q]]; });
    gram(s.group_in(), grid, phase.size[2], pixel_gram);
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
  double line_sum(const Phase& phase, const A* p, const A* g, int64_t stride) const {
    Vec<double> total = {};
    double sum = 0;
    int64_t u = 0;
    for (; u + kLanes<A> <= s.out[2]; u += kLanes<A>) {
      Vec<A> x = {};
      for (int64_t shift : phase.shifts) x += load<A>(p + shift * (stride + 1) + u);
      A products[kLanes<A>];
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
  std::vector<Phase> phases;
  std::vector<A> panels, output_gram, pixel_gram;
  std::vector<double> diagonal;
  std::vector<int64_t> depth_offsets;
};
