// Clipped sums sum_b w_b G_b: the same tiles as the direct norm, so its very numbers, weighted and added in double: no
// example's contribution depends on the others beyond 2^-53 of the sum. Each task owns a block of the weight and walks
// its slice of the batch in order: the result does not depend on the number of threads. Included by conv_cpu.cpp inside
// namespace dpk::DPK_ISA.

// Adds examples' weighted gradients of one block of the weight after the other.
template <typename T, typename A>
class BlockSum {
 public:
  BlockSum(const ConvSumParams<T>& params, int64_t channels)
      : q(params), s(params.shape), unfold(params.shape, channels) {}

  // total: [rows of the block, outputs of the block].
  void add(const ConvBlock& block, const std::vector<int64_t>& examples, double* total) {
    const int64_t step = unfold.own ? kPanel<A> : block.outputs;
    for (int64_t first = 0; first < block.outputs; first += step) {
      ConvBlock part = block;
      part.output += first;
      part.outputs = std::min(step, block.outputs - first);
      add_part(part, examples, total + first, block.outputs);
    }
  }

 private:
  void add_part(const ConvBlock& part, const std::vector<int64_t>& examples, double* total, int64_t stride) {
    const int64_t input_size = unfold.input_size(part.channels), output_size = unfold.output_size(part.outputs);
    const int64_t count = examples.size();
    const int64_t chunk = std::max<int64_t>(1, ConvSumGrid::kOperand / std::max(input_size, output_size));
    input.resize(std::max<std::size_t>(input.size(), chunk * input_size));
    grads.resize(std::max<std::size_t>(grads.size(), chunk * output_size));
    panels.resize(std::max<std::size_t>(panels.size(), chunk));
    for (int64_t begin = 0; begin < count; begin += chunk) {
      const int64_t end = std::min(begin + chunk, count);
      for (int64_t e = begin; e < end; ++e) {
        unfold.pack_input(q.input + examples[e] * s.in_channels * s.pixels(), q.input_layout, part,
                          input.data() + (e - begin) * input_size);
        panels[e - begin] = unfold.panels(q.output_grads + examples[e] * s.out_channels * s.positions(),
                                          q.output_layout, part, grads.data() + (e - begin) * output_size);
      }
      for (int64_t output = 0; output < part.outputs; output += kPanel<A>)
        for (int64_t row = 0; row < part.channels * s.taps(); row += kTileRows)
          for (int64_t e = begin; e < end; ++e) {
            const A* x = input.data() + (e - begin) * input_size;
            unfold.tile(x, panels[e - begin], part, row, output, [&](const auto* values) {
              add_tile(part, row, output, q.weights[examples[e]], values, total + row * stride + output, stride);
            });
          }
    }
  }

  template <typename V>
  void add_tile(const ConvBlock& part, int64_t row, int64_t output, double weight, const V* values, double* total,
                int64_t stride) const {
    const int64_t rows = std::min(kTileRows, part.channels * s.taps() - row);
    const int64_t used = std::min(kPanel<A>, part.outputs - output), width = unfold.panel_width(part.outputs, output);
    if (rows == kTileRows && used == kPanel<A>) {  // sizes that the compiler knows
      for (int64_t i = 0; i < kTileRows; ++i)
        for (int64_t j = 0; j < kPanel<A>; j += kLanes<double>)
          add_vector(weight, values + i * kPanel<A> + j, total + i * stride + j);
      return;
    }
    for (int64_t i = 0; i < rows; ++i) {
      double* to = total + i * stride;
      const V* from = values + i * width;
      int64_t j = 0;
      for (; j + kLanes<double> <= used; j += kLanes<double>) add_vector(weight, from + j, to + j);
      for (; j < used; ++j) to[j] += weight * static_cast<double>(from[j]);
    }
  }

  template <typename V>
  static void add_vector(double weight, const V* from, double* to) {
    store<double>(to, load<double>(to) + weight * load_double(from));
  }

  const ConvSumParams<T>& q;
  const ConvShape& s;
  const Unfold<T, A> unfold;
  Buffer<A> input, grads;  // of a chunk of examples
  std::vector<typename Unfold<T, A>::Panels> panels;
};

// to[c, r] = from[r, c]
inline void transpose_block(const double* from, int64_t rows, int64_t columns, double* to, int64_t to_stride) {
  constexpr int64_t kLine = 8;  // doubles of a cache line
  for (int64_t first = 0; first < columns; first += kLine)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = first; c < std::min(first + kLine, columns); ++c) to[c * to_stride + r] = from[r * columns + c];
}

template <typename T>
void clipped_sums(const ConvSumParams<T>& q, int64_t begin, int64_t end) {
  const ConvShape& s = q.shape;
  const ConvSumGrid grid(s);
  BlockSum<T, T> sum(q, grid.channels);
  std::unique_ptr<BlockSum<T, double>> wide_sum;
  Buffer<double> total;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t slice = task / grid.blocks();
    const ConvBlock block = grid.block(task % grid.blocks());
    const int64_t rows = block.channels * s.taps();
    std::vector<int64_t> narrow, wide;
    for (int64_t b = slice * s.batch / grid.slices; b < (slice + 1) * s.batch / grid.slices; ++b)
      if (q.weights[b] != 0) (q.wide[b] ? wide : narrow).push_back(b);
    total.assign(rows * block.outputs, 0.);
    sum.add(block, narrow, total.data());
    if (!wide.empty()) {
      if (!wide_sum) wide_sum = std::make_unique<BlockSum<T, double>>(q, grid.channels);
      wide_sum->add(block, wide, total.data());
    }
    double* to = q.partial_sums + (slice * s.out_channels + block.output) * s.rows() + block.channel * s.taps();
    transpose_block(total.data(), rows, block.outputs, to, s.rows());
  }
}

template <typename T>
void wide_examples(const ConvSumParams<T>& q, bool* wide, int64_t begin, int64_t end) {
  const ConvShape& s = q.shape;
  const int64_t inputs = s.in_channels * s.pixels(), outputs = s.out_channels * s.positions();
  for (int64_t b = begin; b < end; ++b)
    wide[b] = q.weights[b] != 0 &&
              leaves_range<T>(largest(q.input + b * inputs, inputs) * largest(q.output_grads + b * outputs, outputs),
                              s.positions());
}

// Sum of n values in double, `stride` apart.
template <typename T>
inline double sum_of(const T* p, int64_t n, int64_t stride) {
  Vec<double> partial[2] = {};
  int64_t i = 0;
  if (stride == 1)
    for (; i + 2 * kLanes<double> <= n; i += 2 * kLanes<double>)
      for (int64_t u = 0; u < 2; ++u) partial[u] += load_double(p + i + u * kLanes<double>);
  double sum = lane_sum<double>(partial[0] + partial[1]);
  for (; i < n; ++i) sum += static_cast<double>(p[i * stride]);
  return sum;
}

// The same of kVecs vectors of values that lie next to each other.
template <int64_t kVecs, typename T>
inline void vector_sums(const T* p, int64_t n, int64_t stride, double* sums) {
  Vec<double> partial[kVecs] = {};
  for (int64_t t = 0; t < n; ++t)
    for (int64_t v = 0; v < kVecs; ++v) partial[v] += load_double(p + t * stride + v * kLanes<double>);
  for (int64_t v = 0; v < kVecs; ++v) store<double>(sums + v * kLanes<double>, partial[v]);
}

// The sum of each channel begin <= c < end of an example's map.
template <typename T>
void channel_sums(const T* map, const ConvLayout& layout, int64_t begin, int64_t end, int64_t positions, double* sums) {
  constexpr int64_t kVecs = 4, kWidth = kVecs * kLanes<double>;
  int64_t c = begin;
  if (layout.channel == 1) {
    for (; c + kWidth <= end; c += kWidth) vector_sums<kVecs>(map + c, positions, layout.pixel, sums + c - begin);
    for (; c + kLanes<double> <= end; c += kLanes<double>)
      vector_sums<1>(map + c, positions, layout.pixel, sums + c - begin);
  }
  for (; c < end; ++c) sums[c - begin] = sum_of(map + c * layout.channel, positions, layout.pixel);
}

template <typename T>
void bias_sums(const ConvBiasSumParams<T>& q, int64_t begin, int64_t end) {
  std::fill(q.sum + begin, q.sum + end, 0.);
  std::vector<double> sums(end - begin);
  for (int64_t b = 0; b < q.batch; ++b) {
    if (q.weights[b] == 0) continue;
    channel_sums(q.source + b * q.channels * q.positions, q.layout, begin, end, q.positions, sums.data());
    for (int64_t c = begin; c < end; ++c) q.sum[c] += q.weights[b] * sums[c - begin];
  }
}
