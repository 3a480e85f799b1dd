// Embeddings and embedding bags against a naive loop, with repeated and padding tokens.
#include <limits>

#include "check.h"
#include "embedding/embedding.h"

namespace {

template <typename T>
void matches_the_loop(int64_t batch, int64_t positions, int64_t dim, bool bags) {
  constexpr int64_t kRows = 7, kPadding = 2;
  std::mt19937 engine(9);
  std::vector<int64_t> indices(batch * positions), order(batch * positions);
  for (int64_t& v : indices) v = engine() % kRows;
  std::vector<double> scales = check::normal<double>(batch * positions, 1);
  if (scales.size() > 1) scales[1] = 0;  // left out
  std::vector<T> g = check::normal<T>(batch * (bags ? 1 : positions) * dim, 2);
  std::vector<double> weights = check::normal<double>(batch, 3);
  std::vector<double> norms(batch, -1.), sum(kRows * dim, -1.), expected(kRows * dim, 0.);
  dpk::EmbeddingParams<T> params{indices.data(),
                                 g.data(),
                                 bags ? scales.data() : nullptr,
                                 nullptr,
                                 order.data(),
                                 norms.data(),
                                 batch,
                                 positions,
                                 dim,
                                 0,
                                 bags ? -1 : kPadding};

  const auto gradient = [&](int64_t b) {
    std::vector<double> table(kRows * dim, 0.);
    for (int64_t t = b * positions; t < (b + 1) * positions; ++t) {
      if (!bags && indices[t] == kPadding) continue;
      for (int64_t k = 0; k < dim; ++k)
        table[indices[t] * dim + k] += bags ? scales[t] * g[b * dim + k] : static_cast<double>(g[t * dim + k]);
    }
    return table;
  };

  dpk::embedding_squared_norms_cpu(params, 0, batch);
  for (int64_t b = 0; b < batch; ++b) {
    double squared = 0;
    for (double x : gradient(b)) squared += x * x;
    CHECK_CLOSE(norms[b], squared, 1e-12);
  }

  if (batch > 1) {  // an example of weight 0 is skipped, whatever it holds
    weights[1] = 0;
    const int64_t size = g.size() / batch;
    std::fill_n(g.begin() + size, size, std::numeric_limits<T>::quiet_NaN());
  }
  for (int64_t b = 0; b < batch; ++b) {
    if (weights[b] == 0) continue;
    const std::vector<double> table = gradient(b);
    for (size_t i = 0; i < table.size(); ++i) expected[i] += weights[b] * table[i];
  }
  params.weights = weights.data();
  params.result = sum.data();
  params.num_embeddings = kRows;
  dpk::embedding_order_cpu(params, 0, batch);
  dpk::embedding_clipped_sums_cpu(params, 0, dpk::embedding_sum_tasks(kRows, dim));
  for (int64_t i = 0; i < kRows * dim; ++i) CHECK_CLOSE(sum[i], expected[i], 1e-12);
}

}  // namespace

int main() {
  check::for_each_isa([] {
    for (bool bags : {false, true})
      for (int64_t dim : {1, 5, 40}) {
        matches_the_loop<float>(3, 12, dim, bags);
        matches_the_loop<double>(3, 12, dim, bags);
        matches_the_loop<float>(0, 12, dim, bags);
        matches_the_loop<float>(2, 1, dim, bags);
      }
  });
  return check::result();
}
