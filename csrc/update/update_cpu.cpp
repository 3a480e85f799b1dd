// Noise and update on the CPU, by groups of 128 values that stay in the first-level cache:
//
//   mean = (round(sum / grid) + round(z noise_std / grid)) grid / denominator       z standard normal
//
// The sum of the two integers is exact, and round(sum / grid) moves by at most one unit more than the sum does: the
// noisy sum is the ideal one rounded to the grid (Mironov 2012; DESIGN: sensitivity C + grid sqrt(size)). Sums beyond
// 2^51 units are moved to that bound, which brings no two of them farther apart. What follows is post-processing: the
// mean in double, then
//
//   SGD   g = mean + decay p;  b = keep b + add g;  p -= rate (nesterov ? g + keep b : b)
//   Adam  g = mean + decay p;  m = keep m + (1 - keep) g;  v = keep2 v + (1 - keep2) g^2;
//         p = shrink p - rate m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon)
//
// in double too, stored in the parameter's type. Bytes per float value: 8 for the sum, 8 for each of parameter and
// moments.
#define DPK_BODY "update/update_cpu.cpp"
#include "common/exact_normal.h"
#include "update/update.h"
// After what must not be compiled for a CPU that may be absent.
#include "common/each_isa.h"

#ifdef DPK_ISA

namespace dpk::DPK_ISA {
namespace {

#include "common/simd.h"
#include "common/simd_keystream.h"
#include "common/simd_normals.h"

// Without an FMA, a call of the library for each value would cost more than all else.
static inline double multiply_add(double a, double b, double c) {
#if DPK_VECTOR_BYTES > 16 || defined(__FP_FAST_FMA)
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

#include "update/rule.h"

// mean[i] for n values from `sum`, with the integers `noise` or without (null).
inline void noised_means(const UpdateParams& q, const double* __restrict sum, const double* __restrict noise, int64_t n,
                         double* __restrict mean) {
  if (!noise) {
    for (int64_t i = 0; i < n; ++i) mean[i] = sum[i] / q.denominator;
    return;
  }
  const double per_grid = 1 / q.grid, unit = q.grid / q.denominator;
  for (int64_t i = 0; i < n; ++i) mean[i] = noised_mean(sum[i], noise[i], per_grid, unit);
}

template <typename T>
inline void sgd(const UpdateTensor& t, int64_t at, int64_t n, const double* __restrict mean) {
  T* __restrict p = static_cast<T*>(t.parameter) + at;
  if (!t.first_moment) {
    for (int64_t i = 0; i < n; ++i) {
      const double g = decayed(t, mean[i], p[i]);
      p[i] = static_cast<T>(sgd_parameter(t, p[i], g, g));
    }
    return;
  }
  T* __restrict b = static_cast<T*>(t.first_moment) + at;
  for (int64_t i = 0; i < n; ++i) {
    const double g = decayed(t, mean[i], p[i]), momentum = sgd_momentum(t, b[i], g);
    b[i] = static_cast<T>(momentum);
    p[i] = static_cast<T>(sgd_parameter(t, p[i], g, momentum));
  }
}

template <typename T>
inline void adam(const UpdateTensor& t, int64_t at, int64_t n, const double* __restrict mean) {
  T* __restrict p = static_cast<T*>(t.parameter) + at;
  T* __restrict m = static_cast<T*>(t.first_moment) + at;
  T* __restrict v = static_cast<T*>(t.second_moment) + at;
  double first[kGroupWords], root[kGroupWords];
  for (int64_t i = 0; i < n; ++i) {
    const double g = decayed(t, mean[i], p[i]);
    first[i] = adam_first(t, m[i], g);
    root[i] = adam_second(t, v[i], g);
    m[i] = static_cast<T>(first[i]);
    v[i] = static_cast<T>(root[i]);
  }
  if (t.largest_second) {
    T* __restrict largest = static_cast<T*>(t.largest_second) + at;
    for (int64_t i = 0; i < n; ++i) {
      root[i] = root[i] > largest[i] ? root[i] : largest[i];
      largest[i] = static_cast<T>(root[i]);
    }
  }
  for (int64_t i = n; i % kLanes<double> != 0; ++i) root[i] = 0;
  for (int64_t i = 0; i < n; i += kLanes<double>) store<double>(root + i, vector_sqrt<double>(load<double>(root + i)));
  for (int64_t i = 0; i < n; ++i) p[i] = static_cast<T>(adam_parameter(t, p[i], first[i], root[i]));
}

template <typename T>
inline void apply(UpdateRule rule, const UpdateTensor& t, int64_t at, int64_t n, const double* mean) {
  if (rule == UpdateRule::kSgd) return sgd<T>(t, at, n, mean);
  if (rule == UpdateRule::kAdam) return adam<T>(t, at, n, mean);
  T* __restrict out = static_cast<T*>(t.parameter) + at;
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(mean[i]);
}

}  // namespace

void update(const UpdateParams& q, int64_t begin, int64_t end) {
  const UpdateTensor* last = q.tensors + q.count;
  const UpdateTensor* t = std::partition_point(
      q.tensors, last, [&](const UpdateTensor& tensor) { return tensor.end <= begin * kGroupWords; });
  double noise[kGroupWords], mean[kGroupWords];
  for (int64_t g = begin; g < end; ++g) {
    const int64_t start = g * kGroupWords, stop = start + kGroupWords;
    if (q.noise_std > 0) group_normals<true>(q.stream, g, q.noise_std / q.grid, noise);
    for (; t != last && t->begin < stop; ++t) {
      const int64_t from = std::max(start, t->begin), n = std::min(stop, t->end) - from, at = from - t->begin;
      if (n > 0) {
        noised_means(q, t->sum + at, q.noise_std > 0 ? noise + (from - start) : nullptr, n, mean);
        t->wide ? apply<double>(q.rule, *t, at, n, mean) : apply<float>(q.rule, *t, at, n, mean);
      }
      if (t->end > stop) break;  // goes on in the next group
    }
  }
}

}  // namespace dpk::DPK_ISA

#else

namespace dpk {
void update_cpu(const UpdateParams& params, int64_t begin, int64_t end) { DPK_DISPATCH(update, params, begin, end); }
}  // namespace dpk

#endif
