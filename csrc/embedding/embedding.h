// Embeddings: output t of an example is row v_t of the table, so its gradient adds g_t to row v_t, and rows that occur
// more than once hold a sum. Embedding bags add their rows, each times a scale, into one output: its gradient adds
// s_t g to row v_t.
#pragma once

#include <cstdint>

struct CUstream_st;  // a CUDA stream is a pointer to it

namespace dpk {

template <typename T>
struct EmbeddingParams {
  const int64_t* indices;  // [batch, positions]
  const T* output_grads;   // [batch, positions, dim]; bags: [batch, dim]
  const double* scales;    // bags: [batch, positions], where 0 leaves a position out; null for plain embeddings
  const double* weights;   // [batch], sums only; an example of weight 0 is skipped
  int64_t* order;          // [batch, positions], scratch
  double* result;          // squared norms: [batch]; clipped sums: [num_embeddings, dim]
  int64_t batch, positions, dim;
  int64_t num_embeddings;  // sums only
  int64_t padding_idx;     // contributes nothing; -1 for none
};

// Squared gradient norms of the examples begin <= b < end.
template <typename T>
void embedding_squared_norms_cpu(const EmbeddingParams<T>& params, int64_t begin, int64_t end);

// Fills the order of the examples begin <= b < end, which the clipped sums read.
template <typename T>
void embedding_order_cpu(const EmbeddingParams<T>& params, int64_t begin, int64_t end);

// Clipped sums for the tasks begin <= task < end, of embedding_sum_tasks in all. Every index is within the table.
template <typename T>
void embedding_clipped_sums_cpu(const EmbeddingParams<T>& params, int64_t begin, int64_t end);

int64_t embedding_sum_tasks(int64_t num_embeddings, int64_t dim);

// The whole batch on the device; both fill the order themselves. Every index is that of a row of the table. T: float,
// bfloat16, half.
template <typename T>
void embedding_squared_norms_cuda(const EmbeddingParams<T>& params, CUstream_st* stream);
template <typename T>
void embedding_clipped_sums_cuda(const EmbeddingParams<T>& params, CUstream_st* stream);

}  // namespace dpk
