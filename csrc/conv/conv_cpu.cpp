// Convolutions on the CPU. Squared norms, per example, by the cheaper of two ways:
//   direct (direct.h): the gradient itself in register tiles, squared on the spot, stored if asked
//   Gram   (gram.h):   products of pairs of positions, for small maps of many channels
// Clipped sums (sums.h) with the direct way's tiles.
//
// A norm is never below that of what the sum adds for the example. Directly computed, both are the very same numbers:
// products accumulate in T over kDepth positions, in the same order, then in double; in double throughout where they
// could leave the range of T. A Gram norm is not below the true one: its square errs by at most GramNorm::error S^2
// with S = sum_t ||g_t|| ||x_t||, which is added; where that exceeds 1% of the square (Gram forms cancel) it is
// computed again in double. The sum that goes with it rounds every value by at most e = DirectNorm::error times sum_t
// |g_t| |x_t|, the whole by at most e S in norm, which is added too.
#include <numeric>

#include "conv/conv.h"
#include "conv/map.h"
#include "conv/plan.h"

#define DPK_BODY "conv/conv_cpu.cpp"
#include "common/each_isa.h"

#ifdef DPK_ISA

namespace dpk::DPK_ISA {
namespace {

#include "common/simd.h"

template <typename A>
constexpr double unit_roundoff() {
  return static_cast<double>(std::numeric_limits<A>::epsilon()) / 2;
}

#include "common/simd_transpose.h"
#include "conv/tile.h"
// Blocks and operands of a direct product.
#include "conv/unfold.h"
// What they serve.
#include "conv/direct.h"
#include "conv/gram.h"
#include "conv/sums.h"

template <typename T>
class WeightNorm {
 public:
  explicit WeightNorm(const ConvNormParams<T>& params) : q(params), s(params.shape) {
    if (q.strategy == ConvStrategy::kGram)
      gram = std::make_unique<GramNorm<T, T>>(s, q.input_layout, q.output_layout);
    else
      direct = std::make_unique<DirectNorm<T, T>>(s, q.input_layout, q.output_layout);
    for (int i = 0; i < 3; ++i)
      reads *= std::min<double>(s.out[i], (s.kernel[i] - 1) / (s.stride[i] / std::gcd(s.stride[i], s.dilation[i])) + 1);
  }

  double squared(int64_t b) {
    const int64_t inputs = s.in_channels * s.pixels(), outputs = s.out_channels * s.positions();
    const T *x = q.input + b * inputs, *g = q.output_grads + b * outputs;
    const double largest_x = largest(x, inputs), largest_g = largest(g, outputs);
    const bool wide = leaves_range<T>(largest_x * largest_g, s.positions());
    if (gram) return gram_squared(x, g, inputs * largest_x * largest_x + outputs * largest_g * largest_g, wide);
    T* stored = q.weight_grads ? q.weight_grads + b * s.rows() * s.out_channels : nullptr;
    const double square = wide ? DirectNorm<T, double>(s, q.input_layout, q.output_layout).squared(x, g, stored)
                               : direct->squared(x, g, stored);
    const double magnitude = std::sqrt(reads * inputs * outputs) * largest_x * largest_g;
    return raised(square, unit_roundoff<double>() * (s.positions() / kDepth + 4) * magnitude);
  }

 private:
  // The square of a norm and its error; the sum of squares itself is rounded too.
  double raised(double square, double error) const {
    const double norm = std::sqrt(square * (1 + DirectNorm<T, T>::square_error(s))) + error;
    return norm * norm;
  }

  // `squares`: at least ||x||^2 + ||g||^2.
  double gram_squared(const T* x, const T* g, double squares, bool wide) {
    const double error = wide ? DirectNorm<T, double>::error(s.positions()) : DirectNorm<T, T>::error(s.positions());
    if (const auto [term, form] = upward(*gram, x, g, squares); term <= 0.01 * form.squared)
      return raised(form.squared + term, error * form.magnitude);
    if (!wide_gram) wide_gram = std::make_unique<GramNorm<T, double>>(s, q.input_layout, q.output_layout);
    const auto [term, form] = upward(*wide_gram, x, g, squares);
    return raised(std::max(form.squared, 0.) + term, error * form.magnitude);
  }

  // A Gram form and what must be added to its square.
  template <typename A>
  std::pair<double, GramForm> upward(GramNorm<T, A>& gram, const T* x, const T* g, double squares) const {
    GramForm form = gram.squared(x, g);
    form.magnitude *= 1.01;  // itself rounded
    const double pairs = static_cast<double>(s.positions()) * s.positions() * s.taps() * (s.group_in() + s.group_out());
    return {gram.error(s) * form.magnitude * form.magnitude + std::numeric_limits<A>::denorm_min() * pairs * squares,
            form};
  }

  const ConvNormParams<T>& q;
  const ConvShape& s;
  std::unique_ptr<DirectNorm<T, T>> direct;
  std::unique_ptr<GramNorm<T, T>> gram;
  std::unique_ptr<GramNorm<T, double>> wide_gram;
  double reads = 1;  // positions that read one pixel, at most
};

template <typename T>
double bias_squared_norm(const ConvNormParams<T>& q, int64_t b) {
  double* grads = q.bias_grads + b * q.bias_channels;
  const T* source = q.bias_source + b * q.bias_channels * q.bias_positions;
  channel_sums(source, q.bias_layout, 0, q.bias_channels, q.bias_positions, grads);
  const double magnitude = sum_of_squares(source, q.bias_channels * q.bias_positions);  // of all terms
  // A sum of n terms errs by at most n u times their magnitudes' sum, itself at most sqrt(n) times their norm.
  const double error = unit_roundoff<double>() * q.bias_positions * std::sqrt(q.bias_positions * magnitude);
  const double norm = std::sqrt(sum_of_squares(grads, q.bias_channels)) + error;
  return norm * norm * (1 + q.bias_channels * unit_roundoff<double>());
}

template <typename T>
void squared_norms(const ConvNormParams<T>& q, int64_t begin, int64_t end) {
  const std::unique_ptr<WeightNorm<T>> weight(q.input ? new WeightNorm<T>(q) : nullptr);
  for (int64_t b = begin; b < end; ++b) {  // both at once: an example's maps are still in the cache
    q.squared_norms[b] = weight ? weight->squared(b) : 0;
    if (q.bias_source) q.squared_norms[b] += bias_squared_norm(q, b);
  }
}

}  // namespace

#define DPK_CONV_BODIES(T)                                                                             \
  void norms(const ConvNormParams<T>& q, int64_t begin, int64_t end) { squared_norms(q, begin, end); } \
  void sums(const ConvSumParams<T>& q, int64_t begin, int64_t end) { clipped_sums(q, begin, end); }    \
  void ranges(const ConvSumParams<T>& q, bool* wide, int64_t begin, int64_t end) {                     \
    wide_examples(q, wide, begin, end);                                                                \
  }                                                                                                    \
  void biases(const ConvBiasSumParams<T>& q, int64_t begin, int64_t end) { bias_sums(q, begin, end); }
DPK_CONV_BODIES(float)
DPK_CONV_BODIES(double)
#undef DPK_CONV_BODIES

}  // namespace dpk::DPK_ISA

#else

namespace dpk {

template <typename T>
void conv_squared_norms_cpu(const ConvNormParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(norms, params, begin, end);
}

template <typename T>
void conv_wide_examples_cpu(const ConvSumParams<T>& params, bool* wide, int64_t begin, int64_t end) {
  DPK_DISPATCH(ranges, params, wide, begin, end);
}

template <typename T>
void conv_clipped_sums_cpu(const ConvSumParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(sums, params, begin, end);
}

template <typename T>
void conv_bias_sums_cpu(const ConvBiasSumParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(biases, params, begin, end);
}

#define DPK_CONV_INSTANCES(T)                                                             \
  template void conv_squared_norms_cpu(const ConvNormParams<T>&, int64_t, int64_t);       \
  template void conv_wide_examples_cpu(const ConvSumParams<T>&, bool*, int64_t, int64_t); \
  template void conv_clipped_sums_cpu(const ConvSumParams<T>&, int64_t, int64_t);         \
  template void conv_bias_sums_cpu(const ConvBiasSumParams<T>&, int64_t, int64_t);
DPK_CONV_INSTANCES(float)
DPK_CONV_INSTANCES(double)
#undef DPK_CONV_INSTANCES

}  // namespace dpk

#endif
