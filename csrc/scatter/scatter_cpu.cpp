// The scattering transform on the CPU.
//
//   S0 = A x,  S1[n] = A |x * psi_n|,  S2[n, m] = A | |x * psi_n| * psi_m |,  scale of psi_m > scale of psi_n,
//
// where A is the low pass, subsampled by 2^scales and cropped, and |x * psi_n| is kept at resolution scale(n).
// Convolutions are circular products of Fourier transforms on an image that is padded by reflection.
//
// How it is computed. A vector lane holds one plane: every operation is the same for all lanes, nothing is shuffled,
// and an image's features depend on no other image. An image is real, so half of its spectrum is kept, and columns are
// transformed in pairs as real and imaginary part of one sequence. The product with a wavelet is folded to its
// resolution row by row and transformed back along the row at once; then a pair of columns is transformed back, its
// modulus taken, its low pass multiplied out (A is separable: two small matrix products, no transform), and, where a
// second order follows, transformed forth again while it is in the first-level cache. Only spectra and one folded
// product go through memory.
//
// Operations for a 32x32 plane (40x40 padded, scales 2, angles 8; vector operations a lane, FMA counted once):
//   72 folded products back at 20x20: 20 + 20 transforms of 20 (280 each)         806 k
//    8 products back at 40x40: 40 + 40 transforms of 40 (700 each)                448 k
//    9 transforms of a real 40x40: 20 + 21 transforms of 40, separation           280 k
//   products: 64 x 1600 x 2 folded, 16 x 1600 x 2                                 256 k
//   moduli: 41,600 x 3, and a square root (8 cycles a vector of 8 floats)         125 k + 330 k cycles
//   low pass: 72 x (20 x 8 x 20 + 8 x 8 x 20), 9 x (40 x 8 x 40 + 8 x 8 x 40)     460 k
// in all 2.4 M vector operations. Two a cycle at best; with one and a half, 8 planes take 1.6 M cycles and the square
// roots overlap in part: 0.6 ms at 3 GHz, hence 4,000 images of 3x32x32 a second and core with vectors of 8 floats.
#define DPK_BODY "scatter/scatter_cpu.cpp"
#include "common/each_isa.h"
#include "scatter/scatter.h"

#ifdef DPK_ISA

namespace dpk::DPK_ISA {
namespace {

#include "common/simd.h"
#include "scatter/fourier.h"

// Memory for `count` values, aligned to vectors.
template <typename T>
class Aligned {
 public:
  explicit Aligned(int64_t count) : storage(count + 2 * kLanes<T>) {}
  T* data() {
    void* p = storage.data();
    std::size_t space = storage.size() * sizeof(T);
    return static_cast<T*>(std::align(DPK_VECTOR_BYTES, DPK_VECTOR_BYTES, p, space));
  }

 private:
  std::vector<T> storage;
};

// to[o] = sum_i matrix[o][i] from[i] for two sequences of vectors at once; matrix: [outs, ins].
template <typename T>
void project(const T* matrix, int64_t outs, int64_t ins, const T* from0, const T* from1, T* to0, T* to1,
             int64_t to_stride) {
  constexpr int64_t kBlock = 4;  // by 2 sequences: 8 sums in registers
  for (int64_t o = 0; o < outs; o += kBlock) {
    const T* line[kBlock];
    int64_t at[kBlock];
    for (int64_t u = 0; u < kBlock; ++u) {  // the last block repeats the last row where it is not whole
      at[u] = std::min(o + u, outs - 1);
      line[u] = matrix + at[u] * ins;
    }
    Vec<T> sum0[kBlock] = {}, sum1[kBlock] = {};
    for (int64_t i = 0; i < ins; ++i) {
      const Vec<T> x0 = load<T>(from0 + i * kLanes<T>), x1 = load<T>(from1 + i * kLanes<T>);
      for (int64_t u = 0; u < kBlock; ++u) {
        sum0[u] += line[u][i] * x0;
        sum1[u] += line[u][i] * x1;
      }
    }
    for (int64_t u = 0; u < kBlock; ++u) {
      store<T>(to0 + at[u] * to_stride * kLanes<T>, sum0[u]);
      store<T>(to1 + at[u] * to_stride * kLanes<T>, sum1[u]);
    }
  }
}

// The transform of kLanes planes, one in each lane.
template <typename T>
class Transform {
 public:
  explicit Transform(const ScatterParams<T>& params)
      : q(params),
        spectrum(half_spectrum()),
        next_spectrum(half_spectrum()),
        product(q.padded_height * q.padded_width * kComplex<T>),
        strip(q.out_height * q.padded_width * kLanes<T>),
        column(q.padded_height * kComplex<T>),
        pair(2 * q.padded_height * kLanes<T>),
        result((q.out_height + 1) * q.out_width * kLanes<T>) {
    for (int64_t r = 0; r < q.scales; ++r) {
      vertical.emplace_back(q.padded_height >> r);
      horizontal.emplace_back(q.padded_width >> r);
    }
  }

  void run(int64_t plane, int64_t count) {
    first_plane = plane;
    planes = count;
    pad();
    for (int64_t c = 0; c < q.padded_width; c += 2) {
      const T* columns[2];
      for (int64_t u = 0; u < 2; ++u) columns[u] = product.data() + (c + u) * q.padded_height * kLanes<T>;
      smooth_columns(0, columns[0], columns[1], c);
      transform_columns(0, columns[0], columns[1], c, spectrum.data());
    }
    transform_rows(0, spectrum.data());
    smooth_rows(0, 0);

    int64_t second = 1 + q.scales * q.angles;
    for (int64_t n = 0; n < q.scales * q.angles; ++n) {
      const int64_t scale = n / q.angles;
      const bool followed = scale + 1 < q.scales;
      wavelet(0, scale, n, spectrum.data(), followed ? next_spectrum.data() : nullptr, 1 + n);
      if (!followed) continue;
      transform_rows(scale, next_spectrum.data());
      for (int64_t m = (scale + 1) * q.angles; m < q.scales * q.angles; ++m)
        wavelet(scale, m / q.angles, m, next_spectrum.data(), nullptr, second++);
    }
  }

 private:
  const ScatterParams<T>& q;
  int64_t first_plane = 0, planes = 0;
  std::vector<Fourier<T>> vertical, horizontal;  // by resolution
  Aligned<T> spectrum, next_spectrum;  // [height / 2 + 1, width + 1] of twice the image, complex; the last is the first
  Aligned<T> product;                  // folded, transformed along rows: [height, width] complex
  Aligned<T> strip;                    // low pass of the columns: [out_height, width]
  Aligned<T> column, pair;             // one column, complex; two columns, real
  Aligned<T> result;                   // [out_height, out_width] and a row that is not used

  int64_t half_spectrum() const { return (q.padded_height / 2 + 1) * (q.padded_width + 1) * kComplex<T>; }

  // The padded planes into `product` as [width, height]. Lanes beyond the last plane repeat it.
  void pad() {
    T* to = product.data();
    for (int64_t l = 0; l < kLanes<T>; ++l) {
      const T* image = q.images + (first_plane + std::min(l, planes - 1)) * q.height * q.width;
      for (int64_t h = 0; h < q.padded_height; ++h) {
        const T* line = image + q.row_source[h] * q.width;
        for (int64_t w = 0; w < q.padded_width; ++w)
          to[(w * q.padded_height + h) * kLanes<T> + l] = line[q.column_source[w]];
      }
    }
  }

  // Low pass of the columns c and c + 1 at a resolution, into `strip`.
  void smooth_columns(int64_t resolution, const T* first, const T* second, int64_t c) {
    const int64_t width = q.padded_width >> resolution;
    T* to = strip.data() + c * kLanes<T>;
    project(q.rows[resolution], q.out_height, q.padded_height >> resolution, first, second, to, to + kLanes<T>, width);
  }

  // Low pass along the rows of `strip`, which is a channel of the features.
  void smooth_rows(int64_t resolution, int64_t channel) {
    const int64_t width = q.padded_width >> resolution, area = q.out_height * q.out_width;
    for (int64_t h = 0; h < q.out_height; h += 2) {
      const T* from = strip.data() + h * width * kLanes<T>;
      T* to = result.data() + h * q.out_width * kLanes<T>;
      const int64_t next = h + 1 < q.out_height;
      project(q.columns[resolution], q.out_width, width, from, from + next * width * kLanes<T>, to,
              to + q.out_width * kLanes<T>, 1);
    }
    const int64_t channels = scatter_channels(q.scales, q.angles);
    for (int64_t l = 0; l < planes; ++l) {
      T* to = q.features + ((first_plane + l) * channels + channel) * area;
      for (int64_t i = 0; i < area; ++i) to[i] = result.data()[i * kLanes<T> + l];
    }
  }

  // Half of the spectra of the columns c and c + 1, times two, into columns of `to`.
  void transform_columns(int64_t resolution, const T* first, const T* second, int64_t c, T* to) {
    const int64_t height = q.padded_height >> resolution, width = q.padded_width >> resolution;
    T* z = column.data();
    for (int64_t h = 0; h < height; ++h)
      store_complex<T>(z + h * kComplex<T>, {load<T>(first + h * kLanes<T>), load<T>(second + h * kLanes<T>)});
    vertical[resolution].template run<false>(z, 1, z, 1);
    for (int64_t k = 0; k <= height / 2; ++k) {
      const Complex<T> a = load_complex<T>(z + k * kComplex<T>);
      const Complex<T> b = load_complex<T>(z + (k == 0 ? 0 : height - k) * kComplex<T>);
      T* at = to + (k * (width + 1) + c) * kComplex<T>;
      store_complex<T>(at, {a.re + b.re, a.im - b.im});
      store_complex<T>(at + kComplex<T>, {a.im + b.im, b.re - a.re});
    }
  }

  void transform_rows(int64_t resolution, T* half) {
    const int64_t height = q.padded_height >> resolution, width = q.padded_width >> resolution;
    for (int64_t k = 0; k <= height / 2; ++k) {
      T* row = half + k * (width + 1) * kComplex<T>;
      horizontal[resolution].template run<false>(row, 1, row, 1);
      store_complex(row + width * kComplex<T>, load_complex<T>(row));
    }
  }

  // The channel A |x * psi_n|, x of resolution `from` given by its spectrum, the modulus at resolution `to`; where
  // `next` is given, the modulus's half spectrum is transformed along columns into it.
  void wavelet(int64_t from, int64_t to, int64_t n, const T* half, T* next, int64_t channel) {
    const int64_t area = (q.padded_height >> from) * (q.padded_width >> from);
    const T* filter = q.wavelets[from] + (n - scatter_first(from) * q.angles) * area;
    switch (to - from) {
      case 0:
        fold<1>(from, to, filter, half);
        break;
      case 1:
        fold<2>(from, to, filter, half);
        break;
      default:
        fold<0>(from, to, filter, half);
    }
    const T scale = static_cast<T>(0.5 / static_cast<double>(area));  // of both inverse transforms, and of `half`
    const int64_t height = q.padded_height >> to, width = q.padded_width >> to;
    T* columns[2] = {pair.data(), pair.data() + height * kLanes<T>};
    for (int64_t c = 0; c < width; c += 2) {
      for (int64_t u = 0; u < 2; ++u) {
        vertical[to].template run<true>(product.data() + (c + u) * kComplex<T>, width, column.data(), 1);
        for (int64_t h = 0; h < height; ++h) {
          const Complex<T> z = load_complex<T>(column.data() + h * kComplex<T>);
          store<T>(columns[u] + h * kLanes<T>, scale * vector_sqrt<T>(z.re * z.re + z.im * z.im));
        }
      }
      smooth_columns(to, columns[0], columns[1], c);
      if (next) transform_columns(to, columns[0], columns[1], c, next);
    }
    smooth_rows(to, channel);
  }

  // The product of a spectrum and a filter, folded to resolution `to` (subsampling in space) and transformed back along
  // rows, into `product`. kFold: 2^(to - from), or 0 for any.
  template <int64_t kFold>
  void fold(int64_t from, int64_t to, const T* filter, const T* half) {
    const int64_t folds = kFold ? kFold : int64_t{1} << (to - from);
    const int64_t height = q.padded_height >> from, width = q.padded_width >> from;
    const int64_t to_height = q.padded_height >> to, to_width = q.padded_width >> to;
    for (int64_t k = 0; k < to_height; ++k) {
      T* row = product.data() + k * to_width * kComplex<T>;
      for (int64_t a = 0; a < folds; ++a) {
        const int64_t h = k + a * to_height;
        const bool mirrored = h > height / 2;  // X[h, w] is the conjugate of X[-h, -w]
        const T* line = half + (mirrored ? (height - h) * (width + 1) + width : h * (width + 1)) * kComplex<T>;
        const T* factors = filter + h * width;
        const int64_t step = mirrored ? -kComplex<T> : kComplex<T>;
        const T sign = mirrored ? -1 : 1;
        for (int64_t l = 0; l < to_width; ++l) {
          Complex<T> sum = {};
          for (int64_t b = 0; b < folds; ++b) {
            const int64_t w = l + b * to_width;
            const Complex<T> x = load_complex<T>(line + w * step);
            sum.re += factors[w] * x.re;
            sum.im += factors[w] * x.im;
          }
          sum.im *= sign;
          T* at = row + l * kComplex<T>;
          store_complex(at, a ? load_complex<T>(at) + sum : sum);
        }
      }
      horizontal[to].template run<true>(row, 1, row, 1);
    }
  }
};

template <typename T>
void transform(const ScatterParams<T>& q, int64_t begin, int64_t end) {
  Transform<T> transform(q);
  const int64_t last = std::min(end * kScatterGroup, q.planes);
  for (int64_t p = begin * kScatterGroup; p < last; p += kLanes<T>) transform.run(p, std::min(kLanes<T>, last - p));
}

}  // namespace

void scatter(const ScatterParams<float>& q, int64_t b, int64_t e) { transform(q, b, e); }
void scatter(const ScatterParams<double>& q, int64_t b, int64_t e) { transform(q, b, e); }

}  // namespace dpk::DPK_ISA

#else

namespace dpk {

template <typename T>
void scatter_cpu(const ScatterParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(scatter, params, begin, end);
}

template void scatter_cpu(const ScatterParams<float>&, int64_t, int64_t);
template void scatter_cpu(const ScatterParams<double>&, int64_t, int64_t);

}  // namespace dpk

#endif
