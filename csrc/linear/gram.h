// Squared norm of one example's weight gradient from products of pairs of positions:
//
//   ||sum_t g_t a_t^T||^2 = sum_{t,u} (a_t . a_u) (g_t . g_u)
//
// Half of either matrix of products, in register tiles: kGramDepth features at a time are turned around into panels
// [features, positions of the panel]. Included by linear_cpu.cpp inside namespace dpk::DPK_ISA.

struct GramForm {
  double squared;
  double magnitude;  // at least S = sum_t ||a_t|| ||g_t||
  double lost;       // at most this is what products that vanish below the range of T take from `squared`
};

template <typename T>
class Gram {
 public:
  Gram(int64_t positions, int64_t in_features, int64_t out_features)
      : n(positions),
        p(in_features),
        d(out_features),
        stride((n + kWidth - 1) / kWidth * kWidth),
        panels(kDepth * stride),  // zero beyond the last position
        a_gram(uncleared<T>(rows() * stride)),
        g_gram(uncleared<T>(rows() * stride)) {}

  GramForm form(const T* a, const T* g) {
    products(a, p, a_gram.get());
    products(g, d, g_gram.get());
    double beside = 0, diagonal = 0, magnitude = 0, squares = 0;
    for (int64_t t = 0; t < n; ++t) {
      const T *x = a_gram.get() + t * stride, *y = g_gram.get() + t * stride;
      beside += dot(x, y, t);
      const double a_square = static_cast<double>(x[t]), g_square = static_cast<double>(y[t]);
      diagonal += a_square * g_square;
      // What a square misses: rounding, and terms that vanish.
      const double a_most = a_square * 1.01 + p * kVanishing, g_most = g_square * 1.01 + d * kVanishing;
      magnitude += std::sqrt(a_most) * std::sqrt(g_most);
      squares += d * a_most + p * g_most;
    }
    // sum_{t,u} |g_t . g_u| <= n sum_t ||g_t||^2, each times what a dot of a's loses, and the reverse.
    return {2 * beside + diagonal, magnitude * 1.01, n * kVanishing * squares};
  }

  // Relative to S^2, what rounding in T takes from `squared` or adds to it.
  static double error(int64_t p, int64_t d) {
    const auto chain = [](int64_t size) { return std::min(size, kDepth) + size / kDepth + 2; };
    return unit_roundoff<T>() * static_cast<double>(chain(p) + chain(d) + 4);
  }

 private:
  static constexpr int64_t kDepth = 64;  // features: a chain of roundings, and panels in the first-level cache
  static constexpr int64_t kWidth = kPanel<T> % kTileRows ? 2 * kPanel<T> : kPanel<T>;  // positions of a panel
  // A product and a sum lose at most the least normal number each: subnormal ones may be flushed.
  static constexpr double kVanishing = 4 * static_cast<double>(std::numeric_limits<T>::min());

  int64_t rows() const { return (n + kTileRows - 1) / kTileRows * kTileRows; }

  // gram[t, u] = x_t . x_u for u <= t; x: [n, size].
  void products(const T* x, int64_t size, T* gram) {
    for (int64_t k = 0; k < size; k += kDepth) {
      const int64_t depth = std::min(kDepth, size - k);
      for (int64_t t = 0; t < n; t += kWidth)
        transpose(x + t * size + k, std::min(kWidth, n - t), depth, size, panels.data() + t * kDepth, kWidth);
      for (int64_t t = 0; t < n; t += kTileRows) {
        const T* rows = panels.data() + t / kWidth * kWidth * kDepth + t % kWidth;
        for (int64_t u = 0; u < t + kTileRows; u += kPanel<T>) {
          const T* columns = panels.data() + u / kWidth * kWidth * kDepth + u % kWidth;
          const int64_t used = std::min(kPanel<T>, t + kTileRows - u);
          alignas(64) T values[kTile<T>];
          tile_product(rows, kWidth, columns, kWidth, depth, used, values);
          for (int64_t i = 0; i < kTileRows; ++i)
            for (int64_t c = 0; c < used; c += kLanes<T>) {
              T* cell = gram + (t + i) * stride + u + c;
              const Vec<T> sum = load<T>(values + i * kPanel<T> + c);
              store<T>(cell, k == 0 ? sum : load<T>(cell) + sum);
            }
        }
      }
    }
  }

  // In double.
  static double dot(const T* x, const T* y, int64_t size) {
    Vec<double> sum[2] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes<double> <= size; i += 2 * kLanes<double>)
      for (int64_t v = 0; v < 2; ++v)
        sum[v] += load_double(x + i + v * kLanes<double>) * load_double(y + i + v * kLanes<double>);
    double tail = 0;
    for (; i < size; ++i) tail += static_cast<double>(x[i]) * static_cast<double>(y[i]);
    return tail + lane_sum<double>(sum[0] + sum[1]);
  }

  const int64_t n, p, d, stride;
  Buffer<T> panels;                   // [stride / kWidth, kDepth, kWidth]
  const Uncleared<T> a_gram, g_gram;  // [rows, stride]
};
