#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <memory>
#include <tuple>
#include <vector>

#include "common/torch.h"
#include "conv/conv.h"
#include "conv/plan.h"

namespace dpk {
namespace {

using Ints = std::vector<int64_t>;

// Product of the sizes of a map [batch, channels, *map].
int64_t positions_of(const Tensor& t) {
  int64_t positions = 1;
  for (int64_t i = 2; i < t.dim(); ++i) positions *= t.size(i);
  return positions;
}

// How a map [batch, channels, *map] lies in memory: plainly, or with the channels last. Where a size is 1 any stride is
// as good.
ConvLayout layout_of(const Tensor& t, const char* name) {
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
ConvShape shape_of(const Tensor& input, const Tensor& output_grads, const Ints& kernel, const Ints& stride,
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

Tensor new_tensor(const Tensor& like, const Ints& sizes, ScalarType type) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()), type);
}

// [..., *kernel, ...]
Ints around(Ints front, const Ints& kernel, std::initializer_list<int64_t> back = {}) {
  front.insert(front.end(), kernel.begin(), kernel.end());
  front.insert(front.end(), back);
  return front;
}

// Asks for huge pages in a large tensor that is about to be written: the system hands memory over page by page, which
// otherwise costs more than the product that fills it.
void prefer_huge_pages([[maybe_unused]] Tensor& t, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096, kWorthIt = 1 << 24;
  const uintptr_t start = (reinterpret_cast<uintptr_t>(t.mutable_data_ptr()) + kPage - 1) / kPage * kPage;
  if (static_cast<uintptr_t>(bytes) >= kWorthIt)
    madvise(reinterpret_cast<void*>(start), (bytes - kPage) / kPage * kPage, MADV_HUGEPAGE);  // a wish: may fail
#endif
}

int64_t work(const ConvShape& s) { return s.positions() * s.rows() * s.out_channels; }

std::tuple<Tensor, Tensor, Tensor> squared_norms(const Tensor& input, const Tensor& output_grads, const Ints& kernel,
                                                 const Ints& stride, const Ints& padding, const Ints& dilation,
                                                 int64_t groups, bool transposed, bool weight, bool bias, bool store,
                                                 int64_t strategy, [[maybe_unused]] bool tf32) {
  const OnDevice device(input);
  const ConvShape s = shape_of(input, output_grads, kernel, stride, padding, dilation, groups, transposed);
  check_size(0 <= strategy && strategy <= 2, "strategy");
  ConvStrategy chosen = static_cast<ConvStrategy>(strategy);
  if (chosen == ConvStrategy::kAuto && store) chosen = ConvStrategy::kDirect;
#if !defined(USE_CUDA)  // there the launcher chooses
  if (chosen == ConvStrategy::kAuto) chosen = conv_strategy(s);
#endif
  check_size(!store || chosen == ConvStrategy::kDirect, "store, strategy");
  const bool stored = store && weight;
  const ConvLayout input_layout = layout_of(input, "input"), grads_layout = layout_of(output_grads, "output_grads");
  const int64_t channels = output_grads.size(1), positions = positions_of(output_grads);
  Tensor result = empty_double(input, {s.batch});
  const Ints stored_sizes = stored ? around({s.batch, s.group_in()}, kernel, {s.out_channels}) : Ints{0};
  Tensor weight_grads = new_tensor(input, stored_sizes, acc_type(input));
  if (stored && input.is_cpu())
    prefer_huge_pages(weight_grads, s.batch * s.rows() * s.out_channels * weight_grads.element_size());
  Tensor bias_grads = new_tensor(input, bias ? Ints{s.batch, channels} : Ints{0}, ScalarType::Double);
  for_dtype<Wide::kEverywhere>(input, [&](auto zero) {
    using T = decltype(zero);
    const T *map = data<T>(transposed ? output_grads : input), *grads = data<T>(transposed ? input : output_grads);
    ConvNormParams<T> params{s,
                             weight ? map : nullptr,
                             grads,
                             transposed ? grads_layout : input_layout,
                             transposed ? input_layout : grads_layout,
                             bias ? data<T>(output_grads) : nullptr,
                             grads_layout,
                             channels,
                             positions,
                             mutable_data<double>(result),
                             stored ? mutable_data<acc_t<T>>(weight_grads) : nullptr,
                             mutable_data<double>(bias_grads),
                             chosen};
    run(
        s.batch, work(s), [&](auto begin, auto end) { conv_squared_norms_cpu(params, begin, end); },
        [&](auto stream) {
          params.tf32 = tf32;
          Tensor scratch = empty_double(input, {conv_norm_scratch(params)});
          params.scratch = mutable_data<double>(scratch);
          conv_squared_norms_cuda(params, stream);
        });
  });
  return {result, weight_grads, bias_grads};
}

std::tuple<Tensor, Tensor> clipped_sums(const Tensor& input, const Tensor& output_grads, const Tensor& weights,
                                        const Ints& kernel, const Ints& stride, const Ints& padding,
                                        const Ints& dilation, int64_t groups, bool transposed, bool weight, bool bias,
                                        [[maybe_unused]] bool tf32) {
  const OnDevice device(input);
  const ConvShape s = shape_of(input, output_grads, kernel, stride, padding, dilation, groups, transposed);
  check_input(weights, "weights", 1, ScalarType::Double);
  check_size(weights.size(0) == s.batch, "weights, input");
  const ConvLayout input_layout = layout_of(input, "input"), grads_layout = layout_of(output_grads, "output_grads");
  const int64_t channels = output_grads.size(1), positions = positions_of(output_grads);
  [[maybe_unused]] const int64_t size = s.rows() * s.out_channels;
  const Ints sum_sizes = weight ? around({s.out_channels, s.group_in()}, kernel) : Ints{0};
  Tensor weight_sum = new_tensor(input, sum_sizes, ScalarType::Double);
  Tensor bias_sum = empty_double(input, {bias ? channels : 0});
  for_dtype<Wide::kEverywhere>(input, [&](auto zero) {
    using T = decltype(zero);
    if (weight) {
#if defined(USE_CUDA)
      ConvSumParams<T> params{s,
                              data<T>(transposed ? output_grads : input),
                              data<T>(transposed ? input : output_grads),
                              transposed ? grads_layout : input_layout,
                              transposed ? input_layout : grads_layout,
                              data<double>(weights),
                              nullptr,
                              nullptr,
                              mutable_data<double>(weight_sum),
                              tf32};
      Tensor scratch = empty_double(input, {conv_sum_scratch(params)});
      params.partial_sums = mutable_data<double>(scratch);
      conv_clipped_sums_cuda(params, current_stream());
#else
      const ConvSumGrid grid(s);
      Tensor partial = grid.slices == 1 ? weight_sum : empty_double(input, {grid.slices, size});
      const auto wide = std::make_unique<bool[]>(s.batch);
      const ConvSumParams<T> params{s,
                                    data<T>(transposed ? output_grads : input),
                                    data<T>(transposed ? input : output_grads),
                                    transposed ? grads_layout : input_layout,
                                    transposed ? input_layout : grads_layout,
                                    data<double>(weights),
                                    wide.get(),
                                    mutable_data<double>(partial)};
      const int64_t values = s.in_channels * s.pixels() + s.out_channels * s.positions();
      parallel(s.batch, values,
               [&](int64_t begin, int64_t end) { conv_wide_examples_cpu(params, wide.get(), begin, end); });
      const int64_t tasks = grid.blocks() * grid.slices;
      parallel(tasks, s.batch * work(s) / tasks,
               [&](int64_t begin, int64_t end) { conv_clipped_sums_cpu(params, begin, end); });
      if (grid.slices > 1) {
        const double* from = data<double>(partial);
        double* to = mutable_data<double>(weight_sum);
        parallel(size, grid.slices, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            to[i] = 0;
            for (int64_t slice = 0; slice < grid.slices; ++slice) to[i] += from[slice * size + i];
          }
        });
      }
#endif
    }
    if (bias) {
      ConvBiasSumParams<T> params{data<T>(output_grads),
                                  grads_layout,
                                  data<double>(weights),
                                  mutable_data<double>(bias_sum),
                                  s.batch,
                                  channels,
                                  positions};
      run(
          channels, s.batch * positions, [&](auto begin, auto end) { conv_bias_sums_cpu(params, begin, end); },
          [&](auto stream) {
            Tensor scratch = empty_double(input, {s.batch, channels});
            params.scratch = mutable_data<double>(scratch);
            conv_bias_sums_cuda(params, stream);
          });
    }
  });
  return {weight_sum, bias_sum};
}

DPK_SCHEMAS(m) {
  m.def(
      "conv_squared_norms(Tensor input, Tensor output_grads, int[] kernel_size, int[] stride, int[] padding, "
      "int[] dilation, int groups, bool transposed, bool weight, bool bias, bool store, int strategy, "
      "bool tf32=False) -> (Tensor, Tensor, Tensor)");
  m.def(
      "conv_clipped_sums(Tensor input, Tensor output_grads, Tensor weights, int[] kernel_size, int[] stride, "
      "int[] padding, int[] dilation, int groups, bool transposed, bool weight, bool bias, bool tf32=False) -> "
      "(Tensor, Tensor)");
}

DPK_IMPLEMENTATIONS(m) {
  m.impl("conv_squared_norms", TORCH_BOX(&squared_norms));
  m.impl("conv_clipped_sums", TORCH_BOX(&clipped_sums));
}

}  // namespace
}  // namespace dpk
