#include "norm/norm.h"
#include "simt/binding.h"

namespace dpk::simt {
namespace {

using Optional = std::optional<py::array>;

py::object group_norm_backward(const py::array& x, const py::array& output_grads, const py::array& mean,
                               const py::array& rstd, const Optional& weight, bool fixed, bool input_grads,
                               const std::string& schedule) {
  return for_dtype<float, bfloat16, half>(x, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    const auto batch = x.shape(0), channels = x.shape(1), spatial = x.shape(2);
    const GroupNormParams<T> params{call.input<T>(x),
                                    call.input<T>(output_grads),
                                    call.input<acc_t<T>>(mean),
                                    call.input<acc_t<T>>(rstd),
                                    call.input<T>(weight),
                                    input_grads ? call.output<T>({batch, channels, spatial}) : nullptr,
                                    call.output<double>({batch, channels}),
                                    call.output<double>({batch, channels}),
                                    channels,
                                    mean.shape(1),
                                    spatial,
                                    fixed};
    group_norm_backward_cuda(params, batch, call.stream());
    return call.result();
  });
}

py::object layer_norm_backward(const py::array& x, const py::array& output_grads, const Optional& mean,
                               const py::array& rstd, const Optional& weight, bool input_grads,
                               const std::string& schedule) {
  return for_dtype<float, bfloat16, half>(x, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    const auto batch = x.shape(0), positions = x.shape(1), features = x.shape(2);
    const LayerNormParams<T> params{call.input<T>(x),
                                    call.input<T>(output_grads),
                                    call.input<acc_t<T>>(mean),
                                    call.input<acc_t<T>>(rstd),
                                    call.input<T>(weight),
                                    input_grads ? call.output<T>({batch, positions, features}) : nullptr,
                                    call.output<double>({batch, features}),
                                    call.output<double>({batch, features}),
                                    positions,
                                    features};
    layer_norm_backward_cuda(params, batch, call.stream());
    return call.result();
  });
}

const Family norm([](py::module_& m) {
  m.def("group_norm_backward", group_norm_backward, py::arg("x"), py::arg("output_grads"), py::arg("mean"),
        py::arg("rstd"), py::arg("weight"), py::kw_only(), py::arg("fixed") = false, py::arg("input_grads") = true,
        py::arg("schedule"));
  m.def("layer_norm_backward", layer_norm_backward, py::arg("x"), py::arg("output_grads"), py::arg("mean"),
        py::arg("rstd"), py::arg("weight"), py::kw_only(), py::arg("input_grads") = true, py::arg("schedule"));
});

}  // namespace
}  // namespace dpk::simt
