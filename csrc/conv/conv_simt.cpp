#include "conv/conv.h"
#include "conv/plan.h"
#include "simt/binding.h"

namespace dpk::simt {
namespace {

using Triple = std::array<int64_t, 3>;

// A convolution of maps, of which `map` is what taps see and `grads` what they meet; either may have its channels last.
struct Maps {
  ConvShape shape;
  ConvLayout map, grads;

  Maps(int64_t batch, int64_t groups, int64_t channels, int64_t outputs, const Triple& in, const Triple& out,
       const Triple& kernel, const Triple& stride, const Triple& padding, const Triple& dilation, bool map_last,
       bool grads_last)
      : shape{batch, groups, channels, outputs, {}, {}, {}, {}, {}, {}} {
    for (int i = 0; i < 3; ++i) {
      shape.in[i] = in[i];
      shape.out[i] = out[i];
      shape.kernel[i] = kernel[i];
      shape.stride[i] = stride[i];
      shape.padding[i] = padding[i];
      shape.dilation[i] = dilation[i];
    }
    map = map_last ? ConvLayout{1, channels} : ConvLayout{shape.pixels(), 1};
    grads = grads_last ? ConvLayout{1, outputs} : ConvLayout{shape.positions(), 1};
  }
};

py::object squared_norms(const py::array& map, const py::array& grads, const Maps& m, bool transposed, bool weight,
                         bool bias, bool store, bool tf32, ConvStrategy strategy, const std::string& schedule) {
  return for_dtype<float, double, bfloat16, half>(map, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    const ConvShape& s = m.shape;
    const T *x = call.input<T>(map), *g = call.input<T>(grads);
    const int64_t channels = transposed ? s.in_channels : s.out_channels;
    ConvNormParams<T> params{s,
                             weight ? x : nullptr,
                             g,
                             m.map,
                             m.grads,
                             bias ? (transposed ? x : g) : nullptr,
                             transposed ? m.map : m.grads,
                             channels,
                             transposed ? s.pixels() : s.positions(),
                             call.output<double>({s.batch}),
                             store ? call.output<acc_t<T>>({s.batch, s.rows(), s.out_channels}) : nullptr,
                             bias ? call.output<double>({s.batch, channels}) : nullptr,
                             strategy};
    params.tf32 = tf32;
    params.scratch = call.scratch<double>(conv_norm_scratch(params));
    conv_squared_norms_cuda(params, call.stream());
    return call.result();
  });
}

py::object clipped_sums(const py::array& map, const py::array& grads, const py::array& weights, const Maps& m,
                        bool tf32, const std::string& schedule) {
  return for_dtype<float, double, bfloat16, half>(map, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    const ConvShape& s = m.shape;
    const T *x = call.input<T>(map), *g = call.input<T>(grads);
    const auto* w = call.input<double>(weights);
    ConvSumParams<T> params{s, x, g, m.map, m.grads, w, nullptr, nullptr};
    params.sum = call.output<double>({s.out_channels, s.rows()});
    params.tf32 = tf32;
    params.partial_sums = call.scratch<double>(conv_sum_scratch(params));
    conv_clipped_sums_cuda(params, call.stream());
    return call.result();
  });
}

// source: the map or the grads, whose bias is summed.
py::object bias_sums(const py::array& source, const py::array& weights, const Maps& m, bool transposed,
                     const std::string& schedule) {
  return for_dtype<float, double, bfloat16, half>(source, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    const ConvShape& s = m.shape;
    const int64_t channels = transposed ? s.in_channels : s.out_channels;
    ConvBiasSumParams<T> params{call.input<T>(source),
                                transposed ? m.map : m.grads,
                                call.input<double>(weights),
                                call.output<double>({channels}),
                                s.batch,
                                channels,
                                transposed ? s.pixels() : s.positions()};
    params.scratch = call.scratch<double>(s.batch * channels);
    conv_bias_sums_cuda(params, call.stream());
    return call.result();
  });
}

const Family conv([](py::module_& m) {
  py::enum_<ConvStrategy>(m, "ConvStrategy")
      .value("auto", ConvStrategy::kAuto)
      .value("direct", ConvStrategy::kDirect)
      .value("gram", ConvStrategy::kGram);
  m.def("conv_strategy_cuda", [](const Maps& maps) { return conv_strategy_cuda(maps.shape); });
  py::class_<Maps>(m, "ConvMaps")
      .def(py::init<int64_t, int64_t, int64_t, int64_t, Triple, Triple, Triple, Triple, Triple, Triple, bool, bool>());
  m.def("conv_squared_norms", squared_norms, py::arg("map"), py::arg("grads"), py::arg("maps"), py::kw_only(),
        py::arg("transposed") = false, py::arg("weight") = true, py::arg("bias") = true, py::arg("store") = false,
        py::arg("tf32") = false, py::arg("strategy") = ConvStrategy::kAuto, py::arg("schedule"));
  m.def("conv_clipped_sums", clipped_sums, py::arg("map"), py::arg("grads"), py::arg("weights"), py::arg("maps"),
        py::kw_only(), py::arg("tf32") = false, py::arg("schedule"));
  m.def("conv_bias_sums", bias_sums, py::arg("source"), py::arg("weights"), py::arg("maps"), py::kw_only(),
        py::arg("transposed") = false, py::arg("schedule"));
});

}  // namespace
}  // namespace dpk::simt
