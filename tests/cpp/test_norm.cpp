// Affine normalization against a naive loop: parameter gradients of each example and the input's gradient.
#include <limits>

#include "check.h"
#include "norm/norm.h"

namespace {

// Gradients of one normalized set of n values, whose k-th has output gradient g[k] and weight w[k].
struct Loop {
  std::vector<double> xhat, input_grads;

  Loop(const std::vector<double>& x, const std::vector<double>& g, const std::vector<double>& w, double mean,
       double rstd, bool centred, bool fixed) {
    double sum = 0, product = 0;
    for (size_t k = 0; k < x.size(); ++k) {
      xhat.push_back((x[k] - mean) * rstd);
      sum += g[k] * w[k];
      product += g[k] * w[k] * xhat[k];
    }
    const double n = fixed ? kInfinity : static_cast<double>(x.size());
    for (size_t k = 0; k < x.size(); ++k)
      input_grads.push_back(rstd * (g[k] * w[k] - (centred ? sum / n : 0) - xhat[k] * product / n));
  }

  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
};

template <typename T>
constexpr double kTolerance = 200 * static_cast<double>(std::numeric_limits<T>::epsilon());

template <typename T>
void group_norm_matches(int64_t batch, int64_t channels, int64_t groups, int64_t spatial, bool fixed) {
  const std::vector<T> x = check::normal<T>(batch * channels * spatial, 1), g = check::normal<T>(x.size(), 2);
  const std::vector<T> mean = check::normal<T>(batch * groups, 3), weight = check::normal<T>(channels, 4);
  std::vector<T> rstd = check::normal<T>(batch * groups, 5), input_grads(x.size(), T(-1));
  for (T& r : rstd) r = 1 + r * r / 8;
  std::vector<double> weight_grads(batch * channels, -1.), bias_grads(batch * channels, -1.);
  dpk::group_norm_backward_cpu<T>({x.data(), g.data(), mean.data(), rstd.data(), weight.data(), input_grads.data(),
                                   weight_grads.data(), bias_grads.data(), channels, groups, spatial, fixed},
                                  0, batch * groups);
  const int64_t members = channels / groups;
  for (int64_t task = 0; task < batch * groups; ++task) {
    const int64_t first = task * members * spatial;
    std::vector<double> xs, gs, ws;
    for (int64_t k = 0; k < members * spatial; ++k) {
      xs.push_back(x[first + k]);
      gs.push_back(g[first + k]);
      ws.push_back(weight[task % groups * members + k / spatial]);
    }
    const Loop loop(xs, gs, ws, mean[task], rstd[task], true, fixed);
    for (int64_t k = 0; k < members * spatial; ++k)
      CHECK_CLOSE(input_grads[first + k], loop.input_grads[k], kTolerance<T>);
    for (int64_t c = 0; c < members; ++c) {
      double weight_grad = 0, bias_grad = 0;
      for (int64_t k = c * spatial; k < (c + 1) * spatial; ++k) {
        weight_grad += gs[k] * loop.xhat[k];
        bias_grad += gs[k];
      }
      CHECK_CLOSE(weight_grads[task * members + c], weight_grad, kTolerance<T>);
      CHECK_CLOSE(bias_grads[task * members + c], bias_grad, kTolerance<T>);
    }
  }
}

template <typename T>
void layer_norm_matches(int64_t batch, int64_t positions, int64_t features, bool centred) {
  const std::vector<T> x = check::normal<T>(batch * positions * features, 1), g = check::normal<T>(x.size(), 2);
  const std::vector<T> mean = check::normal<T>(batch * positions, 3), weight = check::normal<T>(features, 4);
  std::vector<T> rstd = check::normal<T>(batch * positions, 5), input_grads(x.size(), T(-1));
  for (T& r : rstd) r = 1 + r * r / 8;
  std::vector<double> weight_grads(batch * features, -1.), bias_grads(batch * features, -1.);
  dpk::layer_norm_backward_cpu<T>({x.data(), g.data(), centred ? mean.data() : nullptr, rstd.data(), weight.data(),
                                   input_grads.data(), weight_grads.data(), bias_grads.data(), positions, features},
                                  0, batch);
  for (int64_t b = 0; b < batch; ++b) {
    std::vector<double> weight_sum(features, 0.), bias_sum(features, 0.);
    for (int64_t t = b * positions; t < (b + 1) * positions; ++t) {
      const std::vector<double> xs(x.begin() + t * features, x.begin() + (t + 1) * features);
      const std::vector<double> gs(g.begin() + t * features, g.begin() + (t + 1) * features);
      const Loop loop(xs, gs, {weight.begin(), weight.end()}, centred ? mean[t] : T(0), rstd[t], centred, false);
      for (int64_t k = 0; k < features; ++k) {
        CHECK_CLOSE(input_grads[t * features + k], loop.input_grads[k], kTolerance<T>);
        weight_sum[k] += gs[k] * loop.xhat[k];
        bias_sum[k] += gs[k];
      }
    }
    for (int64_t k = 0; k < features; ++k) {
      CHECK_CLOSE(weight_grads[b * features + k], weight_sum[k], kTolerance<T>);
      CHECK_CLOSE(bias_grads[b * features + k], bias_sum[k], kTolerance<T>);
    }
  }
}

template <typename T>
void all_match() {
  for (bool flag : {false, true}) {
    group_norm_matches<T>(3, 6, 2, 35, flag);
    group_norm_matches<T>(2, 4, 4, 1, flag);
    group_norm_matches<T>(0, 4, 2, 9, flag);
    layer_norm_matches<T>(3, 5, 33, flag);
    layer_norm_matches<T>(2, 1, 1, flag);
  }
}

}  // namespace

int main() {
  check::for_each_isa([] {
    all_match<float>();
    all_match<double>();
  });
  return check::result();
}
