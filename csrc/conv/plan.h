// What is decided from the shape of a convolution alone: how its norms are computed, whether gradients are worth
// storing, and how a clipped sum is cut into tasks. No torch, no instruction sets.
#pragma once

#include <algorithm>
#include <cstdint>

#include "conv/conv.h"
#include "conv/map.h"

namespace dpk {

// Cycles per example of one core, from measurements with 8 floats to a vector: a tile of 6 rows and 16 outputs takes 6
// cycles a position and some for what becomes of it. Only ratios matter.
struct ConvCosts {
  double direct;  // the norm
  double gram;    // the norm
  double sum;     // the clipped sum from the operands
  double stored;  // writing gradients, reading them again for the clipped sum

  explicit ConvCosts(const ConvShape& s) {
    const double positions = s.positions(), size = static_cast<double>(s.rows()) * s.out_channels;
    const double tiles = std::max(1., size / s.groups / 96) * s.groups;
    direct = tiles * (6.3 * positions + 80);
    sum = tiles * (6.8 * positions + 170);
    stored = 2.1 * size;
    gram = half_gram(positions, s.group_out());
    for (const ConvPhase& phase : conv_phases(s)) {
      const double inside = phase.inside(), pixels = phase.pixels(), taps = phase.shifts.size();
      gram += half_gram(inside, s.group_in()) + 2 * inside * s.group_in() + 0.6 * inside * inside + pixels * pixels / 8;
      const double lines = s.out[0] * s.out[1], vectors = s.out[2] / 8 + s.out[2] % 8;
      gram += positions * lines / 2 * (vectors * (taps + 2) + 12);
    }
    gram *= s.groups;
  }

 private:
  static double half_gram(double columns, double depth) { return columns * columns / 192 * (6 * depth + 80); }
};

// Worth storing: cheaper than computing them again, and small or not much larger than the operands that they replace.
inline bool conv_stores(const ConvShape& s) {
  constexpr int64_t kTimesOperands = 4, kSmall = 4096;
  const ConvCosts costs(s);
  const int64_t operands = s.in_channels * s.pixels() + s.out_channels * s.positions();
  return costs.direct + costs.stored < std::min(costs.direct, costs.gram) + costs.sum &&
         s.rows() * s.out_channels <= std::max(kSmall, kTimesOperands * operands);
}

// The cheaper norm where nothing is stored.
inline ConvStrategy conv_strategy(const ConvShape& s) {
  const ConvCosts costs(s);
  return costs.gram < costs.direct ? ConvStrategy::kGram : ConvStrategy::kDirect;
}

// On the device: pairs of positions are products of at most 64 x 64, all groups in one.
inline bool conv_gram_fits_cuda(const ConvShape& s) { return s.groups == 1 && s.pixels() <= 64 && s.positions() <= 64; }

// The cheaper norm on the device where nothing is stored. In products on tensor cores, in fragments of 16 and 8; a read
// of shared memory, when taps are summed, takes the time of some.
inline ConvStrategy conv_strategy_cuda(const ConvShape& s) {
  if (!conv_gram_fits_cuda(s)) return ConvStrategy::kDirect;
  const auto whole = [](int64_t n, int64_t part) { return static_cast<double>((n + part - 1) / part * part); };
  constexpr double kRead = 10, kOverhead = 1.5;  // products; folding chains
  const double positions = static_cast<double>(s.positions()), pixels = static_cast<double>(s.pixels());
  const double direct = whole(s.out_channels, 16) * whole(s.rows(), 8) * whole(s.positions(), 8);
  const double products = whole(s.pixels(), 16) * pixels * whole(s.in_channels, 8) +
                          whole(s.positions(), 16) * positions * whole(s.out_channels, 8);
  const double reads = positions * positions * static_cast<double>(s.taps());
  return kOverhead * products + kRead * reads < direct ? ConvStrategy::kGram : ConvStrategy::kDirect;
}

// Whether outputs have so few channels in common that each loads its own.
inline bool own_channels(const ConvShape& s) { return s.groups > 1 && s.group_out() <= 4 && s.group_in() <= 16; }

// Channels [channel, channel + channels) of a group, outputs [output, output + outputs), counted over all groups. In
// own-channel mode the channels are those of each output's own group.
struct ConvBlock {
  int64_t group, channel, channels, output, outputs;
};

// How the sum is cut into tasks; a function of the shape alone.
struct ConvSumGrid {
  static constexpr int64_t kOperand = 1 << 15;  // packed values of a chunk of examples, each operand: half an L2 cache
  static constexpr int64_t kTotal = 1 << 15;    // sums of a block
  static constexpr int64_t kTasks = 16;         // enough for threads to share evenly

  const ConvShape& s;
  const bool own;
  int64_t outputs, channels;              // of a block
  int64_t output_blocks, channel_blocks;  // in a group (own channels: over all outputs)
  int64_t slices;                         // of the batch

  explicit ConvSumGrid(const ConvShape& shape) : s(shape), own(own_channels(shape)) {
    const int64_t all = own ? s.out_channels : s.group_out();
    outputs = std::min(all, std::clamp<int64_t>(kOperand / s.positions() / 32 * 32, 32, 128));
    const int64_t fitting = std::min(kOperand / ConvDirectMap(s).pixels(), kTotal / (outputs * s.taps()));
    channels = own ? s.group_in() : std::clamp<int64_t>(fitting, 1, s.group_in());
    output_blocks = (all + outputs - 1) / outputs;
    channel_blocks = (s.group_in() + channels - 1) / channels;
    slices = std::clamp<int64_t>(kTasks / blocks(), 1, std::max<int64_t>(1, s.batch / 8));
  }

  int64_t blocks() const { return (own ? 1 : s.groups) * output_blocks * channel_blocks; }

  ConvBlock block(int64_t index) const {
    const int64_t group = index / (output_blocks * channel_blocks);
    const int64_t all = own ? s.out_channels : s.group_out();
    const int64_t output = index / channel_blocks % output_blocks * outputs;
    const int64_t channel = index % channel_blocks * channels;
    return {group, channel, std::min(channels, s.group_in() - channel), group * s.group_out() + output,
            std::min(outputs, all - output)};
  }
};

}  // namespace dpk
