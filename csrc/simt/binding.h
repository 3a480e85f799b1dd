// How a family's operators reach Python: csrc/<f>/<f>_simt.cpp registers them into the module `_simt`. The arrays of a
// call are NumPy's; bfloat16 is passed as its bits, uint16.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>
#include <list>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "common/scalar.h"
#include "simt/guarded.h"
#include "simt/machine.h"

struct CUstream_st;

namespace dpk::simt {

namespace py = pybind11;

// The functions that add operators to the module.
inline std::vector<std::function<void(py::module_&)>>& families() {
  static std::vector<std::function<void(py::module_&)>> list;
  return list;
}
struct Family {
  explicit Family(std::function<void(py::module_&)> add) { families().push_back(std::move(add)); }
};

template <typename T>
py::dtype dtype_of() {
  if constexpr (std::is_same_v<T, half>)
    return py::dtype("float16");
  else if constexpr (std::is_same_v<T, bfloat16>)
    return py::dtype::of<uint16_t>();
  else
    return py::dtype::of<T>();
}

// Calls f(T{}) for the first of the types T... that the array holds.
template <typename First, typename... Rest, typename F>
py::object for_dtype(const py::array& array, F f) {
  if (array.dtype().is(dtype_of<First>())) return f(First{});
  if constexpr (sizeof...(Rest) > 0)
    return for_dtype<Rest...>(array, f);
  else
    throw py::type_error("unsupported dtype " + std::string(py::str(array.dtype())));
}

// One call of an operator. Kernels read and write guarded copies of the arrays: outputs and scratch memory are poison
// at first, inputs cannot be written.
class Call {
 public:
  explicit Call(const std::string& schedule) { machine.schedule = parse(schedule); }

  template <typename T>
  const T* input(const py::array& array) {
    if (!array.dtype().is(dtype_of<T>()) || !(array.flags() & py::array::c_style))
      throw py::type_error("expected a C-contiguous array of " + std::string(py::str(dtype_of<T>())) + ", got " +
                           std::string(py::str(array.dtype())));
    return reinterpret_cast<const T*>(add(array.data(), static_cast<size_t>(array.nbytes())));
  }
  template <typename T>
  const T* input(const std::optional<py::array>& array) {
    return array ? input<T>(*array) : nullptr;
  }
  // Small tables that a launcher reads on the host stay where they are; this one is for those that a kernel reads.
  template <typename T>
  const T* input(const std::vector<T>& values) {
    return reinterpret_cast<const T*>(add(values.data(), values.size() * sizeof(T)));
  }

  template <typename T>
  T* scratch(int64_t count) {
    return reinterpret_cast<T*>(add(nullptr, static_cast<size_t>(count) * sizeof(T)));
  }
  // As scratch; result() returns what kernels wrote.
  template <typename T>
  T* output(const std::vector<py::ssize_t>& shape) {
    py::array array(dtype_of<T>(), shape);
    T* data = scratch<T>(array.size());
    outputs_.push_back({std::move(array), reinterpret_cast<unsigned char*>(data)});
    return data;
  }

  CUstream_st* stream() const { return nullptr; }

  // The outputs in the order in which they were made; one alone, or a tuple.
  py::object result() {
    py::tuple all(outputs_.size());
    for (size_t i = 0; i < outputs_.size(); ++i) {
      std::memcpy(outputs_[i].array.mutable_data(), outputs_[i].data, static_cast<size_t>(outputs_[i].array.nbytes()));
      all[i] = outputs_[i].array;
    }
    return outputs_.size() == 1 ? py::object(all[0]) : py::object(all);
  }

  static Schedule parse(const std::string& name);

 private:
  struct Output {
    py::array array;
    unsigned char* data;
  };
  std::list<Guarded> buffers_;
  std::vector<Output> outputs_;

  // Eager schedules guard the end of a buffer, the others its start.
  unsigned char* add(const void* from, size_t bytes) {
    return buffers_.emplace_back(from, bytes, machine.schedule.eager).data();
  }
};

// The names of all schedules.
const std::vector<std::string>& schedules();

}  // namespace dpk::simt
