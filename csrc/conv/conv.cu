// Convolutions on the device: tiles of each example's gradient on tensor cores, squared or weighted where they are
// (common/product_kernels.cuh), or norms from pairs of positions (common/product_gram.cuh) where plan.h finds that
// cheaper. Nothing of the size batch x parameters is formed unless it is asked for.
//
// Bytes: the operands once for every tile of outputs (input) and of rows (output gradients), mostly from the caches.
// Operations: 2 batch positions rows out_channels each for norms and sums; three times that on tensor cores for float32
// without tf32.
#include "common/product_kernels.cuh"
#include "conv/conv.h"
#include "conv/plan.h"

namespace dpk {
namespace {

ProductShape shape_of(const ConvShape& c, const ConvLayout& input, const ConvLayout& output) {
  ProductShape s;
  s.batch = c.batch;
  s.groups = static_cast<int>(c.groups);
  s.channels = static_cast<int>(c.group_in());
  s.outputs = static_cast<int>(c.group_out());
  for (int i = 0; i < 3; ++i) {
    s.in[i] = static_cast<int>(c.in[i]);
    s.out[i] = static_cast<int>(c.out[i]);
    s.kernel[i] = static_cast<int>(c.kernel[i]);
    s.stride[i] = static_cast<int>(c.stride[i]);
    s.padding[i] = static_cast<int>(c.padding[i]);
    s.dilation[i] = static_cast<int>(c.dilation[i]);
  }
  s.input = {input.channel, input.pixel, c.in_channels * c.pixels()};
  s.output = {output.channel, output.pixel, c.out_channels * c.positions()};
  s.finish();
  return s;
}

template <typename T, typename P>
ProductShape shape_of(const P& q) {
  ProductShape s = shape_of(q.shape, q.input_layout, q.output_layout);
  s.half = std::is_same_v<T, half>;
  s.tf32 = q.tf32;
  return s;
}

template <typename T>
bool takes_gram(const ConvNormParams<T>& q) {
  if (std::is_same_v<T, double> || !q.input || q.weight_grads) return false;
  return q.strategy == ConvStrategy::kGram
             ? conv_gram_fits_cuda(q.shape)
             : q.strategy == ConvStrategy::kAuto && conv_strategy_cuda(q.shape) == ConvStrategy::kGram;
}

}  // namespace

template <typename T>
int64_t conv_norm_scratch(const ConvNormParams<T>& q) {
  return q.input ? product_norm_scratch<T>(shape_of<T>(q)) : 0;
}

template <typename T>
int64_t conv_sum_scratch(const ConvSumParams<T>& q) {
  const ProductShape s = shape_of<T>(q);
  const int64_t slices = product_slices<T>(s);
  return slices > 1 ? slices * s.entries() : 0;
}

template <typename T>
void conv_squared_norms_cuda(const ConvNormParams<T>& q, CUstream_st* stream) {
  const ProductShape s = shape_of<T>(q);
  const bool gram = takes_gram(q);
  if (q.input) launch_product_norms<false>(s, q.input, q.output_grads, q.weight_grads, gram, q.scratch, stream);
  if (q.bias_source)
    launch_position_sums(q.bias_source,
                         ProductLayout{q.bias_layout.channel, q.bias_layout.pixel, q.bias_channels * q.bias_positions},
                         s.batch, q.bias_channels, q.bias_positions, nullptr, q.bias_grads, stream);
  launch_finish_norms<T>(s, q.input ? q.scratch : nullptr, gram, q.bias_source ? q.bias_grads : nullptr,
                         q.bias_channels, q.squared_norms, stream);
}

template <typename T>
void conv_clipped_sums_cuda(const ConvSumParams<T>& q, CUstream_st* stream) {
  launch_product_sums<false>(shape_of<T>(q), q.input, q.output_grads, q.weights, q.partial_sums, q.sum, stream);
}

template <typename T>
void conv_bias_sums_cuda(const ConvBiasSumParams<T>& q, CUstream_st* stream) {
  launch_position_sums(q.source, ProductLayout{q.layout.channel, q.layout.pixel, q.channels * q.positions}, q.batch,
                       q.channels, q.positions, q.weights, q.scratch, stream);
  launch_weighted_rows(q.scratch, q.weights, q.sum, q.batch, q.channels, stream);
}

#define DPK_CONV_INSTANCES(T)                                                    \
  template int64_t conv_norm_scratch(const ConvNormParams<T>&);                  \
  template int64_t conv_sum_scratch(const ConvSumParams<T>&);                    \
  template void conv_squared_norms_cuda(const ConvNormParams<T>&, CUstream_st*); \
  template void conv_clipped_sums_cuda(const ConvSumParams<T>&, CUstream_st*);   \
  template void conv_bias_sums_cuda(const ConvBiasSumParams<T>&, CUstream_st*);
DPK_CONV_INSTANCES(float)
DPK_CONV_INSTANCES(double)
DPK_CONV_INSTANCES(bfloat16)
DPK_CONV_INSTANCES(half)
#undef DPK_CONV_INSTANCES

}  // namespace dpk
