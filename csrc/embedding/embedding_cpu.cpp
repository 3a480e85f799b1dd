// Embeddings on the CPU.
//
// Squared norms. The positions of an example are sorted by index, so that equal indices lie side by side; no buffer
// grows with the table.
//   embedding: sum_v ||sum_{t: v_t = v} g_t||^2        a row that occurs once is squared where it lies
//   bag:       ||g||^2 sum_v (sum_{t: v_t = v} s_t)^2
// Sums over repeated indices are taken in double and may cancel: with S the sum of the norms that enter them and m the
// positions, their rounding and that of the clipped sum stay below 4 m u S, which is added to the norm.
//
// Clipped sums: w_b g_bt is added to row v_bt of a double table. A task owns a block of the table's rows and columns
// and walks over all examples in order: the result does not depend on the number of threads.
#include "embedding/embedding.h"

#define DPK_BODY "embedding/embedding_cpu.cpp"
#include "common/each_isa.h"

#ifdef DPK_ISA

namespace dpk::DPK_ISA {
namespace {

#include "common/simd.h"

struct Token {
  int64_t index, position;
  bool operator<(const Token& other) const {
    return index < other.index || (index == other.index && position < other.position);
  }
};

// The positions of example b that contribute, equal indices side by side.
template <typename T>
void collect(const EmbeddingParams<T>& q, int64_t b, std::vector<Token>& tokens) {
  tokens.clear();
  for (int64_t t = 0; t < q.positions; ++t) {
    const int64_t index = q.indices[b * q.positions + t];
    if (index != q.padding_idx && !(q.scales && q.scales[b * q.positions + t] == 0)) tokens.push_back({index, t});
  }
  std::sort(tokens.begin(), tokens.end());
}

// Calls f(first, last) for every run of equal indices.
template <typename F>
inline void for_each_run(const std::vector<Token>& tokens, F f) {
  const size_t count = tokens.size();
  for (size_t first = 0, last; first < count; first = last) {
    last = first + 1;
    while (last < count && tokens[last].index == tokens[first].index) ++last;
    f(first, last);
  }
}

// (sqrt(squared) + 4 m u S)^2
inline double rounded_up(double squared, double magnitude, int64_t positions) {
  if (magnitude == 0) return squared;
  constexpr double kUnit = std::numeric_limits<double>::epsilon() / 2;
  const double norm = std::sqrt(squared) + 4 * kUnit * static_cast<double>(positions) * magnitude;
  return norm * norm;
}

template <typename T>
double rows_squared_norm(const EmbeddingParams<T>& q, const T* g, const std::vector<Token>& tokens,
                         std::vector<double>& sum) {
  double squared = 0, magnitude = 0;
  for_each_run(tokens, [&](size_t first, size_t last) {
    if (last - first == 1) {
      squared += sum_of_squares(g + tokens[first].position * q.dim, q.dim);
      return;
    }
    std::fill(sum.begin(), sum.end(), 0.);
    for (size_t i = first; i < last; ++i) {
      const T* row = g + tokens[i].position * q.dim;
      for (int64_t j = 0; j < q.dim; ++j) sum[j] += static_cast<double>(row[j]);
      magnitude += std::sqrt(sum_of_squares(row, q.dim));
    }
    squared += sum_of_squares(sum.data(), q.dim);
  });
  return rounded_up(squared, magnitude, q.positions);
}

template <typename T>
double bag_squared_norm(const EmbeddingParams<T>& q, const T* g, const double* scales,
                        const std::vector<Token>& tokens) {
  if (tokens.empty()) return 0;  // whatever the output's gradient is
  double squared = 0, magnitude = 0;
  for_each_run(tokens, [&](size_t first, size_t last) {
    double sum = 0;
    for (size_t i = first; i < last; ++i) {
      const double scale = scales[tokens[i].position];
      sum += scale;
      if (last - first > 1) magnitude += std::abs(scale);
    }
    squared += sum * sum;
  });
  return rounded_up(squared, magnitude, q.positions) * sum_of_squares(g, q.dim);
}

template <typename T>
void squared_norms(const EmbeddingParams<T>& q, int64_t begin, int64_t end) {
  std::vector<Token> tokens;
  tokens.reserve(q.positions);
  std::vector<double> sum(q.scales ? 0 : q.dim);
  for (int64_t b = begin; b < end; ++b) {
    collect(q, b, tokens);
    q.result[b] = q.scales ? bag_squared_norm(q, q.output_grads + b * q.dim, q.scales + b * q.positions, tokens)
                           : rows_squared_norm(q, q.output_grads + b * q.positions * q.dim, tokens, sum);
  }
}

// A task's block of the table. Each task reads all indices, which is little beside the rows that it adds.
constexpr int64_t kTableColumns = 128;  // a kilobyte of a row
constexpr int64_t kTableRows = 4096;    // at least
constexpr int64_t kTableBlocks = 8;     // at most

inline int64_t rows_of_block(int64_t num_embeddings) {
  return std::max(kTableRows, (num_embeddings + kTableBlocks - 1) / kTableBlocks);
}

inline int64_t column_tasks(int64_t dim) { return (dim + kTableColumns - 1) / kTableColumns; }

template <typename T>
void clipped_sums(const EmbeddingParams<T>& q, int64_t begin, int64_t end) {
  const int64_t block_rows = rows_of_block(q.num_embeddings);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row0 = task / column_tasks(q.dim) * block_rows, column0 = task % column_tasks(q.dim) * kTableColumns;
    const int64_t row1 = std::min(row0 + block_rows, q.num_embeddings);
    const int64_t columns = std::min(kTableColumns, q.dim - column0);
    for (int64_t v = row0; v < row1; ++v) std::fill_n(q.result + v * q.dim + column0, columns, 0.);
    for (int64_t b = 0; b < q.batch; ++b) {
      const double weight = q.weights[b];
      if (weight == 0) continue;
      for (int64_t t = 0; t < q.positions; ++t) {
        const int64_t token = b * q.positions + t, index = q.indices[token];
        if (index < row0 || index >= row1 || index == q.padding_idx) continue;
        const double scale = q.scales ? q.scales[token] : 1;
        if (scale == 0) continue;
        const T* g = q.output_grads + (q.scales ? b : token) * q.dim + column0;
        double* __restrict row = q.result + index * q.dim + column0;
        const double factor = weight * scale;
        for (int64_t j = 0; j < columns; ++j) row[j] += factor * static_cast<double>(g[j]);
      }
    }
  }
}

}  // namespace

void norms(const EmbeddingParams<float>& q, int64_t b, int64_t e) { squared_norms(q, b, e); }
void norms(const EmbeddingParams<double>& q, int64_t b, int64_t e) { squared_norms(q, b, e); }
void sums(const EmbeddingParams<float>& q, int64_t b, int64_t e) { clipped_sums(q, b, e); }
void sums(const EmbeddingParams<double>& q, int64_t b, int64_t e) { clipped_sums(q, b, e); }

}  // namespace dpk::DPK_ISA

#else

namespace dpk {

int64_t embedding_sum_tasks(int64_t num_embeddings, int64_t dim) {
  const int64_t rows = baseline::rows_of_block(num_embeddings);
  return (num_embeddings + rows - 1) / rows * baseline::column_tasks(dim);
}

template <typename T>
void embedding_squared_norms_cpu(const EmbeddingParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(norms, params, begin, end);
}

template <typename T>
void embedding_clipped_sums_cpu(const EmbeddingParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(sums, params, begin, end);
}

template void embedding_squared_norms_cpu(const EmbeddingParams<float>&, int64_t, int64_t);
template void embedding_squared_norms_cpu(const EmbeddingParams<double>&, int64_t, int64_t);
template void embedding_clipped_sums_cpu(const EmbeddingParams<float>&, int64_t, int64_t);
template void embedding_clipped_sums_cpu(const EmbeddingParams<double>&, int64_t, int64_t);

}  // namespace dpk

#endif
