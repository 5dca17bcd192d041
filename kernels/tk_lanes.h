// tk_lanes.h -- a vector of binary32 numbers as wide as the build's registers, and memory to keep them in.
//
// A lane always holds one chain: one score (a chain over d) or one output column (a chain over keys). Nothing is
// summed across lanes, so the width is free (docs/tka1.md, S15). The vector type is the compilers' own extension and
// operations on it are loops over its lanes; there is no intrinsic, and one text serves every instruction set.
#ifndef TK_LANES_H
#define TK_LANES_H
#include <algorithm>
#include <vector>

#include "tk_row.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "transpose_pairs reads two bf16 as one little-endian word"
#endif

#define TK_INLINE inline __attribute__((always_inline))
#define TK_UNROLL _Pragma("GCC unroll 16")

namespace tka1 {

// The register tile: kTileRows rows of kTileLanes vectors of sums, next to one row of factors and a broadcast.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kTileRows = 6, kTileLanes = 4;  // 24 of 32 registers
#elif defined(__AVX__)
constexpr int kLanes = 8, kTileRows = 6, kTileLanes = 2;   // 12 of 16
#elif defined(__aarch64__)
constexpr int kLanes = 4, kTileRows = 6, kTileLanes = 4;   // 24 of 32
#else
constexpr int kLanes = 4, kTileRows = 2, kTileLanes = 2;   // the software fma needs the other registers
#endif
typedef float Lanes __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));

constexpr int round_up(int x, int unit = kLanes) { return (x + unit - 1) / unit * unit; }

template <class V>
TK_FN V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
template <class V>
TK_FN void store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}
TK_FN Lanes broadcast(float x) { return x - Lanes{}; }  // in every lane; x - 0 is x
TK_FN Lanes fma_lanes(Lanes a, Lanes b, Lanes c) {
  Lanes r;
  for (int lane = 0; lane < kLanes; ++lane) r[lane] = tk_fma(a[lane], b[lane], c[lane]);
  return r;
}

// Floats on a cache line: a vector that straddles two lines costs twice. Zeroed once; they keep what was written.
class Floats {
 public:
  float* grow(size_t count) {
    if (lines_.size() * 16 < count) lines_.resize((count + 15) / 16);
    return lines_.data()->x;
  }
  float* data() { return lines_.data()->x; }

 private:
  struct alignas(64) Line {
    float x[16] = {};
  };
  std::vector<Line> lines_;
};

}  // namespace tka1
#endif
