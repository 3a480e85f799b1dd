// Marks functions that run on the CPU and in CUDA kernels alike.
#pragma once

#ifdef __CUDACC__
#define DPK_HOST_DEVICE __host__ __device__
#else
#define DPK_HOST_DEVICE
#endif
