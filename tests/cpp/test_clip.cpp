// Clip factors keep every weighted norm within the bound; rows against a naive loop.
#include <limits>

#include "check.h"
#include "clip/clip.h"

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void factors_keep_the_bound() {
  constexpr double kBound = 0.1, kScale = 8;
  std::vector<double> first, second;
  for (double x = 1e-12; x < 1e12; x *= 1.7) {
    first.push_back(x);
    second.push_back(x / 3);
  }
  first.insert(first.end(), {0, kInfinity, std::nan("")});
  second.insert(second.end(), {0, 0, 0});
  const int64_t batch = first.size();
  const double* parts[] = {first.data(), second.data()};
  std::vector<double> weights(batch, -1.), norms(batch, -1.);
  dpk::clip_factors_cpu({parts, weights.data(), norms.data(), 2, kBound, kScale}, 0, batch);
  for (int64_t b = 0; b < batch; ++b) {
    const double captured = std::sqrt(first[b] + second[b]);
    if (!std::isfinite(captured)) {
      CHECK(weights[b] == 0);
      continue;
    }
    CHECK(weights[b] * captured <= kBound);
    CHECK(norms[b] >= kScale * captured);
    CHECK_CLOSE(weights[b], std::fmin(kScale, kBound / captured), 1e-14);
    CHECK_CLOSE(norms[b] / (kScale * captured + 1e-300), captured > 0, 1e-14);
  }
}

template <typename T>
void rows_match_the_loop(int64_t batch, int64_t size) {
  const std::vector<T> rows = check::normal<T>(batch * size, 1);
  const std::vector<double> weights = check::normal<double>(batch, 2);
  std::vector<double> norms(batch, -1.), sum(size, -1.);
  std::vector<const T*> pointers;
  for (int64_t b = 0; b < batch; ++b) pointers.push_back(rows.data() + b * size);
  dpk::row_squared_norms_cpu<T>({rows.data(), norms.data(), size}, 0, batch);
  dpk::weighted_row_sum_cpu<T>({pointers.data(), weights.data(), sum.data(), batch, size}, 0,
                               (size + dpk::kRowSumBlock - 1) / dpk::kRowSumBlock);
  for (int64_t b = 0; b < batch; ++b) {
    double squared = 0;
    for (int64_t i = 0; i < size; ++i) squared += static_cast<double>(pointers[b][i]) * pointers[b][i];
    CHECK(norms[b] >= squared * (1 - 1e-15));
    CHECK_CLOSE(norms[b], squared, 1e-12);
  }
  for (int64_t i = 0; i < size; ++i) {
    double expected = 0;
    for (int64_t b = 0; b < batch; ++b) expected += weights[b] * pointers[b][i];
    CHECK_CLOSE(sum[i], expected, 1e-13);
  }
}

}  // namespace

int main() {
  check::for_each_isa([] {
    factors_keep_the_bound();
    for (int64_t batch : {0, 1, 6})
      for (int64_t size : {0, 1, 33, 2500}) {
        rows_match_the_loop<float>(batch, size);
        rows_match_the_loop<double>(batch, size);
      }
  });
  return check::result();
}
