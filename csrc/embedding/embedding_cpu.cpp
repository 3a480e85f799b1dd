// Embeddings on the CPU.
//
// An example's positions are sorted by index, so that equal indices lie side by side; no buffer grows with the table.
//
// Squared norms
//   embedding: sum_v ||sum_{t: v_t = v} g_t||^2        a row that occurs once is squared where it lies
//   bag:       ||g||^2 sum_v (sum_{t: v_t = v} s_t)^2
// Clipped sums: w_b times each of these rows is added to a double table.
//
// Sums over repeated indices are taken in double and in the same order for both, so the norm is that of the very rows
// that are added, also where repeats cancel; and an example that is clipped to C never adds a row of more than C.
// A task of the sums owns a block of the table's rows and columns and walks over all examples in order: the result does
// not depend on the number of threads.
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

// Writes the positions of example b that contribute, equal indices side by side, and then -1.
template <typename T>
void sort_positions(const EmbeddingParams<T>& q, int64_t b, std::vector<Token>& tokens, int64_t* order) {
  tokens.clear();
  for (int64_t t = 0; t < q.positions; ++t) {
    const int64_t index = q.indices[b * q.positions + t];
    if (index != q.padding_idx && !(q.scales && q.scales[b * q.positions + t] == 0)) tokens.push_back({index, t});
  }
  std::sort(tokens.begin(), tokens.end());
  for (const Token& token : tokens) *order++ = token.position;
  std::fill_n(order, q.positions - static_cast<int64_t>(tokens.size()), int64_t{-1});
}

// Calls f(index, positions, count) for every run of equal indices of an example.
template <typename F>
inline void for_each_run(const int64_t* indices, const int64_t* order, int64_t positions, F f) {
  for (int64_t first = 0, last; first < positions && order[first] >= 0; first = last) {
    const int64_t index = indices[order[first]];
    last = first + 1;
    while (last < positions && order[last] >= 0 && indices[order[last]] == index) ++last;
    f(index, order + first, last - first);
  }
}

// sum[j] = sum of columns column0 <= c < column0 + columns of the output gradients of a run.
template <typename T>
inline void sum_rows(const EmbeddingParams<T>& q, const T* g, const int64_t* positions, int64_t count, int64_t column0,
                     int64_t columns, double* __restrict sum) {
  std::fill_n(sum, columns, 0.);
  for (int64_t i = 0; i < count; ++i) {
    const T* row = g + positions[i] * q.dim + column0;
    for (int64_t j = 0; j < columns; ++j) sum[j] += static_cast<double>(row[j]);
  }
}

inline double sum_scales(const double* scales, const int64_t* positions, int64_t count) {
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += scales[positions[i]];
  return sum;
}

template <typename T>
void sort_examples(const EmbeddingParams<T>& q, int64_t begin, int64_t end) {
  std::vector<Token> tokens;
  tokens.reserve(q.positions);
  for (int64_t b = begin; b < end; ++b) sort_positions(q, b, tokens, q.order + b * q.positions);
}

template <typename T>
void squared_norms(const EmbeddingParams<T>& q, int64_t begin, int64_t end) {
  sort_examples(q, begin, end);
  std::vector<double> sum(q.dim);
  for (int64_t b = begin; b < end; ++b) {
    const int64_t first = b * q.positions;
    const T* g = q.output_grads + (q.scales ? b : first) * q.dim;
    double squared = 0;
    bool any = false;
    for_each_run(q.indices + first, q.order + first, q.positions, [&](int64_t, const int64_t* run, int64_t count) {
      any = true;
      if (q.scales) {
        const double scale = sum_scales(q.scales + first, run, count);
        squared += scale * scale;
      } else if (count == 1) {
        squared += sum_of_squares(g + *run * q.dim, q.dim);
      } else {
        sum_rows(q, g, run, count, 0, q.dim, sum.data());
        squared += sum_of_squares(sum.data(), q.dim);
      }
    });
    // A bag of nothing but padding has no gradient, whatever that of its output.
    // Squares of doubles may vanish below their range, and the other factor be large.
    constexpr double kLeast = std::numeric_limits<double>::min();
    q.result[b] =
        q.scales && any ? (squared + q.positions * kLeast) * (sum_of_squares(g, q.dim) + q.dim * kLeast) : squared;
  }
}

// row[j] += factor * g[j]
template <typename G>
inline void add(double* __restrict row, const G* g, double factor, int64_t columns) {
  for (int64_t j = 0; j < columns; ++j) row[j] += factor * static_cast<double>(g[j]);
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
      const int64_t first = b * q.positions;
      const T* g = q.output_grads + (q.scales ? b : first) * q.dim;
      for_each_run(q.indices + first, q.order + first, q.positions, [&](int64_t v, const int64_t* run, int64_t count) {
        if (v < row0 || v >= row1) return;
        double* row = q.result + v * q.dim + column0;
        if (q.scales) {
          add(row, g + column0, weight * sum_scales(q.scales + first, run, count), columns);
        } else if (count == 1) {
          add(row, g + *run * q.dim + column0, weight, columns);
        } else {
          double sum[kTableColumns];
          sum_rows(q, g, run, count, column0, columns, sum);
          add(row, sum, weight, columns);
        }
      });
    }
  }
}

}  // namespace

void norms(const EmbeddingParams<float>& q, int64_t b, int64_t e) { squared_norms(q, b, e); }
void norms(const EmbeddingParams<double>& q, int64_t b, int64_t e) { squared_norms(q, b, e); }
void orders(const EmbeddingParams<float>& q, int64_t b, int64_t e) { sort_examples(q, b, e); }
void orders(const EmbeddingParams<double>& q, int64_t b, int64_t e) { sort_examples(q, b, e); }
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
void embedding_order_cpu(const EmbeddingParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(orders, params, begin, end);
}

template <typename T>
void embedding_clipped_sums_cpu(const EmbeddingParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(sums, params, begin, end);
}

template void embedding_squared_norms_cpu(const EmbeddingParams<float>&, int64_t, int64_t);
template void embedding_squared_norms_cpu(const EmbeddingParams<double>&, int64_t, int64_t);
template void embedding_order_cpu(const EmbeddingParams<float>&, int64_t, int64_t);
template void embedding_order_cpu(const EmbeddingParams<double>&, int64_t, int64_t);
template void embedding_clipped_sums_cpu(const EmbeddingParams<float>&, int64_t, int64_t);
template void embedding_clipped_sums_cpu(const EmbeddingParams<double>&, int64_t, int64_t);

}  // namespace dpk

#endif
