#include "simt/binding.h"
#include "sparse/sparse.h"

namespace dpk::simt {
namespace {

using Triple = std::array<int64_t, 3>;

// maps: [batch, channels, *in] and [batch, outputs, *out] in three dimensions, or with the channels last.
py::object sparse_gradients(const py::array& input, const py::array& output_grads, const py::array& entries,
                            const Triple& kernel, const Triple& stride, const Triple& padding, const Triple& dilation,
                            int64_t groups, bool channels_last, const std::string& schedule) {
  return for_dtype<float, double, bfloat16, half>(input, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    const int channel = channels_last ? 4 : 1, map = channels_last ? 1 : 2;
    ConvShape s{input.shape(0), groups, input.shape(channel), output_grads.shape(channel), {}, {}, {}, {}, {}, {}};
    for (int i = 0; i < 3; ++i) {
      s.in[i] = input.shape(map + i);
      s.out[i] = output_grads.shape(map + i);
      s.kernel[i] = kernel[i];
      s.stride[i] = stride[i];
      s.padding[i] = padding[i];
      s.dilation[i] = dilation[i];
    }
    const SparseParams<T> params{s,
                                 call.input<T>(input),
                                 call.input<T>(output_grads),
                                 channels_last ? ConvLayout{1, s.in_channels} : ConvLayout{s.pixels(), 1},
                                 channels_last ? ConvLayout{1, s.out_channels} : ConvLayout{s.positions(), 1},
                                 call.input<int64_t>(entries),
                                 entries.shape(0),
                                 call.output<acc_t<T>>({s.batch, entries.shape(0)})};
    sparse_gradients_cuda(params, call.stream());
    return call.result();
  });
}

const Family sparse([](py::module_& m) {
  m.def("sparse_gradients", sparse_gradients, py::arg("input"), py::arg("output_grads"), py::arg("entries"),
        py::kw_only(), py::arg("kernel_size"), py::arg("stride"), py::arg("padding"), py::arg("dilation"),
        py::arg("groups") = 1, py::arg("channels_last") = false, py::arg("schedule"));
});

}  // namespace
}  // namespace dpk::simt
