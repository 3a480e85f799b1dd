// One group of a stream in vector lanes. Included by a kernel body inside namespace dpk::DPK_ISA, after common/simd.h.

using Words = Vec<uint32_t>;

template <int N>
static inline Words rotate(Words x) {
#if DPK_VECTOR_BYTES == 32 && !defined(__clang__)
  // AVX2 has no rotation: whole bytes move by one shuffle instead of two shifts and an or.
  typedef uint8_t Bytes __attribute__((vector_size(32)));
  if constexpr (N == 16)
    return (Words)__builtin_shuffle((Bytes)x, Bytes{2,  3,  0,  1,  6,  7,  4,  5,  10, 11, 8,  9,  14, 15, 12, 13,
                                                    18, 19, 16, 17, 22, 23, 20, 21, 26, 27, 24, 25, 30, 31, 28, 29});
  if constexpr (N == 8)
    return (Words)__builtin_shuffle((Bytes)x, Bytes{3,  0,  1,  2,  7,  4,  5,  6,  11, 8,  9,  10, 15, 12, 13, 14,
                                                    19, 16, 17, 18, 23, 20, 21, 22, 27, 24, 25, 26, 31, 28, 29, 30});
#endif
  return x << N | x >> (32 - N);
}

static inline void quarter_rounds(Words& a, Words& b, Words& c, Words& d) {
  a += b, d = rotate<16>(d ^ a);
  c += d, b = rotate<12>(b ^ c);
  a += b, d = rotate<8>(d ^ a);
  c += d, b = rotate<7>(b ^ c);
}

// Interleaves the 32-bit lanes of two vectors: within each four lanes, the first two (kHalf = 0) or the last two.
template <int kHalf>
static inline Words interleave(Words low, Words high) {
  Words order;
  for (int l = 0; l < kLanes<uint32_t>; ++l) order[l] = l / 4 * 4 + 2 * kHalf + l % 4 / 2 + l % 2 * kLanes<uint32_t>;
#if defined(__clang__)
  Words out;
  for (int l = 0; l < kLanes<uint32_t>; ++l)
    out[l] = order[l] < kLanes<uint32_t> ? low[order[l]] : high[order[l] - kLanes<uint32_t>];
  return out;
#else
  return __builtin_shuffle(low, high, order);
#endif
}

// The kGroupWords words of a group, in order.
static inline void group_words(const Stream& stream, int64_t group, uint64_t* out) {
  constexpr int kBlocks = kLanes<uint32_t>;  // computed at a time
  uint32_t state[16];
  chacha20_state(stream, stream.domain, static_cast<uint32_t>(group * kGroupBlocks), state);
  // The lane of each block, such that interleaved words come out in the order of their blocks.
  Words counter;
  for (int l = 0; l < kBlocks; ++l) counter[l] = l % 4 / 2 * (kBlocks / 2) + l / 4 * 2 + l % 2;
  counter += state[12];
  for (int64_t first = 0; first < kGroupBlocks; first += kBlocks, counter += kBlocks) {
    Words v[16];
    for (int i = 0; i < 16; ++i) v[i] = i == 12 ? counter : Words{} + state[i];
    for (int round = 0; round < 10; ++round) {
      quarter_rounds(v[0], v[4], v[8], v[12]);
      quarter_rounds(v[1], v[5], v[9], v[13]);
      quarter_rounds(v[2], v[6], v[10], v[14]);
      quarter_rounds(v[3], v[7], v[11], v[15]);
      quarter_rounds(v[0], v[5], v[10], v[15]);
      quarter_rounds(v[1], v[6], v[11], v[12]);
      quarter_rounds(v[2], v[7], v[8], v[13]);
      quarter_rounds(v[3], v[4], v[9], v[14]);
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const Words low = v[2 * j] + (j == 6 ? counter : Words{} + state[2 * j]);
      const Words high = v[2 * j + 1] + state[2 * j + 1];
      uint64_t* to = out + j * kGroupBlocks + first;
      store<uint64_t>(to, (Vec<uint64_t>)interleave<0>(low, high));
      store<uint64_t>(to + kBlocks / 2, (Vec<uint64_t>)interleave<1>(low, high));
    }
  }
}
