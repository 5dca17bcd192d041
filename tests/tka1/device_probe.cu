// The rules of a key and of a row as device code: compiled, never run, so that the headers stay fit for a GPU.
#include "tk_row.h"

#if defined(__CUDACC__)
#define TK_KERNEL __global__
#define TK_LANE threadIdx.x
#else
#define TK_KERNEL __attribute__((global))
#define TK_LANE __builtin_amdgcn_workitem_id_x()
#endif

extern "C" TK_KERNEL void probe(const float* x, float* lse, int* n, uint16_t* out) {
  const int i = TK_LANE;
  const tk_key key = tk_weigh(x[i], x[i + 1]);
  n[i] = key.n;
  const tk_factors f = tk_merge_factors(key.n, n[i + 1]);
  const tk_end end = tk_finish(tk_merge(key.p, f.a, x[i + 2], f.b), f.m, true, x[i + 3]);
  out[i] = tk_output(end, x[i + 4]);
  lse[i] = end.lse_sink;
}
