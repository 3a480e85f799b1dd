// Clipping on the CPU.
//
//   weight_i = min(loss_scale, C / ||g_i||)     g_i: the gradient as captured, loss_scale g_i the example's gradient
//   norm_i   = loss_scale ||g_i||
//
// so weight_i g_i = loss_scale g_i min(1, C / norm_i). Privacy needs weight_i ||g_i|| <= C in floating point: the
// squared norm is rounded upward over everything that its sum may have lost, and the quotient downward. A norm that is
// not finite gives weight 0, which the sums skip.
//
// Rows: squares of floats are exact in double, and every sum runs in double. A block of columns walks over all rows in
// order, so no sum depends on the number of threads. Both read their input once and are bound by memory.
#define DPK_BODY "clip/clip_cpu.cpp"
#include "clip/clip.h"
#include "common/each_isa.h"

#ifdef DPK_ISA

namespace dpk::DPK_ISA {
namespace {

#include "common/simd.h"

constexpr double kEpsilon = std::numeric_limits<double>::epsilon();

template <typename T>
void row_norms(const RowNormParams<T>& q, int64_t begin, int64_t end) {
  // A square errs by u in double (not at all in float), a sum of n / (4 lanes) terms and the lanes after it by as many
  // u.
  const double upward = 1 + (static_cast<double>(q.size) / (4 * kLanes<double>)+8 + 4 * kLanes<double>)*kEpsilon;
  for (int64_t b = begin; b < end; ++b)
    q.squared_norms[b] = upward * sum_of_squares(q.per_example + b * q.size, q.size);
}

template <typename T>
void row_sum(const RowSumParams<T>& q, int64_t begin, int64_t end) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kRowSumBlock, width = std::min(kRowSumBlock, q.size - first);
    double sum[kRowSumBlock] = {};
    for (int64_t r = 0; r < q.kept; r += 4) {
      const T* row[4];
      double w[4];
      // The last rows are read again with weight 0 where kept is no multiple of 4.
      for (int64_t u = 0; u < 4; ++u) {
        row[u] = q.rows[std::min(r + u, q.kept - 1)] + first;
        w[u] = r + u < q.kept ? q.weights[r + u] : 0;
      }
      int64_t i = 0;
      for (; i + kLanes<double> <= width; i += kLanes<double>) {
        Vec<double> s = load<double>(sum + i);
        for (int64_t u = 0; u < 4; ++u) s += w[u] * load_double(row[u] + i);
        store<double>(sum + i, s);
      }
      for (; i < width; ++i)
        for (int64_t u = 0; u < 4; ++u) sum[i] += w[u] * static_cast<double>(row[u][i]);
    }
    std::copy_n(sum, width, q.sum + first);
  }
}

}  // namespace

void factors(const ClipFactorParams& q, int64_t begin, int64_t end) {
  const double upward = 1 + (static_cast<double>(q.parts) + 4) * kEpsilon, downward = 1 - 4 * kEpsilon;
  for (int64_t b = begin; b < end; ++b) q.norms[b] = 0;
  for (int64_t k = 0; k < q.parts; ++k)
    for (int64_t b = begin; b < end; ++b) q.norms[b] += q.squared_norms[k][b];
  for (int64_t b = begin; b < end; ++b) {
    const double captured = std::sqrt(q.norms[b] * upward);
    const double weight = std::min(q.loss_scale, q.max_grad_norm / captured * downward);
    q.norms[b] = q.loss_scale * captured;
    q.weights[b] = std::isfinite(q.norms[b]) ? weight : 0;
  }
}

void row_norm(const RowNormParams<float>& q, int64_t b, int64_t e) { row_norms(q, b, e); }
void row_norm(const RowNormParams<double>& q, int64_t b, int64_t e) { row_norms(q, b, e); }
void sums(const RowSumParams<float>& q, int64_t b, int64_t e) { row_sum(q, b, e); }
void sums(const RowSumParams<double>& q, int64_t b, int64_t e) { row_sum(q, b, e); }

}  // namespace dpk::DPK_ISA

#else

namespace dpk {
void clip_factors_cpu(const ClipFactorParams& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(factors, params, begin, end);
}

template <typename T>
void row_squared_norms_cpu(const RowNormParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(row_norm, params, begin, end);
}

template <typename T>
void weighted_row_sum_cpu(const RowSumParams<T>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(sums, params, begin, end);
}

template void row_squared_norms_cpu(const RowNormParams<float>&, int64_t, int64_t);
template void row_squared_norms_cpu(const RowNormParams<double>&, int64_t, int64_t);
template void weighted_row_sum_cpu(const RowSumParams<float>&, int64_t, int64_t);
template void weighted_row_sum_cpu(const RowSumParams<double>&, int64_t, int64_t);

}  // namespace dpk

#endif
