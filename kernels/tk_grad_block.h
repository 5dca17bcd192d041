// tk_grad_block.h -- the backward on a GPU: bodies in phases, as in tk_block.h (docs/tka1.md: S16).
//
// Every sum has one owner: a block of query rows owns dQ, a block of keys dK and dV, so there are no atomics. A thread
// owns columns of a sum. Its unfinished nodes (S8) lie in global memory that no other thread touches, with no barrier.
#ifndef TK_GRAD_BLOCK_H
#define TK_GRAD_BLOCK_H
#include "tk_block.h"
#include "tk_grad.h"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__) || defined(__clang__)
#define TK_ROLLED _Pragma("unroll 1")
#else
#define TK_ROLLED _Pragma("GCC unroll 1")
#endif

#define TK_GRAD_KEYS 8     // rows of KV of a block
#define TK_GRAD_LINES 16   // pairs (query row, head) at a time: a thread computes one pair of line and key

struct tk_grad_item {      // the keys of a block: rows of KV from `key` on, counted from the first that is held
  int32_t family, request;
  int64_t key;
};
struct tk_gpu_grad_args {
  tk_grad_args g;          // all pointers are the device's
  tk_end* end;             // [T, H]
  float* delta;            // [T, H]
  const int32_t* lines;    // [T * group, 2]: (query row, head in its group) of each request, by position; a device has
                           // no integer division but by an approximate reciprocal
  const int32_t* first;    // [requests + 1]: where a request begins in `lines`
  const tk_grad_item* items;
  float* nodes;            // [blocks, depth, width]: unfinished nodes
  int32_t depth;           // of a sum, at most
  int32_t width;           // numbers of the sum of a block, of 8 keys `stride` each
  int32_t stride;          // D + DV, to a multiple of the threads: a column has one thread
  int32_t group;           // query heads of a kv head
};

// ---- the stack of one sum: which nodes wait is the same for all columns, so every thread keeps its own copy of it

struct tk_stack {
  float* nodes;            // node i of column c: nodes[i * width + c]
  int32_t width, depth;
  uint32_t last;
  int32_t level[TK_TOP + 2];
};
TK_FN void tk_stack_open(tk_stack& s, const tk_gpu_grad_args& a, int64_t block) {
  s.nodes = a.nodes + block * a.depth * a.width;
  s.width = a.width;
  s.depth = 0;
}
TK_FN void tk_stack_merge(tk_stack& s, int level, int thread, int count) {
  for (; s.depth >= 2 && s.level[s.depth - 1] < level; --s.depth) {
    float* low = s.nodes + (int64_t)(s.depth - 2) * s.width;
    for (int c = thread; c < count; c += TK_THREADS) low[c] = tk_add(low[c], low[c + s.width]);
  }
}
TK_FN float* tk_stack_at(tk_stack& s, uint32_t key, int thread, int count) {  // the chain of the leaf `key`
  if (s.depth && key == s.last) return s.nodes + (int64_t)(s.depth - 1) * s.width;
  const int level = s.depth ? tk_meeting_level(s.last, key) : TK_TOP;
  tk_stack_merge(s, level, thread, count);
  float* top = s.nodes + (int64_t)s.depth * s.width;
  TK_ROLLED  // unrolled, its sixteen offsets cost scalar registers, which then spill on gfx90a
  for (int c = thread; c < count; c += TK_THREADS) top[c] = -0.0f;
  s.level[s.depth++] = level;
  s.last = key;
  return top;
}
TK_FN float tk_stack_total(const tk_stack& s, int c) { return s.depth ? s.nodes[c] : -0.0f; }  // merged below TK_TOP

TK_FN float tk_chain(const void* left, int64_t l, int32_t l_type, const void* right, int64_t r, int32_t r_type,
                     int count) {
  float sum = 0.0f;
  for (int x = 0; x < count; ++x) sum = tk_fma(tk_get(left, l + x, l_type), tk_get(right, r + x, r_type), sum);
  return sum;
}
// S16.2 of one row, head and key; `at` is the key's row among (row, kv head).
TK_FN tk_slope tk_slope_at(const tk_gpu_grad_args& a, const tk_rows& rows, int64_t row, int64_t at) {
  const tk_args& f = a.g.a;
  const float s = tk_chain(f.q, row * f.D, TK_TYPE(f), rows.k, at * f.D, TK_TYPE(f), f.D);
  const float d_p = tk_chain(a.g.d_out, row * f.DV, a.g.d_type, rows.v, at * f.DV, TK_TYPE(f), f.DV);
  return tk_slope_of(s, d_p, a.delta[row], a.end[row], tk_f32(f.scale));
}

// ---- S16.1: one thread a (row, head)

TK_FN void tk_grad_rows_block(const tk_block& block, const tk_gpu_grad_args& a, int t, int head0) {
  block.phase([&](int thread) {
    if (head0 + thread >= a.g.a.H) return;
    const int64_t row = (int64_t)t * a.g.a.H + head0 + thread;
    const tk_end end = tk_grad_end(a.g, row, head0 + thread);
    a.end[row] = end;
    a.delta[row] = tk_delta(a.g, end, row);
  });
}

// ---- S16.3: a block of one (row, head); its keys leaf by leaf, a thread a key for g and a column for dQ

struct tk_grad_shared {
  float p[TK_GRAD_LINES][TK_GRAD_KEYS], g[TK_LEAF];
  int64_t at[TK_LEAF];
  int32_t seen[TK_GRAD_LINES][TK_GRAD_KEYS];
};

struct tk_span {
  int64_t low, high;
};
TK_FN tk_span tk_seen(const tk_family& family, int t) {  // row ids between which the keys of a query row lie
  tk_span span = {0, 0};
  if (family.ids) {
    const int64_t begin = family.offsets[t], end = family.offsets[t + 1];
    if (begin < end) span.low = family.ids[begin], span.high = family.ids[end - 1] + 1;
  } else if (family.lo[t] < family.hi[t]) {
    span.low = family.lo[t], span.high = family.hi[t];
  }
  return span;
}

TK_FN void tk_grad_query_block(const tk_block& block, const tk_gpu_grad_args& a, tk_grad_shared& sh, int t, int head,
                               int kv_head) {
  const tk_args& f = a.g.a;
  const int64_t row = (int64_t)t * f.H + head;
  tk_own<tk_stack> own;
  block.phase([&](int thread) { tk_stack_open(own[thread], a, row); });
  const bool live = a.end[row].kind != TK_ZERO;
  for (int number = 0; live && number < f.families; ++number) {
    const tk_family& family = f.family[number];
    const tk_rows& rows = family.requests[f.request[t]];
    const tk_span span = tk_seen(family, t);
    for (int64_t leaf = span.low / TK_LEAF; leaf * TK_LEAF < span.high; ++leaf) {
      int64_t begin;
      const int n = tk_leaf_keys(family, t, leaf, &begin);
      if (n == 0) continue;  // for all threads alike
      block.phase([&](int thread) {
        for (int j = thread; j < n; j += TK_THREADS) {
          sh.at[j] = ((family.ids ? family.ids[begin + j] : begin + j) - rows.first) * f.Hkv + kv_head;
          sh.g[j] = tk_slope_at(a, rows, row, sh.at[j]).g;
        }
      });
      block.phase([&](int thread) {
        const uint32_t key = (uint32_t)number << TK_FAMILY_SHIFT | (uint32_t)leaf;
        float* to = tk_stack_at(own[thread], key, thread, f.D);
        for (int d = thread; d < f.D; d += TK_THREADS) {
          float sum = to[d];
          for (int j = 0; j < n; ++j) sum = tk_fma(sh.g[j], tk_get(rows.k, sh.at[j] * f.D + d, TK_TYPE(f)), sum);
          to[d] = sum;
        }
      });
    }
  }
  block.phase([&](int thread) {
    tk_stack_merge(own[thread], TK_TOP, thread, f.D);
    for (int d = thread; d < f.D; d += TK_THREADS)
      a.g.d_q[row * f.D + d] = tk_end_of_sum(tk_stack_total(own[thread], d), a.g.last);
  });
}

// ---- S16.4: a block of some keys of one family, request and kv head, over its queries in the order of positions

TK_FN bool tk_sees(const tk_family& family, int t, int64_t id) {
  if (!family.ids) return id >= family.lo[t] && id < family.hi[t];
  const int64_t at = tk_lower(family.ids, family.offsets[t], family.offsets[t + 1], id);
  return at < family.offsets[t + 1] && family.ids[at] == id;
}

TK_FN void tk_grad_key_block(const tk_block& block, const tk_gpu_grad_args& a, tk_grad_shared& sh, int item,
                             int kv_head) {
  const tk_args& f = a.g.a;
  const int number = a.items[item].family, request = a.items[item].request;
  const int64_t key0 = a.items[item].key;
  const tk_family& family = f.family[number];
  const tk_rows& rows = family.requests[request];
  const tk_grad_rows& to = a.g.rows[number][request];
  const int columns = f.D + f.DV;
  const int keys = to.count - key0 < TK_GRAD_KEYS ? (int)(to.count - key0) : TK_GRAD_KEYS;
  tk_own<tk_stack> own;
  block.phase([&](int thread) { tk_stack_open(own[thread], a, (int64_t)item * f.Hkv + kv_head); });
  for (int32_t line0 = a.first[request]; line0 < a.first[request + 1]; line0 += TK_GRAD_LINES) {
    const int lines = a.first[request + 1] - line0 < TK_GRAD_LINES ? a.first[request + 1] - line0 : TK_GRAD_LINES;
    block.phase([&](int thread) {
      const int line = thread / TK_GRAD_KEYS, j = thread % TK_GRAD_KEYS;
      sh.seen[line][j] = 0;
      if (line >= lines || j >= keys) return;
      const int t = a.lines[2 * (line0 + line)];
      const int64_t row = (int64_t)t * f.H + kv_head * a.group + a.lines[2 * (line0 + line) + 1];
      if (a.end[row].kind == TK_ZERO || !tk_sees(family, t, rows.first + key0 + j)) return;
      const tk_slope slope = tk_slope_at(a, rows, row, (key0 + j) * f.Hkv + kv_head);
      sh.seen[line][j] = 1;
      sh.p[line][j] = slope.p;
      sh.g[line * TK_GRAD_KEYS + j] = slope.g;
    });
    block.phase([&](int thread) {
      for (int line = 0; line < lines; ++line) {
        const int t = a.lines[2 * (line0 + line)];
        const int64_t row = (int64_t)t * f.H + kv_head * a.group + a.lines[2 * (line0 + line) + 1];
        float* sums = tk_stack_at(own[thread], (uint32_t)(a.g.positions[t] / TK_LEAF), thread, a.width);
        for (int x = thread; x < columns; x += TK_THREADS) {
          const bool key = x < f.D;
          const float term = key ? tk_get(f.q, row * f.D + x, TK_TYPE(f))
                                 : tk_get(a.g.d_out, row * f.DV + x - f.D, a.g.d_type);
          for (int j = 0; j < keys; ++j)
            if (sh.seen[line][j]) {
              float& sum = sums[j * a.stride + x];
              sum = tk_fma(key ? sh.g[line * TK_GRAD_KEYS + j] : sh.p[line][j], term, sum);
            }
        }
      }
    });
  }
  block.phase([&](int thread) { tk_stack_merge(own[thread], TK_TOP, thread, a.width); });
  block.phase([&](int thread) {
    for (int j = 0; j < keys; ++j) {
      const int64_t at = (key0 + j) * f.Hkv + kv_head;
      for (int x = thread; x < columns; x += TK_THREADS) {
        const float sum = tk_stack_total(own[thread], j * a.stride + x);
        if (x < f.D) {  // where k and v are one tensor its gradient is dK + dV; another thread merged that column
          const float both = to.v ? -0.0f : tk_stack_total(own[thread], j * a.stride + x + f.D);
          to.k[at * f.D + x] = tk_end_of_sum(tk_add(sum, both), a.g.last);
        } else if (to.v) {
          to.v[at * f.DV + x - f.D] = tk_end_of_sum(sum, a.g.last);
        }
      }
    }
  });
}

// ---- S16.5: a block of a request; a thread a head

TK_FN void tk_grad_sink_block(const tk_block& block, const tk_gpu_grad_args& a, int request) {
  const tk_args& f = a.g.a;
  block.phase([&](int thread) {
    tk_stack stack;
    tk_stack_open(stack, a, request);
    for (int32_t i = a.first[request]; i < a.first[request + 1]; i += a.group) {
      const int t = a.lines[2 * i];
      float* sums = tk_stack_at(stack, (uint32_t)(a.g.positions[t] / TK_LEAF), thread, f.H);
      for (int h = thread; h < f.H; h += TK_THREADS) {
        const int64_t row = (int64_t)t * f.H + h;
        if (tk_sink_counts(a.end[row], f.sink[h]))
          sums[h] = tk_fma(-tk_sink_slope(a.end[row]), a.delta[row], sums[h]);
      }
    }
    tk_stack_merge(stack, TK_TOP, thread, f.H);
    for (int h = thread; h < f.H; h += TK_THREADS)
      a.g.d_sink[(int64_t)request * f.H + h] = tk_end_of_sum(tk_stack_total(stack, h), a.g.last);
  });
}

#endif
