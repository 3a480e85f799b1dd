#include <tuple>

#include "common/torch.h"
#include "noise/noise.h"

namespace dpk {
namespace {

constexpr int64_t kGroupWork = 10 * kGroupWords;  // operations that a group costs

template <typename T, typename F>
Tensor fill(const Tensor& key, int64_t domain, int64_t step, int64_t offset, int64_t count, double scale, double unit,
            ScalarType type, F fill_groups) {
  check_stream_range(offset, count);
  const Stream stream = stream_of(key, domain, step);
  Tensor result = torch::stable::new_empty(key, torch::headeronly::IntHeaderOnlyArrayRef(&count, 1), type);
  const StreamParams<T> params{stream, offset, count, scale, unit, mutable_data<T>(result)};
  parallel(stream_groups(offset, count), kGroupWork,
           [&](int64_t begin, int64_t end) { fill_groups(params, begin, end); });
  return result;
}

Tensor random_bits(const Tensor& key, int64_t domain, int64_t step, int64_t offset, int64_t count) {
  return fill<int64_t>(key, domain, step, offset, count, 0, 0, ScalarType::Long, random_bits_cpu);
}

Tensor gaussian(const Tensor& key, int64_t domain, int64_t step, int64_t offset, int64_t count) {
  return fill<double>(key, domain, step, offset, count, 0, 0, ScalarType::Double, gaussian_cpu);
}

Tensor grid_gaussian(const Tensor& key, int64_t domain, int64_t step, int64_t offset, int64_t count, double noise_std,
                     double grid) {
  check_grid(noise_std, grid);
  return fill<double>(key, domain, step, offset, count, noise_std / grid, grid, ScalarType::Double, grid_gaussian_cpu);
}

std::tuple<Tensor, Tensor> box_muller(const Tensor& words) {
  check_input(words, "words", 2, ScalarType::Long);
  check_size(words.size(1) == 4, "words");
  const int64_t pairs = words.size(0);
  Tensor exact = empty_double(words, {pairs, 2, 2}), fast = empty_double(words, {pairs, 2});
  const BoxMullerParams params{reinterpret_cast<const uint64_t*>(data<int64_t>(words)), mutable_data<double>(exact),
                               mutable_data<double>(fast)};
  box_muller_cpu(params, 0, pairs);
  return {exact, fast};
}

DPK_SCHEMAS(m) {
  m.def("random_bits(Tensor key, int domain, int step, int offset, int count) -> Tensor");
  m.def("gaussian(Tensor key, int domain, int step, int offset, int count) -> Tensor");
  m.def(
      "grid_gaussian(Tensor key, int domain, int step, int offset, int count, float noise_std, float grid) -> Tensor");
  m.def("box_muller(Tensor words) -> (Tensor, Tensor)");
}

DPK_IMPLEMENTATIONS(m) {
  m.impl("random_bits", TORCH_BOX(&random_bits));
  m.impl("gaussian", TORCH_BOX(&gaussian));
  m.impl("grid_gaussian", TORCH_BOX(&grid_gaussian));
  m.impl("box_muller", TORCH_BOX(&box_muller));
}

}  // namespace
}  // namespace dpk
