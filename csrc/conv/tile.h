// Products of an unfolded input with output gradients in register tiles, without an unfolded input in memory. Included
// by conv_cpu.cpp inside namespace dpk::DPK_ISA.
//
// A tile holds kTileRows rows (channel, tap) of the unfolded input times up to kTileVecs vectors of outputs. Output
// gradients are packed in panels [positions, outputs of the panel]; a row's value at a position is broadcast straight
// from the zero-padded input at row offset + position offset, so any stride, dilation and padding costs the same.
// Where outputs have few channels of their own (depthwise) a broadcast would serve one output only: there the packed
// input is [pixels, channels, outputs of the panel] and each row loads a vector.

constexpr int64_t kTileRows = DPK_VECTOR_BYTES == 64 ? 8 : DPK_VECTOR_BYTES == 32 ? 6 : 4;
constexpr int64_t kTileVecs = 2;  // 12 accumulators, 2 panel vectors and a broadcast fill AVX2's 16 registers
constexpr int64_t kDepth = 128;   // products added up in A, one after the other, before they join a total
template <typename A>
constexpr int64_t kPanel = kTileVecs * kLanes<A>;  // outputs of a panel
template <typename A>
constexpr int64_t kTile = kTileRows * kPanel<A>;

// values[i, :] = sum_k x[row_offsets[i] + offsets[k]] * panel[k * stride, :] for kVecs vectors of outputs. Not inlined:
// amid a caller's variables some accumulators would live in memory.
template <typename A, int64_t kVecs, bool kOwn>
[[gnu::noinline]] void tile_product(const A* x, const int64_t* row_offsets, const int64_t* offsets, const A* panel,
                                    int64_t stride, int64_t depth, A* values) {
  constexpr int64_t kChains = kVecs == 1 ? 2 : 1;  // one alone would wait for its products
  const A* rows[kTileRows];
  for (int64_t i = 0; i < kTileRows; ++i) rows[i] = x + row_offsets[i];
  Vec<A> acc[kChains][kTileRows][kVecs] = {};
  const auto add = [&](int64_t k, Vec<A>(&to)[kTileRows][kVecs]) __attribute__((always_inline)) {
    const int64_t offset = offsets[k];
    Vec<A> g[kVecs];
    DPK_UNROLL
    for (int64_t v = 0; v < kVecs; ++v) g[v] = load<A>(panel + k * stride + v * kLanes<A>);
    DPK_UNROLL
    for (int64_t i = 0; i < kTileRows; ++i) {
      DPK_UNROLL
      for (int64_t v = 0; v < kVecs; ++v)
        if constexpr (kOwn)
          to[i][v] += load<A>(rows[i] + offset + v * kLanes<A>) * g[v];
        else
          to[i][v] += rows[i][offset] * g[v];
    }
  };
  int64_t k = 0;
  for (; k + kChains <= depth; k += kChains) {
    DPK_UNROLL
    for (int64_t c = 0; c < kChains; ++c) add(k + c, acc[c]);
  }
  if (kChains > 1 && k < depth) add(k, acc[0]);
  DPK_UNROLL
  for (int64_t i = 0; i < kTileRows; ++i) {
    DPK_UNROLL
    for (int64_t v = 0; v < kVecs; ++v) {
      Vec<A> sum = acc[0][i][v];
      if constexpr (kChains == 2) sum += acc[1][i][v];
      store<A>(values + (i * kVecs + v) * kLanes<A>, sum);
    }
  }
}
