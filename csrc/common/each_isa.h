// Compiles the including file's body once per instruction set. A kernel file is written as
//
//   #include "linear/linear.h"                 // first: what a target region declares would get that target
//   #define DPK_BODY "linear/linear_cpu.cpp"   // its own path
//   #include "common/each_isa.h"
//   #ifdef DPK_ISA
//   namespace dpk::DPK_ISA { ...the body... }
//   #else
//   ...the dispatch through DPK_DISPATCH...
//   #endif
//
// Standard headers are included here, outside the target regions: their inline functions must not be compiled for a CPU
// that may be absent, and neither must the dispatch, which takes the target of its first declaration. No include guard:
// the file includes itself through its body.
#ifndef DPK_ISA

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/isa.h"

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define DPK_ISA avx512
#define DPK_VECTOR_BYTES 64
#include DPK_BODY
#undef DPK_ISA
#undef DPK_VECTOR_BYTES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define DPK_ISA avx2
#define DPK_VECTOR_BYTES 32
#include DPK_BODY
#undef DPK_ISA
#undef DPK_VECTOR_BYTES
#pragma GCC pop_options

#endif  // __x86_64__

#define DPK_ISA baseline
#define DPK_VECTOR_BYTES 16
#include DPK_BODY
#undef DPK_ISA
#undef DPK_VECTOR_BYTES

#endif  // DPK_ISA
