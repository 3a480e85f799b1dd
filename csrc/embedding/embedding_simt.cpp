#include "embedding/embedding.h"
#include "simt/binding.h"

namespace dpk::simt {
namespace {

using Optional = std::optional<py::array>;

// scales: of bags, or none.
template <typename T>
EmbeddingParams<T> params_of(Call& call, const py::array& indices, const py::array& output_grads,
                             const Optional& scales, int64_t padding_idx) {
  EmbeddingParams<T> params{};
  params.indices = call.input<int64_t>(indices);
  params.output_grads = call.input<T>(output_grads);
  params.scales = call.input<double>(scales);
  params.order = call.scratch<int64_t>(indices.size());
  params.batch = indices.shape(0), params.positions = indices.shape(1);
  params.dim = output_grads.shape(output_grads.ndim() - 1);
  params.padding_idx = padding_idx;
  return params;
}

py::object embedding_squared_norms(const py::array& indices, const py::array& output_grads, const Optional& scales,
                                   int64_t padding_idx, const std::string& schedule) {
  return for_dtype<float, bfloat16, half>(output_grads, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    auto params = params_of<T>(call, indices, output_grads, scales, padding_idx);
    params.result = call.output<double>({indices.shape(0)});
    embedding_squared_norms_cuda(params, call.stream());
    return call.result();
  });
}

py::object embedding_clipped_sums(const py::array& indices, const py::array& output_grads, const Optional& scales,
                                  const py::array& weights, int64_t num_embeddings, int64_t padding_idx,
                                  const std::string& schedule) {
  return for_dtype<float, bfloat16, half>(output_grads, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    auto params = params_of<T>(call, indices, output_grads, scales, padding_idx);
    params.weights = call.input<double>(weights);
    params.num_embeddings = num_embeddings;
    params.result = call.output<double>({num_embeddings, params.dim});
    embedding_clipped_sums_cuda(params, call.stream());
    return call.result();
  });
}

const Family embedding([](py::module_& m) {
  m.def("embedding_squared_norms", embedding_squared_norms, py::arg("indices"), py::arg("output_grads"),
        py::arg("scales"), py::kw_only(), py::arg("padding_idx") = -1, py::arg("schedule"));
  m.def("embedding_clipped_sums", embedding_clipped_sums, py::arg("indices"), py::arg("output_grads"),
        py::arg("scales"), py::arg("weights"), py::kw_only(), py::arg("num_embeddings"), py::arg("padding_idx") = -1,
        py::arg("schedule"));
});

}  // namespace
}  // namespace dpk::simt
