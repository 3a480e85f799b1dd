// The scattering transform on the device. The formula is scatter_cpu.cpp's:
//
//   S0 = A x,  S1[n] = A |x * psi_n|,  S2[n, m] = A | |x * psi_n| * psi_m |,  scale of psi_m > scale of psi_n.
//
// A block owns a plane, and all that lies between the image and the features stays in its shared memory: the half
// spectra of the image and of one modulus, and two buffers of the padded size. Products with a wavelet are folded to
// its resolution while the first stage of the transform back reads them; four wavelets of half the resolution or less
// lie side by side in a buffer, so that an element of the spectrum is read once for all of them. Stages go from one
// buffer to the other (Stockham's form, the smallest radix first); threads lie along the sequences, at odd pitches, so
// that they read different banks. The last stage writes moduli, of which the low pass is two small matrix products.
// Only transforms back are written: one forth is that of the conjugates, conjugated.
//
// Where it is padded to 40x40 (32x32) or 36x36 (28x28) pixels, of two scales, lengths are constants, and radices and
// places come out at compile time.
//
// For a 32x32 plane, scales 2, angles 8 (scatter_cpu.cpp counts the same): 2.4 M operations of a lane, FMA counted
// once, at best 0.081 us on an H100 (132 multiprocessors, 128 lanes, 1.755 GHz). Shared memory, in words of 4 bytes:
//   72 folded products back at 20x20: 400 numbers x (8 / 4 + 2 + 2 x 4 + 3)             432 k
//    8 products back at 40x40:       1600 numbers x (2 + 2 + 2 x 4 + 3)                 192 k
//    9 transforms of a real 40x40:    800 numbers x 8, 840 x 10                         133 k
//   low pass: 72 x (20 x 8 x 20 + 8 x 8 x 20) / 2, 9 x (40 x 8 x 40 + 8 x 8 x 40) / 2   230 k
// and filters through the caches: 9 x 51 kB of the second scale and 51 kB of the first, 128 k words. 1.1 M words at 32
// a cycle and multiprocessor take 0.150 us: this bounds the kernel, at 2.2 M images of 3x32x32 a second. Global memory
// moves 25 kB a plane, 0.008 us.
#include "scatter/scatter.h"
#include "scatter/sequences.cuh"

namespace dpk {
namespace {

constexpr int kBlocks = 5;  // on a multiprocessor of an H100, as shared memory allows at 40x40; 96 registers a thread
constexpr int kSide = 4;    // wavelets side by side in a buffer, at half the resolution or less
constexpr int kQuad = 4;    // outputs of a low pass that a thread sums at once

template <typename T>
struct alignas(16) Quad {
  T values[kQuad];
};

DPK_HOST_DEVICE constexpr int rounded(int count) { return (count + kQuad - 1) / kQuad * kQuad; }

// What lies where in shared memory: numbers of complex values, and then of values.
struct ScatterMemory {
  int64_t spectrum, next, buffer, roots, rows, columns;

  DPK_HOST_DEVICE constexpr ScatterMemory(int64_t height, int64_t width, int64_t out_height, int64_t out_width,
                                          int64_t scales)
      : spectrum((height / 2 + 1) * (width + 1)),
        next(scales > 1 ? spectrum : 0),
        buffer(height * (width + 1)),
        roots(height + width),
        rows(values(height, out_height, scales)),
        columns(values(width, out_width, scales)) {}

  // Of the matrices [size >> r, outs] of all resolutions.
  DPK_HOST_DEVICE static constexpr int64_t values(int64_t size, int64_t outs, int64_t scales) {
    return (2 * size - (2 * size >> scales)) * ((outs + kQuad - 1) / kQuad * kQuad);
  }
  template <typename T>
  int64_t bytes() const {
    const auto size = static_cast<int64_t>(sizeof(T));
    const int64_t even = ceil_div((spectrum + next + 2 * buffer + roots) * 2 * size, 16) * 16;
    return even + (rows + columns) * size;
  }
};

// kHeight, kWidth: of the padded image, of two scales; or 0 for any.
template <typename T, int kHeight, int kWidth>
class Scattering {
  static constexpr bool kFixed = kHeight > 0;
  using C = Complex<T>;

 public:
  __device__ __forceinline__ Scattering(const ScatterParams<T>& params, Shared<T> shared) : q(params) {
    const ScatterMemory memory(height(0), width(0), out_height(), out_width(), scales());
    const Shared<C> all = shared_cast<C>(shared);
    int64_t at = 0;
    const auto take = [&](int64_t count) {
      at += count;
      return shared_slice(all, at - count, count);
    };
    image_spectrum_ = take(memory.spectrum);
    next_spectrum_ = take(memory.next);
    from_ = take(memory.buffer);
    to_ = take(memory.buffer);
    row_roots_ = take(height(0));
    column_roots_ = take(width(0));
    constexpr int64_t kAligned = 16 / sizeof(T);
    at = (at * 2 + kAligned - 1) / kAligned * kAligned;
    rows_ = shared_slice(shared, at, memory.rows);
    columns_ = shared_slice(shared, at + memory.rows, memory.columns);
  }

  __device__ __forceinline__ void run() {
    fill_roots(row_roots_, height(0));
    fill_roots(column_roots_, width(0));
    for (int r = 0; r < scales(); ++r) {
      fill_matrix(rows_, q.rows[r], r, height(0), out_height());
      fill_matrix(columns_, q.columns[r], r, width(0), out_width());
    }
    pad();
    const int angles = static_cast<int>(q.angles), followed = (scales() - 1) * angles;
    int second = 1 + scales() * angles;
    // The image, and every modulus of the first order that a second one follows.
    for (int n = -1; n < followed; ++n) {
      const int scale = n < 0 ? 0 : n / angles;
      const Shared<C> spectrum = n < 0 ? image_spectrum_ : next_spectrum_;
      at_resolution(scale, [&](auto r) {
        if (n >= 0) moduli<1>(0, r, n, image_spectrum_);
        smooth<1>(r, n + 1, 1);
        transform_real(r, spectrum);
      });
      for (int m = (n < 0 ? scales() - 1 : scale + 1) * angles; m < scales() * angles;) {
        const int count = leaves(scale, m / angles, m, angles - m % angles, n < 0 ? 1 + m : second, spectrum);
        m += count;
        if (n >= 0) second += count;
      }
    }
  }

 private:
  const ScatterParams<T>& q;
  Shared<C> image_spectrum_, next_spectrum_;  // [height / 2 + 1, width + 1] of twice the plane; the last is the first
  Shared<C> from_, to_;                       // each pass goes from one to the other
  Shared<C> row_roots_, column_roots_;        // exp(2 pi i k / length)
  Shared<T> rows_, columns_;                  // for each resolution [size >> r, outs], outs in whole quads

  template <typename Int>
  __device__ __forceinline__ int height(Int r) const {
    return (kFixed ? kHeight : static_cast<int>(q.padded_height)) >> r;
  }
  template <typename Int>
  __device__ __forceinline__ int width(Int r) const {
    return (kFixed ? kWidth : static_cast<int>(q.padded_width)) >> r;
  }
  __device__ __forceinline__ int scales() const { return kFixed ? 2 : static_cast<int>(q.scales); }
  __device__ __forceinline__ int out_height() const {
    return kFixed ? kHeight / 4 - 2 : static_cast<int>(q.out_height);
  }
  __device__ __forceinline__ int out_width() const { return kFixed ? kWidth / 4 - 2 : static_cast<int>(q.out_width); }

  // A size at a resolution if both are constants, else 0.
  template <int kSize, int kResolution>
  DPK_HOST_DEVICE static constexpr int length(Constant<kResolution>) {
    return kSize >> kResolution;
  }
  template <int kSize>
  DPK_HOST_DEVICE static constexpr int length(int) {
    return 0;
  }

  // f(resolution), a constant where lengths are; such a plane is followed at resolution 0 alone.
  template <typename F>
  __device__ __forceinline__ void at_resolution(int r, F f) {
    if constexpr (kFixed)
      f(Constant<0>());
    else
      f(r);
  }

  __device__ __forceinline__ void next_pass() {
    __syncthreads();
    swap();
  }
  __device__ __forceinline__ void swap() {
    const Shared<C> before = from_;
    from_ = to_;
    to_ = before;
  }

  // Values of a row of moduli side by side: twice an odd number, as pairs of columns are read as complex numbers.
  template <int kMany, typename Int>
  __device__ __forceinline__ int real_pitch(Int r) const {
    return 2 * (kMany * width(r) / 2 | 1);
  }

  __device__ __forceinline__ void fill_roots(Shared<C> roots, int n) const {
    for (int k = threadIdx.x; k < n; k += kThreads) {
      const double half_turns = 2. * k / n;
      roots[k] = C{static_cast<T>(cospi(half_turns)), static_cast<T>(sinpi(half_turns))};
    }
  }

  // source: [outs, size >> r].
  __device__ __forceinline__ void fill_matrix(Shared<T> matrices, const T* source, int r, int size, int outs) const {
    const int n = size >> r, pitch = rounded(outs);
    const Shared<T> to = matrices + matrix_at(size, r, outs);
#pragma unroll 1
    for (int item = threadIdx.x; item < n * pitch; item += kThreads) {
      const int i = item % n, o = item / n;
      to[i * pitch + o] = o < outs ? source[o * n + i] : T{0};
    }
  }
  static __device__ __forceinline__ int matrix_at(int size, int r, int outs) {
    return (2 * size - (2 * size >> r)) * rounded(outs);
  }

  __device__ __forceinline__ void pad() {
    const Shared<T> to = shared_cast<T>(to_);
    const T* image = q.images + blockIdx.x * q.height * q.width;
    const int pitch = real_pitch<1>(0);
#pragma unroll 1
    for (int item = threadIdx.x; item < height(0) * width(0); item += kThreads) {
      const int h = item / width(0), w = item % width(0);
      // Only within the image, whatever the indices are.
      const int64_t row = min(max(q.row_source[h], int64_t{0}), q.height - 1);
      const int64_t column = min(max(q.column_source[w], int64_t{0}), q.width - 1);
      to[h * pitch + w] = image[row * q.width + column];
    }
    next_pass();
  }

  // Transforms back `lines` times kMany sequences, load and store as in `stage`, which in between lie at `place`.
  template <int kLength, int kMany, typename Load, typename Store>
  __device__ __forceinline__ void transform(int length, int lines, Shared<const C> roots, int shift, Sequences place,
                                            Load load, Store store) {
    if constexpr (kLength > 0) {
      constant_stages<kLength, kMany, 1>(lines, roots, shift, place, load, store);
    } else {
      const int all = kMany * lines;
#pragma unroll 1
      for (int item = threadIdx.x; item < lines * length; item += kThreads) {
        const int line = item % lines, i = item / lines;
        C values[kMany] = {};
        load(line, i, values);
        for (int m = 0; m < kMany; ++m) to_[place.at(line + m * lines, i)] = values[m];
      }
      next_pass();
      if (stages<T>(from_, to_, place, length, all, roots, shift)) swap();
#pragma unroll 1
      for (int item = threadIdx.x; item < all * length; item += kThreads) {
        const int line = item % all, i = item / all;
        store(line, i, from_[place.at(line, i)]);
      }
      next_pass();
    }
  }

  template <int kLength, int kMany, int kDone, typename Load, typename Store>
  __device__ __forceinline__ void constant_stages(int lines, Shared<const C> roots, int shift, Sequences place,
                                                  Load load, Store store) {
    constexpr int kRadix = radix_after(kLength, kDone);
    const auto write = [&](int line, int i, const C& value) {
      if constexpr (kDone * kRadix == kLength)
        store(line, i, value);
      else
        to_[place.at(line, i)] = value;
    };
    if constexpr (kDone == 1) {
      stage<kRadix, kMany, T>(kLength, kDone, lines, roots, shift, load, write);
    } else {
      const auto read = [&](int line, int i, C(&values)[1]) { values[0] = from_[place.at(line, i)]; };
      stage<kRadix, 1, T>(kLength, kDone, lines * kMany, roots, shift, read, write);
    }
    next_pass();
    if constexpr (kDone * kRadix < kLength)
      constant_stages<kLength, kMany, kDone * kRadix>(lines, roots, shift, place, load, store);
  }

  // |x * psi_n|, |x * psi_(n + 1)|, ... at resolution `to` into the buffer, side by side, x of resolution `from` given
  // by its spectrum. Beyond the last wavelet of `count` the last is repeated.
  template <int kMany, typename From, typename To>
  __device__ __forceinline__ void moduli(From from, To to, int n, Shared<const C> spectrum, int count = 1) {
    const int rows = height(from), pitch = width(from) + 1, folds = 1 << (to - from);
    const int to_rows = height(to), to_columns = width(to), area = rows * width(from);
    const T* filter = q.wavelets[from] + int64_t{n - static_cast<int>(scatter_first(from) * q.angles)} * area;
    const int to_pitch = kMany * to_columns + 1;
    const Sequences down{1, to_pitch, 0, 0};
    transform<length<kHeight>(To()), kMany>(
        to_rows, to_columns, row_roots_, to, down,
        [&](int w0, int h0, C(&sums)[kMany]) {
#pragma unroll 1
          for (int a = 0; a < folds; ++a) {
            const int h = h0 + a * to_rows;
            const bool mirrored = h > rows / 2;  // X[h, w] is the conjugate of X[-h, -w]
#pragma unroll(kFixed ? 2 : 1)
            for (int b = 0; b < folds; ++b) {
              const int w = w0 + b * to_columns;
              const C at = spectrum[mirrored ? (rows - h) * pitch + pitch - 1 - w : h * pitch + w];
              const C x = mirrored ? conjugate(at) : at;
#pragma unroll
              for (int m = 0; m < kMany; ++m)
                sums[m] = added(__ldg(filter + (min(m, count - 1) * area + h * (pitch - 1) + w)), x, sums[m]);
            }
          }
        },
        [&](int w, int h, const C& z) { to_[down.at(w, h)] = z; });
    const int real = real_pitch<kMany>(to);
    const T scale = static_cast<T>(0.5 / area);  // of both transforms back, and of the spectrum
    const Sequences along{to_pitch, 1, to_rows, to_columns}, reals{real, 1, to_rows, to_columns};
    transform<length<kWidth>(To()), 1>(
        to_columns, kMany * to_rows, column_roots_, to, along,
        [&](int line, int w, C(&values)[1]) { values[0] = from_[along.at(line, w)]; },
        [&](int line, int w, const C& z) {
          shared_cast<T>(to_)[reals.at(line, w)] = scale * sqrt(fma(z.re, z.re, z.im * z.im));
        });
  }

  // Moduli of up to kSide of the `left` wavelets from m on that are not followed, at their scale, into features from a
  // channel on. Returns how many.
  __device__ __forceinline__ int leaves(int from, int scale, int m, int left, int channel, Shared<const C> spectrum) {
    if constexpr (!kFixed)
      if (scale == 0) {  // a buffer has no room for several
        moduli<1>(from, scale, m, spectrum);
        smooth<1>(scale, channel, 1);
        return 1;
      }
    const int count = min(left, kSide);
    const auto go = [&](auto f, auto t) {
      moduli<kSide>(f, t, m, spectrum, count);
      smooth<kSide>(t, channel, count);
    };
    if constexpr (kFixed)
      go(Constant<0>(), Constant<1>());
    else
      go(from, scale);
    return count;
  }

  // The low pass of planes of resolution r that lie side by side in a buffer, into `count` channels of the features.
  // The planes are left where they are.
  template <int kMany, typename Int>
  __device__ __forceinline__ void smooth(Int r, int channel, int count) {
    const int columns = width(r), pitch = real_pitch<kMany>(r), lines = kMany * columns;
    const int strip_pitch = columns + 1, outs = kMany * out_height();
    const Shared<const T> planes = shared_cast<const T>(from_);
    const Shared<T> strip = shared_cast<T>(to_);  // [outs, columns]
    const int quads = rounded(out_height()) / kQuad;
#pragma unroll 1
    for (int item = threadIdx.x; item < quads * lines; item += kThreads) {
      const int line = item % lines, quad = item / lines, plane = line / columns;
      T sums[kQuad] = {};
      project(rows_ + matrix_at(height(0), r, out_height()), quads, quad, height(r), planes + line, pitch, sums);
#pragma unroll
      for (int u = 0; u < kQuad; ++u)
        if (kQuad * quad + u < out_height())
          strip[(plane * out_height() + kQuad * quad + u) * strip_pitch + line % columns] = sums[u];
    }
    __syncthreads();
    const int wide = rounded(out_width()) / kQuad, channels = static_cast<int>(scatter_channels(scales(), q.angles));
    T* features = q.features + (blockIdx.x * int64_t{channels} + channel) * out_height() * out_width();
#pragma unroll 1
    for (int item = threadIdx.x; item < wide * outs; item += kThreads) {
      const int line = item % outs, quad = item / outs;
      T sums[kQuad] = {};
      project(columns_ + matrix_at(width(0), r, out_width()), wide, quad, columns, strip + line * strip_pitch, 1, sums);
#pragma unroll
      for (int u = 0; u < kQuad; ++u)
        if (line / out_height() < count && kQuad * quad + u < out_width())
          features[line * out_width() + kQuad * quad + u] = sums[u];
    }
    __syncthreads();
  }

  // Adds a quad of the columns of a matrix [n, quads] times n values that lie `stride` apart.
  static __device__ __forceinline__ void project(Shared<const T> matrix, int quads, int quad, int n,
                                                 Shared<const T> values, int stride, T (&sums)[kQuad]) {
    const Shared<const Quad<T>> all = shared_cast<const Quad<T>>(matrix);
#pragma unroll 4
    for (int i = 0; i < n; ++i) {
      const Quad<T> factors = all[i * quads + quad];
      const T x = values[i * stride];
#pragma unroll
      for (int u = 0; u < kQuad; ++u) sums[u] = fma(factors.values[u], x, sums[u]);
    }
  }

  // Half of the spectrum, times two, of the real plane in the buffer: pairs of columns as real and imaginary parts.
  template <typename Int>
  __device__ __forceinline__ void transform_real(Int r, Shared<C> spectrum) {
    const int rows = height(r), columns = width(r), pitch = columns + 1, pair_pitch = real_pitch<1>(r) / 2;
    const Sequences down{1, pitch, 0, 0}, along{pitch, 1, 0, 0};
    transform<length<kHeight>(Int()), 1>(
        rows, columns / 2, row_roots_, r, down,
        [&](int c, int h, C(&values)[1]) { values[0] = conjugate<T>(from_[h * pair_pitch + c]); },
        [&](int c, int k, const C& z) { to_[down.at(c, k)] = z; });
    transform<length<kWidth>(Int()), 1>(
        columns, rows / 2 + 1, column_roots_, r, along,
        [&](int k, int w, C(&values)[1]) {  // the conjugate of twice a column's number
          const C a = from_[k * pitch + w / 2], b = from_[(k ? rows - k : 0) * pitch + w / 2];
          values[0] = w % 2 ? C{-(a.im + b.im), a.re - b.re} : C{a.re + b.re, a.im - b.im};
        },
        [&](int k, int w, const C& z) {
          spectrum[along.at(k, w)] = conjugate(z);
          if (w == 0) spectrum[k * pitch + columns] = conjugate(z);
        });
  }
};

// Blocks: [planes]. Dynamic shared memory: 45136 bytes.
template <typename T, int kHeight, int kWidth>
__global__ void __launch_bounds__(kThreads, kBlocks) scatter_fixed_kernel(const __grid_constant__ ScatterParams<T> q) {
  DPK_DYNAMIC_SHARED(T, shared);
  Scattering<T, kHeight, kWidth>(q, shared).run();
}

// Blocks: [planes]. Dynamic shared memory: 166912 bytes.
template <typename T>
__global__ void __launch_bounds__(kThreads) scatter_kernel(const __grid_constant__ ScatterParams<T> q) {
  DPK_DYNAMIC_SHARED(T, shared);
  Scattering<T, 0, 0>(q, shared).run();
}

}  // namespace

template <typename T>
int64_t scatter_shared_bytes(const ScatterParams<T>& q) {
  return ScatterMemory(q.padded_height, q.padded_width, q.out_height, q.out_width, q.scales).template bytes<T>();
}

template <typename T>
void scatter_cuda(const ScatterParams<T>& q, CUstream_st* stream) {
  const int64_t bytes = scatter_shared_bytes(q);
  const auto is = [&](int64_t height, int64_t width) {
    return q.padded_height == height && q.padded_width == width && q.out_height == height / 4 - 2 &&
           q.out_width == width / 4 - 2 && q.scales == 2;
  };
  if constexpr (std::is_same_v<T, float>) {
    if (is(40, 40)) return DPK_LAUNCH((scatter_fixed_kernel<T, 40, 40>), q.planes, kThreads, bytes, stream, q);
    if (is(36, 36)) return DPK_LAUNCH((scatter_fixed_kernel<T, 36, 36>), q.planes, kThreads, bytes, stream, q);
  }
  DPK_LAUNCH(scatter_kernel<T>, q.planes, kThreads, bytes, stream, q);
}

template int64_t scatter_shared_bytes(const ScatterParams<float>&);
template int64_t scatter_shared_bytes(const ScatterParams<double>&);
template void scatter_cuda(const ScatterParams<float>&, CUstream_st*);
template void scatter_cuda(const ScatterParams<double>&, CUstream_st*);

}  // namespace dpk
