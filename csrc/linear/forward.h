// Outputs of a layer with few of them: the cost is reading the activations, and ||a||^2 is taken from the same read.
// Included by linear_cpu.cpp inside namespace dpk::DPK_ISA.

constexpr int64_t kForwardRows = kWide ? 8 : 4;  // rows of a register tile of dot products
constexpr int64_t kForwardOutputs = 3;           // outputs of it: 8x3 or 4x3 accumulators
constexpr int64_t kForwardDepth =
    4096 / sizeof(float);  // inputs at a time: the tile's rows stay in the first-level cache

// totals[r, j] += sum over n inputs of rows[r] * weight[j] for kRows rows and kOutputs outputs.
template <typename T, int64_t kRows, int64_t kOutputs>
inline void add_dots(const T* const* rows, const T* weight, int64_t stride, int64_t n, double* totals,
                     int64_t totals_stride) {
  Vec<T> acc[kRows][kOutputs] = {};
  const int64_t whole = n - n % kLanes<T>;
  for (int64_t k = 0; k < whole; k += kLanes<T>) {
    Vec<T> w[kOutputs];
    for (int64_t j = 0; j < kOutputs; ++j) w[j] = load<T>(weight + j * stride + k);
    for (int64_t r = 0; r < kRows; ++r) {
      const Vec<T> x = load<T>(rows[r] + k);
      for (int64_t j = 0; j < kOutputs; ++j) acc[r][j] += x * w[j];
    }
  }
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t j = 0; j < kOutputs; ++j) {
      double tail = 0;
      for (int64_t k = whole; k < n; ++k)
        tail += static_cast<double>(rows[r][k]) * static_cast<double>(weight[j * stride + k]);
      totals[r * totals_stride + j] += lane_sum<T>(acc[r][j]) + tail;
    }
}

template <typename T, int64_t kRows>
void forward_rows(const LinearForwardParams<T>& q, int64_t row, double* totals) {
  const int64_t p = q.in_features, d = q.out_features;
  for (int64_t r = 0; r < kRows; ++r) {
    q.squared_rows[row + r] = 0;
    for (int64_t j = 0; j < d; ++j) totals[r * d + j] = q.bias ? static_cast<double>(q.bias[j]) : 0.;
  }
  for (int64_t k = 0; k < p; k += kForwardDepth) {
    const int64_t n = std::min(kForwardDepth, p - k);
    const T* rows[kRows];
    for (int64_t r = 0; r < kRows; ++r) {
      rows[r] = q.activations + (row + r) * p + k;
      q.squared_rows[row + r] += sum_of_squares(rows[r], n);
    }
    int64_t j = 0;
    for (; j + kForwardOutputs <= d; j += kForwardOutputs)
      add_dots<T, kRows, kForwardOutputs>(rows, q.weight + j * p + k, p, n, totals + j, d);
    for (; j < d; ++j) add_dots<T, kRows, 1>(rows, q.weight + j * p + k, p, n, totals + j, d);
  }
  for (int64_t i = 0; i < kRows * d; ++i) q.outputs[row * d + i] = static_cast<T>(totals[i]);
}

template <typename T>
void forward(const LinearForwardParams<T>& q, int64_t begin, int64_t end) {
  std::vector<double> totals(kForwardRows * q.out_features);
  int64_t row = begin;
  for (; row + kForwardRows <= end; row += kForwardRows) forward_rows<T, kForwardRows>(q, row, totals.data());
  for (; row < end; ++row) forward_rows<T, 1>(q, row, totals.data());
}
