// The shape of a convolution in three spatial dimensions (fewer are lifted), how its maps lie in memory, and what taps
// read of a channel. No torch, no instruction sets.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/host_device.h"

namespace dpk {

struct ConvShape {
  int64_t batch, groups, in_channels, out_channels;
  int64_t in[3], out[3];  // sizes of the maps: depth, height, width
  int64_t kernel[3], stride[3], padding[3], dilation[3];

  DPK_HOST_DEVICE int64_t group_in() const { return in_channels / groups; }
  DPK_HOST_DEVICE int64_t group_out() const { return out_channels / groups; }
  DPK_HOST_DEVICE int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
  DPK_HOST_DEVICE int64_t rows() const { return group_in() * taps(); }  // of the unfolded input, in each group
  DPK_HOST_DEVICE int64_t pixels() const { return in[0] * in[1] * in[2]; }
  DPK_HOST_DEVICE int64_t positions() const { return out[0] * out[1] * out[2]; }
  DPK_HOST_DEVICE int64_t padded(int d) const { return in[d] + 2 * padding[d]; }
};

// How far apart an operand's channels lie, and its pixels (positions): [channels, pixels], or the other way round in
// torch's channels-last format. Examples follow each other.
struct ConvLayout {
  int64_t channel, pixel;
};

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

}  // namespace dpk
