// tk_gpu.cu -- the entries of TKA-1 on a GPU: nvcc, NVRTC, clang++ -x hip, hipRTC. No header of theirs is needed.
//
// Options that the promise of bits needs: CUDA -fmad=false -ftz=false, HIP -ffp-contract=off.
// TK_FIXED_TYPE: the type of q, k, v and out, so that the compiler sees it (tk_args.h: enum tk_type).
#if defined(__HIP__) || defined(__HIPCC_RTC__)
#if !defined(__global__)
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#endif
#define TK_THREAD ((int)__builtin_amdgcn_workitem_id_x())
#define TK_BLOCK_X ((int)__builtin_amdgcn_workgroup_id_x())
#define TK_BLOCK_Y ((int)__builtin_amdgcn_workgroup_id_y())
#define TK_BLOCK_Z ((int)__builtin_amdgcn_workgroup_id_z())
#define TK_BARRIER                                       \
  do {                                                   \
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); \
    __builtin_amdgcn_s_barrier();                        \
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup"); \
  } while (0)
#define TK_BOUNDS __attribute__((amdgpu_flat_work_group_size(1, 128)))
#define TK_IN inline __attribute__((device, always_inline))
#else
#define TK_THREAD ((int)threadIdx.x)
#define TK_BLOCK_X ((int)blockIdx.x)
#define TK_BLOCK_Y ((int)blockIdx.y)
#define TK_BLOCK_Z ((int)blockIdx.z)
#define TK_BARRIER __syncthreads()
#define TK_BOUNDS __launch_bounds__(128, 4)
#define TK_IN __device__ __forceinline__
#endif

#if !defined(TK_FIXED_TYPE)
#define TK_FIXED_TYPE TK_BF16
#endif
#define TK_TYPE(args) TK_FIXED_TYPE
#define TK_DEVICE
#include "tk_grad_block.h"

#if !defined(__HIP__) || defined(__HIP_DEVICE_COMPILE__)
// grid (T, Hkv * parts, runs); the second is below 2^16
#define TK_RUN(NAME, COLUMNS, HEADS)                                                                      \
  extern "C" __global__ void TK_BOUNDS NAME(tk_gpu_args g) {                                              \
    __shared__ tk_shared<HEADS> shared;                                                                   \
    const int kv_head = (int)((uint64_t)TK_BLOCK_Y * g.parts_inverse >> 32);                              \
    const int first = (TK_BLOCK_Y - kv_head * g.parts) * HEADS, left = g.group - first;                   \
    tk_run_block<COLUMNS, HEADS>(tk_block(), g, shared, TK_BLOCK_X, kv_head, kv_head * g.group + first,   \
                                 left < HEADS ? left : HEADS, TK_BLOCK_Z);                                \
  }
TK_RUN(tk_run_128, 1, 4)  // DV up to 128
TK_RUN(tk_run_512, 4, 8)  // DV up to 512
// grid (T, H)
extern "C" __global__ void TK_BOUNDS tk_merge(tk_gpu_args g) { tk_merge_block(tk_block(), g, TK_BLOCK_X, TK_BLOCK_Y); }

// The backward, in this order: grid (T, H / 128 rounded up); (T, Hkv, group); (items, Hkv); (requests) with a sink.
extern "C" __global__ void TK_BOUNDS tk_grad_rows(tk_gpu_grad_args g) {
  tk_grad_rows_block(tk_block(), g, TK_BLOCK_X, TK_BLOCK_Y * TK_THREADS);
}
extern "C" __global__ void TK_BOUNDS tk_grad_queries(tk_gpu_grad_args g) {
  __shared__ tk_grad_shared shared;
  tk_grad_query_block(tk_block(), g, shared, TK_BLOCK_X, TK_BLOCK_Y * g.group + TK_BLOCK_Z, TK_BLOCK_Y);
}
extern "C" __global__ void TK_BOUNDS tk_grad_keys(tk_gpu_grad_args g) {
  __shared__ tk_grad_shared shared;
  tk_grad_key_block(tk_block(), g, shared, TK_BLOCK_X, TK_BLOCK_Y);
}
extern "C" __global__ void TK_BOUNDS tk_grad_sinks(tk_gpu_grad_args g) { tk_grad_sink_block(tk_block(), g, TK_BLOCK_X); }
#endif
