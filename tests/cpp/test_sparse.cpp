// Selected entries of per-example weight gradients against a naive loop, with strides, padding, dilation and groups, in
// both layouts, on maps of one slab and of several.
#include "check.h"
#include "sparse/sparse.h"

namespace {

template <typename T>
void matches_the_loop(const dpk::ConvShape& s, bool channels_last, int64_t step) {
  const int64_t inputs = s.in_channels * s.pixels(), outputs = s.out_channels * s.positions();
  const std::vector<T> x = check::normal<T>(s.batch * inputs, 1), g = check::normal<T>(s.batch * outputs, 2);
  std::vector<int64_t> entries;
  for (int64_t e = s.rows(); e < s.out_channels * s.rows(); e += step)
    entries.push_back(e);  // none of the first output
  if (entries.size() > 2) std::swap(entries.front(), entries.back());
  const int64_t selected = entries.size();
  const auto layout = [&](int64_t channels, int64_t pixels) {
    return channels_last ? dpk::ConvLayout{1, channels} : dpk::ConvLayout{pixels, 1};
  };
  std::vector<T> got(s.batch * selected, -1);
  dpk::SparseParams<T> params{s,
                              x.data(),
                              g.data(),
                              layout(s.in_channels, s.pixels()),
                              layout(s.out_channels, s.positions()),
                              entries.data(),
                              selected,
                              got.data()};
  const int64_t cut = s.batch / 3;  // where the work is cut is not seen
  dpk::sparse_gradients_cpu(params, 0, cut);
  dpk::sparse_gradients_cpu(params, cut, s.batch);
  std::vector<T> whole(got.size(), -1);
  params.gradients = whole.data();
  dpk::sparse_gradients_cpu(params, 0, s.batch);
  CHECK(got == whole);

  for (int64_t b = 0; b < s.batch; ++b)
    for (int64_t n = 0; n < selected; ++n) {
      const int64_t o = entries[n] / s.rows(), row = entries[n] % s.rows(), tap = row % s.taps();
      const int64_t c = o / s.group_out() * s.group_in() + row / s.taps();
      const int64_t taps[3] = {tap / (s.kernel[1] * s.kernel[2]), tap / s.kernel[2] % s.kernel[1], tap % s.kernel[2]};
      double want = 0;
      for (int64_t t = 0; t < s.positions(); ++t) {
        const int64_t at[3] = {t / (s.out[1] * s.out[2]), t / s.out[2] % s.out[1], t % s.out[2]};
        int64_t pixel = 0;
        bool inside = true;
        for (int i = 0; i < 3; ++i) {
          const int64_t line = at[i] * s.stride[i] + taps[i] * s.dilation[i] - s.padding[i];
          inside = inside && 0 <= line && line < s.in[i];
          pixel = pixel * s.in[i] + line;
        }
        if (inside)
          want +=
              static_cast<double>(x[b * inputs + c * params.input_layout.channel + pixel * params.input_layout.pixel]) *
              g[b * outputs + o * params.output_layout.channel + t * params.output_layout.pixel];
      }
      CHECK_CLOSE(got[b * selected + n], want, sizeof(T) == 4 ? 1e-4 : 1e-12);
    }
}

}  // namespace

int main() {
  const dpk::ConvShape shapes[] = {
      {19, 1, 5, 7, {1, 6, 5}, {1, 6, 5}, {1, 3, 3}, {1, 1, 1}, {0, 1, 1}, {1, 1, 1}},
      {3, 2, 6, 4, {1, 9, 24}, {1, 5, 12}, {1, 2, 3}, {1, 2, 2}, {0, 1, 1}, {1, 1, 1}},
      {5, 1, 3, 4, {1, 23, 40}, {1, 19, 40}, {1, 3, 3}, {1, 1, 1}, {0, 0, 2}, {1, 2, 2}},
      {2, 1, 2, 3, {1, 1, 600}, {1, 1, 300}, {1, 1, 1}, {1, 1, 2}, {0, 0, 0}, {1, 1, 1}},
      {9, 1, 3, 2, {4, 7, 5}, {2, 7, 6}, {3, 3, 2}, {2, 1, 1}, {1, 1, 1}, {1, 1, 1}},
      {11, 1, 90, 50, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}, {1, 1, 1}},
      {0, 1, 5, 7, {1, 6, 5}, {1, 6, 5}, {1, 3, 3}, {1, 1, 1}, {0, 1, 1}, {1, 1, 1}},
  };
  check::for_each_isa([&] {
    for (const dpk::ConvShape& shape : shapes)
      for (bool channels_last : {false, true})
        for (int64_t step : {1, 4, 100000}) {
          matches_the_loop<float>(shape, channels_last, step);
          matches_the_loop<double>(shape, channels_last, step);
        }
  });
  return check::result();
}
