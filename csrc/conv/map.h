// The maps that kernels compute on: what taps read of a channel, padding included. No torch, no instruction sets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "conv/conv.h"

namespace dpk {

// The map of the direct way: all lines that taps can reach, or those that they do where a dimension has a single tap.
struct ConvDirectMap : ConvMap {
  int64_t stride[3];  // between the positions

  explicit ConvDirectMap(const ConvShape& s) {
    for (int i = 0; i < 3; ++i) {
      stride[i] = s.kernel[i] == 1 ? 1 : s.stride[i];
      set(s, i, (s.out[i] - 1) * stride[i] + (s.kernel[i] - 1) * s.dilation[i] + 1, 0, s.stride[i] / stride[i]);
    }
  }
};

// The map of the taps that are congruent to `residue` modulo the stride: its lines are a stride apart, so positions are
// one pixel apart, and each tap is a shift.
struct ConvPhase : ConvMap {
  std::vector<int64_t> shifts;  // of each tap, in pixels of this map; empty: no such tap

  ConvPhase(const ConvShape& s, const int64_t (&residue)[3]) {
    std::vector<int64_t> tap[3];  // in lines
    for (int i = 0; i < 3; ++i) {
      for (int64_t k = 0; k < s.kernel[i]; ++k)
        if (k * s.dilation[i] % s.stride[i] == residue[i]) tap[i].push_back(k * s.dilation[i] / s.stride[i]);
      if (tap[i].empty()) return;
      set(s, i, s.out[i] + tap[i].back(), residue[i], s.stride[i]);
    }
    for (int64_t d : tap[0])
      for (int64_t h : tap[1])
        for (int64_t w : tap[2]) shifts.push_back(pixel(d, h, w));
  }
};

// All phases that have taps.
inline std::vector<ConvPhase> conv_phases(const ConvShape& s) {
  std::vector<ConvPhase> phases;
  for (int64_t d = 0; d < s.stride[0]; ++d)
    for (int64_t h = 0; h < s.stride[1]; ++h)
      for (int64_t w = 0; w < s.stride[2]; ++w)
        if (ConvPhase phase(s, {d, h, w}); !phase.shifts.empty()) phases.push_back(std::move(phase));
  return phases;
}

}  // namespace dpk
