// The random generator: ChaCha20 (RFC 8439, section 2.3) in counter mode, as plain scalar code for host and device.
//
// A 256-bit key and a 96-bit nonce = (domain, logical step) select a stream of 2^32 blocks of sixteen 32-bit words. The
// stream is read as 64-bit words: word j of block b is its 32-bit words 2j (low) and 2j + 1 (high). Blocks are taken in
// groups of sixteen, and within a group word j of every block comes before word j + 1 of any, so that blocks computed
// side by side (vector lanes, threads of a warp) write side by side:
//
//   index i  ->  group i / 128, word (i % 128) / 16, block 16 (i / 128) + i % 16
//
// A value depends on key, domain, step and index alone.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DPK_HOST_DEVICE __host__ __device__
#else
#define DPK_HOST_DEVICE
#endif

namespace dpk {

constexpr int64_t kGroupBlocks = 16;
constexpr int64_t kGroupWords = 8 * kGroupBlocks;
constexpr int64_t kMaxStreamWords = int64_t{8} << 32;  // the 32-bit block counter ends here

// Domains lie below this bit; with it set, the nonce selects the extension words.
constexpr uint32_t kExtensionDomain = uint32_t{1} << 31;

struct Stream {
  uint32_t key[8];
  uint32_t domain;
  uint64_t step;
};

DPK_HOST_DEVICE inline uint32_t rotate_left(uint32_t x, int n) { return x << n | x >> (32 - n); }

DPK_HOST_DEVICE inline void quarter_round(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d) {
  a += b, d = rotate_left(d ^ a, 16);
  c += d, b = rotate_left(b ^ c, 12);
  a += b, d = rotate_left(d ^ a, 8);
  c += d, b = rotate_left(b ^ c, 7);
}

// The input of the block function: constants, key, block counter, nonce.
DPK_HOST_DEVICE inline void chacha20_state(const Stream& stream, uint32_t domain, uint32_t counter,
                                           uint32_t (&state)[16]) {
  state[0] = 0x61707865, state[1] = 0x3320646e, state[2] = 0x79622d32, state[3] = 0x6b206574;
  for (int i = 0; i < 8; ++i) state[4 + i] = stream.key[i];
  state[12] = counter, state[13] = domain;
  state[14] = static_cast<uint32_t>(stream.step), state[15] = static_cast<uint32_t>(stream.step >> 32);
}

DPK_HOST_DEVICE inline void chacha20_block(const Stream& stream, uint32_t domain, uint32_t counter,
                                           uint32_t (&out)[16]) {
  uint32_t state[16];
  chacha20_state(stream, domain, counter, state);
  for (int i = 0; i < 16; ++i) out[i] = state[i];
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 4; ++i) quarter_round(out[i], out[4 + i], out[8 + i], out[12 + i]);
    for (int i = 0; i < 4; ++i)
      quarter_round(out[i], out[4 + (i + 1) % 4], out[8 + (i + 2) % 4], out[12 + (i + 3) % 4]);
  }
  for (int i = 0; i < 16; ++i) out[i] += state[i];
}

// Word j of a block. The block is never indexed by j, which on the device would move it from registers to memory.
DPK_HOST_DEVICE inline uint64_t word_of_block(const uint32_t (&block)[16], int64_t j) {
  uint64_t word = 0;
  for (int k = 0; k < 8; ++k)
    if (k == j) word = block[2 * k] | static_cast<uint64_t>(block[2 * k + 1]) << 32;
  return word;
}

DPK_HOST_DEVICE inline uint64_t random_word(const Stream& stream, int64_t index) {
  uint32_t block[16];
  const int64_t j = index % kGroupWords / kGroupBlocks;
  const int64_t counter = index / kGroupWords * kGroupBlocks + index % kGroupBlocks;
  chacha20_block(stream, stream.domain, static_cast<uint32_t>(counter), block);
  return word_of_block(block, j);
}

// Two more words for each of the 2^34 pairs of indices: four pairs to a block of the extension domain.
DPK_HOST_DEVICE inline void extension_words(const Stream& stream, int64_t pair, uint64_t (&words)[2]) {
  uint32_t block[16];
  chacha20_block(stream, stream.domain | kExtensionDomain, static_cast<uint32_t>(pair / 4), block);
  for (int64_t w = 0; w < 2; ++w) words[w] = word_of_block(block, pair % 4 * 2 + w);
}

}  // namespace dpk
