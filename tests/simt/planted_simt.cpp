#include <map>
#include <string>

#include "planted.h"
#include "simt/binding.h"

namespace dpk::simt {
namespace {

const std::map<std::string, Planted> kFaults{{"none", Planted::kNone},
                                             {"no barrier", Planted::kNoBarrier},
                                             {"no trailing barrier", Planted::kNoTrailingBarrier},
                                             {"no wait", Planted::kNoWait},
                                             {"uncommitted", Planted::kUncommitted},
                                             {"divergent", Planted::kDivergent},
                                             {"two barriers", Planted::kTwoBarriers},
                                             {"exited", Planted::kExited},
                                             {"beyond", Planted::kBeyond},
                                             {"global", Planted::kGlobal},
                                             {"input", Planted::kInput},
                                             {"unwritten", Planted::kUnwritten},
                                             {"partial", Planted::kPartial},
                                             {"misaligned", Planted::kMisaligned},
                                             {"overflow", Planted::kOverflow}};

py::object staged(const py::array& x, const std::string& fault, const std::string& schedule) {
  Call call(schedule);
  staged_cuda({call.input<float>(x), call.output<float>({x.size() / 2}), x.size()}, kFaults.at(fault), call.stream());
  return call.result();
}

py::object tiles(const py::array& a, const py::array& b, const std::string& fault, const std::string& schedule) {
  Call call(schedule);
  const int depth = static_cast<int>(a.shape(1));
  tiles_cuda({call.input<bfloat16>(a), call.input<bfloat16>(b), call.output<float>({32, 8}), depth}, kFaults.at(fault),
             call.stream());
  return call.result();
}

template <typename T>
py::object product(const py::array& a, const py::array& b, const std::string& schedule) {
  Call call(schedule);
  product_cuda<T>({call.input<float>(a), call.input<float>(b), call.output<float>({16, 8})}, call.stream());
  return call.result();
}

py::object intrinsics(const py::array& x, const std::string& schedule) {
  Call call(schedule);
  intrinsics_cuda({call.input<int>(x), call.output<int>({10, 64})}, call.stream());
  return call.result();
}

const Family planted([](py::module_& m) {
  m.def("planted_staged", staged, py::arg("x"), py::arg("fault"), py::arg("schedule"));
  m.def("planted_tiles", tiles, py::arg("a"), py::arg("b"), py::arg("fault"), py::arg("schedule"));
  m.def("product_tf32", product<tf32>, py::arg("a"), py::arg("b"), py::arg("schedule"));
  m.def("product_bfloat16", product<bfloat16>, py::arg("a"), py::arg("b"), py::arg("schedule"));
  m.def("product_half", product<half>, py::arg("a"), py::arg("b"), py::arg("schedule"));
  m.def("intrinsics", intrinsics, py::arg("x"), py::arg("schedule"));
  // Of common/scalar.h, element by element.
  m.def("widen_half", py::vectorize([](uint16_t bits) { return widen(half{bits}); }));
  m.def("narrow_half", py::vectorize([](float x) { return narrow<half>(x).bits; }));
  m.def("narrow_bfloat16", py::vectorize([](float x) { return narrow<bfloat16>(x).bits; }));
});

}  // namespace
}  // namespace dpk::simt
