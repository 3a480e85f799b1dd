#include <vector>

#include "common/torch.h"
#include "scatter/scatter.h"

namespace dpk {
namespace {

using Tensors = std::vector<Tensor>;

// images: [planes, height, width]; for each resolution wavelets [count, H >> r, W >> r], rows [out_height, H >> r] and
// columns [out_width, W >> r], in one dtype.
Tensor scatter(const Tensor& images, const Tensors& wavelets, const Tensors& rows, const Tensors& columns,
               const Tensor& row_source, const Tensor& column_source, int64_t angles) {
  const OnDevice device(images);
  const ScalarType type = images.scalar_type();
  check_input(images, "images", 3, type);
  check_input(row_source, "row_source", 1, ScalarType::Long);
  check_input(column_source, "column_source", 1, ScalarType::Long);
  const int64_t planes = images.size(0), scales = static_cast<int64_t>(rows.size());
  STD_TORCH_CHECK(1 <= scales && scales <= kMaxScatterScales && angles >= 1, "scales and angles must be positive");
  check_size(static_cast<int64_t>(wavelets.size()) == scales && static_cast<int64_t>(columns.size()) == scales,
             "wavelets, rows, columns");
  const int64_t height = row_source.size(0), width = column_source.size(0);
  const int64_t out_height = rows[0].size(0), out_width = columns[0].size(0);
  STD_TORCH_CHECK(
      height >= 1 && width >= 1 && height % (int64_t{1} << scales) == 0 && width % (int64_t{1} << scales) == 0,
      "padded sizes must be multiples of 2^scales, got ", height, " and ", width);
  STD_TORCH_CHECK(1 <= out_height && out_height <= height >> scales && 1 <= out_width && out_width <= width >> scales,
                  "features must be neither empty nor larger than the subsampled image, got ", out_height, " x ",
                  out_width);
  for (int64_t r = 0; r < scales; ++r) {
    check_input(wavelets[r], "wavelets", 3, type);
    check_input(rows[r], "rows", 2, type);
    check_input(columns[r], "columns", 2, type);
    check_size(wavelets[r].size(0) == std::max<int64_t>(0, scales - scatter_first(r)) * angles &&
                   wavelets[r].size(1) == height >> r && wavelets[r].size(2) == width >> r,
               "wavelets");
    check_size(rows[r].size(0) == out_height && rows[r].size(1) == height >> r, "rows");
    check_size(columns[r].size(0) == out_width && columns[r].size(1) == width >> r, "columns");
  }
#if !defined(USE_CUDA)  // the device's kernel looks at them itself
  const auto within = [](const Tensor& source, int64_t size) {
    const int64_t* at = data<int64_t>(source);
    return std::all_of(at, at + source.size(0), [&](int64_t i) { return 0 <= i && i < size; });
  };
  STD_TORCH_CHECK(within(row_source, images.size(1)) && within(column_source, images.size(2)),
                  "row_source and column_source must lie within the images");
#endif

  const int64_t channels = scatter_channels(scales, angles);
  const int64_t sizes[] = {planes, channels, out_height, out_width};
  Tensor features = torch::stable::new_empty(images, torch::headeronly::IntHeaderOnlyArrayRef(sizes, 4));
  const auto transform = [&](auto zero) {
    using T = decltype(zero);
    ScatterParams<T> params{};
    params.images = data<T>(images);
    for (int64_t r = 0; r < scales; ++r) {
      params.wavelets[r] = data<T>(wavelets[r]);
      params.rows[r] = data<T>(rows[r]);
      params.columns[r] = data<T>(columns[r]);
    }
    params.row_source = data<int64_t>(row_source);
    params.column_source = data<int64_t>(column_source);
    params.features = mutable_data<T>(features);
    params.planes = planes;
    params.height = images.size(1);
    params.width = images.size(2);
    params.padded_height = height;
    params.padded_width = width;
    params.out_height = out_height;
    params.out_width = out_width;
    params.scales = scales;
    params.angles = angles;
    run((planes + kScatterGroup - 1) / kScatterGroup, kScatterGroup * channels * height * width,
        [&](auto begin, auto end) { scatter_cpu(params, begin, end); },
        [&](auto stream) {
          const int64_t bytes = scatter_shared_bytes(params);
          STD_TORCH_CHECK(bytes <= kScatterSharedBytes, "images must be small enough for a plane of them to take ",
                          kScatterSharedBytes, " bytes of shared memory on CUDA; padded to ", height, " x ", width,
                          " one takes ", bytes, ". The CPU takes any size");
          scatter_cuda(params, stream);
        });
  };
  if (type == ScalarType::Float) {
    transform(float{});
  } else {
    STD_TORCH_CHECK(type == ScalarType::Double, "dtype must be float32 or float64");
    transform(double{});
  }
  return features;
}

DPK_SCHEMAS(m) {
  m.def(
      "scatter(Tensor images, Tensor[] wavelets, Tensor[] rows, Tensor[] columns, Tensor row_source, "
      "Tensor column_source, int angles) -> Tensor");
}

DPK_IMPLEMENTATIONS(m) { m.impl("scatter", TORCH_BOX(&scatter)); }

}  // namespace
}  // namespace dpk
