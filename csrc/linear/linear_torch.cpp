#include <optional>
#include <tuple>

#include "common/torch.h"
#include "linear/linear.h"

namespace dpk {
namespace {

void check(const Tensor& activations, const Tensor& output_grads) {
  check_input(activations, "activations", 3, activations.scalar_type());
  check_input(output_grads, "output_grads", 3, activations.scalar_type());
  check_size(activations.size(0) == output_grads.size(0) && activations.size(1) == output_grads.size(1),
             "activations, output_grads");
}

Tensor squared_norms(const Tensor& activations, const Tensor& output_grads, bool weight, bool bias,
                     [[maybe_unused]] bool tf32) {
  const OnDevice device(activations);
  check(activations, output_grads);
  Tensor result = empty_double(activations, {activations.size(0)});
  for_dtype<Wide::kEverywhere>(activations, [&](auto zero) {
    using T = decltype(zero);
    LinearNormParams<T> params{data<T>(activations),
                               data<T>(output_grads),
                               mutable_data<double>(result),
                               activations.size(1),
                               activations.size(2),
                               output_grads.size(2),
                               weight,
                               bias};
    const int64_t work =
        params.positions * (params.in_features + params.out_features) * std::min<int64_t>(params.positions, 64);
    run(
        activations.size(0), work, [&](auto begin, auto end) { linear_squared_norms_cpu(params, begin, end); },
        [&](auto stream) {
          Tensor scratch = empty_double(activations, {linear_norm_scratch(params, activations.size(0))});
          params.scratch = mutable_data<double>(scratch);
          params.tf32 = tf32;
          linear_squared_norms_cuda(params, activations.size(0), stream);
        });
  });
  return result;
}

std::tuple<Tensor, Tensor> forward(const Tensor& activations, const Tensor& weight, const std::optional<Tensor>& bias) {
  const OnDevice device(activations);
  check_input(activations, "activations", 2, activations.scalar_type());
  check_input(weight, "weight", 2, activations.scalar_type());
  check_size(weight.size(1) == activations.size(1), "weight, activations");
  const int64_t rows = activations.size(0), p = activations.size(1), d = weight.size(0);
  if (bias) {
    check_input(*bias, "bias", 1, activations.scalar_type());
    check_size(bias->size(0) == d, "bias, weight");
  }
  Tensor outputs = torch::stable::new_empty(activations, {rows, d});
  Tensor squared_rows = empty_double(activations, {rows});
  for_dtype<Wide::kEverywhere>(activations, [&](auto zero) {
    using T = decltype(zero);
    const LinearForwardParams<T> params{data<T>(activations),
                                        data<T>(weight),
                                        bias ? data<T>(*bias) : nullptr,
                                        mutable_data<T>(outputs),
                                        mutable_data<double>(squared_rows),
                                        p,
                                        d};
    // Pieces of whole register tiles, the same for any number of threads: a row's bits depend on its tile's height.
    constexpr int64_t kPiece = 8;
    run((rows + kPiece - 1) / kPiece, kPiece * p * (d + 1),
        [&](auto begin, auto end) { linear_forward_cpu(params, begin * kPiece, std::min(end * kPiece, rows)); },
        [&](auto stream) { linear_forward_cuda(params, rows, stream); });
  });
  return {outputs, squared_rows};
}

std::tuple<Tensor, Tensor> clipped_sums(const Tensor& activations, const Tensor& output_grads, const Tensor& weights,
                                        bool weight, bool bias, [[maybe_unused]] bool tf32) {
  const OnDevice device(activations);
  check(activations, output_grads);
  check_input(weights, "weights", 1, ScalarType::Double);
  check_size(weights.size(0) == activations.size(0), "weights, activations");
  const int64_t p = activations.size(2), d = output_grads.size(2);
  Tensor weight_sum = empty_double(activations, {weight ? d : 0, weight ? p : 0});
  Tensor bias_sum = empty_double(activations, {bias ? d : 0});
  for_dtype<Wide::kEverywhere>(activations, [&](auto zero) {
    using T = decltype(zero);
    LinearSumParams<T> params{data<T>(activations),
                              data<T>(output_grads),
                              data<double>(weights),
                              weight ? mutable_data<double>(weight_sum) : nullptr,
                              bias ? mutable_data<double>(bias_sum) : nullptr,
                              activations.size(0),
                              activations.size(1),
                              p,
                              d};
#if defined(USE_CUDA)
    Tensor scratch = empty_double(activations, {linear_sum_scratch(params)});
    params.scratch = mutable_data<double>(scratch);
    params.tf32 = tf32;
    linear_clipped_sums_cuda(params, current_stream());
#else
    const int64_t tasks = linear_sum_tasks(p, d);
    parallel(tasks, activations.size(0) * activations.size(1) * (p + 1) * d / std::max<int64_t>(1, tasks),
             [&](int64_t begin, int64_t end) { linear_clipped_sums_cpu(params, begin, end); });
#endif
  });
  return {weight_sum, bias_sum};
}

DPK_SCHEMAS(m) {
  m.def(
      "linear_squared_norms(Tensor activations, Tensor output_grads, bool weight, bool bias, bool tf32=False) -> "
      "Tensor");
  m.def("linear_forward(Tensor activations, Tensor weight, Tensor? bias) -> (Tensor, Tensor)");
  m.def(
      "linear_clipped_sums(Tensor activations, Tensor output_grads, Tensor weights, bool weight, bool bias, "
      "bool tf32=False) -> (Tensor, Tensor)");
}

DPK_IMPLEMENTATIONS(m) {
  m.impl("linear_squared_norms", TORCH_BOX(&squared_norms));
  m.impl("linear_forward", TORCH_BOX(&forward));
  m.impl("linear_clipped_sums", TORCH_BOX(&clipped_sums));
}

}  // namespace
}  // namespace dpk
