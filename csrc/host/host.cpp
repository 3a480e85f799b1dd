// dpkernels._host: what this build is, for `dpkernels doctor`, error messages and tests, and what cost models choose.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/isa.h"
#include "conv/plan.h"

namespace py = pybind11;

using Triple = std::array<int64_t, 3>;

PYBIND11_MODULE(_host, m) {
  m.doc() = "Build information, CPU features and the choices of cost models.";
  m.def(
      "build_info",
      [] {
        return std::map<std::string, std::string>{{"compiler", __VERSION__},
                                                  {"torch", DPK_BUILD_TORCH},
                                                  {"stable_abi_target", DPK_STABLE_ABI},
                                                  {"cuda", DPK_BUILD_CUDA}};
      },
      "Compiler and torch that built the extension, the oldest torch that it loads on, and the CUDA version or "
      "'none'.");
  m.def(
      "cpu_isas",
      [] { return std::vector<std::string>(dpk::kIsaNames, dpk::kIsaNames + static_cast<int>(dpk::widest_isa()) + 1); },
      "Instruction sets that the kernels can run on this CPU, narrowest first.");
  m.def(
      "conv_plan",
      [](int64_t in_channels, int64_t out_channels, int64_t groups, Triple in, Triple out, Triple kernel, Triple stride,
         Triple padding, Triple dilation) {
        dpk::ConvShape s{1, groups, in_channels, out_channels, {}, {}, {}, {}, {}, {}};
        for (int i = 0; i < 3; ++i) {
          s.in[i] = in[i];
          s.out[i] = out[i];
          s.kernel[i] = kernel[i];
          s.stride[i] = stride[i];
          s.padding[i] = padding[i];
          s.dilation[i] = dilation[i];
        }
        const bool stores = dpk::conv_stores(s);
        const bool gram = !stores && dpk::conv_strategy(s) == dpk::ConvStrategy::kGram;
        const dpk::ConvCosts costs(s);
        const std::map<std::string, double> ways{{"stored", costs.direct + costs.stored},
                                                 {"direct", costs.direct + costs.sum},
                                                 {"gram", costs.gram + costs.sum}};
        return std::pair(stores ? "stored" : gram ? "gram" : "direct", ways);
      },
      py::arg("in_channels"), py::arg("out_channels"), py::arg("groups"), py::arg("in_size"), py::arg("out_size"),
      py::arg("kernel_size"), py::arg("stride"), py::arg("padding"), py::arg("dilation"),
      "How norms and clipped sum of a convolution are computed, and what they are predicted to cost with stored "
      "gradients, with gradients computed twice (direct), and by pairs of positions (gram). Sizes are in three "
      "dimensions; a transposed convolution swaps its two maps.");
}
