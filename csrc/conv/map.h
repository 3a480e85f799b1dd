// The maps that kernels compute on: what taps read of a channel, padding included. No torch, no instruction sets.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "conv/conv.h"

namespace dpk {

// A map made of lines of a channel's map: in dimension i, line l is line origin[i] + l * step[i] of the channel, and
// zero outside of first[i] <= l < last[i], in the padding.
struct ConvMap {
  int64_t size[3], step[3], origin[3], first[3], last[3];

  // `lines` of the zero-padded channel, from line `start` on and `every` apart.
  void set(const ConvShape& s, int i, int64_t lines, int64_t start, int64_t every) {
    size[i] = lines;
    step[i] = every;
    origin[i] = start - s.padding[i];
    const auto lines_below = [&](int64_t line) {  // how many lie below this line of the channel
      return std::clamp<int64_t>((line - origin[i] + every - 1) / every, 0, lines);
    };
    first[i] = origin[i] < 0 ? lines_below(0) : 0;
    last[i] = std::max(first[i], lines_below(s.in[i]));
  }

  int64_t pixels() const { return size[0] * size[1] * size[2]; }
  int64_t pixel(int64_t d, int64_t h, int64_t w) const { return (d * size[1] + h) * size[2] + w; }
  int64_t line() const { return last[2] - first[2]; }  // pixels of a line inside the padding
  int64_t inside() const { return (last[0] - first[0]) * (last[1] - first[1]) * line(); }

  // f(pixel of this map, pixel of the channel) for the start of each line inside the padding.
  template <typename F>
  void each_line(const ConvShape& s, F f) const {
    for (int64_t d = first[0]; d < last[0]; ++d)
      for (int64_t h = first[1]; h < last[1]; ++h)
        f(pixel(d, h, first[2]),
          ((origin[0] + d * step[0]) * s.in[1] + origin[1] + h * step[1]) * s.in[2] + origin[2] + first[2] * step[2]);
  }
};

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
