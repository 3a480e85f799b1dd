#include <optional>
#include <tuple>

#include "common/torch.h"
#include "norm/norm.h"

namespace dpk {
namespace {

using Grads = std::tuple<Tensor, Tensor, Tensor>;  // input, weight, bias

// Whether a map [batch, channels, spatial] lies as [batch, spatial, channels], which the CPU's kernel reads as it is.
bool channels_last(const Tensor& t) {
  return t.is_cpu() && !t.is_contiguous() && t.stride(1) == 1 && t.stride(2) == t.size(1) &&
         (t.size(0) == 1 || t.stride(0) == t.size(1) * t.size(2));
}

void check_values(const Tensor& x, const Tensor& output_grads, bool may_be_last) {
  check_kind(x, "x", 3, x.scalar_type());
  check_kind(output_grads, "output_grads", 3, x.scalar_type());
  const bool last = may_be_last && channels_last(x) && channels_last(output_grads);
  STD_TORCH_CHECK(last || (x.is_contiguous() && output_grads.is_contiguous()), "x and output_grads must be contiguous");
  for (int64_t dim = 0; dim < 3; ++dim) check_size(output_grads.size(dim) == x.size(dim), "output_grads, x");
}

void check_weight(const std::optional<Tensor>& weight, const Tensor& x, int64_t size) {
  if (!weight) return;
  check_input(*weight, "weight", 1, x.scalar_type());
  check_size(weight->size(0) == size, "weight, x");
}

Grads allocate(const Tensor& x, bool input_grads, int64_t size) {
  Tensor input = input_grads ? torch::stable::empty_like(x) : torch::stable::new_empty(x, {0, 0, 0});
  return {input, empty_double(x, {x.size(0), size}), empty_double(x, {x.size(0), size})};
}

Grads group_norm_backward(const Tensor& x, const Tensor& output_grads, const Tensor& mean, const Tensor& rstd,
                          const std::optional<Tensor>& weight, bool fixed, bool input_grads) {
  const OnDevice device(x);
  check_values(x, output_grads, true);
  check_input(mean, "mean", 2, acc_type(x));
  check_input(rstd, "rstd", 2, acc_type(x));
  const int64_t batch = x.size(0), channels = x.size(1), groups = mean.size(1);
  check_size(mean.size(0) == batch && rstd.size(0) == batch && rstd.size(1) == groups, "mean, rstd, x");
  check_size(groups > 0 && channels % groups == 0, "channels must be a multiple of the groups");
  check_weight(weight, x, channels);
  Grads grads = allocate(x, input_grads, channels);
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const GroupNormParams<T> params{data<T>(x),
                                    data<T>(output_grads),
                                    data<acc_t<T>>(mean),
                                    data<acc_t<T>>(rstd),
                                    weight ? data<T>(*weight) : nullptr,
                                    input_grads ? mutable_data<T>(std::get<0>(grads)) : nullptr,
                                    mutable_data<double>(std::get<1>(grads)),
                                    mutable_data<double>(std::get<2>(grads)),
                                    channels,
                                    groups,
                                    x.size(2),
                                    fixed};
    const bool last = channels_last(x);
    run(
        last ? batch : batch * groups, (last ? channels : channels / groups) * x.size(2),
        [&](auto begin, auto end) {
          last ? group_norm_last_backward_cpu(params, begin, end) : group_norm_backward_cpu(params, begin, end);
        },
        [&](auto stream) { group_norm_backward_cuda(params, batch, stream); });
  });
  return grads;
}

Grads layer_norm_backward(const Tensor& x, const Tensor& output_grads, const std::optional<Tensor>& mean,
                          const Tensor& rstd, const std::optional<Tensor>& weight, bool input_grads) {
  const OnDevice device(x);
  check_values(x, output_grads, false);
  const int64_t batch = x.size(0), positions = x.size(1), features = x.size(2);
  if (mean) {
    check_input(*mean, "mean", 2, acc_type(x));
    check_size(mean->size(0) == batch && mean->size(1) == positions, "mean, x");
  }
  check_input(rstd, "rstd", 2, acc_type(x));
  check_size(rstd.size(0) == batch && rstd.size(1) == positions, "rstd, x");
  check_weight(weight, x, features);
  Grads grads = allocate(x, input_grads, features);
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const LayerNormParams<T> params{data<T>(x),
                                    data<T>(output_grads),
                                    mean ? data<acc_t<T>>(*mean) : nullptr,
                                    data<acc_t<T>>(rstd),
                                    weight ? data<T>(*weight) : nullptr,
                                    input_grads ? mutable_data<T>(std::get<0>(grads)) : nullptr,
                                    mutable_data<double>(std::get<1>(grads)),
                                    mutable_data<double>(std::get<2>(grads)),
                                    positions,
                                    features};
    run(
        batch, positions * features, [&](auto begin, auto end) { layer_norm_backward_cpu(params, begin, end); },
        [&](auto stream) { layer_norm_backward_cuda(params, batch, stream); });
  });
  return grads;
}

DPK_SCHEMAS(m) {
  m.def(
      "group_norm_backward(Tensor x, Tensor output_grads, Tensor mean, Tensor rstd, Tensor? weight, bool fixed, "
      "bool input_grads) -> (Tensor, Tensor, Tensor)");
  m.def(
      "layer_norm_backward(Tensor x, Tensor output_grads, Tensor? mean, Tensor rstd, Tensor? weight, bool input_grads) "
      "-> (Tensor, Tensor, Tensor)");
}

DPK_IMPLEMENTATIONS(m) {
  m.impl("group_norm_backward", TORCH_BOX(&group_norm_backward));
  m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
}

}  // namespace
}  // namespace dpk
