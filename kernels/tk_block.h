// tk_block.h -- TKA-1 on a GPU: one body for CUDA, HIP and, to test it, the host (docs/tka1.md: S4 to S14).
//
// A body is a sequence of phases with a barrier after each; in a phase every thread of the block does its part. On a
// GPU a phase is straight code and a barrier, on the host a loop over the threads, in any order: if an order changed a
// bit, one thread would have read what another wrote without a barrier between them. No atomics, and no arithmetic
// across threads except an integer maximum.
#ifndef TK_BLOCK_H
#define TK_BLOCK_H
#include "tk_row.h"

#define TK_THREADS 128     // of a block: one a key of a leaf
#define TK_RUN_LEVEL 3     // a block walks an aligned run of 2^3 leaves (S14)
#define TK_SLAB 32         // values of d that are staged in shared memory at a time
#define TK_FAMILY_SHIFT 26
#define TK_TOP 33

// What a launch needs on a device besides tk_args: room for the partials of the runs, and which runs there are.
struct tk_gpu_args {
  tk_args a;               // all pointers are the device's
  float* acc;              // [T, runs, H, DV]
  float* l;                // [T, runs, H]
  int32_t* m;              // [T, runs, H]
  int32_t first[TK_FAMILIES], count[TK_FAMILIES];  // runs of a family, in units of 2^TK_RUN_LEVEL leaves
  int32_t runs;            // of all families
  int32_t group, parts;    // query heads of a kv head, and in how many blocks they are done
  uint64_t parts_inverse;  // ceil(2^32 / parts): a device has no integer division but by an approximate reciprocal
};

#if defined(TK_DEVICE)
struct tk_block {
  template <class Phase>
  TK_IN void phase(Phase body) const {
    body(TK_THREAD);
    TK_BARRIER;
  }
};
template <class State>
struct tk_own {            // what a thread keeps for itself between phases
  State mine;
  TK_IN State& operator[](int) { return mine; }
};
#else
#define TK_IN inline
struct tk_block {
  int* order;              // the threads of the next phase
  void (*reorder)(int*);
  template <class Phase>
  void phase(Phase body) const {
    reorder(order);
    for (int i = 0; i < TK_THREADS; ++i) body(order[i]);
  }
};
template <class State>
struct tk_own {
  State all[TK_THREADS];
  State& operator[](int thread) { return all[thread]; }
};
#endif

TK_FN uint32_t tk_run_key(const tk_gpu_args& g, int run, int* family) {
  *family = run < g.count[0] ? 0 : 1;
  const uint32_t leaf = (uint32_t)(g.first[*family] + run - (*family ? g.count[0] : 0)) << TK_RUN_LEVEL;
  return (uint32_t)*family << TK_FAMILY_SHIFT | leaf;
}

// The keys of query row t in a leaf: [begin, end) of the list, or of row ids where the family is a range.
TK_FN int64_t tk_lower(const int64_t* ids, int64_t begin, int64_t end, int64_t id) {
  while (begin < end) {
    const int64_t middle = begin + ((end - begin) >> 1);
    if (ids[middle] < id)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}
TK_FN int32_t tk_leaf_keys(const tk_family& f, int t, int64_t leaf, int64_t* begin) {
  const int64_t low = leaf * TK_LEAF, high = low + TK_LEAF;
  int64_t end;
  if (f.ids) {
    *begin = tk_lower(f.ids, f.offsets[t], f.offsets[t + 1], low);
    end = tk_lower(f.ids, *begin, f.offsets[t + 1], high);
  } else {
    *begin = f.lo[t] > low ? f.lo[t] : low;
    end = f.hi[t] < high ? f.hi[t] : high;
  }
  return end > *begin ? (int32_t)(end - *begin) : 0;
}

// ---- a block's shared memory and a thread's own numbers. HEADS: query heads of one kv head that share the keys.

#define TK_DEPTH (TK_RUN_LEVEL + 2)
template <int HEADS>
struct tk_shared {
  float q[HEADS][TK_SLAB];
  float k[TK_LEAF][TK_SLAB + 1];   // one more: keys then lie in different banks
  float p[HEADS][TK_LEAF];
  int32_t n[HEADS][TK_LEAF], poison[HEADS][TK_LEAF];
  int64_t row[TK_LEAF];            // index of a key's row among (row, kv head)
  float l[TK_DEPTH][HEADS];        // the stack of nodes (tk_plan.h); acc lies with the threads
  int32_t m[TK_DEPTH][HEADS];
  float fa[TK_DEPTH][HEADS], fb[TK_DEPTH][HEADS];  // of the merges that are due
  int32_t level[TK_DEPTH];
  int32_t depth, merges;
};
template <int COLUMNS, int HEADS>
struct tk_mine {
  float score[HEADS];
  float acc[TK_DEPTH][COLUMNS][HEADS];
};

// The merges of all nodes that meet below `level`: (l, M) by one thread a head, then acc by every thread.
template <int COLUMNS, int HEADS>
TK_FN void tk_merge_below(const tk_block& block, tk_shared<HEADS>& sh, tk_own<tk_mine<COLUMNS, HEADS>>& own,
                          int level) {
  block.phase([&](int thread) {
    if (thread >= HEADS) return;
    int d = sh.depth, merges = 0;
    for (; d >= 2 && sh.level[d - 1] < level; --d, ++merges) {
      const tk_factors f = tk_merge_factors(sh.m[d - 2][thread], sh.m[d - 1][thread]);
      sh.l[d - 2][thread] = tk_merge(sh.l[d - 2][thread], f.a, sh.l[d - 1][thread], f.b);
      sh.m[d - 2][thread] = f.m;
      sh.fa[merges][thread] = f.a;
      sh.fb[merges][thread] = f.b;
    }
    if (thread == 0) sh.merges = merges;
  });
  block.phase([&](int thread) {
    tk_mine<COLUMNS, HEADS>& mine = own[thread];
    for (int i = 0; i < sh.merges; ++i) {
      const int d = sh.depth - i;
      for (int c = 0; c < COLUMNS; ++c)
        for (int h = 0; h < HEADS; ++h)
          mine.acc[d - 2][c][h] = tk_merge(mine.acc[d - 2][c][h], sh.fa[i][h], mine.acc[d - 1][c][h], sh.fb[i][h]);
    }
  });
  block.phase([&](int thread) {
    if (thread == 0) sh.depth -= sh.merges;
  });
}

// S4: one thread a key; it keeps the chains of all heads while slabs of q and k pass through shared memory.
template <int COLUMNS, int HEADS>
TK_FN void tk_scores(const tk_block& block, const tk_args& a, const void* keys, tk_shared<HEADS>& sh,
                     tk_own<tk_mine<COLUMNS, HEADS>>& own, int64_t q_row, int heads, int n) {
  block.phase([&](int thread) {
    for (int h = 0; h < HEADS; ++h) own[thread].score[h] = 0.0f;
  });
  for (int d = 0; d < a.D; d += TK_SLAB) {
    const int width = a.D - d < TK_SLAB ? a.D - d : TK_SLAB;
    block.phase([&](int thread) {
      const int x = thread % TK_SLAB;
      if (x >= width) return;
      for (int h = thread / TK_SLAB; h < HEADS; h += TK_THREADS / TK_SLAB)
        sh.q[h][x] = h < heads ? tk_get(a.q, (q_row + h) * a.D + d + x, TK_TYPE(a)) : 0.0f;
      for (int j = thread / TK_SLAB; j < n; j += TK_THREADS / TK_SLAB)
        sh.k[j][x] = tk_get(keys, sh.row[j] * a.D + d + x, TK_TYPE(a));
    });
    block.phase([&](int thread) {
      if (thread >= n) return;
      for (int x = 0; x < width; ++x)
        for (int h = 0; h < HEADS; ++h)
          own[thread].score[h] = tk_fma(sh.q[h][x], sh.k[thread][x], own[thread].score[h]);
    });
  }
}

// S5 to S6.2: scores become weights in shared memory; M and the poison of the leaf go to the top of the stack.
template <int COLUMNS, int HEADS>
TK_FN void tk_weights(const tk_block& block, const tk_args& a, tk_shared<HEADS>& sh,
                      tk_own<tk_mine<COLUMNS, HEADS>>& own, int n) {
  block.phase([&](int thread) {
    if (thread >= n) return;
    for (int h = 0; h < HEADS; ++h) {
      const tk_key key = tk_weigh(own[thread].score[h], tk_f32(a.scale));
      sh.p[h][thread] = key.p;
      sh.n[h][thread] = key.n;
      sh.poison[h][thread] = key.poison;
    }
  });
  block.phase([&](int thread) {
    if (thread >= HEADS) return;
    int32_t m = TK_EMPTY, poison = 0;
    for (int j = 0; j < n; ++j) {
      m = tk_max(m, sh.n[thread][j]);
      poison |= sh.poison[thread][j];
    }
    sh.m[sh.depth - 1][thread] = m;
    sh.poison[thread][0] = poison;
  });
  block.phase([&](int thread) {
    if (thread >= n) return;
    for (int h = 0; h < HEADS; ++h)
      sh.p[h][thread] = tk_scale(sh.p[h][thread], sh.n[h][thread] - sh.m[sh.depth - 1][h]);
  });
}

// S6.3, S6.4: columns by all threads, l by one a head.
template <int COLUMNS, int HEADS>
TK_FN void tk_sums(const tk_block& block, const tk_args& a, const void* values, tk_shared<HEADS>& sh,
                   tk_own<tk_mine<COLUMNS, HEADS>>& own, int n) {
  block.phase([&](int thread) {
    const int top = sh.depth - 1;
    for (int c = 0; c < COLUMNS; ++c) {
      const int column = c * TK_THREADS + thread;
      if (column >= a.DV) continue;
      float acc[HEADS];
      for (int h = 0; h < HEADS; ++h) acc[h] = 0.0f;
      for (int j = 0; j < n; ++j) {
        const float v = tk_get(values, sh.row[j] * a.DV + column, TK_TYPE(a));
        for (int h = 0; h < HEADS; ++h) acc[h] = tk_fma(sh.p[h][j], v, acc[h]);
      }
      for (int h = 0; h < HEADS; ++h) own[thread].acc[top][c][h] = sh.m[top][h] == TK_EMPTY ? -0.0f : acc[h];
    }
    if (thread >= HEADS) return;
    float l = 0.0f;
    for (int j = 0; j < n; ++j) l = tk_add(l, sh.p[thread][j]);
    l = sh.m[top][thread] == TK_EMPTY ? 0.0f : l;
    sh.l[top][thread] = sh.poison[thread][0] ? tk_f32(TK_NAN) : l;
  });
}

// ---- a block: query row t, `heads` heads from head0 on, all of one kv head, and one run of leaves

template <int COLUMNS, int HEADS>
TK_FN void tk_run_block(const tk_block& block, const tk_gpu_args& g, tk_shared<HEADS>& sh, int t, int kv_head,
                        int head0, int heads, int run) {
  const tk_args& a = g.a;
  tk_own<tk_mine<COLUMNS, HEADS>> own;
  int number;
  const uint32_t first = tk_run_key(g, run, &number);
  const tk_family& family = a.family[number];
  const tk_rows& rows = family.requests[a.request[t]];
  uint32_t last = 0;
  bool any = false;
  block.phase([&](int thread) {
    if (thread == 0) sh.depth = 0;
  });
  for (uint32_t key = first; key < first + (1u << TK_RUN_LEVEL); ++key) {
    int64_t begin;
    const int n = tk_leaf_keys(family, t, key & ((1u << TK_FAMILY_SHIFT) - 1u), &begin);
    if (n == 0) continue;  // for all threads alike
    const int level = any ? tk_meeting_level(last, key) : TK_TOP;
    if (any) tk_merge_below(block, sh, own, level);
    any = true;
    last = key;
    block.phase([&](int thread) {
      if (thread == 0) sh.level[sh.depth++] = level;
      for (int j = thread; j < n; j += TK_THREADS)
        sh.row[j] = ((family.ids ? family.ids[begin + j] : begin + j) - rows.first) * a.Hkv + kv_head;
    });
    tk_scores(block, a, rows.k, sh, own, (int64_t)t * a.H + head0, heads, n);
    tk_weights(block, a, sh, own, n);
    tk_sums(block, a, rows.v, sh, own, n);
  }
  if (any) tk_merge_below(block, sh, own, TK_TOP);
  block.phase([&](int thread) {
    const int64_t at = ((int64_t)t * g.runs + run) * a.H + head0;
    for (int h = 0; h < heads; ++h)
      for (int c = 0; c < COLUMNS; ++c) {
        const int column = c * TK_THREADS + thread;
        if (column < a.DV) g.acc[(at + h) * a.DV + column] = any ? own[thread].acc[0][c][h] : -0.0f;
      }
    if (thread >= heads) return;
    g.l[at + thread] = any ? sh.l[0][thread] : 0.0f;
    g.m[at + thread] = any ? sh.m[0][thread] : TK_EMPTY;
  });
}

// ---- a block: the runs of one (row, head) merge, and the row ends. Each thread keeps its own copy of (l, M).

TK_FN void tk_merge_block(const tk_block& block, const tk_gpu_args& g, int t, int head) {
  const tk_args& a = g.a;
  const int64_t row = (int64_t)t * a.H + head;
  block.phase([&](int thread) {
    for (int c = thread; c < a.DV; c += TK_THREADS) {
      float acc[TK_TOP + 1], l[TK_TOP + 1];
      int32_t m[TK_TOP + 1], level[TK_TOP + 1];
      acc[0] = -0.0f, l[0] = 0.0f, m[0] = TK_EMPTY, level[0] = TK_TOP + 1;
      int depth = 1;
      uint32_t last = 0;
      for (int run = 0; run <= g.runs; ++run) {
        int family = 0;
        const uint32_t key = run < g.runs ? tk_run_key(g, run, &family) : 0;
        const int meets = run == g.runs ? TK_TOP + 1 : run ? tk_meeting_level(last, key) : TK_TOP;
        for (; depth >= 2 && level[depth - 1] < meets; --depth) {
          const tk_factors f = tk_merge_factors(m[depth - 2], m[depth - 1]);
          acc[depth - 2] = tk_merge(acc[depth - 2], f.a, acc[depth - 1], f.b);
          l[depth - 2] = tk_merge(l[depth - 2], f.a, l[depth - 1], f.b);
          m[depth - 2] = f.m;
        }
        if (run == g.runs) break;
        const int64_t at = ((int64_t)t * g.runs + run) * a.H + head;
        acc[depth] = g.acc[at * a.DV + c], l[depth] = g.l[at], m[depth] = g.m[at], level[depth] = meets;
        ++depth;
        last = key;
      }
      if (a.acc) {
        a.acc[row * a.DV + c] = tk_is_nan(l[0]) ? TK_NAN : tk_bits(tk_one_nan(acc[0]));
        if (c == 0) a.l[row] = tk_bits(tk_one_nan(l[0])), a.m[row] = m[0];
      }
      if (!a.out) continue;
      const tk_end end = tk_finish(l[0], m[0], a.sink != nullptr, a.sink ? tk_f32(a.sink[head]) : 0.0f);
      tk_put(a.out, row * a.DV + c, TK_TYPE(a), tk_output(end, acc[0]));
      if (c == 0) a.lse[row] = tk_bits(end.lse), a.lse_sink[row] = tk_bits(end.lse_sink);
    }
  });
}

#endif
