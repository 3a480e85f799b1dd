// Random words and Gaussian noise on the device: the very words of noise_cpu.cpp, and the same multiples of the grid.
//
// A lane computes one ChaCha20 block and a warp two groups of 128 values, which lie side by side. Nothing is read from
// memory, 8 bytes are written per value; the 120 integer operations of ChaCha20 for each value take longer than that.
//
// The operators take their key as a tensor, and a tensor on the device is what sends them here. So the kernels can read
// it there: fetching it to the host would wait for the device. Where the host has the key, as in the update, it comes
// with the arguments and never lies in the device's memory. Either way a captured graph repeats step and noise.
#include "common/device_normals.h"
#include "common/launch.h"
#include "noise/noise.h"

namespace dpk {
namespace {

constexpr int kThreads = 128;  // warps work alone: small blocks leave fewest registers unused
constexpr int kWarps = kThreads / kWarp;

__device__ __forceinline__ Stream with_key(Stream stream, const uint8_t* key) {
  if (key)
    for (int i = 0; i < 32; i += 4)
      stream.key[i / 4] = key[i] | uint32_t{key[i + 1]} << 8 | uint32_t{key[i + 2]} << 16 | uint32_t{key[i + 3]} << 24;
  return stream;
}

// The first of this warp's groups.
__device__ __forceinline__ int64_t warp_group(int64_t offset) {
  return offset / kGroupWords + (int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kWarpGroups;
}

template <typename T>
__device__ __forceinline__ void write(const StreamParams<T>& q, int64_t index, T value) {
  if (index >= q.offset && index < q.offset + q.count) q.out[index - q.offset] = value;
}

// Blocks: [groups / (kWarps kWarpGroups)].
__global__ void __launch_bounds__(kThreads) random_bits_kernel(StreamParams<int64_t> q, const uint8_t* key) {
  const Stream stream = with_key(q.stream, key);
  const int64_t counter = warp_group(q.offset) * kGroupBlocks + threadIdx.x % kWarp;
  uint32_t block[16];
  chacha20_block(stream, stream.domain, static_cast<uint32_t>(counter), block);
  const int64_t index = counter / kGroupBlocks * kGroupWords + counter % kGroupBlocks;
#pragma unroll
  for (int j = 0; j < 8; ++j) write(q, index + j * kGroupBlocks, static_cast<int64_t>(word_of_block(block, j)));
}

// Blocks: [groups / (kWarps kWarpGroups)].
template <bool kGrid>
__global__ void __launch_bounds__(kThreads) gaussian_kernel(StreamParams<double> q, const uint8_t* key) {
  DPK_SHARED(double, values, kWarps* kWarpValues);
  DPK_SHARED(uint16_t, listed, kWarps* kWarpPairs);
  const int warp = threadIdx.x / kWarp;
  const Shared<double> normals = shared_slice(values, warp * kWarpValues, kWarpValues);
  const int64_t group = warp_group(q.offset);
  warp_normals<kGrid>(with_key(q.stream, key), group, q.scale, normals,
                      shared_slice(listed, warp * kWarpPairs, kWarpPairs));
  for (int i = threadIdx.x % kWarp; i < kWarpValues; i += kWarp) {
    const double normal = normals[i];
    write(q, group * kGroupWords + i, kGrid ? normal * q.unit : normal);
  }
}

template <typename T>
int64_t blocks_of(const StreamParams<T>& q) {
  return ceil_div(stream_groups(q.offset, q.count), kWarps * kWarpGroups);
}

}  // namespace

void random_bits_cuda(const StreamParams<int64_t>& q, const uint8_t* device_key, CUstream_st* stream) {
  DPK_LAUNCH(random_bits_kernel, blocks_of(q), kThreads, 0, stream, q, device_key);
}

void gaussian_cuda(const StreamParams<double>& q, const uint8_t* device_key, CUstream_st* stream) {
  DPK_LAUNCH(gaussian_kernel<false>, blocks_of(q), kThreads, 0, stream, q, device_key);
}

void grid_gaussian_cuda(const StreamParams<double>& q, const uint8_t* device_key, CUstream_st* stream) {
  DPK_LAUNCH(gaussian_kernel<true>, blocks_of(q), kThreads, 0, stream, q, device_key);
}

}  // namespace dpk
