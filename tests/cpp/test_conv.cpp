// Convolutions against a naive loop, by both ways of computing norms and in both layouts.
#include <limits>
#include <memory>

#include "check.h"
#include "conv/conv.h"
#include "conv/plan.h"

namespace {

using dpk::ConvShape;

ConvShape shape(int64_t batch, int64_t groups, int64_t in_channels, int64_t out_channels,
                std::initializer_list<int64_t> in, std::initializer_list<int64_t> kernel, int64_t stride,
                int64_t padding, int64_t dilation) {
  ConvShape s{batch, groups, in_channels, out_channels, {}, {}, {}, {}, {}, {}};
  for (int i = 0; i < 3; ++i) {
    s.in[i] = in.begin()[i];
    s.kernel[i] = kernel.begin()[i];
    const bool flat = s.in[i] == 1 && s.kernel[i] == 1;  // a dimension that is only there to make three
    s.stride[i] = flat ? 1 : stride;
    s.padding[i] = flat ? 0 : padding;
    s.dilation[i] = flat ? 1 : dilation;
    s.out[i] = (s.padded(i) - s.dilation[i] * (s.kernel[i] - 1) - 1) / s.stride[i] + 1;
  }
  return s;
}

// Maps of a batch, in either layout.
template <typename T>
struct Maps {
  std::vector<T> values;
  int64_t channels, pixels;
  dpk::ConvLayout layout;

  Maps(int64_t batch, int64_t channels, int64_t pixels, bool channels_last, int seed)
      : values(check::normal<T>(batch * channels * pixels, seed)),
        channels(channels),
        pixels(pixels),
        layout(channels_last ? dpk::ConvLayout{1, channels} : dpk::ConvLayout{pixels, 1}) {}

  double operator()(int64_t b, int64_t channel, int64_t pixel) const {
    return values[b * channels * pixels + channel * layout.channel + pixel * layout.pixel];
  }
};

// The weight gradient of example b, [out_channels, rows], in double.
template <typename T>
std::vector<double> gradient(const ConvShape& s, const Maps<T>& x, const Maps<T>& g, int64_t b) {
  std::vector<double> result;
  for (int64_t o = 0; o < s.out_channels; ++o)
    for (int64_t c = 0; c < s.group_in(); ++c)
      for (int64_t k = 0; k < s.taps(); ++k) {
        const int64_t tap[3] = {k / (s.kernel[1] * s.kernel[2]), k / s.kernel[2] % s.kernel[1], k % s.kernel[2]};
        const int64_t channel = o / s.group_out() * s.group_in() + c;
        double sum = 0;
        for (int64_t t = 0; t < s.positions(); ++t) {
          const int64_t at[3] = {t / (s.out[1] * s.out[2]), t / s.out[2] % s.out[1], t % s.out[2]};
          int64_t pixel = 0;
          bool inside = true;
          for (int i = 0; i < 3; ++i) {
            const int64_t p = at[i] * s.stride[i] + tap[i] * s.dilation[i] - s.padding[i];
            inside = inside && 0 <= p && p < s.in[i];
            pixel = pixel * s.in[i] + p;
          }
          if (inside) sum += g(b, o, t) * x(b, channel, pixel);
        }
        result.push_back(sum);
      }
  return result;
}

template <typename T>
void matches_the_loop(const ConvShape& s, bool channels_last) {
  const double tolerance = 1e3 * std::numeric_limits<T>::epsilon();
  const Maps<T> x(s.batch, s.in_channels, s.pixels(), channels_last, 1);
  Maps<T> g(s.batch, s.out_channels, s.positions(), channels_last, 2);
  std::vector<double> weights = check::normal<double>(s.batch, 3);
  const int64_t size = s.rows() * s.out_channels;

  for (dpk::ConvStrategy strategy : {dpk::ConvStrategy::kDirect, dpk::ConvStrategy::kGram}) {
    std::vector<double> norms(s.batch, -1.), bias_grads(s.batch * s.out_channels, -1.);
    dpk::conv_squared_norms_cpu<T>({s, x.values.data(), g.values.data(), x.layout, g.layout, g.values.data(), g.layout,
                                    s.out_channels, s.positions(), norms.data(), nullptr, bias_grads.data(), strategy},
                                   0, s.batch);
    for (int64_t b = 0; b < s.batch; ++b) {
      double squared = 0;
      for (double v : gradient(s, x, g, b)) squared += v * v;
      for (int64_t o = 0; o < s.out_channels; ++o) {
        double bias = 0;
        for (int64_t t = 0; t < s.positions(); ++t) bias += g(b, o, t);
        CHECK_CLOSE(bias_grads[b * s.out_channels + o], bias, 1e-12);
        squared += bias * bias;
      }
      // Computed directly it is the norm of the rounded numbers that the sum adds; a Gram form is rounded upward.
      const double below = strategy == dpk::ConvStrategy::kDirect ? tolerance : 1e-12;
      CHECK(norms[b] >= squared * (1 - below));
      CHECK(norms[b] <= squared * 1.01);
    }
  }

  if (s.batch > 1) {  // an example of weight 0 is skipped, whatever it holds
    weights[1] = 0;
    const int64_t values = s.out_channels * s.positions();
    std::fill_n(g.values.begin() + values, values, std::numeric_limits<T>::quiet_NaN());
  }
  std::vector<double> expected(size, 0.), bias_expected(s.out_channels, 0.), bias_sum(s.out_channels, -1.);
  for (int64_t b = 0; b < s.batch; ++b) {
    if (weights[b] == 0) continue;
    const std::vector<double> grad = gradient(s, x, g, b);
    for (int64_t i = 0; i < size; ++i) expected[i] += weights[b] * grad[i];
    for (int64_t o = 0; o < s.out_channels; ++o)
      for (int64_t t = 0; t < s.positions(); ++t) bias_expected[o] += weights[b] * g(b, o, t);
  }
  const dpk::ConvSumGrid grid(s);
  const auto wide = std::make_unique<bool[]>(s.batch);
  std::vector<double> partial(grid.slices * size, -1.);
  const dpk::ConvSumParams<T> params{s,        x.values.data(), g.values.data(), x.layout,
                                     g.layout, weights.data(),  wide.get(),      partial.data()};
  dpk::conv_wide_examples_cpu(params, wide.get(), 0, s.batch);
  dpk::conv_clipped_sums_cpu(params, 0, grid.blocks() * grid.slices);
  dpk::conv_bias_sums_cpu<T>(
      {g.values.data(), g.layout, weights.data(), bias_sum.data(), s.batch, s.out_channels, s.positions()}, 0,
      s.out_channels);
  for (int64_t i = 0; i < size; ++i) {
    double sum = 0;
    for (int64_t slice = 0; slice < grid.slices; ++slice) sum += partial[slice * size + i];
    CHECK_CLOSE(sum, expected[i], tolerance);
  }
  for (int64_t o = 0; o < s.out_channels; ++o) CHECK_CLOSE(bias_sum[o], bias_expected[o], 1e-12);
}

}  // namespace

int main() {
  check::for_each_isa([] {
    for (const ConvShape& s : {
             shape(3, 1, 3, 33, {1, 9, 7}, {1, 3, 3}, 1, 1, 1),    // the usual one
             shape(2, 1, 2, 48, {1, 13, 11}, {1, 3, 3}, 1, 1, 1),  // whole vectors of outputs
             shape(2, 2, 4, 6, {1, 8, 8}, {1, 4, 2}, 2, 1, 1),     // groups, stride, an even kernel
             shape(3, 5, 5, 10, {1, 1, 17}, {1, 1, 3}, 1, 2, 2),   // depthwise, one dimension, dilation
             shape(2, 1, 2, 3, {4, 5, 6}, {3, 2, 3}, 2, 1, 1),     // three dimensions
             shape(0, 1, 2, 3, {1, 4, 4}, {1, 3, 3}, 1, 1, 1),
         })
      for (bool channels_last : {false, true}) {
        matches_the_loop<float>(s, channels_last);
        matches_the_loop<double>(s, channels_last);
      }
  });
  return check::result();
}
