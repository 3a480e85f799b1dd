// Noise and update on the device: the formulas of update_cpu.cpp in the arithmetic of update/rule.h, hence the bits
// that the CPU writes where it has an FMA.
//
// A warp owns two groups of 128 indices of the step, wherever tensors begin and end. It draws their noise into shared
// memory and then, tensor by tensor, reads and writes each value once. Bytes per float value: 8 for the sum, 8 for each
// of parameter and moments; 120 integer operations for its noise.
//
// The table of tensors comes with the arguments of the launch, up to the 32764 bytes that CUDA 12.1 allows them from
// sm_70 on: no buffer on the device, no copy to it and no host memory that must outlive the launch. That holds 254
// tensors; a model with more takes another launch. Fewer than 29 take a small table, whose launch is as quick as any.
//
// Key and step are arguments too: a captured graph would repeat them, and with them the noise, at every replay. So this
// must not be captured; the binding refuses.
#include <algorithm>

#include "common/device_normals.h"
#include "common/launch.h"
#include "common/scalar.h"
#include "update/update.h"

namespace dpk {
namespace {

#include "update/rule.h"

constexpr int kThreads = 128;  // warps work alone: small blocks leave fewest registers unused
constexpr int kWarps = kThreads / kWarp;
constexpr int kBatch = 4;         // values of a lane in flight
constexpr int kSmallTable = 28;   // arguments below 4 KiB
constexpr int kLargeTable = 254;  // below 32764 bytes

// What a launch is about.
struct Work {
  int64_t group, count;                       // the first group, and the number of tensors
  double denominator, per_grid, unit, scale;  // per_grid 0: neither noise nor rounding
  Stream stream;
};

template <int kTensors>
struct Table {
  UpdateTensor tensors[kTensors];
};
static_assert(sizeof(Table<kSmallTable>) + sizeof(Work) <= 4096);
static_assert(sizeof(Table<kLargeTable>) + sizeof(Work) <= 32764);

// Values of T as the CPU stores them: 16-bit types through float.
template <typename T>
__device__ __forceinline__ double wide(T x) {
  return static_cast<double>(widen(x));
}
template <typename T>
__device__ __forceinline__ void put(void* to, int64_t i, double value) {
  static_cast<T*>(to)[i] = narrow<T>(static_cast<acc_t<T>>(value));
}

// Updates the values begin <= i < end of a tensor, a warp's. noise: of the value `begin` onward.
template <UpdateRule kRule, typename T>
__device__ __forceinline__ void update_values(const UpdateTensor& t, const Work& w, int64_t begin, int64_t end,
                                              Shared<const double> noise) {
  const bool momentum = kRule == UpdateRule::kSgd && t.first_moment;
  const bool reads_first = kRule == UpdateRule::kAdam || (momentum && !t.overwrite_first);
  for (int64_t i0 = begin + threadIdx.x % kWarp; i0 < end; i0 += kBatch * kWarp) {
    double sum[kBatch];
    T p[kBatch], first[kBatch], second[kBatch], largest[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {  // all reads before the writes, which for all the compiler knows may change them
      const int64_t i = i0 + u * int64_t{kWarp};
      const auto read = [&](const void* from, bool used) {
        return i < end && used ? static_cast<const T*>(from)[i] : T{};
      };
      sum[u] = i < end ? t.sum[i] : 0;
      p[u] = read(t.parameter, kRule != UpdateRule::kMean);
      first[u] = read(t.first_moment, reads_first);
      second[u] = read(t.second_moment, kRule == UpdateRule::kAdam);
      largest[u] = read(t.largest_second, kRule == UpdateRule::kAdam && t.largest_second);
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      const int64_t i = i0 + u * int64_t{kWarp};
      if (i >= end) break;
      const double mean =
          w.per_grid > 0 ? noised_mean(sum[u], noise[i - begin], w.per_grid, w.unit) : sum[u] / w.denominator;
      if constexpr (kRule == UpdateRule::kMean) {
        put<T>(t.parameter, i, mean);
      } else if constexpr (kRule == UpdateRule::kSgd) {
        const double g = decayed(t, mean, wide(p[u])), step = momentum ? sgd_momentum(t, wide(first[u]), g) : g;
        if (momentum) put<T>(t.first_moment, i, step);
        put<T>(t.parameter, i, sgd_parameter(t, wide(p[u]), g, step));
      } else {
        const double g = decayed(t, mean, wide(p[u])), m = adam_first(t, wide(first[u]), g);
        double v = adam_second(t, wide(second[u]), g);
        put<T>(t.first_moment, i, m);
        put<T>(t.second_moment, i, v);
        if (t.largest_second) {
          v = v > wide(largest[u]) ? v : wide(largest[u]);
          put<T>(t.largest_second, i, v);
        }
        put<T>(t.parameter, i, adam_parameter(t, wide(p[u]), m, sqrt(v)));
      }
    }
  }
}

// Blocks: [groups / (kWarps kWarpGroups)].
template <UpdateRule kRule, int kTensors>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const __grid_constant__ Work w, const __grid_constant__ Table<kTensors> table) {
  DPK_SHARED(double, values, kWarps* kWarpValues);
  DPK_SHARED(uint16_t, listed, kWarps* kWarpPairs);
  const int warp = threadIdx.x / kWarp;
  const Shared<double> noise = shared_slice(values, warp * kWarpValues, kWarpValues);
  const int64_t group = w.group + (int64_t{blockIdx.x} * kWarps + warp) * kWarpGroups;
  const int64_t start = group * kGroupWords, stop = start + kWarpValues;
  int k = 0;  // the first tensor that ends behind start
  for (int rest = static_cast<int>(w.count); rest > 0;) {
    const int half = rest / 2;
    const bool behind = table.tensors[k + half].end <= start;
    k = behind ? k + half + 1 : k;
    rest = behind ? rest - half - 1 : half;
  }
  if (k == w.count) return;  // the whole warp
  if (w.per_grid > 0)
    warp_normals<true>(w.stream, group, w.scale, noise, shared_slice(listed, warp * kWarpPairs, kWarpPairs));
  for (; k < w.count && table.tensors[k].begin < stop; ++k) {
    const UpdateTensor& t = table.tensors[k];
    const int64_t from = max(start, t.begin), begin = from - t.begin, end = min(stop, t.end) - t.begin;
    if (begin >= end) continue;
    const Shared<const double> drawn = noise + (from - start);
    if (t.wide)
      update_values<kRule, double>(t, w, begin, end, drawn);
    else if (t.narrow == Narrow::kBfloat16)
      update_values<kRule, bfloat16>(t, w, begin, end, drawn);
    else if (t.narrow == Narrow::kHalf)
      update_values<kRule, half>(t, w, begin, end, drawn);
    else
      update_values<kRule, float>(t, w, begin, end, drawn);
  }
}

template <UpdateRule kRule, int kTensors>
void launch_table(const UpdateParams& q, CUstream_st* stream) {
  for (int64_t first = 0; first < q.count; first += kTensors) {
    Table<kTensors> table{};
    Work work{};
    work.count = std::min<int64_t>(kTensors, q.count - first);
    std::copy_n(q.tensors + first, work.count, table.tensors);
    work.group = table.tensors[0].begin / kGroupWords;
    work.denominator = q.denominator;
    work.stream = q.stream;
    if (q.noise_std > 0) {
      work.per_grid = 1 / q.grid;
      work.unit = q.grid / q.denominator;
      work.scale = q.noise_std / q.grid;
    }
    const int64_t begin = table.tensors[0].begin, end = table.tensors[work.count - 1].end;
    if (begin == end) continue;
    // A group that two launches share is drawn in both.
    const int64_t groups = ceil_div(end, kGroupWords) - work.group;
    DPK_LAUNCH((update_kernel<kRule, kTensors>), ceil_div(groups, kWarps * kWarpGroups), kThreads, 0, stream, work,
               table);
  }
}

template <UpdateRule kRule>
void launch_rule(const UpdateParams& q, CUstream_st* stream) {
  q.count <= kSmallTable ? launch_table<kRule, kSmallTable>(q, stream) : launch_table<kRule, kLargeTable>(q, stream);
}

}  // namespace

void update_cuda(const UpdateParams& q, CUstream_st* stream) {
  switch (q.rule) {
    case UpdateRule::kMean:
      return launch_rule<UpdateRule::kMean>(q, stream);
    case UpdateRule::kSgd:
      return launch_rule<UpdateRule::kSgd>(q, stream);
    case UpdateRule::kAdam:
      return launch_rule<UpdateRule::kAdam>(q, stream);
  }
}

}  // namespace dpk
