// Linear layers on the CPU.
//
// Squared norms, per example, with a_t and g_t the rows of one example:
//   T = 1:  ||g a^T||^2 = ||a||^2 ||g||^2
//   Gram:   ||sum_t g_t a_t^T||^2 = sum_{t,t'} (a_t . a_t') (g_t . g_t')       T^2 (p + d) products, no p x d gradient
//   direct: the p x d gradient in register tiles, squared on the spot          T p d products
// The cheaper of the last two is taken. Both round, and a Gram form cancels: with S = sum_t ||a_t|| ||g_t||, every
// rounding error of the squared norm is at most c u S^2, which is added, so the result is never below the true one.
// Where that term exceeds 1% of a Gram norm the example is recomputed directly, and where it exceeds 1% of a direct
// norm in float, in double. A dot of a Gram form may also vanish below the range of T and be multiplied by a large one:
// what that can lose is part of the term.
//
// Forward of a layer with few outputs: its cost is reading the activations, and ||a||^2 is taken from the same read.
//
// Clipped sums: sum_b w_b sum_t g_bt a_bt^T, one matrix product over all rows in double, in which products of two
// floats are exact. It adds an example's positions to those of others, so one whose positions are large and cancel
// rounds what the others add: by at most 2^-53 k w S for sums of k terms. Therefore a squared norm carries (2^-22 k
// S)^2 as well, which keeps that below 2^-31 C. The bias, cheaper, sums an example's positions before it adds them. A
// tile of the weight walks over all examples in order: the result does not depend on the number of threads.
#include "linear/linear.h"

#define DPK_BODY "linear/linear_cpu.cpp"
#include "common/each_isa.h"

#ifdef DPK_ISA

namespace dpk::DPK_ISA {
namespace {

#include "common/simd.h"

constexpr bool kWide = DPK_VECTOR_BYTES == 64;  // 32 vector registers instead of 16
constexpr int64_t kTileRows = kWide ? 8 : 4;    // outputs in a register tile
constexpr int64_t kTileVecs = 3;   // vectors of inputs in a register tile: 8x3 or 4x3 accumulators, no spill
constexpr int64_t kPrefetch = 64;  // columns ahead: packing walks down many rows, one page each

// acc[i][v] = sum_k g[k, i] * a[k, v]; g: [depth, kTileRows] packed, a: [depth, kTileVecs * lanes] packed.
template <typename A>
inline void tile_product(const A* g, const A* a, int64_t depth, Vec<A> (&acc)[kTileRows][kTileVecs]) {
  for (int64_t k = 0; k < depth; ++k) {
    Vec<A> x[kTileVecs];
    for (int64_t v = 0; v < kTileVecs; ++v) x[v] = load<A>(a + (k * kTileVecs + v) * kLanes<A>);
    for (int64_t i = 0; i < kTileRows; ++i)
      for (int64_t v = 0; v < kTileVecs; ++v) acc[i][v] += g[k * kTileRows + i] * x[v];
  }
}

// Copies columns first <= c < first + kWidth of the given rows of a matrix into a [rows, kWidth] panel, times the rows'
// scale if there is one; zero beyond the last column.
template <int64_t kWidth, typename T, typename A>
inline void pack(const T* const* rows, int64_t count, int64_t columns, int64_t first, A* panel,
                 const double* scale = nullptr) {
  const int64_t used = std::min(kWidth, columns - first);
  for (int64_t r = 0; r < count; ++r, panel += kWidth) {
    const T* row = rows[r] + first;
    __builtin_prefetch(row + kPrefetch);
    const A factor = scale ? static_cast<A>(scale[r]) : A(1);
    if (used == kWidth) {  // a constant count: straight vector code
      for (int64_t c = 0; c < kWidth; ++c) panel[c] = static_cast<A>(row[c]) * factor;
    } else {
      for (int64_t c = 0; c < kWidth; ++c) panel[c] = c < used ? static_cast<A>(row[c]) * factor : A(0);
    }
  }
}

template <typename T>
inline std::vector<const T*> row_pointers(const T* matrix, int64_t rows, int64_t columns) {
  std::vector<const T*> pointers(rows);
  for (int64_t r = 0; r < rows; ++r) pointers[r] = matrix + r * columns;
  return pointers;
}

// Squared norm of sum_t g_t a_t^T with products accumulated in A.
template <typename T, typename A>
double direct_squared_norm(const T* a, const T* g, int64_t positions, int64_t p, int64_t d) {
  constexpr int64_t kWidth = kTileVecs * kLanes<A>;
  const int64_t row_tiles = (d + kTileRows - 1) / kTileRows;
  const auto a_rows = row_pointers(a, positions, p), g_rows = row_pointers(g, positions, d);
  std::vector<A> g_panels(row_tiles * positions * kTileRows), a_panel(positions * kWidth);
  for (int64_t i = 0; i < row_tiles; ++i)
    pack<kTileRows>(g_rows.data(), positions, d, i * kTileRows, g_panels.data() + i * positions * kTileRows);
  double total = 0;
  for (int64_t first = 0; first < p; first += kWidth) {
    pack<kWidth>(a_rows.data(), positions, p, first, a_panel.data());
    for (int64_t i = 0; i < row_tiles; ++i) {
      Vec<A> acc[kTileRows][kTileVecs] = {};
      tile_product<A>(g_panels.data() + i * positions * kTileRows, a_panel.data(), positions, acc);
      A values[kTileRows * kWidth];
      std::memcpy(values, acc, sizeof(values));
      total += sum_of_squares(values, kTileRows * kWidth);
    }
  }
  return total;
}

template <typename T>
inline double dot(const T* x, const T* y, int64_t n) {
  Vec<T> acc[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes<T> <= n; i += 2 * kLanes<T>) {
    acc[0] += load<T>(x + i) * load<T>(y + i);
    acc[1] += load<T>(x + i + kLanes<T>) * load<T>(y + i + kLanes<T>);
  }
  double s = 0;
  for (; i < n; ++i) s += static_cast<double>(x[i]) * static_cast<double>(y[i]);
  return s + lane_sum<T>(acc[0]) + lane_sum<T>(acc[1]);
}

template <typename T>
double gram_squared_norm(const T* a, const T* g, int64_t positions, int64_t p, int64_t d) {
  double total = 0;
  for (int64_t t = 0; t < positions; ++t)
    for (int64_t s = 0; s <= t; ++s)
      total += (s < t ? 2 : 1) * dot(a + t * p, a + s * p, p) * dot(g + t * d, g + s * d, d);
  return total;
}

constexpr int64_t kSumDepth = 32;  // rows summed at a time: no more pages than the first-level TLB holds

// What must be added to a squared norm because its clipped sum is shared with other examples; `magnitude` is S.
inline double shared_term(int64_t positions, double magnitude) {
  const double chain = static_cast<double>(std::min(positions, kSumDepth) + positions / kSumDepth + 2);
  return chain * chain * 0x1p-44 * magnitude * magnitude;
}

template <typename T>
double weight_squared_norm(const T* a, const T* g, int64_t positions, int64_t p, int64_t d) {
  constexpr double kLeast = std::numeric_limits<T>::min();  // subnormal numbers may be flushed
  if (positions == 1) {
    // Squares of doubles leave their range; squares of floats do not.
    const double lost = std::is_same_v<T, double> ? kLeast : 0;
    return (sum_of_squares(a, p) + p * lost) * (sum_of_squares(g, d) + d * lost);
  }
  double magnitude = 0, squares = 0;  // S; d ||a||^2 + p ||g||^2
  for (int64_t t = 0; t < positions; ++t) {
    const double a_square = sum_of_squares(a + t * p, p), g_square = sum_of_squares(g + t * d, d);
    magnitude += std::sqrt(a_square * g_square);
    squares += d * a_square + p * g_square;
  }
  const double unit = std::numeric_limits<T>::epsilon() / 2, shared = shared_term(positions, magnitude);
  // Relative to S^2: a dot of length n over 2 * lanes partial sums errs by (n / (2 lanes) + 2) u, twice for the two
  // factors. A product and a sum of a dot lose at most kLeast each, and sum_tu |g_t . g_u| <= T ||g||^2.
  const double gram_term =
      unit * ((p + d) / (2. * kLanes<T>)+6) * magnitude * magnitude + 2 * kLeast * positions * squares;
  const double direct_term = unit * 2 * (positions + 2) * magnitude * magnitude;
  if (positions * (p + d) < 2 * p * d) {  // half of the Gram matrix is enough
    const double squared = gram_squared_norm(a, g, positions, p, d);
    if (std::isfinite(squared) && squared > 0 && gram_term <= 0.01 * squared) return squared + gram_term + shared;
  }
  const double squared = direct_squared_norm<T, T>(a, g, positions, p, d);
  if (std::is_same_v<T, double> || (std::isfinite(squared) && direct_term <= 0.01 * squared))
    return squared + direct_term + shared;
  const double exact = direct_squared_norm<T, double>(a, g, positions, p, d);
  return exact + direct_term * (std::numeric_limits<double>::epsilon() / std::numeric_limits<T>::epsilon()) + shared;
}

template <typename T>
double bias_squared_norm(const T* g, int64_t positions, int64_t d) {
  if (positions == 1) return sum_of_squares(g, d);
  std::vector<double> sum(d, 0.);
  for (int64_t t = 0; t < positions; ++t)
    for (int64_t j = 0; j < d; ++j) sum[j] += g[t * d + j];
  return sum_of_squares(sum.data(), d);
}

template <typename T>
void squared_norms(const LinearNormParams<T>& q, int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const T* a = q.activations + b * q.positions * q.in_features;
    const T* g = q.output_grads + b * q.positions * q.out_features;
    double squared = 0;
    if (q.weight) squared += weight_squared_norm(a, g, q.positions, q.in_features, q.out_features);
    if (q.bias) squared += bias_squared_norm(g, q.positions, q.out_features);
    q.squared_norms[b] = squared;
  }
}

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

constexpr int64_t kSumWidth = kTileVecs * kLanes<double>;  // inputs of a register tile
constexpr int64_t kSumColumns = 240;                       // inputs of a task: a long run of every row that it reads
constexpr int64_t kSumRows = 64;                           // outputs of a task: its sum stays in the second-level cache
static_assert(kSumColumns % kSumWidth == 0 && kSumRows % kTileRows == 0);

inline int64_t sum_column_tasks(int64_t p) { return std::max<int64_t>(1, (p + kSumColumns - 1) / kSumColumns); }

// Adds to sum [kSumRows, kSumColumns] the products of `depth` rows.
template <typename T>
void add_products(const T* const* a_rows, const double* g_panels, int64_t depth, int64_t p, int64_t column0,
                  int64_t columns, int64_t tiles, double* a_panel, double* sum) {
  for (int64_t j = 0; j < columns; j += kSumWidth) {
    pack<kSumWidth>(a_rows, depth, p, column0 + j, a_panel);
    for (int64_t i = 0; i < tiles; ++i) {
      Vec<double> acc[kTileRows][kTileVecs] = {};
      tile_product<double>(g_panels + i * kSumDepth * kTileRows, a_panel, depth, acc);
      for (int64_t y = 0; y < kTileRows; ++y)
        for (int64_t v = 0; v < kTileVecs; ++v) {
          double* to = sum + (i * kTileRows + y) * kSumColumns + j + v * kLanes<double>;
          store<double>(to, load<double>(to) + acc[y][v]);
        }
    }
  }
}

template <typename T>
void clipped_sums(const LinearSumParams<T>& q, int64_t begin, int64_t end) {
  const int64_t p = q.in_features, d = q.out_features, rows = q.batch * q.positions, column_tasks = sum_column_tasks(p);
  // Left as they are: small layers are bound by clearing them.
  const auto a_panel = std::make_unique_for_overwrite<double[]>(kSumDepth * kSumWidth);
  const auto g_panels = std::make_unique_for_overwrite<double[]>(kSumDepth * kSumRows);
  const auto sum = std::make_unique_for_overwrite<double[]>(kSumRows * kSumColumns);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row0 = task / column_tasks * kSumRows, column0 = task % column_tasks * kSumColumns;
    const int64_t task_rows = std::min(kSumRows, d - row0), tiles = (task_rows + kTileRows - 1) / kTileRows;
    const int64_t columns = q.weight_sum ? std::min(kSumColumns, p - column0) : 0;
    double* bias_sum = q.bias_sum && column0 == 0 ? q.bias_sum + row0 : nullptr;
    if (bias_sum) std::fill_n(bias_sum, task_rows, 0.);
    double example_sum[kSumRows] = {};
    std::fill_n(sum.get(), tiles * kTileRows * kSumColumns, 0.);
    for (int64_t r = 0; r < rows;) {
      const T *a_rows[kSumDepth], *g_rows[kSumDepth];
      double weight[kSumDepth];
      bool last[kSumDepth];  // row of its example
      int64_t depth = 0;
      for (; r < rows && depth < kSumDepth; ++r) {
        if (q.weights[r / q.positions] == 0) continue;  // skipped: it may hold NaN
        a_rows[depth] = q.activations + r * p;
        g_rows[depth] = q.output_grads + r * d;
        last[depth] = (r + 1) % q.positions == 0;
        weight[depth++] = q.weights[r / q.positions];
      }
      for (int64_t i = 0; i < tiles; ++i)
        pack<kTileRows>(g_rows, depth, d, row0 + i * kTileRows, g_panels.get() + i * kSumDepth * kTileRows, weight);
      add_products(a_rows, g_panels.get(), depth, p, column0, columns, tiles, a_panel.get(), sum.get());
      if (!bias_sum) continue;
      for (int64_t k = 0; k < depth; ++k) {
        for (int64_t i = 0; i < task_rows; ++i) example_sum[i] += static_cast<double>(g_rows[k][row0 + i]);
        if (!last[k]) continue;
        for (int64_t i = 0; i < task_rows; ++i) bias_sum[i] += weight[k] * example_sum[i];
        std::fill_n(example_sum, task_rows, 0.);
      }
    }
    for (int64_t i = 0; columns > 0 && i < task_rows; ++i)
      std::copy_n(sum.get() + i * kSumColumns, columns, q.weight_sum + (row0 + i) * p + column0);
  }
}

}  // namespace

void norms(const LinearNormParams<float>& q, int64_t b, int64_t e) { squared_norms(q, b, e); }
void norms(const LinearNormParams<double>& q, int64_t b, int64_t e) { squared_norms(q, b, e); }
void outputs(const LinearForwardParams<float>& q, int64_t b, int64_t e) { forward(q, b, e); }
void outputs(const LinearForwardParams<double>& q, int64_t b, int64_t e) { forward(q, b, e); }
void sums(const LinearSumParams<float>& q, int64_t b, int64_t e) { clipped_sums(q, b, e); }
void sums(const LinearSumParams<double>& q, int64_t b, int64_t e) { clipped_sums(q, b, e); }
int64_t sum_tasks(int64_t p, int64_t d) { return sum_column_tasks(p) * ((d + kSumRows - 1) / kSumRows); }

}  // namespace dpk::DPK_ISA

#else

namespace dpk {
int64_t linear_sum_tasks(int64_t in_features, int64_t out_features) {
  DPK_DISPATCH(sum_tasks, in_features, out_features);
}

template <typename T>
void linear_squared_norms_cpu(const LinearNormParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(norms, params, begin, end);
}

template <typename T>
void linear_forward_cpu(const LinearForwardParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(outputs, params, begin, end);
}

template <typename T>
void linear_clipped_sums_cpu(const LinearSumParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(sums, params, begin, end);
}

template void linear_squared_norms_cpu(const LinearNormParams<float>&, int64_t, int64_t);
template void linear_squared_norms_cpu(const LinearNormParams<double>&, int64_t, int64_t);
template void linear_forward_cpu(const LinearForwardParams<float>&, int64_t, int64_t);
template void linear_forward_cpu(const LinearForwardParams<double>&, int64_t, int64_t);
template void linear_clipped_sums_cpu(const LinearSumParams<float>&, int64_t, int64_t);
template void linear_clipped_sums_cpu(const LinearSumParams<double>&, int64_t, int64_t);

}  // namespace dpk

#endif
