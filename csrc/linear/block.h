// Blocks of sum_b w_b sum_t g_bt a_bt^T. Included by linear_cpu.cpp inside namespace dpk::DPK_ISA.

// How a gradient [out_features, in_features] is cut: the sum of a block, in double, and the rows that it is computed
// from stay in the second-level cache; a small layer has several blocks for several threads.
class Blocks {
 public:
  Blocks(int64_t in_features, int64_t out_features)
      : p(in_features), d(out_features), rows(part(d, 96, kTileRows)), columns(part(p, 192, kPanel<float>)) {
    constexpr int64_t kSeveral = 8, kFewRows = 32;
    while (count() < kSeveral && rows > kFewRows) rows = part(d, rows / 2, kTileRows);
  }

  int64_t count() const { return parts(d, rows) * parts(p, columns); }
  int64_t row(int64_t block) const { return block / parts(p, columns) * rows; }
  int64_t column(int64_t block) const { return block % parts(p, columns) * columns; }

 private:
  static int64_t parts(int64_t n, int64_t size) { return std::max<int64_t>(1, (n + size - 1) / size); }
  // The size of as few parts of n as `most` allows: even ones, in whole units.
  static int64_t part(int64_t n, int64_t most, int64_t unit) { return parts(parts(n, parts(n, most)), unit) * unit; }

 public:
  const int64_t p, d;
  int64_t rows, columns;  // of a block, whole register tiles
};

// The sum of one block at a time, over the examples of a batch.
//
// A = float: the positions of an example, in even pieces of at most kPieceDepth, are multiplied and added up in float;
// pieces join in double, and their sum, times the example's weight, is added to that of other examples in double. A
// value of a piece that leaves the range of float is computed in double. So every entry gets one addend from an
// example, and it depends on nothing but the example.
//
// A = double: a chain of sums in double runs over the positions of one example after the other, up to kDepth of them,
// and joins the total.
template <typename T, typename A>
class BlockSum {
 public:
  BlockSum(const Blocks& grid, int64_t n)
      : blocks(grid),
        positions(n),
        pieces((n + kDepth - 1) / kDepth),
        a_stride(odd_lines(blocks.columns)),
        g_stride(odd_lines(blocks.rows)),
        a_rows(uncleared<A>(kDepth * a_stride)),
        g_rows(uncleared<A>(kDepth * g_stride)),
        total(uncleared<double>(blocks.rows * blocks.columns)),
        example(uncleared<double>(kByExample && pieces > 1 ? blocks.rows * blocks.columns : 0)) {}

  // The block's part of the sum over activations [batch, positions, p] and output_grads [batch, positions, d], without
  // the examples of weight 0: [rows, columns] in lines of blocks.columns, valid until the next call. `guarded`: look
  // for values that left the range of float, which show in a sum that is not finite.
  const double* sum(int64_t block, const T* activations, const T* output_grads, const double* weights, int64_t batch,
                    bool guarded) {
    row0 = blocks.row(block), column0 = blocks.column(block);
    rows = std::min(blocks.rows, blocks.d - row0), columns = std::min(blocks.columns, blocks.p - column0);
    guard = guarded;
    std::fill_n(total.get(), blocks.rows * blocks.columns, 0.);
    for (int64_t b = 0; b < batch; ++b) {
      if (weights[b] == 0) continue;  // skipped: it may hold NaN
      const T* a = activations + b * positions * blocks.p;
      const T* g = output_grads + b * positions * blocks.d;
      for (int64_t i = 0; i < pieces; ++i)
        gather(a, g, i * positions / pieces, (i + 1) * positions / pieces, {0, 0, weights[b], i == 0, i == pieces - 1});
    }
    multiply();
    return total.get();
  }

  int64_t row0, column0, rows, columns;  // of the last block

  static constexpr bool kByExample = std::is_same_v<A, float>;
  static constexpr int64_t kDepth = kByExample ? kPieceDepth : 64;  // rows gathered at a time: most of a piece

 private:
  // At least n values: an odd number of cache lines, so that the same columns of many rows stay in the first-level
  // cache.
  static int64_t odd_lines(int64_t n) {
    constexpr int64_t kLine = 64 / sizeof(A);
    return ((n + kLine - 1) / kLine | 1) * kLine;
  }

  struct Segment {  // gathered rows that are one piece
    int64_t begin, depth;
    double weight;
    bool first, last;  // of its example
  };

  // Copies an example's positions begin <= t < end, the columns of the block. The memory's prefetcher does not see rows
  // that lie far apart.
  void gather(const T* a, const T* g, int64_t begin, int64_t end, Segment segment) {
    if (depth + end - begin > kDepth) multiply();
    segment.begin = depth, segment.depth = end - begin;
    constexpr int64_t kLine = 64 / sizeof(T), kAhead = 4;
    for (int64_t t = begin; t < end; ++t, ++depth) {
      for (int64_t c = 0; c < columns; c += kLine) __builtin_prefetch(a + (t + kAhead) * blocks.p + column0 + c);
      for (int64_t c = 0; c < rows; c += kLine) __builtin_prefetch(g + (t + kAhead) * blocks.d + row0 + c);
      pack_row<kLanes<A>, false>(a + t * blocks.p + column0, A(1), columns, a_rows.get() + depth * a_stride);
      pack_row<kTileRows, !kByExample>(g + t * blocks.d + row0, static_cast<A>(segment.weight), rows,
                                       g_rows.get() + depth * g_stride);
    }
    if (kByExample) segments.push_back(segment);
  }

  // Adds the products of the gathered rows.
  void multiply() {
    if (!kByExample) segments.assign(1, {0, depth, 1, true, true});
    for (int64_t j = 0; j < columns; j += kPanel<A>)
      for (int64_t i = 0; i < rows; i += kTileRows)
        for (const Segment& segment : segments) {
          const A* g = g_rows.get() + segment.begin * g_stride + i;
          const A* a = a_rows.get() + segment.begin * a_stride + j;
          const int64_t used = std::min(kPanel<A>, columns - j), at = i * blocks.columns + j;
          alignas(64) A values[kTile<A>];
          tile_product(g, g_stride, a, a_stride, segment.depth, used, values);
          if (kByExample && guard)
            add_guarded(g, a, segment, values, used, at);
          else
            add(segment, values, used, at);
        }
    segments.clear();
    depth = 0;
  }

  // Adds a tile's values, from the entry `at` on, to the example's sum, and a whole example's sum to the total.
  template <typename V>
  void add(const Segment& segment, const V* values, int64_t used, int64_t at) {
    const double weight = segment.weight;
    if (segment.first && segment.last)
      each_vector(values, used, at,
                  [=](Vec<double> x, double* to, double*) { store<double>(to, load<double>(to) + weight * x); });
    else if (segment.first)
      each_vector(values, used, at, [](Vec<double> x, double*, double* own) { store<double>(own, x); });
    else if (!segment.last)
      each_vector(values, used, at,
                  [](Vec<double> x, double*, double* own) { store<double>(own, load<double>(own) + x); });
    else
      each_vector(values, used, at, [=](Vec<double> x, double* to, double* own) {
        store<double>(to, load<double>(to) + weight * (load<double>(own) + x));
      });
  }

  template <typename V, typename F>
  void each_vector(const V* values, int64_t used, int64_t at, F f) const {
    double *to = total.get() + at, *own = example.get() + at;  // as locals: not read again after every store
    for (int64_t i = 0, stride = blocks.columns; i < kTileRows; ++i, values += kPanel<A>, to += stride, own += stride) {
      if (used == kPanel<A>) {  // a constant count
        DPK_UNROLL
        for (int64_t c = 0; c < kPanel<A>; c += kLanes<double>) f(load_double(values + c), to + c, own + c);
      } else {
        for (int64_t c = 0; c < used; c += kLanes<double>) f(load_double(values + c), to + c, own + c);
      }
    }
  }

  // The same, with values that are not finite computed in double.
  void add_guarded(const A* g, const A* a, const Segment& segment, const A* values, int64_t used, int64_t at) {
    double wide[kTile<A>] = {};
    for (int64_t k = 0; k < segment.depth; ++k, g += g_stride, a += a_stride)
      for (int64_t i = 0; i < kTileRows; ++i)
        for (int64_t c = 0; c < used; ++c)
          wide[i * kPanel<A> + c] += static_cast<double>(g[i]) * static_cast<double>(a[c]);
    for (int64_t i = 0; i < kTileRows; ++i)
      for (int64_t c = i * kPanel<A>; c < i * kPanel<A> + used; ++c)
        if (std::isfinite(values[c])) wide[c] = static_cast<double>(values[c]);
    add(segment, wide, used, at);
  }

  const Blocks& blocks;
  const int64_t positions, pieces;
  const int64_t a_stride, g_stride;
  const Uncleared<A> a_rows, g_rows;       // [kDepth, a_stride], [kDepth, g_stride]
  const Uncleared<double> total, example;  // [rows, columns]
  std::vector<Segment> segments;
  int64_t depth = 0;  // rows gathered
  bool guard = false;
};
