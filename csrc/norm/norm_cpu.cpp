// Normalization layers on the CPU.
//
// With gamma the weight, n the values that share a statistic, and sums over them,
//   dx = rstd (gamma g - sum(gamma g) / n - xhat sum(gamma g xhat) / n)
// where RMS norm has no second term and given statistics have neither. Group norm: the sums over a channel's positions
// are the parameters' gradients, and the input's gradient combines those of a group. Memory: x and g are read once,
// a group (or a row) at a time, and found in cache when dx is written; with the channels last, an example at a time.
//
// Products are accumulated in T over at most kBlock positions and in double beyond. (x - mean) * rstd is taken in this
// order: it neither cancels like x * rstd - mean * rstd nor leaves the range of T.
#include "norm/norm.h"

#define DPK_BODY "norm/norm_cpu.cpp"
#include "common/each_isa.h"

#ifdef DPK_ISA

namespace dpk::DPK_ISA {
namespace {

#include "common/simd.h"

constexpr int64_t kBlock = 512;  // values of a channel summed in T: 32 terms a lane under AVX2, two accumulators
constexpr int64_t kRows = 32;    // positions of a layer norm summed in T

// The lanes of x, widened and summed pairwise.
template <typename T>
inline double wide_sum(Vec<T> x) {
  if constexpr (std::is_same_v<T, double>) {
    return lane_sum<double>(x);
  } else {
    T lanes[kLanes<T>];
    store<T>(lanes, x);
    return lane_sum<double>(load_double(lanes) + load_double(lanes + kLanes<double>));
  }
}

struct Sums {
  double scaled = 0;  // of g (x - mean) rstd
  double plain = 0;   // of g
};

template <typename T>
inline Sums channel_sums(const T* x, const T* g, int64_t n, T mean, T rstd) {
  constexpr int64_t kStep = 2 * kLanes<T>;
  Sums sums;
  int64_t i = 0;
  while (i + kLanes<T> <= n) {
    Vec<T> scaled[2] = {}, plain[2] = {};
    const int64_t stop = std::min(i + kBlock, n);
    for (; i + kStep <= stop; i += kStep)
      for (int64_t u = 0; u < 2; ++u) {
        const Vec<T> y = load<T>(g + i + u * kLanes<T>);
        scaled[u] += y * ((load<T>(x + i + u * kLanes<T>) - mean) * rstd);
        plain[u] += y;
      }
    for (; i + kLanes<T> <= stop; i += kLanes<T>) {
      const Vec<T> y = load<T>(g + i);
      scaled[0] += y * ((load<T>(x + i) - mean) * rstd);
      plain[0] += y;
    }
    sums.scaled += wide_sum<T>(scaled[0] + scaled[1]);
    sums.plain += wide_sum<T>(plain[0] + plain[1]);
  }
  T scaled = 0, plain = 0;
  for (; i < n; ++i) {
    scaled += g[i] * ((x[i] - mean) * rstd);
    plain += g[i];
  }
  sums.scaled += static_cast<double>(scaled);
  sums.plain += static_cast<double>(plain);
  return sums;
}

template <typename T>
void group_norm_backward(const GroupNormParams<T>& q, int64_t begin, int64_t end) {
  const int64_t width = q.channels / q.groups;  // channels of a group
  for (int64_t task = begin; task < end; ++task) {
    const int64_t group = task % q.groups, first = task * width * q.spatial;
    const T mean = q.mean[task], rstd = q.rstd[task];
    const T* gamma = q.weight ? q.weight + group * width : nullptr;
    double scaled = 0, plain = 0;
    for (int64_t c = 0; c < width; ++c) {
      const int64_t at = first + c * q.spatial;
      const Sums sums = channel_sums(q.x + at, q.output_grads + at, q.spatial, mean, rstd);
      q.weight_grads[task * width + c] = sums.scaled;
      q.bias_grads[task * width + c] = sums.plain;
      scaled += sums.scaled * (gamma ? gamma[c] : 1);
      plain += sums.plain * (gamma ? gamma[c] : 1);
    }
    if (!q.input_grads) continue;
    const double count = static_cast<double>(width * q.spatial);
    const T offset = static_cast<T>(rstd * plain / count), slope = static_cast<T>(rstd * scaled / count);
    for (int64_t c = 0; c < width; ++c) {
      const int64_t at = first + c * q.spatial;
      const T factor = gamma ? rstd * gamma[c] : rstd;
      const T* x = q.x + at;
      const T* g = q.output_grads + at;
      T* __restrict to = q.input_grads + at;
      if (q.fixed)
        for (int64_t i = 0; i < q.spatial; ++i) to[i] = factor * g[i];
      else
        for (int64_t i = 0; i < q.spatial; ++i) to[i] = factor * g[i] - offset - slope * ((x[i] - mean) * rstd);
    }
  }
}

// The same with the channels last: every loop runs over all channels of a position.
template <typename T>
void group_norm_last_backward(const GroupNormParams<T>& q, int64_t begin, int64_t end) {
  const int64_t n = q.channels, width = n / q.groups;
  std::vector<T> of_channel(6 * n);
  T *mean = of_channel.data(), *rstd = mean + n, *scaled = rstd + n, *plain = scaled + n, *factor = plain + n;
  T *offset = scaled, *slope = plain, *xhat = factor + n;  // the sums are done when offset and slope are needed
  for (int64_t b = begin; b < end; ++b) {
    for (int64_t c = 0; c < n; ++c) {
      mean[c] = q.mean[b * q.groups + c / width];
      rstd[c] = q.rstd[b * q.groups + c / width];
    }
    double *weight_grads = q.weight_grads + b * n, *bias_grads = q.bias_grads + b * n;
    std::fill_n(weight_grads, n, 0.);
    std::fill_n(bias_grads, n, 0.);
    for (int64_t s = 0; s < q.spatial;) {
      std::fill_n(scaled, n, T{0});
      std::fill_n(plain, n, T{0});
      for (const int64_t stop = std::min(s + kRows, q.spatial); s < stop; ++s) {
        const T* __restrict x = q.x + (b * q.spatial + s) * n;
        const T* __restrict g = q.output_grads + (b * q.spatial + s) * n;
        for (int64_t c = 0; c < n; ++c) scaled[c] += g[c] * ((x[c] - mean[c]) * rstd[c]);
        for (int64_t c = 0; c < n; ++c) plain[c] += g[c];
      }
      for (int64_t c = 0; c < n; ++c) weight_grads[c] += static_cast<double>(scaled[c]);
      for (int64_t c = 0; c < n; ++c) bias_grads[c] += static_cast<double>(plain[c]);
    }
    if (!q.input_grads) continue;
    const double count = static_cast<double>(width * q.spatial);
    for (int64_t first = 0; first < n; first += width) {
      double of_group = 0, of_group_plain = 0;
      for (int64_t c = first; c < first + width; ++c) {
        const double gamma = q.weight ? static_cast<double>(q.weight[c]) : 1;
        of_group += weight_grads[c] * gamma;
        of_group_plain += bias_grads[c] * gamma;
        factor[c] = q.weight ? rstd[c] * q.weight[c] : rstd[c];
      }
      std::fill_n(offset + first, width, static_cast<T>(rstd[first] * of_group_plain / count));
      std::fill_n(slope + first, width, static_cast<T>(rstd[first] * of_group / count));
    }
    for (int64_t s = 0; s < q.spatial; ++s) {
      const int64_t at = (b * q.spatial + s) * n;
      const T* __restrict x = q.x + at, * __restrict g = q.output_grads + at;
      T* __restrict to = q.input_grads + at;
      for (int64_t c = 0; c < n; ++c) to[c] = factor[c] * g[c];
      if (q.fixed) continue;
      for (int64_t c = 0; c < n; ++c) xhat[c] = (x[c] - mean[c]) * rstd[c];
      for (int64_t c = 0; c < n; ++c) to[c] = to[c] - offset[c] - slope[c] * xhat[c];
    }
  }
}

// One position: adds g xhat and g to the blocks (a fresh block holds nothing yet), and returns the row's sums of
// gamma g xhat and gamma g.
template <bool kFresh, typename T>
inline Sums row_sums(const T* x, const T* g, const T* gamma, int64_t n, T mean, T rstd, T* weight_block,
                     T* bias_block) {
  Sums sums;
  int64_t i = 0;
  while (i + kLanes<T> <= n) {
    Vec<T> scaled = {}, plain = {};
    for (const int64_t stop = std::min(i + kBlock, n); i + kLanes<T> <= stop; i += kLanes<T>) {
      const Vec<T> y = load<T>(g + i), z = y * ((load<T>(x + i) - mean) * rstd);
      store<T>(weight_block + i, kFresh ? z : load<T>(weight_block + i) + z);
      store<T>(bias_block + i, kFresh ? y : load<T>(bias_block + i) + y);
      scaled += gamma ? load<T>(gamma + i) * z : z;
      plain += gamma ? load<T>(gamma + i) * y : y;
    }
    sums.scaled += wide_sum<T>(scaled);
    sums.plain += wide_sum<T>(plain);
  }
  for (; i < n; ++i) {
    const T y = g[i], z = y * ((x[i] - mean) * rstd);
    weight_block[i] = kFresh ? z : weight_block[i] + z;
    bias_block[i] = kFresh ? y : bias_block[i] + y;
    sums.scaled += static_cast<double>(gamma ? gamma[i] * z : z);
    sums.plain += static_cast<double>(gamma ? gamma[i] * y : y);
  }
  return sums;
}

// Adds a block to the gradients in double; the first block is all that they hold.
template <typename T>
inline void flush(const T* from, double* __restrict to, int64_t n, bool first) {
  if (first)
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<double>(from[i]);
  else
    for (int64_t i = 0; i < n; ++i) to[i] += static_cast<double>(from[i]);
}

template <typename T>
void layer_norm_backward(const LayerNormParams<T>& q, int64_t begin, int64_t end) {
  const int64_t n = q.features;
  std::vector<T> weight_block(n), bias_block(n);  // sums of up to kRows positions
  for (int64_t b = begin; b < end; ++b) {
    double* weight_grads = q.weight_grads + b * n;
    double* bias_grads = q.bias_grads + b * n;
    if (q.positions == 0) {
      std::fill_n(weight_grads, n, 0.);
      std::fill_n(bias_grads, n, 0.);
    }
    for (int64_t t0 = 0; t0 < q.positions; t0 += kRows) {
      for (int64_t t = t0; t < std::min(t0 + kRows, q.positions); ++t) {
        const int64_t row = b * q.positions + t;
        const T* x = q.x + row * n;
        const T* g = q.output_grads + row * n;
        const T mean = q.mean ? q.mean[row] : T(0), rstd = q.rstd[row];
        const Sums sums = t == t0
                              ? row_sums<true>(x, g, q.weight, n, mean, rstd, weight_block.data(), bias_block.data())
                              : row_sums<false>(x, g, q.weight, n, mean, rstd, weight_block.data(), bias_block.data());
        if (!q.input_grads) continue;
        const T offset = q.mean ? static_cast<T>(rstd * sums.plain / n) : T(0);
        const T slope = static_cast<T>(rstd * sums.scaled / n);
        T* __restrict to = q.input_grads + row * n;
        if (const T* gamma = q.weight)
          for (int64_t i = 0; i < n; ++i) to[i] = rstd * (gamma[i] * g[i]) - offset - slope * ((x[i] - mean) * rstd);
        else
          for (int64_t i = 0; i < n; ++i) to[i] = rstd * g[i] - offset - slope * ((x[i] - mean) * rstd);
      }
      flush(weight_block.data(), weight_grads, n, t0 == 0);
      flush(bias_block.data(), bias_grads, n, t0 == 0);
    }
  }
}

}  // namespace

void group_backward(const GroupNormParams<float>& q, int64_t b, int64_t e) { group_norm_backward(q, b, e); }
void group_backward(const GroupNormParams<double>& q, int64_t b, int64_t e) { group_norm_backward(q, b, e); }
void last_backward(const GroupNormParams<float>& q, int64_t b, int64_t e) { group_norm_last_backward(q, b, e); }
void last_backward(const GroupNormParams<double>& q, int64_t b, int64_t e) { group_norm_last_backward(q, b, e); }
void layer_backward(const LayerNormParams<float>& q, int64_t b, int64_t e) { layer_norm_backward(q, b, e); }
void layer_backward(const LayerNormParams<double>& q, int64_t b, int64_t e) { layer_norm_backward(q, b, e); }

}  // namespace dpk::DPK_ISA

#else

namespace dpk {

template <typename T>
void group_norm_backward_cpu(const GroupNormParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(group_backward, params, begin, end);
}

template <typename T>
void group_norm_last_backward_cpu(const GroupNormParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(last_backward, params, begin, end);
}

template <typename T>
void layer_norm_backward_cpu(const LayerNormParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(layer_backward, params, begin, end);
}

template void group_norm_backward_cpu(const GroupNormParams<float>&, int64_t, int64_t);
template void group_norm_backward_cpu(const GroupNormParams<double>&, int64_t, int64_t);
template void group_norm_last_backward_cpu(const GroupNormParams<float>&, int64_t, int64_t);
template void group_norm_last_backward_cpu(const GroupNormParams<double>&, int64_t, int64_t);
template void layer_norm_backward_cpu(const LayerNormParams<float>&, int64_t, int64_t);
template void layer_norm_backward_cpu(const LayerNormParams<double>&, int64_t, int64_t);

}  // namespace dpk

#endif
