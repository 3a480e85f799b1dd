#include "linear/linear.h"
#include "simt/binding.h"

namespace dpk::simt {
namespace {

using Optional = std::optional<py::array>;

py::object linear_squared_norms(const py::array& activations, const py::array& output_grads, bool weight, bool bias,
                                bool tf32, const std::string& schedule) {
  return for_dtype<float, double, bfloat16, half>(activations, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    const auto batch = activations.shape(0);
    LinearNormParams<T> params{call.input<T>(activations),
                               call.input<T>(output_grads),
                               call.output<double>({batch}),
                               activations.shape(1),
                               activations.shape(2),
                               output_grads.shape(2),
                               weight,
                               bias};
    params.tf32 = tf32;
    params.scratch = call.scratch<double>(linear_norm_scratch(params, batch));
    linear_squared_norms_cuda(params, batch, call.stream());
    return call.result();
  });
}

py::object forward(const py::array& activations, const py::array& weight, const Optional& bias,
                   const std::string& schedule) {
  return for_dtype<float, double, bfloat16, half>(activations, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    const auto rows = activations.shape(0), outputs = weight.shape(0);
    const LinearForwardParams<T> params{call.input<T>(activations),
                                        call.input<T>(weight),
                                        call.input<T>(bias),
                                        call.output<T>({rows, outputs}),
                                        call.output<double>({rows}),
                                        activations.shape(1),
                                        outputs};
    linear_forward_cuda(params, rows, call.stream());
    return call.result();
  });
}

py::object linear_clipped_sums(const py::array& activations, const py::array& output_grads, const py::array& weights,
                               bool weight, bool bias, bool tf32, const std::string& schedule) {
  return for_dtype<float, double, bfloat16, half>(activations, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    const auto p = activations.shape(2), d = output_grads.shape(2);
    LinearSumParams<T> params{call.input<T>(activations),
                              call.input<T>(output_grads),
                              call.input<double>(weights),
                              weight ? call.output<double>({d, p}) : nullptr,
                              bias ? call.output<double>({d}) : nullptr,
                              activations.shape(0),
                              activations.shape(1),
                              p,
                              d};
    params.tf32 = tf32;
    params.scratch = call.scratch<double>(linear_sum_scratch(params));
    linear_clipped_sums_cuda(params, call.stream());
    return call.result();
  });
}

const Family linear([](py::module_& m) {
  m.def("linear_squared_norms", linear_squared_norms, py::arg("activations"), py::arg("output_grads"), py::kw_only(),
        py::arg("weight") = true, py::arg("bias") = true, py::arg("tf32") = false, py::arg("schedule"));
  m.def("linear_forward", forward, py::arg("activations"), py::arg("weight"), py::arg("bias"), py::kw_only(),
        py::arg("schedule"));
  m.def("linear_clipped_sums", linear_clipped_sums, py::arg("activations"), py::arg("output_grads"), py::arg("weights"),
        py::kw_only(), py::arg("weight") = true, py::arg("bias") = true, py::arg("tf32") = false, py::arg("schedule"));
});

}  // namespace
}  // namespace dpk::simt
