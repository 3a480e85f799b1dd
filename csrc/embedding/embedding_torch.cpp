#include "common/torch.h"
#include "embedding/embedding.h"

namespace dpk {
namespace {

void check(const Tensor& indices, const Tensor& output_grads, const Tensor* scales) {
  check_input(indices, "indices", 2, ScalarType::Long);
  check_input(output_grads, "output_grads", scales ? 2 : 3, output_grads.scalar_type());
  check_size(output_grads.size(0) == indices.size(0), "output_grads, indices");
  if (!scales) return check_size(output_grads.size(1) == indices.size(1), "output_grads, indices");
  check_input(*scales, "scales", 2, ScalarType::Double);
  check_size(scales->size(0) == indices.size(0) && scales->size(1) == indices.size(1), "scales, indices");
}

template <typename T>
EmbeddingParams<T> params_of(const Tensor& indices, const Tensor& output_grads, const Tensor* scales,
                             const Tensor* weights, Tensor& order, Tensor& result, int64_t num_embeddings,
                             int64_t padding_idx) {
  return {data<int64_t>(indices),
          data<T>(output_grads),
          scales ? data<double>(*scales) : nullptr,
          weights ? data<double>(*weights) : nullptr,
          mutable_data<int64_t>(order),
          mutable_data<double>(result),
          indices.size(0),
          indices.size(1),
          output_grads.size(scales ? 1 : 2),
          num_embeddings,
          padding_idx};
}

Tensor squared_norms(const Tensor& indices, const Tensor& output_grads, const Tensor* scales, int64_t padding_idx) {
  const OnDevice device(output_grads);
  check(indices, output_grads, scales);
  Tensor order = torch::stable::empty_like(indices), result = empty_double(output_grads, {indices.size(0)});
  for_dtype(output_grads, [&](auto zero) {
    using T = decltype(zero);
    const auto params = params_of<T>(indices, output_grads, scales, nullptr, order, result, 0, padding_idx);
    run(
        params.batch, params.positions * (params.scales ? 8 : params.dim) + params.dim,
        [&](auto begin, auto end) { embedding_squared_norms_cpu(params, begin, end); },
        [&](auto stream) { embedding_squared_norms_cuda(params, stream); });
  });
  return result;
}

Tensor clipped_sums(const Tensor& indices, const Tensor& output_grads, const Tensor* scales, const Tensor& weights,
                    int64_t num_embeddings, int64_t padding_idx) {
  const OnDevice device(output_grads);
  check(indices, output_grads, scales);
  check_input(weights, "weights", 1, ScalarType::Double);
  check_size(weights.size(0) == indices.size(0), "weights, indices");
  [[maybe_unused]] const int64_t tokens = indices.size(0) * indices.size(1);
  const int64_t dim = output_grads.size(scales ? 1 : 2);
#if !defined(USE_CUDA)  // there the forward has looked at them
  const int64_t* index = data<int64_t>(indices);
  STD_TORCH_CHECK(std::all_of(index, index + tokens, [&](int64_t v) { return 0 <= v && v < num_embeddings; }),
                  "indices must lie in [0, num_embeddings)");
#endif
  Tensor order = torch::stable::empty_like(indices), result = empty_double(output_grads, {num_embeddings, dim});
  for_dtype(output_grads, [&](auto zero) {
    using T = decltype(zero);
    const auto params =
        params_of<T>(indices, output_grads, scales, &weights, order, result, num_embeddings, padding_idx);
#if defined(USE_CUDA)
    embedding_clipped_sums_cuda(params, current_stream());
#else
    parallel(params.batch, params.positions * 16,
             [&](int64_t begin, int64_t end) { embedding_order_cpu(params, begin, end); });
    const int64_t tasks = embedding_sum_tasks(num_embeddings, dim);
    parallel(tasks, (tokens + num_embeddings) * dim / std::max<int64_t>(1, tasks),
             [&](int64_t begin, int64_t end) { embedding_clipped_sums_cpu(params, begin, end); });
#endif
  });
  return result;
}

Tensor embedding_squared_norms(const Tensor& indices, const Tensor& output_grads, int64_t padding_idx) {
  return squared_norms(indices, output_grads, nullptr, padding_idx);
}

Tensor embedding_clipped_sums(const Tensor& indices, const Tensor& output_grads, const Tensor& weights,
                              int64_t num_embeddings, int64_t padding_idx) {
  return clipped_sums(indices, output_grads, nullptr, weights, num_embeddings, padding_idx);
}

Tensor embedding_bag_squared_norms(const Tensor& indices, const Tensor& output_grads, const Tensor& scales) {
  return squared_norms(indices, output_grads, &scales, -1);
}

Tensor embedding_bag_clipped_sums(const Tensor& indices, const Tensor& output_grads, const Tensor& scales,
                                  const Tensor& weights, int64_t num_embeddings) {
  return clipped_sums(indices, output_grads, &scales, weights, num_embeddings, -1);
}

DPK_SCHEMAS(m) {
  m.def("embedding_squared_norms(Tensor indices, Tensor output_grads, int padding_idx) -> Tensor");
  m.def(
      "embedding_clipped_sums(Tensor indices, Tensor output_grads, Tensor weights, int num_embeddings, "
      "int padding_idx) -> Tensor");
  m.def("embedding_bag_squared_norms(Tensor indices, Tensor output_grads, Tensor scales) -> Tensor");
  m.def(
      "embedding_bag_clipped_sums(Tensor indices, Tensor output_grads, Tensor scales, Tensor weights, "
      "int num_embeddings) -> Tensor");
}

DPK_IMPLEMENTATIONS(m) {
  m.impl("embedding_squared_norms", TORCH_BOX(&embedding_squared_norms));
  m.impl("embedding_clipped_sums", TORCH_BOX(&embedding_clipped_sums));
  m.impl("embedding_bag_squared_norms", TORCH_BOX(&embedding_bag_squared_norms));
  m.impl("embedding_bag_clipped_sums", TORCH_BOX(&embedding_bag_clipped_sums));
}

}  // namespace
}  // namespace dpk
