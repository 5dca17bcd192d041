// tk_clear.h -- TKA-1 as docs/tka1.md says it: one row, one head, one number at a time. S4 to S9 by plain recursion.
//
// This is the form to read. The fast forms (tk_tile.h, tk_stream.h) and the GPU body are held to its bits.
#ifndef TK_CLEAR_H
#define TK_CLEAR_H
#include "tk_plan.h"
#include "tk_rows.h"

namespace tka1 {

struct Node {
  std::vector<float> acc;
  float l;
  int32_t m;
};

class Clear {
 public:
  explicit Clear(const tk_args& args) : a_(args) {}

  // The row before S10: the families in the order of their numbers (S9).
  Node row(int t, int h) {
    row_ = t, head_ = h;
    Node total = empty();
    for (int f = 0; f < a_.families; ++f) {
      plan_.build(a_, {t, 1, h, 1}, {f, 0, kFamilyShift});
      total = merge(total, tree(f, kFamilyShift, 0));
    }
    return total;
  }

 private:
  Node empty() const { return {std::vector<float>(a_.DV, -0.0f), 0.0f, TK_EMPTY}; }  // S6.4

  // S8: node (level, i) is the merge of (level - 1, 2i) and (level - 1, 2i + 1); one without keys is empty.
  Node tree(int f, int level, int64_t i) {
    const uint32_t first = (uint32_t)f << kFamilyShift | (uint32_t)(i << level);
    const auto by_key = [](const Leaf& leaf, uint64_t key) { return leaf.key < key; };
    const auto begin = std::lower_bound(plan_.leaves.begin(), plan_.leaves.end(), (uint64_t)first, by_key);
    const auto end = std::lower_bound(begin, plan_.leaves.end(), first + ((uint64_t)1 << level), by_key);
    if (begin == end) return empty();
    if (level == 0) return leaf(f, *begin);
    return merge(tree(f, level - 1, 2 * i), tree(f, level - 1, 2 * i + 1));
  }

  Node leaf(int f, const Leaf& leaf) {
    const tk_rows& rows = a_.family[f].requests[a_.request[row_]];
    const int kv_head = head_ / (a_.H / a_.Hkv);
    const int keys = leaf.end - leaf.begin;
    std::vector<tk_key> key(keys);
    Node node = {std::vector<float>(a_.DV, 0.0f), 0.0f, TK_EMPTY};
    bool poisoned = false;
    for (int j = 0; j < keys; ++j) {
      const size_t at = (size_t)(plan_.ids[leaf.begin + j] - rows.first) * a_.Hkv + kv_head;
      float s = 0.0f;  // S4
      for (int d = 0; d < a_.D; ++d)
        s = tk_fma(element(a_.q, ((size_t)row_ * a_.H + head_) * a_.D + d), element(rows.k, at * a_.D + d), s);
      key[j] = tk_weigh(s, tk_f32(a_.scale));  // S5
      node.m = tk_max(node.m, key[j].n);
      poisoned |= key[j].poison != 0;
    }
    for (int j = 0; j < keys; ++j) {  // S6.2, S6.3
      const float p = tk_scale(key[j].p, key[j].n - node.m);
      const size_t at = (size_t)(plan_.ids[leaf.begin + j] - rows.first) * a_.Hkv + kv_head;
      node.l = tk_add(node.l, p);
      for (int c = 0; c < a_.DV; ++c) node.acc[c] = tk_fma(p, element(rows.v, at * a_.DV + c), node.acc[c]);
    }
    if (node.m == TK_EMPTY) node = empty();
    if (poisoned) node.l = tk_f32(TK_NAN);
    return node;
  }

  Node merge(const Node& a, const Node& b) const {  // S7
    const tk_factors f = tk_merge_factors(a.m, b.m);
    Node node = {std::vector<float>(a_.DV), tk_merge(a.l, f.a, b.l, f.b), f.m};
    for (int c = 0; c < a_.DV; ++c) node.acc[c] = tk_merge(a.acc[c], f.a, b.acc[c], f.b);
    return node;
  }

  float element(const void* from, size_t at) const { return tk_get(from, (int64_t)at, a_.type); }

  const tk_args& a_;
  Plan plan_;
  int row_ = 0, head_ = 0;
};

}  // namespace tka1
#endif
