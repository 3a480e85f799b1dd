#include "noise/noise.h"
#include "simt/binding.h"

namespace dpk::simt {
namespace {

// on_device: the key is read there.
template <typename T, typename F>
py::object fill(F launch, const py::array& key, int64_t domain, int64_t step, int64_t offset, int64_t count,
                double scale, double unit, bool on_device, const std::string& schedule) {
  Call call(schedule);
  StreamParams<T> params{
      {{}, static_cast<uint32_t>(domain), static_cast<uint64_t>(step)}, offset, count, scale, unit, nullptr};
  const uint8_t* device_key = call.input<uint8_t>(key);
  if (!on_device) std::memcpy(params.stream.key, device_key, 32);  // x86-64 and aarch64 are little-endian
  params.out = call.output<T>({count});
  launch(params, on_device ? device_key : nullptr, call.stream());
  return call.result();
}

py::object random_bits(const py::array& key, int64_t domain, int64_t step, int64_t offset, int64_t count,
                       bool on_device, const std::string& schedule) {
  return fill<int64_t>([](auto... a) { random_bits_cuda(a...); }, key, domain, step, offset, count, 0, 0, on_device,
                       schedule);
}

py::object gaussian(const py::array& key, int64_t domain, int64_t step, int64_t offset, int64_t count, bool on_device,
                    const std::string& schedule) {
  return fill<double>([](auto... a) { gaussian_cuda(a...); }, key, domain, step, offset, count, 0, 0, on_device,
                      schedule);
}

py::object grid_gaussian(const py::array& key, int64_t domain, int64_t step, int64_t offset, int64_t count,
                         double noise_std, double grid, bool on_device, const std::string& schedule) {
  return fill<double>([](auto... a) { grid_gaussian_cuda(a...); }, key, domain, step, offset, count, noise_std / grid,
                      grid, on_device, schedule);
}

const Family noise([](py::module_& m) {
  const auto key = py::arg("key"), domain = py::arg("domain"), step = py::arg("step"), offset = py::arg("offset"),
             count = py::arg("count");
  m.def("random_bits", random_bits, key, domain, step, offset, count, py::kw_only(), py::arg("on_device") = false,
        py::arg("schedule"));
  m.def("gaussian", gaussian, key, domain, step, offset, count, py::kw_only(), py::arg("on_device") = false,
        py::arg("schedule"));
  m.def("grid_gaussian", grid_gaussian, key, domain, step, offset, count, py::kw_only(), py::arg("noise_std"),
        py::arg("grid"), py::arg("on_device") = false, py::arg("schedule"));
});

}  // namespace
}  // namespace dpk::simt
