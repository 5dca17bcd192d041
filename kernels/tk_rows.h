// tk_rows.h -- rows of K and V in memory: where they lie, and how their elements become binary32 (docs/tka1.md, S2).
#ifndef TK_ROWS_H
#define TK_ROWS_H
#include "tk_lanes.h"

namespace tka1 {

// `count` elements from `at` on, as binary32.
static void widen(const void* from, int64_t at, int32_t type, int count, float* __restrict to) {
  switch (type) {
    case TK_F32:
      for (int x = 0; x < count; ++x) to[x] = tk_get(from, at + x, TK_F32);
      break;
    case TK_F16:
      for (int x = 0; x < count; ++x) to[x] = tk_get(from, at + x, TK_F16);
      break;
    default:
      for (int x = 0; x < count; ++x) to[x] = tk_get(from, at + x, TK_BF16);
  }
}

typedef uint16_t HalfWords __attribute__((vector_size(kLanes * 2)));
TK_FN Lanes load_bf16(const uint16_t* from) {
  const Words bits = __builtin_convertvector(load<HalfWords>(from), Words) << 16;
  return (Lanes)bits;
}

// Asks for a row before it is needed; a long stride defeats the processor's own guess.
static inline void fetch(const void* rows, int64_t at, int32_t type, int count) {
  const char* row = (const char*)rows + at * tk_size(type);
  for (int x = 0; x < count * tk_size(type); x += 64) __builtin_prefetch(row + x, 0, 2);
}

// A square of kLanes words is transposed by swapping off-diagonal blocks of 1, 2, 4, ... words.
template <int S>
static inline void swap_blocks(Words* tile) {
  if constexpr (S < kLanes) {
    Words low, high;
    for (int lane = 0; lane < kLanes; ++lane) {
      low[lane] = (uint32_t)(lane & S ? kLanes + lane - S : lane);
      high[lane] = (uint32_t)(lane & S ? kLanes + lane : lane + S);
    }
    TK_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      if (i & S) continue;
      const Words a = tile[i], b = tile[i + S];
#if defined(__clang__)
      for (int lane = 0; lane < kLanes; ++lane) {
        tile[i][lane] = lane & S ? b[lane - S] : a[lane];
        tile[i + S][lane] = lane & S ? b[lane] : a[lane + S];
      }
#else
      tile[i] = __builtin_shuffle(a, b, low);
      tile[i + S] = __builtin_shuffle(a, b, high);
#endif
    }
    swap_blocks<2 * S>(tile);
  }
}
static inline void transpose(const float* from, ptrdiff_t from_stride, float* to, ptrdiff_t to_stride) {
  Words tile[kLanes];
  TK_UNROLL
  for (int i = 0; i < kLanes; ++i) tile[i] = load<Words>(from + i * from_stride);
  swap_blocks<1>(tile);
  TK_UNROLL
  for (int i = 0; i < kLanes; ++i) store(to + i * to_stride, tile[i]);
}
// bf16 [d] of kLanes keys to binary32 [d][key]: words of two bf16 are transposed, then split.
static void transpose_pairs(const uint16_t* const* key, ptrdiff_t at, int dim, float* to, int stride) {
  int d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    Words tile[kLanes];
    TK_UNROLL
    for (int i = 0; i < kLanes; ++i) tile[i] = load<Words>(key[i] + at + d);
    swap_blocks<1>(tile);
    TK_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      store(to + (size_t)(d + 2 * i) * stride, tile[i] << 16);
      store(to + (size_t)(d + 2 * i + 1) * stride, tile[i] & 0xFFFF0000u);
    }
  }
  for (; d < dim; ++d)
    for (int i = 0; i < kLanes; ++i) to[(size_t)d * stride + i] = tk_from_bf16(key[i][at + d]);
}

}  // namespace tka1
#endif
