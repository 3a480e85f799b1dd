// Random words and Gaussian noise on the CPU. A group of 128 values is computed at once in vector lanes and kept in the
// first-level cache; nothing is read from memory, 8 bytes are written per value.
#define DPK_BODY "noise/noise_cpu.cpp"
#include "common/exact_normal.h"
#include "noise/noise.h"
// After what must not be compiled for a CPU that may be absent.
#include "common/each_isa.h"

#ifdef DPK_ISA

namespace dpk::DPK_ISA {
namespace {

#include "common/simd.h"
#include "common/simd_keystream.h"
#include "common/simd_normals.h"

// Calls write(group, buffer) and copies what of the group lies in the range.
template <typename T, typename F>
void fill(const StreamParams<T>& q, int64_t begin, int64_t end, F write) {
  T buffer[kGroupWords];
  for (int64_t g = begin; g < end; ++g) {
    const int64_t start = (q.offset / kGroupWords + g) * kGroupWords;
    const int64_t first = std::max(start, q.offset), last = std::min(start + kGroupWords, q.offset + q.count);
    write(start / kGroupWords, buffer);
    std::copy(buffer + (first - start), buffer + (last - start), q.out + (first - q.offset));
  }
}

}  // namespace

void bits(const StreamParams<int64_t>& q, int64_t begin, int64_t end) {
  fill(q, begin, end, [&](int64_t group, int64_t* out) {
    uint64_t words[kGroupWords];
    group_words(q.stream, group, words);
    std::memcpy(out, words, sizeof(words));
  });
}

void gaussian(const StreamParams<double>& q, int64_t begin, int64_t end) {
  fill(q, begin, end, [&](int64_t group, double* out) { group_normals<false>(q.stream, group, 0, out); });
}

void grid_gaussian(const StreamParams<double>& q, int64_t begin, int64_t end) {
  fill(q, begin, end, [&](int64_t group, double* out) {
    group_normals<true>(q.stream, group, q.scale, out);
    for (int64_t i = 0; i < kGroupWords; ++i) out[i] *= q.unit;
  });
}

void box_muller(const BoxMullerParams& q, int64_t begin, int64_t end) {
  for (int64_t p = begin; p < end; ++p) {
    const uint64_t* words = q.words + 4 * p;
    DoubleDouble a, b;
    exact_box_muller(words[0], words[1], words[2], words[3], a, b);
    const double parts[] = {a.high, a.low, b.high, b.low};
    std::copy_n(parts, 4, q.exact + 4 * p);
    Doubles first, second;
    const Doubles radius2 = minus_two_log(unit_interval(Bits{} + words[0]));
    polar(vector_sqrt<double>(radius2), Bits{} + words[1], first, second);
    const bool slow = top_bits(outside_fast_range(radius2)) != 0;
    q.fast[2 * p] = slow ? std::numeric_limits<double>::quiet_NaN() : first[0];
    q.fast[2 * p + 1] = slow ? std::numeric_limits<double>::quiet_NaN() : second[0];
  }
}

}  // namespace dpk::DPK_ISA

#else

namespace dpk {
void random_bits_cpu(const StreamParams<int64_t>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(bits, params, begin, end);
}

void gaussian_cpu(const StreamParams<double>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(gaussian, params, begin, end);
}

void grid_gaussian_cpu(const StreamParams<double>& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(grid_gaussian, params, begin, end);
}

void box_muller_cpu(const BoxMullerParams& params, int64_t begin, int64_t end) {
  DPK_DISPATCH(box_muller, params, begin, end);
}

}  // namespace dpk

#endif
