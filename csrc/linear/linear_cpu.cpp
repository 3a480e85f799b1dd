// Linear layers on the CPU. With a_t and g_t the rows of one example, T of them:
//
// Squared norms, per example, by the cheapest of
//   T = 1:            ||g a^T||^2 = ||a||^2 ||g||^2
//   Gram (gram.h):    sum_{t,u} (a_t . a_u) (g_t . g_u)      T^2 (p + d) / 2 products, no p x d gradient
//   direct (block.h): the p x d gradient, a block at a time   T p d products
// Clipped sums: sum_b w_b sum_t g_bt a_bt^T by the direct way's blocks. Outputs with the norms of their inputs, where
// outputs are few (forward.h).
//
// A norm is never below that of what the sum adds for the example. Both are computed in one of two ways, which dtype
// and T decide, so that nothing depends on the rest of the batch.
//
// In float, where T is at least kWorthJoining. An example's sum is rounded before it meets other examples, and is added
// in double as one addend for each entry: others round as they would beside any other example of its norm.
//   - Direct norms are of the very numbers that are added: the same products in the same order, whatever they lose.
//   - Gram norms are not. With u = 2^-24 and S = sum_t ||a_t|| ||g_t||, the square errs by at most Gram::error S^2 and
//     what vanishes below the range of float. An entry (i, j) of the sum passes through at most kPieceDepth roundings
//     in float, so it errs by at most u (min(T, kPieceDepth) + 3) sum_t |g_ti| |a_tj|, and by 2 T times the least
//     normal number where products or sums vanish; over all entries, the norm of what is added by at most u (min(T,
//     kPieceDepth) + 3) S and 2 T sqrt(p d) times that number. All of these are added to the norm. Gram forms cancel:
//     where the terms exceed 1% of the norm, or a sum could exceed the range of float (it cannot below S), the example
//     is computed directly.
//   - Values beyond the range of float come out infinite or NaN, in the sum and in its norm alike; such an entry, and
//     no other, is computed in double by both, from the same rows.
//   - An example that holds NaN or infinity has a norm that is neither finite; its weight is 0, and it is skipped.
//
// In double: few positions, or tensors of double. Products of two floats are exact, but a chain of sums runs over the
// rows of several examples: an example whose rows are large and cancel rounds what the others add, by at most 2^-53 k w
// S for k sums. Therefore a squared norm carries (2^-22 k S)^2, which keeps that below 2^-31 C, and what rounding can
// take from the norm itself. An example's rows, if they fit, share one chain: no other's are added to a part of them.
//
// The bias, cheaper, sums an example's positions in double before it adds them, in norms and sums alike.
//
// A block of the weight walks over all examples in order, and blocks depend on p and d alone: the result does not
// depend on the number of threads.
#include "linear/linear.h"

#define DPK_BODY "linear/linear_cpu.cpp"
#include "common/each_isa.h"

#ifdef DPK_ISA

namespace dpk::DPK_ISA {
namespace {

#include "common/simd.h"
#include "common/simd_transpose.h"

template <typename A>
constexpr double unit_roundoff() {
  return static_cast<double>(std::numeric_limits<A>::epsilon()) / 2;
}

// Positions whose products are added up in float, one after the other.
constexpr int64_t kPieceDepth = 128;

// Whether an example's positions are added up in float before they join other examples: where they are fewer, joining
// costs more than products in double.
template <typename T>
bool in_float(int64_t positions) {
  constexpr int64_t kWorthJoining = 7;
  return std::is_same_v<T, float> && positions >= kWorthJoining;
}

#include "linear/product.h"
// What products serve.
#include "linear/block.h"
#include "linear/forward.h"
#include "linear/gram.h"

template <typename T>
class WeightNorm {
 public:
  explicit WeightNorm(const LinearNormParams<T>& q)
      : n(q.positions), p(q.in_features), d(q.out_features), joins(in_float<T>(n)), blocks(p, d) {}

  double squared(const T* a, const T* g) {
    if (n == 0 || p == 0 || d == 0) return 0;
    if (n == 1) {
      // Squares of doubles leave their range; squares of floats do not.
      const double lost = std::is_same_v<T, double> ? kLeast : 0;
      return (sum_of_squares(a, p) + p * lost) * (sum_of_squares(g, d) + d * lost);
    }
    if (takes_gram()) {
      if (!gram) gram = std::make_unique<Gram<T>>(n, p, d);
      const GramForm form = gram->form(a, g);
      const double upward = form.squared + Gram<T>::error(p, d) * form.magnitude * form.magnitude + form.lost;
      const double norm = std::sqrt(upward) + (joins ? sum_error(form.magnitude) : 0);
      if (std::isfinite(norm) && norm * norm <= 1.01 * form.squared)
        return norm * norm + (joins ? 0 : shared_term(form.magnitude));
    }
    if constexpr (std::is_same_v<T, float>) {
      if (joins) {
        if (!float_sum) float_sum = std::make_unique<BlockSum<T, float>>(blocks, n);
        const double squared = direct_squared(*float_sum, a, g, false);
        return std::isfinite(squared) ? squared : direct_squared(*float_sum, a, g, true);
      }
    }
    if (!double_sum) double_sum = std::make_unique<BlockSum<T, double>>(blocks, n);
    double magnitude = 0;
    for (int64_t t = 0; t < n; ++t)
      magnitude += std::sqrt(sum_of_squares(a + t * p, p)) * std::sqrt(sum_of_squares(g + t * d, d));
    return direct_squared(*double_sum, a, g, false) + unit_roundoff<double>() * 2 * (n + 2) * magnitude * magnitude +
           shared_term(magnitude);
  }

 private:
  static constexpr double kLeast = static_cast<double>(std::numeric_limits<T>::min());  // less may be flushed

  // In products, from measurements: turning operands around for the one, and for the other copying them and adding up
  // tiles.
  bool takes_gram() const {
    const double t = n, rows = whole(d, kTileRows), columns = whole(p, kLanes<T>);
    return t * (p + d) * (t / 2 + 18) < (t + 20) * rows * columns + 10 * t * (p + d);
  }
  static int64_t whole(int64_t size, int64_t unit) { return (size + unit - 1) / unit * unit; }

  template <typename A>
  double direct_squared(BlockSum<T, A>& sum, const T* a, const T* g, bool guarded) const {
    constexpr double kOne = 1;
    double squared = 0;
    for (int64_t block = 0; block < blocks.count() && std::isfinite(squared); ++block) {
      const double* values = sum.sum(block, a, g, &kOne, 1, guarded);
      for (int64_t i = 0; i < sum.rows; ++i) squared += sum_of_squares(values + i * blocks.columns, sum.columns);
    }
    return squared;
  }

  // How far the norm of what the sum adds can be from that of the exact gradient.
  double sum_error(double magnitude) const {
    constexpr double kMost = static_cast<double>(std::numeric_limits<T>::max()) / 2;
    if (!(magnitude < kMost)) return std::numeric_limits<double>::infinity();
    return unit_roundoff<T>() * (std::min(n, kPieceDepth) + 3) * magnitude +
           2 * kLeast * n * std::sqrt(static_cast<double>(p) * static_cast<double>(d));
  }

  // What must be added to a squared norm because the sum is shared with other examples.
  double shared_term(double magnitude) const {
    constexpr int64_t kDepth = BlockSum<T, double>::kDepth;
    const double chain = static_cast<double>(std::min(n, kDepth) + n / kDepth + 2);
    return chain * chain * 0x1p-44 * magnitude * magnitude;
  }

  const int64_t n, p, d;
  const bool joins;
  const Blocks blocks;
  std::unique_ptr<Gram<T>> gram;
  std::unique_ptr<BlockSum<T, float>> float_sum;
  std::unique_ptr<BlockSum<T, double>> double_sum;
};

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
  WeightNorm<T> weight(q);
  for (int64_t b = begin; b < end; ++b) {
    const T* a = q.activations + b * q.positions * q.in_features;
    const T* g = q.output_grads + b * q.positions * q.out_features;
    double squared = 0;
    if (q.weight) squared += weight.squared(a, g);
    if (q.bias) squared += bias_squared_norm(g, q.positions, q.out_features);
    q.squared_norms[b] = squared;
  }
}

// bias_sum[row0 <= i < row0 + rows] = sum_b w_b sum_t g_bt, an example's positions first.
template <typename T>
void bias_sums(const LinearSumParams<T>& q, int64_t row0, int64_t rows) {
  std::vector<double> example(rows);
  double* sum = q.bias_sum + row0;
  std::fill_n(sum, rows, 0.);
  for (int64_t b = 0; b < q.batch; ++b) {
    if (q.weights[b] == 0) continue;
    std::fill(example.begin(), example.end(), 0.);
    for (int64_t t = 0; t < q.positions; ++t) {
      const T* g = q.output_grads + (b * q.positions + t) * q.out_features + row0;
      for (int64_t i = 0; i < rows; ++i) example[i] += static_cast<double>(g[i]);
    }
    for (int64_t i = 0; i < rows; ++i) sum[i] += q.weights[b] * example[i];
  }
}

// Copies n values; whether all of them are finite.
inline bool copy_finite(const double* from, int64_t n, double* to) {
  Vec<double> zeros = {};
  double zero = 0;
  int64_t i = 0;
  for (; i + kLanes<double> <= n; i += kLanes<double>) {
    const Vec<double> x = load<double>(from + i);
    store<double>(to + i, x);
    zeros += x * 0.;
  }
  for (; i < n; ++i) zero += (to[i] = from[i]) * 0;
  return zero + lane_sum<double>(zeros) == 0;
}

template <typename T, typename A>
void weight_sums(const LinearSumParams<T>& q, const Blocks& blocks, int64_t begin, int64_t end) {
  BlockSum<T, A> sum(blocks, q.positions);
  const auto compute = [&](int64_t block, bool guarded) {
    const double* values = sum.sum(block, q.activations, q.output_grads, q.weights, q.batch, guarded);
    bool finite = true;
    for (int64_t i = 0; i < sum.rows; ++i)
      finite &=
          copy_finite(values + i * blocks.columns, sum.columns, q.weight_sum + (sum.row0 + i) * blocks.p + sum.column0);
    return finite;
  };
  for (int64_t block = begin; block < end; ++block)
    if (!compute(block, false) && std::is_same_v<A, float>) compute(block, true);
}

template <typename T>
void clipped_sums(const LinearSumParams<T>& q, int64_t begin, int64_t end) {
  const Blocks blocks(q.in_features, q.out_features);
  if (q.bias_sum)
    for (int64_t block = begin; block < end; ++block)
      if (blocks.column(block) == 0)
        bias_sums(q, blocks.row(block), std::min(blocks.rows, q.out_features - blocks.row(block)));
  if (!q.weight_sum) return;
  if constexpr (std::is_same_v<T, float>)
    if (in_float<T>(q.positions)) return weight_sums<T, float>(q, blocks, begin, end);
  weight_sums<T, double>(q, blocks, begin, end);
}

}  // namespace

void norms(const LinearNormParams<float>& q, int64_t b, int64_t e) { squared_norms(q, b, e); }
void norms(const LinearNormParams<double>& q, int64_t b, int64_t e) { squared_norms(q, b, e); }
void outputs(const LinearForwardParams<float>& q, int64_t b, int64_t e) { forward(q, b, e); }
void outputs(const LinearForwardParams<double>& q, int64_t b, int64_t e) { forward(q, b, e); }
void sums(const LinearSumParams<float>& q, int64_t b, int64_t e) { clipped_sums(q, b, e); }
void sums(const LinearSumParams<double>& q, int64_t b, int64_t e) { clipped_sums(q, b, e); }
int64_t sum_tasks(int64_t p, int64_t d) { return Blocks(p, d).count(); }

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
