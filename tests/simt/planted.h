// Small kernels with a fault that a caller plants: what the machine must find. With kNone each is right.
#pragma once

#include <cstdint>

#include "common/scalar.h"

struct CUstream_st;

namespace dpk {

enum class Planted {
  kNone,
  kNoBarrier,          // before what other threads wrote is read
  kNoTrailingBarrier,  // before what others still read is written again
  kNoWait,             // for an asynchronous copy
  kUncommitted,        // copy: its group is never closed
  kDivergent,          // one warp returns instead of waiting at a barrier
  kTwoBarriers,        // half of a block waits at one barrier, half at another
  kExited,             // a lane returns before a shuffle
  kBeyond,             // the last element of a tile is one too far
  kGlobal,             // so is that of the output
  kInput,              // an input is written
  kUnwritten,          // shared memory is read before it was written
  kPartial,            // a shuffle of half a warp
  kMisaligned,         // four floats are read from where they may not lie
  kOverflow,           // an index is computed in too few bits
};

struct StagedParams {
  const float* x;  // [size], a multiple of 64
  float* sums;     // [size / 2]: of neighbours, after the halves of every 64 changed places
  int64_t size;
};

struct TilesParams {
  const bfloat16* a;  // [32, depth], a multiple of 16
  const bfloat16* b;  // [8, depth]
  float* product;     // [32, 8]: a b^T
  int depth;
};

struct ProductParams {
  const float* a;  // [16, depth], as deep as one mma
  const float* b;  // [depth, 8]
  float* product;  // [16, 8]
};

struct IntrinsicsParams {
  const int* x;  // [64]
  int* out;      // [10, 64]: what each intrinsic gives each thread
};

void staged_cuda(const StagedParams& params, Planted planted, CUstream_st* stream);
void tiles_cuda(const TilesParams& params, Planted planted, CUstream_st* stream);
template <typename T>
void product_cuda(const ProductParams& params, CUstream_st* stream);
void intrinsics_cuda(const IntrinsicsParams& params, CUstream_st* stream);

}  // namespace dpk
