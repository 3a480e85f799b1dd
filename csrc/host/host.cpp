// dpkernels._host: what this build is, for `dpkernels doctor`, error messages and tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <vector>

#include "common/isa.h"

namespace py = pybind11;

PYBIND11_MODULE(_host, m) {
  m.doc() = "Build information and CPU features.";
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
}
