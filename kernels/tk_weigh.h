// tk_weigh.h -- scores become weights (docs/tka1.md: S5, S6.1, S6.2) and their sum l (S6.3).
#ifndef TK_WEIGH_H
#define TK_WEIGH_H
#include "tk_lanes.h"

namespace tka1 {

// For every line of a leaf: which of the leaf's keys it sees, [from, to). Null: all of them.
struct Seen {
  const int32_t *from, *to;
};
struct Weighed {
  float* l;
  int32_t* m;
};

// scores [key][line] of keys [first, last) of a leaf, and of at most kWeighed lines: a lane is a line.
constexpr int kWeighed = 64;
template <bool kAll>
static void weigh_lines(float* scores, ptrdiff_t stride, int lines, int first, int last, float scale, Seen seen,
                        Weighed to) {
  float largest[kWeighed];
  int32_t poison[kWeighed];
  const float infinity = tk_f32(TK_INF);
  const int32_t *__restrict from = seen.from, *__restrict until = seen.to;
  float* __restrict l = to.l;
  int32_t* __restrict m = to.m;
  for (int i = 0; i < lines; ++i) largest[i] = -infinity, poison[i] = 0, l[i] = 0.0f;
  for (int j = first; j < last; ++j) {
    float* __restrict x = scores + j * stride;
    for (int i = 0; i < lines; ++i) {
      const int32_t in = kAll ? 1 : (j >= from[i]) & (j < until[i]);
      x[i] = tk_mul(x[i], scale);
      poison[i] |= in & !(x[i] < infinity);
      largest[i] = in & (x[i] < infinity) & (x[i] > largest[i]) ? x[i] : largest[i];
    }
  }
  for (int i = 0; i < lines; ++i) {  // n never falls while x rises (S5), so the largest x has the largest n
    int32_t n;
    (void)tk_exp(tk_clamp(largest[i]), &n);
    m[i] = largest[i] > -infinity ? n : TK_EMPTY;
  }
  for (int j = first; j < last; ++j) {
    float* __restrict x = scores + j * stride;
    for (int i = 0; i < lines; ++i) {
      const int32_t in = kAll ? 1 : (j >= from[i]) & (j < until[i]);
      int32_t n;
      const float p = tk_exp(tk_clamp(x[i]), &n);
      x[i] = in & tk_is_finite(x[i]) ? tk_scale(p, n - m[i]) : 0.0f;
      l[i] = tk_add(l[i], x[i]);
    }
  }
  for (int i = 0; i < lines; ++i) l[i] = poison[i] ? tk_f32(TK_NAN) : l[i];
}

// scores [key] of one line: a lane is a key. Returns M; l is a chain and comes later.
static int32_t weigh_keys(float* __restrict x, int keys, float scale, int32_t* __restrict exponent, bool* poison) {
  int32_t m = TK_EMPTY, bad = 0;
  for (int j = 0; j < keys; ++j) {
    const tk_key key = tk_weigh(x[j], scale);
    x[j] = key.p;
    exponent[j] = key.n;
    m = tk_max(m, key.n);
    bad |= key.poison;
  }
  for (int j = 0; j < keys; ++j) x[j] = tk_scale(x[j], exponent[j] - m);
  *poison = bad != 0;
  return m;
}

// l of several lines, keys ascending: one chain a line, eight side by side to hide the latency of an addition.
static void sum_keys(const float* p, ptrdiff_t stride, int lines, int keys, float* l) {
  for (int i = 0; i < lines; i += 8) {
    const int n = std::min(8, lines - i);
    const float* x = p + i * stride;
    float sum[8] = {};
    if (n == 8)
      for (int j = 0; j < keys; ++j)
#pragma GCC unroll 8
        for (int k = 0; k < 8; ++k) sum[k] = tk_add(sum[k], x[k * stride + j]);
    else
      for (int j = 0; j < keys; ++j)
        for (int k = 0; k < n; ++k) sum[k] = tk_add(sum[k], x[k * stride + j]);
    std::copy_n(sum, n, l + i);
  }
}

}  // namespace tka1
#endif
