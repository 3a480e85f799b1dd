#include <tuple>
#include <vector>

#include "clip/clip.h"
#include "common/torch.h"

namespace dpk {
namespace {

std::tuple<Tensor, Tensor> clip_factors(const std::vector<Tensor>& squared_norms, double max_grad_norm,
                                        double loss_scale) {
  STD_TORCH_CHECK(!squared_norms.empty(), "squared_norms must not be empty");
  const OnDevice device(squared_norms[0]);
  const int64_t batch = squared_norms[0].size(0);
  std::vector<const double*> parts;
  for (const Tensor& part : squared_norms) {
    check_input(part, "squared_norms", 1, ScalarType::Double);
    check_size(part.size(0) == batch, "squared_norms");
    parts.push_back(data<double>(part));
  }
  Tensor weights = empty_double(squared_norms[0], {batch}), norms = empty_double(squared_norms[0], {batch});
  const ClipFactorParams params{parts.data(),
                                mutable_data<double>(weights),
                                mutable_data<double>(norms),
                                static_cast<int64_t>(parts.size()),
                                max_grad_norm,
                                loss_scale};
  run(
      batch, params.parts + 8, [&](auto begin, auto end) { clip_factors_cpu(params, begin, end); },
      [&](auto stream) { clip_factors_cuda(params, batch, stream); });
  return {weights, norms};
}

Tensor row_squared_norms(const Tensor& per_example) {
  const OnDevice device(per_example);
  check_input(per_example, "per_example", 2, per_example.scalar_type());
  const int64_t batch = per_example.size(0), size = per_example.size(1);
  Tensor result = empty_double(per_example, {batch});
  for_dtype<Wide::kEverywhere>(per_example, [&](auto zero) {
    using T = decltype(zero);
    RowNormParams<T> params{data<T>(per_example), mutable_data<double>(result), size};
    run(
        batch, size, [&](auto begin, auto end) { row_squared_norms_cpu(params, begin, end); },
        [&](auto stream) {
          Tensor partials = empty_double(per_example, {batch, row_norm_splits(size)});
          params.partials = mutable_data<double>(partials);
          row_squared_norms_cuda(params, batch, stream);
        });
  });
  return result;
}

Tensor weighted_row_sum(const Tensor& per_example, const Tensor& weights) {
  const OnDevice device(per_example);
  check_input(per_example, "per_example", 2, per_example.scalar_type());
  check_input(weights, "weights", 1, ScalarType::Double);
  const int64_t batch = per_example.size(0), size = per_example.size(1);
  check_size(weights.size(0) == batch, "weights, per_example");
  Tensor result = empty_double(per_example, {size});
  for_dtype<Wide::kEverywhere>(per_example, [&](auto zero) {
    using T = decltype(zero);
#if defined(USE_CUDA)
    const DenseRowSumParams<T> params{data<T>(per_example), data<double>(weights), mutable_data<double>(result), batch,
                                      size};
    weighted_row_sum_cuda(params, current_stream());
#else
    std::vector<const T*> rows;
    std::vector<double> kept_weights;
    for (int64_t b = 0; b < batch; ++b)
      if (const double weight = data<double>(weights)[b]; weight != 0) {
        rows.push_back(data<T>(per_example) + b * size);
        kept_weights.push_back(weight);
      }
    const int64_t kept = static_cast<int64_t>(rows.size());
    const RowSumParams<T> params{rows.data(), kept_weights.data(), mutable_data<double>(result), kept, size};
    parallel((size + kRowSumBlock - 1) / kRowSumBlock, kRowSumBlock * (kept + 1),
             [&](int64_t begin, int64_t end) { weighted_row_sum_cpu(params, begin, end); });
#endif
  });
  return result;
}

DPK_SCHEMAS(m) {
  m.def("clip_factors(Tensor[] squared_norms, float max_grad_norm, float loss_scale) -> (Tensor, Tensor)");
  m.def("row_squared_norms(Tensor per_example) -> Tensor");
  m.def("weighted_row_sum(Tensor per_example, Tensor weights) -> Tensor");
}

DPK_IMPLEMENTATIONS(m) {
  m.impl("clip_factors", TORCH_BOX(&clip_factors));
  m.impl("row_squared_norms", TORCH_BOX(&row_squared_norms));
  m.impl("weighted_row_sum", TORCH_BOX(&weighted_row_sum));
}

}  // namespace
}  // namespace dpk
