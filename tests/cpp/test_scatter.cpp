// The scattering transform against sums over pixels and frequencies, written out.
#include <complex>
#include <type_traits>

#include "check.h"
#include "scatter/scatter.h"

namespace {

using Image = std::vector<std::complex<double>>;

constexpr double kTurn = 6.283185307179586476925;

// Inverse transform of the product of x's transform with a real filter, at every pixel.
Image filtered(const Image& x, const double* filter, int64_t height, int64_t width) {
  Image spectrum(x.size()), result(x.size());
  const auto each = [&](const Image& from, Image& to, double sign) {
    for (int64_t h = 0; h < height; ++h)
      for (int64_t w = 0; w < width; ++w) {
        std::complex<double> sum = 0;
        for (int64_t i = 0; i < height; ++i)
          for (int64_t j = 0; j < width; ++j)
            sum += from[i * width + j] * std::polar(1., sign * kTurn *
                                                            (static_cast<double>(h * i) / static_cast<double>(height) +
                                                             static_cast<double>(w * j) / static_cast<double>(width)));
        to[h * width + w] = sum;
      }
  };
  each(x, spectrum, -1);
  for (std::size_t k = 0; k < spectrum.size(); ++k) spectrum[k] *= filter[k] / static_cast<double>(x.size());
  each(spectrum, result, 1);
  return result;
}

Image subsampled_modulus(const Image& x, int64_t height, int64_t width, int64_t step) {
  Image result;
  for (int64_t h = 0; h < height; h += step)
    for (int64_t w = 0; w < width; w += step) result.push_back(std::abs(x[h * width + w]));
  return result;
}

template <typename T>
struct Filters {
  std::vector<std::vector<double>> waves, rows, columns;
  std::vector<std::vector<T>> narrow;  // waves, rows and columns, one after the other

  Filters(int64_t scales, int64_t angles, int64_t height, int64_t width, int64_t out_height, int64_t out_width) {
    for (int64_t r = 0; r < scales; ++r) {
      const int64_t count = scales > dpk::scatter_first(r) ? scales - dpk::scatter_first(r) : 0;
      waves.push_back(check::normal<double>(count * angles * (height >> r) * (width >> r), 10 + r));
      rows.push_back(check::normal<double>(out_height * (height >> r), 20 + r));
      columns.push_back(check::normal<double>(out_width * (width >> r), 30 + r));
    }
    for (const auto* group : {&waves, &rows, &columns})
      for (const auto& values : *group) narrow.emplace_back(values.begin(), values.end());
  }
};

template <typename T>
void matches_the_sums(int64_t planes, int64_t height, int64_t width, int64_t scales, int64_t angles) {
  constexpr int64_t kOutHeight = 3, kOutWidth = 2;
  const int64_t image_height = height - 2, image_width = width - 1;
  const Filters<T> filters(scales, angles, height, width, kOutHeight, kOutWidth);
  const std::vector<T> images = check::normal<T>(planes * image_height * image_width, 1);
  std::vector<int64_t> row_source, column_source;
  for (int64_t h = 0; h < height; ++h) row_source.push_back((h * 5 + 1) % image_height);
  for (int64_t w = 0; w < width; ++w) column_source.push_back((w * 3 + 2) % image_width);
  const int64_t channels = dpk::scatter_channels(scales, angles), area = kOutHeight * kOutWidth;
  std::vector<T> features(planes * channels * area, T(-1));
  dpk::ScatterParams<T> params{images.data(),
                               {},
                               {},
                               {},
                               row_source.data(),
                               column_source.data(),
                               features.data(),
                               planes,
                               image_height,
                               image_width,
                               height,
                               width,
                               kOutHeight,
                               kOutWidth,
                               scales,
                               angles};
  for (int64_t r = 0; r < scales; ++r) {
    params.wavelets[r] = filters.narrow[r].data();
    params.rows[r] = filters.narrow[scales + r].data();
    params.columns[r] = filters.narrow[2 * scales + r].data();
  }
  dpk::scatter_cpu(params, 0, (planes + dpk::kScatterGroup - 1) / dpk::kScatterGroup);

  for (int64_t p = 0; p < planes; p += 7) {
    Image image;
    for (int64_t h = 0; h < height; ++h)
      for (int64_t w = 0; w < width; ++w)
        image.push_back(images[(p * image_height + row_source[h]) * image_width + column_source[w]]);
    const auto expect = [&](int64_t channel, const Image& x, int64_t r) {
      for (int64_t h = 0; h < kOutHeight; ++h)
        for (int64_t w = 0; w < kOutWidth; ++w) {
          double sum = 0;
          for (int64_t i = 0; i < height >> r; ++i)
            for (int64_t j = 0; j < width >> r; ++j)
              sum += filters.rows[r][h * (height >> r) + i] * filters.columns[r][w * (width >> r) + j] *
                     x[i * (width >> r) + j].real();
          const T got = features[((p * channels + channel) * kOutHeight + h) * kOutWidth + w];
          CHECK_CLOSE(got, sum, (std::is_same_v<T, float> ? 2e-5 : 1e-13) * std::sqrt(height * width));
        }
    };
    expect(0, image, 0);
    int64_t second = 1 + scales * angles;
    for (int64_t n = 0; n < scales * angles; ++n) {
      const int64_t j = n / angles;
      const Image once = subsampled_modulus(
          filtered(image, filters.waves[0].data() + n * height * width, height, width), height, width, int64_t{1} << j);
      expect(1 + n, once, j);
      for (int64_t m = (j + 1) * angles; m < scales * angles; ++m) {
        const int64_t h = height >> j, w = width >> j;
        const double* filter = filters.waves[j].data() + (m - dpk::scatter_first(j) * angles) * h * w;
        expect(second++, subsampled_modulus(filtered(once, filter, h, w), h, w, int64_t{1} << (m / angles - j)),
               m / angles);
      }
    }
  }
}

}  // namespace

int main() {
  check::for_each_isa([] {
    matches_the_sums<float>(0, 4, 4, 1, 1);
    matches_the_sums<double>(1, 4, 6, 1, 2);
    matches_the_sums<double>(17, 8, 12, 2, 1);
    matches_the_sums<double>(1, 16, 28, 2, 1);
    matches_the_sums<float>(19, 12, 20, 2, 2);
    matches_the_sums<double>(1, 16, 24, 3, 1);
  });
  return check::result();
}
