// tk_row.h -- the rules of one key and of one row, for every target (docs/tka1.md: S4 to S7, S10 to S13).
#ifndef TK_ROW_H
#define TK_ROW_H
#include "tk_args.h"

// ---- S4, S5: what one score becomes
struct tk_key {
  float p;         // e^x = p * 2^n; without meaning when n is TK_EMPTY
  int32_t n;       // TK_EMPTY for -inf, +inf and NaN
  int32_t poison;  // 1 for +inf and NaN
};
TK_FN tk_key tk_weigh(float score, float scale) {
  const float x = tk_mul(score, scale);
  const bool finite = tk_is_finite(x);
  tk_key key;
  key.p = tk_exp(finite ? tk_clamp(x) : 0.0f, &key.n);
  key.n = finite ? key.n : TK_EMPTY;
  key.poison = !finite & (tk_bits(x) != TK_NEG_INF);
  return key;
}

// ---- S7: the factors of a merge
struct tk_factors {
  float a, b;
  int32_t m;
};
TK_FN tk_factors tk_merge_factors(int32_t ma, int32_t mb) {
  tk_factors f;
  f.m = tk_max(ma, mb);
  f.a = tk_pow2(ma - f.m);
  f.b = tk_pow2(mb - f.m);
  return f;
}

// ---- S8: two nodes whose first leaves are x != y meet at 1 + the highest bit in which they differ
TK_FN int32_t tk_meeting_level(uint32_t x, uint32_t y) {
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
  return 32 - __clz((int)(x ^ y));
#else
  return 32 - __builtin_clz(x ^ y);
#endif
}

// ---- S10 to S13: the end of a row
enum tk_kind { TK_VALUE, TK_ZERO, TK_POISONED };
struct tk_end {
  float factor, reciprocal;  // O = acc * factor * reciprocal when kind is TK_VALUE
  float lse, lse_sink;
  float sink;                    // S10.5: p * 2^(n - Md); +0 without a sink
  int32_t m;                     // Md
  int32_t kind;
};
TK_FN tk_end tk_finish(float l, int32_t m, bool has_sink, float sink) {
  tk_end end;
  end.factor = 1.0f;
  end.reciprocal = end.sink = 0.0f;
  end.m = 0;
  end.lse = end.lse_sink = tk_f32(TK_NAN);
  end.kind = TK_POISONED;
  if (tk_is_nan(l) || (has_sink && tk_is_nan(sink))) return end;  // S10.1

  const bool empty = m == TK_EMPTY;
  end.lse = end.lse_sink = empty ? tk_f32(TK_NEG_INF) : tk_log(l, m);
  end.kind = TK_ZERO;
  if (has_sink && tk_bits(sink) == TK_INF) {                      // S10.2
    end.lse_sink = sink;
    return end;
  }
  if (empty) {                                                    // S10.3
    if (has_sink) end.lse_sink = sink;
    return end;
  }
  end.kind = TK_VALUE;
  end.m = m;
  float denominator = l;
  if (has_sink && tk_bits(sink) != TK_NEG_INF) {                  // S10.5; else S10.4
    int32_t n;
    const float p = tk_exp(tk_clamp(sink), &n);
    const tk_factors f = tk_merge_factors(m, n);
    end.factor = f.a;
    end.sink = tk_mul(p, f.b);
    end.m = f.m;
    denominator = tk_merge(l, f.a, p, f.b);
    end.lse_sink = tk_log(denominator, f.m);
  }
  end.reciprocal = tk_rcp(denominator);
  return end;
}
TK_FN float tk_output(const tk_end& end, float acc) {             // not yet rounded to the type of the launch
  if (end.kind == TK_ZERO) return 0.0f;                           // the number, not a product
  if (end.kind == TK_POISONED) return tk_f32(TK_NAN);
  return tk_mul(tk_mul(acc, end.factor), end.reciprocal);
}

#endif
