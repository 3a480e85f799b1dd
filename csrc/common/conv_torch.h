// What bindings of operators over the maps of a convolution share: their shape, checked, and how they lie.
#pragma once

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <vector>

#include "common/conv_shape.h"
#include "common/torch.h"

namespace dpk {

using Ints = std::vector<int64_t>;

// Product of the sizes of a map [batch, channels, *map].
inline int64_t positions_of(const Tensor& t) {
  int64_t positions = 1;
  for (int64_t i = 2; i < t.dim(); ++i) positions *= t.size(i);
  return positions;
}

// How a map [batch, channels, *map] lies in memory: plainly, or with the channels last. Where a size is 1 any stride is
// as good.
inline ConvLayout layout_of(const Tensor& t, const char* name) {
  if (t.is_contiguous()) return {positions_of(t), 1};
  const auto apart = [&](int64_t i, int64_t stride) { return t.size(i) == 1 || t.stride(i) == stride; };
  int64_t dense = t.size(1);
  bool channels_last = apart(1, 1);
  for (int64_t i = t.dim() - 1; i >= 2; dense *= t.size(i--)) channels_last &= apart(i, dense);
  STD_TORCH_CHECK(channels_last && apart(0, dense), name, " must be contiguous or channels-last");
  return {1, t.size(1)};
}

// The shape of the convolution whose weight gradient is wanted, lifted to three dimensions: a transposed convolution
// swaps its two maps, and its output may reach beyond what the input does.
inline ConvShape shape_of(const Tensor& input, const Tensor& output_grads, const Ints& kernel, const Ints& stride,
                          const Ints& padding, const Ints& dilation, int64_t groups, bool transposed) {
  const int64_t dims = kernel.size();
  check_size(1 <= dims && dims <= 3, "kernel_size");
  check_kind(input, "input", dims + 2, input.scalar_type());
  check_kind(output_grads, "output_grads", dims + 2, input.scalar_type());
  check_size(input.size(0) == output_grads.size(0), "input, output_grads");
  for (const Ints* setting : {&stride, &padding, &dilation})
    check_size(setting->size() == kernel.size(), "kernel_size, stride, padding, dilation");
  const Tensor &map = transposed ? output_grads : input, &grads = transposed ? input : output_grads;
  ConvShape s{input.size(0), groups,    map.size(1), grads.size(1), {1, 1, 1},
              {1, 1, 1},     {1, 1, 1}, {1, 1, 1},   {0, 0, 0},     {1, 1, 1}};
  check_size(groups > 0 && s.in_channels > 0 && s.out_channels > 0 && s.in_channels % groups == 0 &&
                 s.out_channels % groups == 0,
             "channels, groups");
  for (int64_t j = 0; j < dims; ++j) {
    const int64_t i = 3 - dims + j;
    s.in[i] = map.size(j + 2);
    s.out[i] = grads.size(j + 2);
    s.kernel[i] = kernel[j];
    s.stride[i] = stride[j];
    s.padding[i] = padding[j];
    s.dilation[i] = dilation[j];
    const bool positive = s.kernel[i] > 0 && s.stride[i] > 0 && s.padding[i] >= 0 && s.dilation[i] > 0;
    const int64_t reach = s.padded(i) - s.dilation[i] * (s.kernel[i] - 1) - 1;
    check_size(positive && reach >= 0 && 0 < s.out[i] && s.out[i] <= reach / s.stride[i] + 1, "maps, kernel");
  }
  return s;
}

inline Tensor new_tensor(const Tensor& like, const Ints& sizes, ScalarType type) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()), type);
}

// Asks for huge pages in a large tensor that is about to be written: the system hands memory over page by page, which
// otherwise costs more than the product that fills it.
inline void prefer_huge_pages([[maybe_unused]] Tensor& t, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096, kWorthIt = 1 << 24;
  const uintptr_t start = (reinterpret_cast<uintptr_t>(t.mutable_data_ptr()) + kPage - 1) / kPage * kPage;
  if (static_cast<uintptr_t>(bytes) >= kWorthIt)
    madvise(reinterpret_cast<void*>(start), (bytes - kPage) / kPage * kPage, MADV_HUGEPAGE);  // a wish: may fail
#endif
}

}  // namespace dpk
