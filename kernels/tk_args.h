// tk_args.h -- what a TKA-1 launch gets and gives (docs/tka1.md: S2, S3). Plain data, the same on host and device.
#ifndef TK_ARGS_H
#define TK_ARGS_H
#include "tk_math.h"

#define TK_LEAF 128         // S6, S15: rows of a leaf; part of the definition
#define TK_FAMILIES 2       // S3, S9: 0 = compressed (or the only one), 1 = recent or dense
#define TK_LEVELS 28        // S8: enough for 2^26 leaves and the family digit

// The type of q, k, v and out (S2, S11): each element is exact in binary32.
enum tk_type { TK_BF16, TK_F16, TK_F32 };
TK_FN int tk_size(int32_t type) { return type == TK_F32 ? 4 : 2; }
TK_FN float tk_get(const void* from, int64_t at, int32_t type) {
  if (type == TK_F32) return tk_f32(((const uint32_t*)from)[at]);
  const uint16_t x = ((const uint16_t*)from)[at];
  return type == TK_F16 ? tk_from_f16(x) : tk_from_bf16(x);
}
TK_FN void tk_put(void* to, int64_t at, int32_t type, float x) {
  if (type == TK_F32)
    ((uint32_t*)to)[at] = tk_bits(tk_one_nan(x));
  else
    ((uint16_t*)to)[at] = type == TK_F16 ? tk_to_f16(x) : tk_to_bf16(x);
}

// The rows of one family of one request. Array row 0 has the row id `first`: a sliding window drops the start.
struct tk_rows {
  const void* k;            // [count, Hkv, D]
  const void* v;            // [count, Hkv, DV]; may be k
  int64_t first;
};

// Which rows each query row sees: the canonical list ids[offsets[t] .. offsets[t+1]), strictly ascending (S3),
// or, when ids is null, the range lo[t] <= id < hi[t].
struct tk_family {
  const tk_rows* requests;  // [requests]
  const int64_t* ids;
  const int64_t* offsets;   // [T + 1]
  const int64_t* lo;        // [T]
  const int64_t* hi;        // [T]
};

struct tk_args {
  const void* q;            // [T, H, D]
  const int32_t* request;   // [T]: which of the requests a query row belongs to
  const uint32_t* sink;     // binary32 bits [H], or null
  void* out;                // [T, H, DV], or null
  uint32_t* lse;            // binary32 bits [T, H]
  uint32_t* lse_sink;       // binary32 bits [T, H]
  uint32_t* acc;            // binary32 bits [T, H, DV], or null: the rows before S10
  uint32_t* l;              // binary32 bits [T, H]
  int32_t* m;               // [T, H]
  tk_family family[TK_FAMILIES];
  int32_t families, T, H, Hkv, D, DV;
  int32_t type;             // tk_type
  uint32_t scale;           // binary32 bits
};

#endif
