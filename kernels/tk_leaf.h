// tk_leaf.h -- the backward on a CPU: the keys of one leaf laid out once, and one query row over them (docs/tka1.md:
// S16.2).
#ifndef TK_LEAF_H
#define TK_LEAF_H
#include <stddef.h>

#include "tk_grad.h"
#include "tk_rows.h"

namespace tka1 {

constexpr int kKeyLanes = 8;                        // vectors of sums side by side
constexpr int kKeyBlock = kKeyLanes * kLanes;       // TK_LEAF is a multiple of it

// The keys of a leaf that one query row sees, as places in the leaf, ascending.
struct Places {
  int16_t at[TK_LEAF];
  int count = 0;
  int from() const { return at[0]; }
  int to() const { return at[count - 1] + 1; }

  void find(const tk_family& family, int t, int64_t first, int64_t end) {  // of the row ids [first, end)
    count = 0;
    if (family.ids) {
      const int64_t* last = family.ids + family.offsets[t + 1];
      const int64_t* id = std::lower_bound(family.ids + family.offsets[t], last, first);
      for (; id < last && *id < end; ++id) at[count++] = (int16_t)(*id - first);
      return;
    }
    for (int64_t id = std::max(first, family.lo[t]); id < std::min(end, family.hi[t]); ++id)
      at[count++] = (int16_t)(id - first);
  }
};

// The rows of one leaf and kv head as binary32: keys [place][D] and, for chains with a key in each lane, [D][place].
class OpenLeaf {
 public:
  explicit OpenLeaf(const tk_grad_args& g) : g_(g) {
    by_d_.grow((size_t)g.a.D * TK_LEAF);
    by_c_.grow((size_t)g.a.DV * TK_LEAF);
    keys_.grow((size_t)TK_LEAF * g.a.D);
    row_.grow(std::max(g.a.D, g.a.DV));
  }
  // What the leaf holds of a request: row ids [first, end). What it does not hold reads as zeros, or as other rows.
  void open(int family, int request, int kv_head, int64_t leaf) {
    const tk_args& a = g_.a;
    const tk_rows& rows = a.family[family].requests[request];
    first = std::max(leaf * TK_LEAF, rows.first);
    end = std::min((leaf + 1) * TK_LEAF, rows.first + g_.rows[family][request].count);
    for (int64_t id = first; id < end; ++id) {
      const int64_t at = (id - rows.first) * a.Hkv + kv_head;
      const int place = (int)(id - first);
      float* key = keys_.data() + (size_t)place * a.D;
      widen(rows.k, at * a.D, a.type, a.D, key);
      spread(key, a.D, by_d_.data() + place);
      widen(rows.v, at * a.DV, a.type, a.DV, row_.data());
      spread(row_.data(), a.DV, by_c_.data() + place);
    }
  }
  const float* key(int place) { return keys_.data() + (size_t)place * g_.a.D; }

  // P and g of the keys [from, to) for a row with these q [D] and dO [DV]; places in between may be unseen.
  void slopes(const float* q, const float* d_out, const tk_end& end_of_row, float delta, int from, int to) {
    chain(q, by_d_.data(), g_.a.D, from, to, g);
    chain(d_out, by_c_.data(), g_.a.DV, from, to, p);
    const float scale = tk_f32(g_.a.scale);
    for (int j = from; j < to; ++j) {
      const tk_slope slope = tk_slope_of(g[j], p[j], delta, end_of_row, scale);
      p[j] = slope.p;
      g[j] = slope.g;
    }
  }
  int64_t first = 0, end = 0;
  alignas(64) float p[TK_LEAF], g[TK_LEAF];

 private:
  static void spread(const float* row, int count, float* to) {
    for (int x = 0; x < count; ++x) to[(size_t)x * TK_LEAF] = row[x];
  }
  // sums[j] = fma(row[x], rows[x][j], .), x ascending
  static void chain(const float* row, const float* rows, int count, int from, int to, float* sums) {
    for (int j = from / kKeyBlock * kKeyBlock; j < to; j += kKeyBlock) {
      Lanes sum[kKeyLanes] = {};
      for (int x = 0; x < count; ++x) {
        const Lanes factor = broadcast(row[x]);
        TK_UNROLL
        for (int n = 0; n < kKeyLanes; ++n)
          sum[n] = fma_lanes(factor, load<Lanes>(rows + (size_t)x * TK_LEAF + j + n * kLanes), sum[n]);
      }
      TK_UNROLL
      for (int n = 0; n < kKeyLanes; ++n) store(sums + j + n * kLanes, sum[n]);
    }
  }
  const tk_grad_args& g_;
  Floats by_d_, by_c_, keys_, row_;
};

}  // namespace tka1
#endif
