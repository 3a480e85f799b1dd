#include "common/conv_torch.h"

#include <memory>
#include <tuple>
#include <vector>

#include "conv/conv.h"
#include "conv/plan.h"

namespace dpk {
namespace {

// [..., *kernel, ...]
Ints around(Ints front, const Ints& kernel, std::initializer_list<int64_t> back = {}) {
  front.insert(front.end(), kernel.begin(), kernel.end());
  front.insert(front.end(), back);
  return front;
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
