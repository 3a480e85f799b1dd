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
  STD_TORCH_CHECK(out_height >= 1 && out_width >= 1, "features must not be empty");
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
  const auto within = [](const Tensor& source, int64_t size) {
    const int64_t* at = data<int64_t>(source);
    return std::all_of(at, at + source.size(0), [&](int64_t i) { return 0 <= i && i < size; });
  };
  STD_TORCH_CHECK(within(row_source, images.size(1)) && within(column_source, images.size(2)),
                  "row_source and column_source must lie within the images");

  const int64_t channels = scatter_channels(scales, angles);
  const int64_t sizes[] = {planes, channels, out_height, out_width};
  Tensor features = torch::stable::new_empty(images, torch::headeronly::IntHeaderOnlyArrayRef(sizes, 4));
  for_dtype(images, [&](auto zero) {
    using T = decltype(zero);
    std::vector<const T*> pointers[3];
    for (int64_t r = 0; r < scales; ++r) {
      pointers[0].push_back(data<T>(wavelets[r]));
      pointers[1].push_back(data<T>(rows[r]));
      pointers[2].push_back(data<T>(columns[r]));
    }
    const ScatterParams<T> params{data<T>(images),
                                  pointers[0].data(),
                                  pointers[1].data(),
                                  pointers[2].data(),
                                  data<int64_t>(row_source),
                                  data<int64_t>(column_source),
                                  mutable_data<T>(features),
                                  planes,
                                  images.size(1),
                                  images.size(2),
                                  height,
                                  width,
                                  out_height,
                                  out_width,
                                  scales,
                                  angles};
    parallel((planes + kScatterGroup - 1) / kScatterGroup, kScatterGroup * channels * height * width,
             [&](int64_t begin, int64_t end) { scatter_cpu(params, begin, end); });
  });
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
