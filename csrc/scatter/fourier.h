// Discrete Fourier transforms of short sequences, a different image in every vector lane. Included by scatter_cpu.cpp
// inside namespace dpk::DPK_ISA.
//
// Stockham's form: a stage of radix r takes r elements m apart, transforms them, turns the results by roots of unity
// and stores them where the next stage finds them in order. Lengths are split into radices 8, 6, 4, 5, 3, 2 and other
// primes.

// An element is a vector of real parts followed by one of imaginary parts.
template <typename T>
constexpr int64_t kComplex = 2 * kLanes<T>;

template <typename T>
struct Complex {
  Vec<T> re, im;
};

template <typename T>
static inline Complex<T> load_complex(const T* p) {
  return {load<T>(p), load<T>(p + kLanes<T>)};
}

template <typename T>
static inline void store_complex(T* p, const Complex<T>& z) {
  store<T>(p, z.re);
  store<T>(p + kLanes<T>, z.im);
}

template <typename T>
static inline Complex<T> operator+(const Complex<T>& a, const Complex<T>& b) {
  return {a.re + b.re, a.im + b.im};
}

template <typename T>
static inline Complex<T> operator-(const Complex<T>& a, const Complex<T>& b) {
  return {a.re - b.re, a.im - b.im};
}

template <typename T>
static inline Complex<T> scaled(T factor, const Complex<T>& a) {
  return {factor * a.re, factor * a.im};
}

template <typename T>
static inline Complex<T> added(T factor, const Complex<T>& a, const Complex<T>& b) {
  return {factor * a.re + b.re, factor * a.im + b.im};
}

// A quarter turn in the direction of the transform: -i z forward, i z backward.
template <bool kInverse, typename T>
static inline Complex<T> quarter(const Complex<T>& z) {
  return kInverse ? Complex<T>{-z.im, z.re} : Complex<T>{z.im, -z.re};
}

// z exp(-+ i angle).
template <bool kInverse, typename T>
static inline Complex<T> turned(const Complex<T>& z, T cosine, T sine) {
  if (!kInverse) sine = -sine;
  return {z.re * cosine - z.im * sine, z.im * cosine + z.re * sine};
}

#include "scatter/butterflies.h"

// The transform of one length. Neither direction divides by it.
template <typename T>
class Fourier {
 public:
  const int64_t length;

  explicit Fourier(int64_t n) : length(n), cosine(n), sine(n), scratch(0) {
    for (int64_t k = 0; k < n; ++k) {
      const double angle = 2 * 3.14159265358979323846 * static_cast<double>(k) / static_cast<double>(n);
      cosine[k] = static_cast<T>(std::cos(angle));
      sine[k] = static_cast<T>(std::sin(angle));
    }
    int64_t rest = n;
    for (int64_t radix : {8, 6, 4, 5, 3, 2})
      for (; rest % radix == 0; rest /= radix) radices.push_back(radix);
    for (int64_t radix = 7; rest > 1; radix += 2)
      for (; rest % radix == 0; rest /= radix) radices.push_back(radix);
    if (radices.empty()) radices.push_back(1);
    scratch.resize(3 * n * kComplex<T>);
  }

  // from, to: elements `stride` complex elements apart; they may be the same.
  template <bool kInverse>
  void run(const T* from, int64_t from_stride, T* to, int64_t to_stride) {
    T* between[2] = {scratch.data(), scratch.data() + length * kComplex<T>};
    int64_t done = 1;
    const T* x = from;
    int64_t x_stride = from_stride;
    for (std::size_t i = 0; i < radices.size(); ++i) {
      const bool last = i + 1 == radices.size();
      T* y = last ? to : between[i % 2];
      const int64_t y_stride = last ? to_stride : 1;
      switch (radices[i]) {
        case 2:
          stage<2, kInverse>(x, x_stride, y, y_stride, done);
          break;
        case 3:
          stage<3, kInverse>(x, x_stride, y, y_stride, done);
          break;
        case 4:
          stage<4, kInverse>(x, x_stride, y, y_stride, done);
          break;
        case 5:
          stage<5, kInverse>(x, x_stride, y, y_stride, done);
          break;
        case 6:
          stage<6, kInverse>(x, x_stride, y, y_stride, done);
          break;
        case 8:
          stage<8, kInverse>(x, x_stride, y, y_stride, done);
          break;
        default:
          prime_stage<kInverse>(x, x_stride, y, y_stride, done, radices[i]);
      }
      done *= radices[i];
      x = y;
      x_stride = 1;
    }
  }

 private:
  std::vector<int64_t> radices;
  std::vector<T> cosine, sine;  // of 2 pi k / length
  std::vector<T> scratch;       // between the stages, and the operands of a prime stage

  template <int kRadix, bool kInverse>
  void stage(const T* x, int64_t x_stride, T* y, int64_t y_stride, int64_t done) const {
    const int64_t apart = length / (done * kRadix);
    for (int64_t p = 0; p < apart; ++p)
      for (int64_t q = 0; q < done; ++q) {
        Complex<T> z[kRadix];
        const T* source = x + (q + done * p) * x_stride * kComplex<T>;
        for (int t = 0; t < kRadix; ++t) z[t] = load_complex<T>(source + done * apart * t * x_stride * kComplex<T>);
        butterfly<kInverse>(z);
        if (p)
          for (int t = 1; t < kRadix; ++t) z[t] = turned<kInverse>(z[t], cosine[p * t * done], sine[p * t * done]);
        T* target = y + (q + done * kRadix * p) * y_stride * kComplex<T>;
        for (int t = 0; t < kRadix; ++t) store_complex(target + done * t * y_stride * kComplex<T>, z[t]);
      }
  }

  template <bool kInverse>
  void prime_stage(const T* x, int64_t x_stride, T* y, int64_t y_stride, int64_t done, int64_t radix) {
    const int64_t apart = length / (done * radix);
    T* z = scratch.data() + 2 * length * kComplex<T>;
    for (int64_t p = 0; p < apart; ++p)
      for (int64_t q = 0; q < done; ++q) {
        for (int64_t t = 0; t < radix; ++t)
          store_complex(z + t * kComplex<T>,
                        load_complex<T>(x + (q + done * (p + apart * t)) * x_stride * kComplex<T>));
        for (int64_t t = 0; t < radix; ++t) {
          Complex<T> sum = load_complex<T>(z);
          for (int64_t u = 1; u < radix; ++u) {
            const int64_t k = u * t % radix * (length / radix);
            sum = sum + turned<kInverse>(load_complex<T>(z + u * kComplex<T>), cosine[k], sine[k]);
          }
          store_complex(y + (q + done * (radix * p + t)) * y_stride * kComplex<T>,
                        turned<kInverse>(sum, cosine[p * t * done], sine[p * t * done]));
        }
      }
  }
};
