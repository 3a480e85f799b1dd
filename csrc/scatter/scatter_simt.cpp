#include "scatter/scatter.h"
#include "simt/binding.h"

namespace dpk::simt {
namespace {

using Arrays = std::vector<py::array>;

py::object scatter(const py::array& images, const Arrays& wavelets, const Arrays& rows, const Arrays& columns,
                   const py::array& row_source, const py::array& column_source, int64_t angles,
                   const std::string& schedule) {
  return for_dtype<float, double>(images, [&](auto zero) {
    using T = decltype(zero);
    Call call(schedule);
    const auto scales = static_cast<int64_t>(rows.size());
    ScatterParams<T> params{};
    params.images = call.input<T>(images);
    for (size_t r = 0; r < rows.size(); ++r) {
      params.wavelets[r] = call.input<T>(wavelets[r]);
      params.rows[r] = call.input<T>(rows[r]);
      params.columns[r] = call.input<T>(columns[r]);
    }
    params.row_source = call.input<int64_t>(row_source);
    params.column_source = call.input<int64_t>(column_source);
    params.planes = images.shape(0);
    params.height = images.shape(1);
    params.width = images.shape(2);
    params.padded_height = row_source.shape(0);
    params.padded_width = column_source.shape(0);
    params.out_height = rows[0].shape(0);
    params.out_width = columns[0].shape(0);
    params.scales = scales;
    params.angles = angles;
    params.features =
        call.output<T>({params.planes, scatter_channels(scales, angles), params.out_height, params.out_width});
    scatter_cuda(params, call.stream());
    return call.result();
  });
}

const Family scatter_operators([](py::module_& m) {
  m.def("scatter", scatter, py::arg("images"), py::arg("wavelets"), py::arg("rows"), py::arg("columns"),
        py::arg("row_source"), py::arg("column_source"), py::arg("angles"), py::kw_only(), py::arg("schedule"));
});

}  // namespace
}  // namespace dpk::simt
