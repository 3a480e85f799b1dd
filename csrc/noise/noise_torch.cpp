#include <tuple>

#include "common/torch.h"
#include "noise/noise.h"

namespace dpk {
namespace {

constexpr int64_t kGroupWork = 10 * kGroupWords;  // operations that a group costs

// On CUDA the key is a tensor of the device, which the kernels read there.
template <typename T, typename Cpu, typename Cuda>
Tensor fill(const Tensor& key, int64_t domain, int64_t step, int64_t offset, int64_t count, double scale, double unit,
            ScalarType type, Cpu cpu, Cuda cuda) {
  const OnDevice device(key);
  check_stream_range(offset, count);
  const Stream stream = stream_of(key, domain, step);
  Tensor result = torch::stable::new_empty(key, torch::headeronly::IntHeaderOnlyArrayRef(&count, 1), type);
  const StreamParams<T> params{stream, offset, count, scale, unit, mutable_data<T>(result)};
  run(
      stream_groups(offset, count), kGroupWork, [&](auto begin, auto end) { cpu(params, begin, end); },
      [&](auto on) { cuda(params, data<uint8_t>(key), on); });
  return result;
}

Tensor random_bits(const Tensor& key, int64_t domain, int64_t step, int64_t offset, int64_t count) {
  return fill<int64_t>(
      key, domain, step, offset, count, 0, 0, ScalarType::Long,
      [](const auto& params, auto begin, auto end) { random_bits_cpu(params, begin, end); },
      [](const auto& params, auto device_key, auto stream) { random_bits_cuda(params, device_key, stream); });
}

Tensor gaussian(const Tensor& key, int64_t domain, int64_t step, int64_t offset, int64_t count) {
  return fill<double>(
      key, domain, step, offset, count, 0, 0, ScalarType::Double,
      [](const auto& params, auto begin, auto end) { gaussian_cpu(params, begin, end); },
      [](const auto& params, auto device_key, auto stream) { gaussian_cuda(params, device_key, stream); });
}

Tensor grid_gaussian(const Tensor& key, int64_t domain, int64_t step, int64_t offset, int64_t count, double noise_std,
                     double grid) {
  check_grid(noise_std, grid);
  return fill<double>(
      key, domain, step, offset, count, noise_std / grid, grid, ScalarType::Double,
      [](const auto& params, auto begin, auto end) { grid_gaussian_cpu(params, begin, end); },
      [](const auto& params, auto device_key, auto stream) { grid_gaussian_cuda(params, device_key, stream); });
}

#if !defined(USE_CUDA)
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
#endif

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
#if !defined(USE_CUDA)
  m.impl("box_muller", TORCH_BOX(&box_muller));
#endif
}

}  // namespace
}  // namespace dpk
