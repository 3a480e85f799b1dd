// Noised means and updates of several parameters against a naive loop, however the groups are cut.
#include <limits>

#include "check.h"
#include "noise/noise.h"
#include "update/update.h"

namespace {

constexpr double kGrid = 1. / 1024, kDeviation = 2, kDenominator = 50;
const dpk::Stream kStream{{1, 2, 3, 4, 5, 6, 7, 8}, 0, 9};

struct Setting {
  dpk::UpdateRule rule;
  bool momentum, nesterov, amsgrad, noisy;
};

// One parameter's values and the state that its optimizer keeps.
template <typename T>
struct Values {
  std::vector<T> parameter, first, second, largest;
  std::vector<double> sum;
};

template <typename T>
Values<T> make(int64_t size, uint32_t seed, const Setting& setting) {
  const bool adam = setting.rule == dpk::UpdateRule::kAdam;
  Values<T> v{check::normal<T>(size, seed), {}, {}, {}, check::normal<double>(size, seed + 1)};
  if (adam || setting.momentum) v.first = check::normal<T>(size, seed + 2);
  if (adam) v.second = check::normal<T>(size, seed + 3);
  for (T& x : v.second) x = x * x;
  if (setting.amsgrad) v.largest = check::normal<T>(size, seed + 4);
  return v;
}

template <typename T>
dpk::UpdateTensor tensor(Values<T>& v, int64_t begin, const Setting& setting) {
  const auto pointer = [](std::vector<T>& x) -> void* { return x.empty() ? nullptr : x.data(); };
  dpk::UpdateTensor t{};
  t.parameter = v.parameter.data();
  t.sum = v.sum.data();
  t.first_moment = pointer(v.first);
  t.second_moment = pointer(v.second);
  t.largest_second = pointer(v.largest);
  t.begin = begin;
  t.end = begin + static_cast<int64_t>(v.sum.size());
  t.rate = 0.1;
  t.decay = 0.01;
  t.shrink = 0.99;
  t.keep_first = 0.9;
  t.add_first = 0.1;
  t.keep_second = 0.99;
  t.second_unbias = 3;
  t.epsilon = 1e-8;
  t.wide = sizeof(T) == 8;
  t.nesterov = setting.nesterov;
  return t;
}

// The formulas at the head of update_cpu.cpp, one value at a time.
template <typename T>
void step(Values<T>& v, const dpk::UpdateTensor& t, const Setting& setting, const double* noise) {
  for (size_t i = 0; i < v.sum.size(); ++i) {
    double mean = v.sum[i] / kDenominator;
    if (setting.noisy) mean = (std::nearbyint(v.sum[i] / kGrid) * kGrid + noise[i]) / kDenominator;
    const double p = v.parameter[i], g = mean + t.decay * p;
    if (setting.rule == dpk::UpdateRule::kMean) {
      v.parameter[i] = static_cast<T>(mean);
    } else if (setting.rule == dpk::UpdateRule::kSgd) {
      double direction = g;
      if (setting.momentum) {
        const double buffer = t.keep_first * v.first[i] + t.add_first * g;
        v.first[i] = static_cast<T>(buffer);
        direction = setting.nesterov ? g + t.keep_first * buffer : buffer;
      }
      v.parameter[i] = static_cast<T>(p - t.rate * direction);
    } else {
      const double first = t.keep_first * v.first[i] + t.add_first * g;
      double second = t.keep_second * v.second[i] + (1 - t.keep_second) * g * g;
      v.first[i] = static_cast<T>(first);
      v.second[i] = static_cast<T>(second);
      if (setting.amsgrad) {
        second = std::fmax(second, v.largest[i]);
        v.largest[i] = static_cast<T>(second);
      }
      v.parameter[i] =
          static_cast<T>(t.shrink * p - t.rate * first / (std::sqrt(second) * t.second_unbias + t.epsilon));
    }
  }
}

template <typename T>
void close(const std::vector<T>& got, const std::vector<T>& want) {
  CHECK(got.size() == want.size());
  for (size_t i = 0; i < got.size(); ++i) CHECK_CLOSE(got[i], want[i], 4 * std::numeric_limits<T>::epsilon());
}

template <typename T>
void close(const Values<T>& got, const Values<T>& want) {
  close(got.parameter, want.parameter);
  close(got.first, want.first);
  close(got.second, want.second);
  close(got.largest, want.largest);
}

void matches_the_loop(const Setting& setting) {
  // Sizes that begin and end within groups of 128 values, one of them empty.
  Values<float> first = make<float>(300, 1, setting), none = make<float>(0, 10, setting);
  Values<double> last = make<double>(77, 20, setting);
  Values<float> first_loop = first;
  Values<double> last_loop = last;
  const dpk::UpdateTensor tensors[] = {tensor(first, 0, setting), tensor(none, 300, setting),
                                       tensor(last, 300, setting)};
  std::vector<double> noise(377);
  dpk::grid_gaussian_cpu({kStream, 0, 377, kDeviation / kGrid, kGrid, noise.data()}, 0, dpk::stream_groups(0, 377));
  step(first_loop, tensors[0], setting, noise.data());
  step(last_loop, tensors[2], setting, noise.data() + 300);

  const dpk::UpdateParams params{
      tensors, 3, setting.rule, kDenominator, kStream, setting.noisy ? kDeviation : 0, setting.noisy ? kGrid : 0};
  dpk::update_cpu(params, 2, 3);
  dpk::update_cpu(params, 0, 2);
  close(first, first_loop);
  close(last, last_loop);
}

}  // namespace

int main() {
  using dpk::UpdateRule;
  check::for_each_isa([] {
    for (bool noisy : {false, true}) {
      matches_the_loop({UpdateRule::kMean, false, false, false, noisy});
      matches_the_loop({UpdateRule::kSgd, false, false, false, noisy});
      matches_the_loop({UpdateRule::kSgd, true, false, false, noisy});
      matches_the_loop({UpdateRule::kSgd, true, true, false, noisy});
      matches_the_loop({UpdateRule::kAdam, false, false, false, noisy});
      matches_the_loop({UpdateRule::kAdam, false, false, true, noisy});
    }
  });
  return check::result();
}
