#include <map>

#include "simt/binding.h"
#include "update/update.h"

namespace dpk::simt {
namespace {

using Arrays = std::vector<py::array>;
using Settings = std::vector<std::map<std::string, double>>;

template <typename T>
void* changed_as(Call& call, const py::array& array) {
  void* data = call.output<T>({array.shape(), array.shape() + array.ndim()});
  std::memcpy(data, array.data(), static_cast<size_t>(array.nbytes()));
  return data;
}

// What the kernel changes and the call returns; null where the array is empty.
void* changed(Call& call, const py::array& array) {
  if (array.size() == 0) return nullptr;
  if (array.dtype().is(dtype_of<double>())) return changed_as<double>(call, array);
  if (array.dtype().is(dtype_of<float>())) return changed_as<float>(call, array);
  if (array.dtype().is(dtype_of<half>())) return changed_as<half>(call, array);
  return changed_as<bfloat16>(call, array);
}

// Tensors by their position in all lists. settings: the scalars of UpdateTensor by name. Returns the parameters and
// moments that are not empty, tensor by tensor.
py::object update(const std::string& rule, const Arrays& parameters, const Arrays& sums, const Arrays& firsts,
                  const Arrays& seconds, const Arrays& largest, Settings settings, double denominator,
                  const py::array& key, int64_t domain, int64_t step, double noise_std, double grid,
                  const std::string& schedule) {
  Call call(schedule);
  std::vector<UpdateTensor> tensors;
  int64_t begin = 0;
  for (size_t k = 0; k < parameters.size(); ++k) {
    const auto set = [&](const char* name) { return settings[k][name]; };
    UpdateTensor t{};
    t.parameter = changed(call, parameters[k]);
    t.sum = call.input<double>(sums[k]);
    t.first_moment = changed(call, firsts[k]);
    t.second_moment = changed(call, seconds[k]);
    t.largest_second = changed(call, largest[k]);
    t.begin = begin, t.end = begin = begin + sums[k].size();
    t.rate = set("rate"), t.decay = set("decay"), t.shrink = set("shrink");
    t.keep_first = set("keep_first"), t.add_first = set("add_first"), t.keep_second = set("keep_second");
    t.second_unbias = set("second_unbias"), t.epsilon = set("epsilon");
    t.nesterov = set("nesterov") != 0, t.overwrite_first = set("overwrite_first") != 0;
    t.wide = parameters[k].dtype().is(dtype_of<double>());
    t.narrow = parameters[k].dtype().is(dtype_of<bfloat16>()) ? Narrow::kBfloat16
               : parameters[k].dtype().is(dtype_of<half>())   ? Narrow::kHalf
                                                              : Narrow::kNot;
    tensors.push_back(t);
  }
  UpdateParams params{tensors.data(),
                      static_cast<int64_t>(tensors.size()),
                      rule == "mean"  ? UpdateRule::kMean
                      : rule == "sgd" ? UpdateRule::kSgd
                                      : UpdateRule::kAdam,
                      denominator,
                      {{}, static_cast<uint32_t>(domain), static_cast<uint64_t>(step)},
                      noise_std,
                      grid};
  std::memcpy(params.stream.key, key.data(), 32);
  update_cuda(params, call.stream());
  return call.result();
}

const Family family([](py::module_& m) {
  m.def("update", update, py::arg("rule"), py::arg("parameters"), py::arg("sums"), py::arg("firsts"),
        py::arg("seconds"), py::arg("largest"), py::arg("settings"), py::kw_only(), py::arg("denominator"),
        py::arg("key"), py::arg("domain"), py::arg("step"), py::arg("noise_std"), py::arg("grid"), py::arg("schedule"));
});

}  // namespace
}  // namespace dpk::simt
