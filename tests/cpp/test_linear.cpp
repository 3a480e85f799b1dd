// Linear layers against a naive loop over examples.
#include <algorithm>
#include <limits>

#include "check.h"
#include "linear/linear.h"

namespace {

struct Shape {
  int64_t batch, positions, p, d;
};

// The gradient of example b, [d, p] and then the bias [d], in double.
template <typename T>
std::vector<double> gradient(const Shape& s, const std::vector<T>& a, const std::vector<T>& g, int64_t b) {
  std::vector<double> sum(s.d * s.p + s.d, 0.);
  for (int64_t t = 0; t < s.positions; ++t)
    for (int64_t j = 0; j < s.d; ++j) {
      const double grad = g[(b * s.positions + t) * s.d + j];
      for (int64_t i = 0; i < s.p; ++i) sum[j * s.p + i] += grad * a[(b * s.positions + t) * s.p + i];
      sum[s.d * s.p + j] += grad;
    }
  return sum;
}

template <typename T>
void matches_the_loop(const Shape& s) {
  const std::vector<T> a = check::normal<T>(s.batch * s.positions * s.p, 1);
  std::vector<T> g = check::normal<T>(s.batch * s.positions * s.d, 2);
  std::vector<double> weights = check::normal<double>(s.batch, 3), norms(s.batch, -1.);
  std::vector<double> weight_sum(s.d * s.p, -1.), bias_sum(s.d, -1.), expected(s.d * s.p + s.d, 0.);

  // Sums of many positions round in float, and norms with them.
  const bool in_float = sizeof(T) == sizeof(float) && s.positions >= 7;
  const double least = in_float ? 1e-4 : 1e-12, tolerance = in_float ? 1e-5 : 1e-12;

  dpk::linear_squared_norms_cpu<T>({a.data(), g.data(), norms.data(), s.positions, s.p, s.d, true, true}, 0, s.batch);
  for (int64_t b = 0; b < s.batch; ++b) {
    double squared = 0;
    for (double x : gradient(s, a, g, b)) squared += x * x;
    CHECK(norms[b] >= squared * (1 - least));
    CHECK(norms[b] <= squared * 1.02);  // rounded upward
    if (s.positions == 1) CHECK_CLOSE(norms[b], squared, 1e-12);
  }

  if (s.batch > 1) {  // an example of weight 0 is skipped, whatever it holds
    weights[1] = 0;
    std::fill_n(g.begin() + s.positions * s.d, s.positions * s.d, std::numeric_limits<T>::quiet_NaN());
  }
  for (int64_t b = 0; b < s.batch; ++b) {
    if (weights[b] == 0) continue;
    const std::vector<double> grad = gradient(s, a, g, b);
    for (size_t i = 0; i < grad.size(); ++i) expected[i] += weights[b] * grad[i];
  }
  dpk::linear_clipped_sums_cpu<T>(
      {a.data(), g.data(), weights.data(), weight_sum.data(), bias_sum.data(), s.batch, s.positions, s.p, s.d}, 0,
      dpk::linear_sum_tasks(s.p, s.d));
  for (int64_t i = 0; i < s.d * s.p; ++i) CHECK_CLOSE(weight_sum[i], expected[i], tolerance);
  for (int64_t j = 0; j < s.d; ++j) CHECK_CLOSE(bias_sum[j], expected[s.d * s.p + j], 1e-12);
}

}  // namespace

int main() {
  check::for_each_isa([] {
    for (const Shape& shape : {Shape{0, 1, 3, 2}, Shape{3, 1, 31, 33}, Shape{2, 40, 5, 70}, Shape{3, 7, 129, 10},
                               Shape{2, 300, 70, 30}, Shape{3, 20, 220, 110}}) {
      matches_the_loop<float>(shape);
      matches_the_loop<double>(shape);
    }
  });
  return check::result();
}
