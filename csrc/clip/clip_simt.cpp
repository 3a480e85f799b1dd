#include "clip/clip.h"
#include "simt/binding.h"

namespace dpk::simt {
namespace {

py::object clip_factors(const std::vector<py::array>& squared_norms, double max_grad_norm, double loss_scale,
                        const std::string& schedule) {
  Call call(schedule);
  std::vector<const double*> parts;
  for (const py::array& part : squared_norms) parts.push_back(call.input<double>(part));
  const auto batch = squared_norms.at(0).size();
  const ClipFactorParams params{parts.data(),
                                call.output<double>({batch}),
                                call.output<double>({batch}),
                                static_cast<int64_t>(parts.size()),
                                max_grad_norm,
                                loss_scale};
  clip_factors_cuda(params, batch, call.stream());
  return call.result();
}

py::object row_squared_norms(const py::array& per_example, const std::string& schedule) {
  return for_dtype<float, double, bfloat16, half>(per_example, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    const auto batch = per_example.shape(0), size = per_example.shape(1);
    const RowNormParams<T> params{call.input<T>(per_example), call.output<double>({batch}), size,
                                  call.scratch<double>(batch * row_norm_splits(size))};
    row_squared_norms_cuda(params, batch, call.stream());
    return call.result();
  });
}

py::object weighted_row_sum(const py::array& per_example, const py::array& weights, const std::string& schedule) {
  return for_dtype<float, double, bfloat16, half>(per_example, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    const auto batch = per_example.shape(0), size = per_example.shape(1);
    const DenseRowSumParams<T> params{call.input<T>(per_example), call.input<double>(weights),
                                      call.output<double>({size}), batch, size};
    weighted_row_sum_cuda(params, call.stream());
    return call.result();
  });
}

const Family clip([](py::module_& m) {
  m.def("clip_factors", clip_factors, py::arg("squared_norms"), py::kw_only(), py::arg("max_grad_norm"),
        py::arg("loss_scale") = 1., py::arg("schedule"));
  m.def("row_squared_norms", row_squared_norms, py::arg("per_example"), py::kw_only(), py::arg("schedule"));
  m.def("weighted_row_sum", weighted_row_sum, py::arg("per_example"), py::arg("weights"), py::kw_only(),
        py::arg("schedule"));
});

}  // namespace
}  // namespace dpk::simt
