// tk_lanes.h -- the inner loops of TKA-1 on a CPU, over a vector of the build's own width.
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
#error "load_transposed reads two bf16 as one little-endian word"
#endif

namespace tka1 {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kAccumulators = 16;  // vectors of sums kept in registers; half of the 32
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kAccumulators = 8;   // of 16
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kAccumulators = 16;  // of 32
#else
constexpr int kLanes = 4;
constexpr int kAccumulators = 4;   // the software fma needs the other registers
#endif
typedef float Lanes __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));

constexpr int round_up(int x) { return (x + kLanes - 1) / kLanes * kLanes; }

// Zeroed floats on a cache line: a vector that straddles two lines costs twice, in every loop below.
class Floats {
 public:
  explicit Floats(size_t count = 0) : lines_((count + 15) / 16) {}
  void grow(size_t count) {
    if (lines_.size() * 16 < count) lines_.resize((count + 15) / 16);
  }
  float* data() { return lines_.data()->x; }

 private:
  struct alignas(64) Line {
    float x[16] = {};
  };
  std::vector<Line> lines_;
};

// A matrix of which only the start and the distance between two rows is known.
struct View {
  float* data;
  int stride;
  float* row(int i) const { return data + (size_t)i * stride; }
  View at(int i, int x) const { return {row(i) + x, stride}; }
};

template <class V>
static inline V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
template <class V>
static inline void store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

static inline Lanes fma_lanes(Lanes a, Lanes b, Lanes c) {
  Lanes r;
  for (int lane = 0; lane < kLanes; ++lane) r[lane] = tk_fma(a[lane], b[lane], c[lane]);
  return r;
}

// ---- chains (S4, S6.3): c[i][x] = fma(a[i][y], b[y][x], c[i][x]), y ascending.
// S4 with i = query and head, y = d, x = key; S6.3 with y = key, x = output column.

// R rows of c and N vectors of each stay in registers while y passes.
template <int R, int N>
static inline void chain_block(View c, View a, View b, int depth) {
  Lanes sum[R][N];
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sum[i][n] = load<Lanes>(c.row(i) + n * kLanes);
  for (int y = 0; y < depth; ++y) {
    Lanes value[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) value[n] = load<Lanes>(b.row(y) + n * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const Lanes factor = a.row(i)[y] - Lanes{};  // in every lane; x - 0 is x
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sum[i][n] = fma_lanes(factor, value[n], sum[i][n]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store(c.row(i) + n * kLanes, sum[i][n]);
}
template <int R>
static void chain_rows(View c, View a, View b, int depth, int width) {
  constexpr int N = kAccumulators / R;
  int x = 0;
  for (; x + N * kLanes <= width; x += N * kLanes) chain_block<R, N>(c.at(0, x), a, b.at(0, x), depth);
  for (; x < width; x += kLanes) chain_block<R, 1>(c.at(0, x), a, b.at(0, x), depth);
}

// `width` is rounded up to whole vectors: c and b have room for that, and what stands there is never read.
// Slabs and panels keep the part of b that all rows use in the first cache.
static void chains(View c, View a, View b, int rows, int depth, int width) {
  constexpr int kSlab = 64, kPanel = 64;
  for (int y = 0; y < depth; y += kSlab) {
    const int steps = std::min(kSlab, depth - y);
    for (int x = 0; x < width; x += kPanel) {
      const int columns = std::min(kPanel, width - x);
      int i = 0;
#if defined(__AVX512F__) || defined(__aarch64__)
      for (; i + 8 <= rows; i += 8) chain_rows<8>(c.at(i, x), a.at(i, y), b.at(y, x), steps, columns);
      for (; i + 4 <= rows; i += 4) chain_rows<4>(c.at(i, x), a.at(i, y), b.at(y, x), steps, columns);
#endif
      for (; i + 2 <= rows; i += 2) chain_rows<2>(c.at(i, x), a.at(i, y), b.at(y, x), steps, columns);
      for (; i < rows; ++i) chain_rows<1>(c.at(i, x), a.at(i, y), b.at(y, x), steps, columns);
    }
  }
}

// ---- l = l + P_j, keys ascending (S6.3): one chain a row, eight rows side by side to hide the latency of an add
static void sum_rows(View p, int rows, int keys, float* l) {
  for (int i = 0; i < rows; i += 8) {
    const int n = std::min(8, rows - i);
    float sum[8] = {};
    if (n == 8)
      for (int j = 0; j < keys; ++j)
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) sum[k] = tk_add(sum[k], p.row(i + k)[j]);
    else
      for (int j = 0; j < keys; ++j)
        for (int k = 0; k < n; ++k) sum[k] = tk_add(sum[k], p.row(i + k)[j]);
    std::copy_n(sum, n, l + i);
  }
}

// ---- S5, S6.1, S6.2: scores of one row in a leaf become P, in place. Returns M; poison is set for +inf and NaN.
static int32_t weigh(float* __restrict row, int32_t* __restrict exponent, int keys, float scale, bool* poison) {
  int32_t m = TK_EMPTY, bad = 0;
  for (int j = 0; j < keys; ++j) {
    const tk_key key = tk_weigh(row[j], scale);
    row[j] = key.p;
    exponent[j] = key.n;
    m = tk_max(m, key.n);
    bad |= key.poison;
  }
  for (int j = 0; j < keys; ++j) row[j] = tk_scale(row[j], exponent[j] - m);
  *poison = bad != 0;
  return m;
}

// ---- S7 for the columns of one row
static void merge_row(float* __restrict a, float fa, const float* __restrict b, float fb, int width) {
  for (int c = 0; c < width; ++c) a[c] = tk_merge(a[c], fa, b[c], fb);
}

// ---- bf16 [d] of kLanes keys to binary32 [d][key].
// Words of two bf16 are transposed by swapping off-diagonal blocks of 1, 2, 4, ... words, then split.

template <int S>
static inline void swap_blocks(Words* tile) {
  if constexpr (S < kLanes) {
    Words low, high;
    for (int lane = 0; lane < kLanes; ++lane) {
      low[lane] = (uint32_t)(lane & S ? kLanes + lane - S : lane);
      high[lane] = (uint32_t)(lane & S ? kLanes + lane : lane + S);
    }
#pragma GCC unroll 16
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
static void load_transposed(const uint16_t* const* key, int dim, float* to, int stride) {
  int d = 0;
  for (; d + 2 * kLanes <= dim; d += 2 * kLanes) {
    Words tile[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) tile[i] = load<Words>(key[i] + d);
    swap_blocks<1>(tile);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      store(to + (size_t)(d + 2 * i) * stride, tile[i] << 16);
      store(to + (size_t)(d + 2 * i + 1) * stride, tile[i] & 0xFFFF0000u);
    }
  }
  for (; d < dim; ++d)
    for (int i = 0; i < kLanes; ++i) to[(size_t)d * stride + i] = tk_from_bf16(key[i][d]);
}

}  // namespace tka1
#endif
