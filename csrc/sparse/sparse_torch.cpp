#include "common/conv_torch.h"
#include "sparse/sparse.h"

namespace dpk {
namespace {

Tensor sparse_gradients(const Tensor& input, const Tensor& output_grads, const Tensor& entries, const Ints& kernel,
                        const Ints& stride, const Ints& padding, const Ints& dilation, int64_t groups) {
  const OnDevice device(input);
  const ConvShape s = shape_of(input, output_grads, kernel, stride, padding, dilation, groups, false);
  check_input(entries, "entries", 1, ScalarType::Long);
  const int64_t selected = entries.size(0);
#if !defined(USE_CUDA)  // there the CPU cannot look
  const int64_t *entry = data<int64_t>(entries), weights = s.out_channels * s.rows();
  STD_TORCH_CHECK(std::all_of(entry, entry + selected, [&](int64_t e) { return 0 <= e && e < weights; }),
                  "entries must lie in the weight");
#endif
  Tensor result = new_tensor(input, {s.batch, selected}, acc_type(input));
  if (input.is_cpu()) prefer_huge_pages(result, s.batch * selected * result.element_size());
  for_dtype<Wide::kEverywhere>(input, [&](auto zero) {
    using T = decltype(zero);
    const SparseParams<T> params{s,
                                 data<T>(input),
                                 data<T>(output_grads),
                                 layout_of(input, "input"),
                                 layout_of(output_grads, "output_grads"),
                                 data<int64_t>(entries),
                                 selected,
                                 mutable_data<acc_t<T>>(result)};
    run(
        s.batch, selected * s.positions() + s.in_channels * s.pixels() + s.out_channels * s.positions(),
        [&](auto begin, auto end) { sparse_gradients_cpu(params, begin, end); },
        [&](auto stream) { sparse_gradients_cuda(params, stream); });
  });
  return result;
}

DPK_SCHEMAS(m) {
  m.def(
      "sparse_gradients(Tensor input, Tensor output_grads, Tensor entries, int[] kernel_size, int[] stride, "
      "int[] padding, int[] dilation, int groups) -> Tensor");
}

DPK_IMPLEMENTATIONS(m) { m.impl("sparse_gradients", TORCH_BOX(&sparse_gradients)); }

}  // namespace
}  // namespace dpk
