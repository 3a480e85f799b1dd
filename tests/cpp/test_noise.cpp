// ChaCha20 against RFC 8439, and vector code against the scalar definition.
#include <cstring>

#include "check.h"
#include "common/exact_normal.h"
#include "common/rng.h"
#include "noise/noise.h"

namespace {

void rfc_8439_block_function() {  // section 2.3.2
  dpk::Stream stream{{}, 0x09000000, 0x4a000000};
  for (int i = 0; i < 32; ++i) stream.key[i / 4] |= static_cast<uint32_t>(i) << (i % 4 * 8);
  const uint32_t expected[16] = {0xe4e7f110, 0x15593bd1, 0x1fdd0f50, 0xc47120a3, 0xc7f4d1c7, 0x0368c033,
                                 0x9aaa2204, 0x4e6cd4c3, 0x466482d2, 0x09aa9f07, 0x05d7c214, 0xa2028bd9,
                                 0xd19c12b5, 0xb94e16de, 0xe883d0cb, 0x4e3c50a2};
  uint32_t block[16];
  dpk::chacha20_block(stream, stream.domain, 1, block);
  CHECK(std::memcmp(block, expected, sizeof(block)) == 0);
}

template <typename T, typename F>
std::vector<T> fill(F fill_groups, int64_t offset, int64_t count, double scale) {
  std::vector<T> out(count, T(-1));
  const dpk::StreamParams<T> params{{{1, 2, 3, 4, 5, 6, 7, 8}, 9, 10}, offset, count, scale, 1, out.data()};
  const int64_t groups = dpk::stream_groups(offset, count);
  fill_groups(params, 0, groups / 2);
  fill_groups(params, groups / 2, groups);
  return out;
}

void vectors_match_the_definition() {
  const int64_t offset = 200, count = 5000;
  const double scale = 0x1p38;  // tens of these values are too close to a boundary for double
  const dpk::Stream stream{{1, 2, 3, 4, 5, 6, 7, 8}, 9, 10};
  const std::vector<int64_t> words = fill<int64_t>(dpk::random_bits_cpu, offset, count, 0);
  const std::vector<double> normals = fill<double>(dpk::gaussian_cpu, offset, count, 0);
  const std::vector<double> integers = fill<double>(dpk::grid_gaussian_cpu, offset, count, scale);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = offset + i, pair = index / 32 * 16 + index % 16;
    const bool second = index / 16 % 2;
    dpk::DoubleDouble pair_normals[2];
    dpk::exact_normals(stream, pair, pair_normals[0], pair_normals[1]);
    CHECK(static_cast<uint64_t>(words[i]) == dpk::random_word(stream, index));
    CHECK(std::fabs(normals[i] - pair_normals[second].high) < 0x1p-46);
    CHECK(integers[i] == dpk::nearest_integer(pair_normals[second] * scale));
  }
}

}  // namespace

int main() {
  rfc_8439_block_function();
  check::for_each_isa(vectors_match_the_definition);
  return check::result();
}
