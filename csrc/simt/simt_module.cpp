// The module `_simt`: every family's CUDA kernels on the CPU, over NumPy arrays. For tests; no distribution holds it.
#include "simt/binding.h"

namespace dpk::simt {

const std::vector<std::string>& schedules() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const char* order : {"forward", "reverse", "shuffled", "warps", "warps-reversed"})
      for (const char* copies : {"eager", "lazy"}) all.push_back(std::string(order) + "/" + copies);
    return all;
  }();
  return names;
}

Schedule Call::parse(const std::string& name) {
  for (size_t i = 0; i < schedules().size(); ++i)
    if (schedules()[i] == name) return {static_cast<Order>(i / 2), i % 2 == 0};
  throw py::value_error("schedule must be one of SCHEDULES, got " + name);
}

}  // namespace dpk::simt

PYBIND11_MODULE(_simt, m) {
  m.doc() = "The CUDA kernels, run on the CPU thread by thread.";
  m.attr("SCHEDULES") = dpk::simt::schedules();
  m.def("launches", [] { return dpk::simt::machine.launches; }, "How often each kernel was launched in this process.");
  for (const auto& add : dpk::simt::families()) add(m);
}
