// Products of two packed operands in register tiles, and packing. Included by linear_cpu.cpp inside namespace
// dpk::DPK_ISA.

constexpr bool kWide = DPK_VECTOR_BYTES == 64;  // 32 vector registers instead of 16
constexpr int64_t kTileRows = kWide ? 8 : 4;
constexpr int64_t kTileVecs = 3;  // 8x3 or 4x3 accumulators, no spill
template <typename A>
constexpr int64_t kPanel = kTileVecs * kLanes<A>;
template <typename A>
constexpr int64_t kTile = kTileRows * kPanel<A>;

// values[i, c] = sum_k x[k, i] * y[k, c] for kTileRows rows i and kVecs vectors of columns c; a row of values has
// kPanel entries. Not inlined: amid a caller's variables some accumulators would live in memory.
template <int64_t kVecs, typename A>
[[gnu::noinline]] void vec_product(const A* x, int64_t x_stride, const A* y, int64_t y_stride, int64_t depth,
                                   A* values) {
  constexpr int64_t kChains = kVecs == 1 ? 2 : 1;  // one alone would wait for its products
  Vec<A> acc[kChains][kTileRows][kVecs] = {};
  const auto add = [&](Vec<A>(&to)[kTileRows][kVecs]) __attribute__((always_inline)) {
    Vec<A> columns[kVecs];
    DPK_UNROLL
    for (int64_t v = 0; v < kVecs; ++v) columns[v] = load<A>(y + v * kLanes<A>);
    DPK_UNROLL
    for (int64_t i = 0; i < kTileRows; ++i) {
      DPK_UNROLL
      for (int64_t v = 0; v < kVecs; ++v) to[i][v] += x[i] * columns[v];
    }
    x += x_stride;
    y += y_stride;
  };
  int64_t k = 0;
  for (; k + kChains <= depth; k += kChains) {
    DPK_UNROLL
    for (int64_t c = 0; c < kChains; ++c) add(acc[c]);
  }
  if (kChains > 1 && k < depth) add(acc[0]);
  DPK_UNROLL
  for (int64_t i = 0; i < kTileRows; ++i) {
    DPK_UNROLL
    for (int64_t v = 0; v < kVecs; ++v) {
      Vec<A> sum = acc[0][i][v];
      if constexpr (kChains == 2) sum += acc[1][i][v];
      store<A>(values + i * kPanel<A> + v * kLanes<A>, sum);
    }
  }
}

// The same for the first `columns` columns, and those that share a vector with them.
template <typename A>
inline void tile_product(const A* x, int64_t x_stride, const A* y, int64_t y_stride, int64_t depth, int64_t columns,
                         A* values) {
  static_assert(kTileVecs == 3);
  if (columns > 2 * kLanes<A>) return vec_product<3>(x, x_stride, y, y_stride, depth, values);
  if (columns > kLanes<A>) return vec_product<2>(x, x_stride, y, y_stride, depth, values);
  return vec_product<1>(x, x_stride, y, y_stride, depth, values);
}

// to[i] = from[i] * factor for i < n, and zero up to whole kUnits.
template <int64_t kUnit, bool kScaled, typename T, typename A>
inline void pack_row(const T* from, [[maybe_unused]] A factor, int64_t n, A* to) {
  int64_t i = 0;
  for (; i + kLanes<A> <= n; i += kLanes<A>) {
    Vec<A> x;
    if constexpr (std::is_same_v<T, A>)
      x = load<A>(from + i);
    else
      x = load_double(from + i);
    store<A>(to + i, kScaled ? x * factor : x);
  }
  for (; i < n; ++i) to[i] = static_cast<A>(from[i]) * (kScaled ? factor : A(1));
  for (; i % kUnit != 0; ++i) to[i] = A(0);
}
