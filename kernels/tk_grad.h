// tk_grad.h -- what a backward gets and gives, and its rules of one row and one key, for every target (docs/tka1.md:
// S16).
#ifndef TK_GRAD_H
#define TK_GRAD_H
#include "tk_row.h"

// The gradients of the rows of one family of one request.
struct tk_grad_rows {
  uint32_t* k;              // binary32 bits [count, Hkv, D]
  uint32_t* v;              // [count, Hkv, DV], or null where k and v are one tensor: k is dK + dV then
  int64_t count;            // rows that are held
};

struct tk_grad_args {
  tk_args a;                // its acc, l and m hold the rows before S10; out and lse are not used
  const void* d_out;        // [T, H, DV]
  const int64_t* positions; // [T]
  uint32_t* d_q;            // binary32 bits [T, H, D]
  uint32_t* d_sink;         // [requests, H], or null
  const tk_grad_rows* rows[TK_FAMILIES];  // [requests] each
  int32_t requests;
  int32_t d_type;           // tk_type of d_out
  float last;               // S16.6: +0 ends a sum; -0 leaves it unfinished
};

// S16.1: the end of a row (its acc) and delta.
TK_FN tk_end tk_grad_end(const tk_grad_args& g, int64_t row, int head) {
  return tk_finish(tk_f32(g.a.l[row]), g.a.m[row], g.a.sink != nullptr, g.a.sink ? tk_f32(g.a.sink[head]) : 0.0f);
}
TK_FN float tk_delta(const tk_grad_args& g, const tk_end& end, int64_t row) {
  float delta = 0.0f;
  for (int c = 0; c < g.a.DV; ++c) {
    const int64_t at = row * g.a.DV + c;
    delta = tk_fma(tk_get(g.d_out, at, g.d_type), tk_output(end, tk_f32(g.a.acc[at])), delta);
  }
  return delta;
}

// S16.2: P and g of one key, from its score (S4) and its dP.
struct tk_slope {
  float p, g;
};
TK_FN tk_slope tk_slope_of(float score, float d_p, float delta, const tk_end& end, float scale) {
  const tk_key key = tk_weigh(score, scale);
  tk_slope to;
  to.p = tk_mul(key.n == TK_EMPTY ? 0.0f : tk_scale(key.p, key.n - end.m), end.reciprocal);
  to.g = tk_mul(tk_mul(to.p, tk_add(d_p, -delta)), scale);
  if (end.kind == TK_POISONED) to.p = to.g = tk_f32(TK_NAN);
  return to;
}

// S16.5: P of the sink, and whether the row has a term of it.
TK_FN bool tk_sink_counts(const tk_end& end, uint32_t sink) { return end.kind != TK_ZERO && sink != TK_NEG_INF; }
TK_FN float tk_sink_slope(const tk_end& end) {
  return end.kind == TK_POISONED ? tk_f32(TK_NAN) : tk_mul(end.sink, end.reciprocal);
}

// S16.6
TK_FN uint32_t tk_end_of_sum(float sum, float last) { return tk_bits(tk_one_nan(tk_add(sum, last))); }

#endif
