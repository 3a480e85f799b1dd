// Discrete Fourier transforms of many sequences in shared memory, by all threads of a block. Stockham's form, as in
// fourier.h: a stage of radix r takes r elements m apart, transforms them, turns the results by roots of unity and
// stores them where the next stage finds them in order. Threads lie along the sequences. Transforms back alone: one
// forth is that of the conjugates, conjugated.
#pragma once

#include "common/launch.h"

namespace dpk {
namespace {

constexpr int kThreads = 128;  // most stages have 200 to 400 butterflies

template <typename T>
struct alignas(2 * sizeof(T)) Complex {
  T re, im;
};

template <typename T>
DPK_HOST_DEVICE inline Complex<T> operator+(const Complex<T>& a, const Complex<T>& b) {
  return {a.re + b.re, a.im + b.im};
}

template <typename T>
DPK_HOST_DEVICE inline Complex<T> operator-(const Complex<T>& a, const Complex<T>& b) {
  return {a.re - b.re, a.im - b.im};
}

template <typename T>
DPK_HOST_DEVICE inline Complex<T> scaled(T factor, const Complex<T>& a) {
  return {factor * a.re, factor * a.im};
}

template <typename T>
DPK_HOST_DEVICE inline Complex<T> added(T factor, const Complex<T>& a, const Complex<T>& b) {
  return {fma(factor, a.re, b.re), fma(factor, a.im, b.im)};
}

template <bool kInverse, typename T>
DPK_HOST_DEVICE inline Complex<T> quarter(const Complex<T>& z) {
  static_assert(kInverse);
  return {-z.im, z.re};
}

template <typename T>
DPK_HOST_DEVICE inline Complex<T> conjugate(const Complex<T>& z) {
  return {z.re, -z.im};
}

template <typename T>
DPK_HOST_DEVICE inline Complex<T> product(const Complex<T>& a, const Complex<T>& b) {
  return {fma(a.re, b.re, -(a.im * b.im)), fma(a.re, b.im, a.im * b.re)};
}

#include "scatter/butterflies.h"

// The next radix of a length of which `rest` is left, the largest first.
DPK_HOST_DEVICE constexpr int next_radix(int rest) {
  for (int radix : {8, 6, 4, 5, 3, 2})
    if (rest % radix == 0) return radix;
  int radix = 7;
  while (rest % radix) radix += 2;
  return radix;
}

// The radix after `done` of a length, the smallest first: the first stage has most to load.
DPK_HOST_DEVICE constexpr int radix_after(int length, int done) {
  int radices[32] = {}, count = 0;
  for (int rest = length; rest > 1; rest /= radices[count++]) radices[count] = next_radix(rest);
  int so_far = 1;
  for (int i = count - 1; i > 0; --i) {
    if (so_far == done) return radices[i];
    so_far *= radices[i];
  }
  return radices[0];
}

// An int that is known at compile time.
template <int kValue>
struct Constant {
  DPK_HOST_DEVICE constexpr operator int() const { return kValue; }
};

// Where sequences lie in a buffer: elements `step` apart, sequences `pitch`; the next `lines` of them `other` further,
// where there are.
struct Sequences {
  int pitch, step, lines, other;

  __device__ __forceinline__ int at(int line, int i) const {
    return (lines ? line % lines * pitch + line / lines * other : line * pitch) + i * step;
  }
};

// Results of all butterflies of a stage. load(line, i, values) gives the elements i of the sequences line, line +
// lines,
// ..., and store(line, i, value) takes one; roots: of a length 2^shift times this one.
template <int kRadix, int kMany, typename T, typename Load, typename Store>
__device__ __forceinline__ void stage(int length, int done, int lines, Shared<const Complex<T>> roots, int shift,
                                      Load load, Store store) {
  const int butterflies = length / kRadix;
#pragma unroll 1
  for (int item = threadIdx.x; item < lines * butterflies; item += kThreads) {
    const int line = item % lines, j = item / lines, p = j / done, first = j + p * done * (kRadix - 1);
    Complex<T> z[kMany][kRadix];
#pragma unroll
    for (int t = 0; t < kRadix; ++t) {
      Complex<T> values[kMany] = {};
      load(line, j + butterflies * t, values);
#pragma unroll
      for (int m = 0; m < kMany; ++m) z[m][t] = values[m];
    }
#pragma unroll
    for (int m = 0; m < kMany; ++m) butterfly<true>(z[m]);
#pragma unroll
    for (int t = 0; t < kRadix; ++t) {
      if (t && done * kRadix < length) {
        const Complex<T> root = roots[(p * done * t) << shift];
#pragma unroll
        for (int m = 0; m < kMany; ++m) z[m][t] = product(z[m][t], root);
      }
#pragma unroll
      for (int m = 0; m < kMany; ++m) store(line + m * lines, first + done * t, z[m][t]);
    }
  }
}

// All stages of a length that is no constant, from one buffer to the other and back; whether they end in `to`. Not
// inlined: it would take a minute to compile everywhere.
template <typename T>
__device__ __attribute__((noinline)) bool stages(Shared<Complex<T>> from, Shared<Complex<T>> to, Sequences place,
                                                 int length, int lines, Shared<const Complex<T>> roots, int shift) {
  bool swapped = false;
  for (int done = 1, radix = 0; done < length; done *= radix) {
    radix = next_radix(length / done);
    const Shared<Complex<T>> x = swapped ? to : from, y = swapped ? from : to;
    const auto run = [&]<int kRadix>(Constant<kRadix>) {
      stage<kRadix, 1, T>(
          length, done, lines, roots, shift,
          [&](int line, int i, Complex<T>(&values)[1]) { values[0] = x[place.at(line, i)]; },
          [&](int line, int i, const Complex<T>& value) { y[place.at(line, i)] = value; });
    };
    if (radix == 8) {
      run(Constant<8>());
    } else if (radix == 6) {
      run(Constant<6>());
    } else if (radix == 5) {
      run(Constant<5>());
    } else if (radix == 4) {
      run(Constant<4>());
    } else if (radix == 3) {
      run(Constant<3>());
    } else if (radix == 2) {
      run(Constant<2>());
    } else {  // another prime: a thread for every result
      const int butterflies = length / radix;
#pragma unroll 1
      for (int item = threadIdx.x; item < lines * length; item += kThreads) {
        const int line = item % lines, j = item / lines % butterflies, t = item / lines / butterflies, p = j / done;
        Complex<T> sum = x[place.at(line, j)];
        for (int u = 1; u < radix; ++u) {
          const Complex<T> root = roots[(u * t % radix * butterflies) << shift];
          sum = sum + product<T>(x[place.at(line, j + butterflies * u)], root);
        }
        const Complex<T> root = roots[(p * done * t) << shift];
        y[place.at(line, j + p * done * (radix - 1) + done * t)] = product(sum, root);
      }
    }
    __syncthreads();
    swapped = !swapped;
  }
  return swapped;
}

}  // namespace
}  // namespace dpk
