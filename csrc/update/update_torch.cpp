#include <cmath>
#include <vector>

#include "common/torch.h"
#include "update/update.h"

namespace dpk {
namespace {

using Tensors = std::vector<Tensor>;
using Doubles = std::vector<double>;
using Flags = std::vector<int64_t>;

constexpr int64_t kGroupWork = 15 * kGroupWords;  // operations that a group costs

// A pointer to the values of a tensor that belongs to parameter `like`; null where it is empty and may be.
void* partner(Tensor tensor, const Tensor& like, const char* name, bool may_be_empty) {
  STD_TORCH_CHECK(on_device(tensor) && tensor.is_contiguous(), name, " must be contiguous and on one device");
  STD_TORCH_CHECK(tensor.scalar_type() == like.scalar_type(), name, " must have the dtypes of the parameters");
  if (may_be_empty && tensor.numel() == 0) return nullptr;
  check_size(tensor.numel() == like.numel(), name);
  return tensor.mutable_data_ptr();
}

// The CPU's kernels know no half precision.
Narrow narrow_of([[maybe_unused]] const Tensor& p) {
#if defined(USE_CUDA)
  if (p.scalar_type() == ScalarType::BFloat16) return Narrow::kBfloat16;
  if (p.scalar_type() == ScalarType::Half) return Narrow::kHalf;
#endif
  return Narrow::kNot;
}

// Parameters and sums; the caller adds moments and scalars.
std::vector<UpdateTensor> tensors_of(const Tensors& parameters, const Tensors& sums) {
  check_size(parameters.size() == sums.size(), "params, sums");
  std::vector<UpdateTensor> result;
  int64_t begin = 0;
  for (size_t k = 0; k < parameters.size(); ++k) {
    Tensor p = parameters[k];
    STD_TORCH_CHECK(
        p.scalar_type() == ScalarType::Float || p.scalar_type() == ScalarType::Double || narrow_of(p) != Narrow::kNot,
        "params must be float32 or float64, or on CUDA bfloat16 or float16");
    check_input(sums[k], "sums", sums[k].dim(), ScalarType::Double);
    check_size(sums[k].numel() == p.numel(), "params, sums");
    UpdateTensor t{};
    t.parameter = partner(p, p, "params", false);
    t.sum = data<double>(sums[k]);
    t.begin = begin, t.end = begin + p.numel();
    t.wide = p.scalar_type() == ScalarType::Double;
    t.narrow = narrow_of(p);
    t.shrink = 1;
    begin = t.end;
    result.push_back(t);
  }
  check_stream_range(0, begin);
  return result;
}

void run_rule(const std::vector<UpdateTensor>& tensors, UpdateRule rule, double denominator, const Tensor& key,
              int64_t domain, int64_t step, double noise_std, double grid) {
  STD_TORCH_CHECK(denominator > 0, "denominator must be positive, got ", denominator);
  UpdateParams params{tensors.data(), static_cast<int64_t>(tensors.size()), rule, denominator, {}, noise_std, grid};
  if (noise_std != 0) {
    check_grid(noise_std, grid);
    STD_TORCH_CHECK(key.is_cpu(), "key must be a CPU tensor");
    params.stream = stream_of(key, domain, step);
  }
  const int64_t size = tensors.empty() ? 0 : tensors.back().end;
  run((size + kGroupWords - 1) / kGroupWords, kGroupWork, [&](auto begin, auto end) { update_cpu(params, begin, end); },
      [&](auto stream) { update_cuda(params, stream); });
}

void noised_mean(const Tensors& outs, const Tensors& sums, double denominator, const Tensor& key, int64_t domain,
                 int64_t step, double noise_std, double grid) {
  if (outs.empty()) return;
  const OnDevice device(outs[0]);
  run_rule(tensors_of(outs, sums), UpdateRule::kMean, denominator, key, domain, step, noise_std, grid);
}

void sgd_update(const Tensors& parameters, const Tensors& sums, const Tensors& momentum_buffers, const Doubles& lr,
                const Doubles& momentum, const Doubles& dampening, const Doubles& weight_decay, const Flags& nesterov,
                const Flags& first, double denominator, const Tensor& key, int64_t domain, int64_t step,
                double noise_std, double grid) {
  const size_t n = parameters.size();
  check_size(momentum_buffers.size() == n && lr.size() == n && momentum.size() == n && dampening.size() == n &&
                 weight_decay.size() == n && nesterov.size() == n && first.size() == n,
             "one of each for every parameter");
  if (parameters.empty()) return;
  const OnDevice device(parameters[0]);
  std::vector<UpdateTensor> tensors = tensors_of(parameters, sums);
  for (size_t k = 0; k < n; ++k) {
    UpdateTensor& t = tensors[k];
    t.first_moment = partner(momentum_buffers[k], parameters[k], "momentum_buffers", momentum[k] == 0);
    t.rate = lr[k], t.decay = weight_decay[k];
    t.keep_first = momentum[k], t.add_first = 1 - dampening[k];
    t.nesterov = nesterov[k], t.overwrite_first = first[k];
  }
  run_rule(tensors, UpdateRule::kSgd, denominator, key, domain, step, noise_std, grid);
}

void adam_update(const Tensors& parameters, const Tensors& sums, const Tensors& exp_avgs, const Tensors& exp_avg_sqs,
                 const Tensors& max_exp_avg_sqs, const Flags& steps, const Doubles& lr, const Doubles& beta1,
                 const Doubles& beta2, const Doubles& eps, const Doubles& weight_decay, const Flags& decoupled,
                 double denominator, const Tensor& key, int64_t domain, int64_t step, double noise_std, double grid) {
  const size_t n = parameters.size();
  check_size(exp_avgs.size() == n && exp_avg_sqs.size() == n && max_exp_avg_sqs.size() == n && steps.size() == n &&
                 lr.size() == n && beta1.size() == n && beta2.size() == n && eps.size() == n &&
                 weight_decay.size() == n && decoupled.size() == n,
             "one of each for every parameter");
  if (parameters.empty()) return;
  const OnDevice device(parameters[0]);
  std::vector<UpdateTensor> tensors = tensors_of(parameters, sums);
  for (size_t k = 0; k < n; ++k) {
    UpdateTensor& t = tensors[k];
    t.first_moment = partner(exp_avgs[k], parameters[k], "exp_avgs", false);
    t.second_moment = partner(exp_avg_sqs[k], parameters[k], "exp_avg_sqs", false);
    t.largest_second = partner(max_exp_avg_sqs[k], parameters[k], "max_exp_avg_sqs", true);
    t.rate = lr[k] / (1 - std::pow(beta1[k], steps[k]));
    t.second_unbias = 1 / std::sqrt(1 - std::pow(beta2[k], steps[k]));
    (decoupled[k] ? t.shrink : t.decay) = decoupled[k] ? 1 - lr[k] * weight_decay[k] : weight_decay[k];
    t.keep_first = beta1[k], t.add_first = 1 - beta1[k], t.keep_second = beta2[k], t.epsilon = eps[k];
  }
  run_rule(tensors, UpdateRule::kAdam, denominator, key, domain, step, noise_std, grid);
}

DPK_SCHEMAS(m) {
  m.def(
      "noised_mean(Tensor(a!)[] outs, Tensor[] sums, float denominator, Tensor key, int domain, int step, "
      "float noise_std, float grid) -> ()");
  m.def(
      "sgd_update(Tensor(a!)[] params, Tensor[] sums, Tensor(b!)[] momentum_buffers, float[] lr, float[] momentum, "
      "float[] dampening, float[] weight_decay, int[] nesterov, int[] first, float denominator, Tensor key, "
      "int domain, int step, float noise_std, float grid) -> ()");
  m.def(
      "adam_update(Tensor(a!)[] params, Tensor[] sums, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
      "Tensor(d!)[] max_exp_avg_sqs, int[] steps, float[] lr, float[] beta1, float[] beta2, float[] eps, "
      "float[] weight_decay, int[] decoupled, float denominator, Tensor key, int domain, int step, "
      "float noise_std, float grid) -> ()");
}

DPK_IMPLEMENTATIONS(m) {
  m.impl("noised_mean", TORCH_BOX(&noised_mean));
  m.impl("sgd_update", TORCH_BOX(&sgd_update));
  m.impl("adam_update", TORCH_BOX(&adam_update));
}

}  // namespace
}  // namespace dpk
