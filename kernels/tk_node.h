// tk_node.h -- the nodes of the tree that a tile works on (docs/tka1.md: S6 to S8): (acc, l, M) of every line, on a
// stack (tk_plan.h). Leaves are taken in batches: first the scores and (l, M) of a batch, then its columns.
#ifndef TK_NODE_H
#define TK_NODE_H
#include "tk_plan.h"
#include "tk_sums.h"
#include "tk_weigh.h"

namespace tka1 {

class Nodes {
 public:
  // `stride`: floats between the columns of two lines. Without leaves every line is the empty partial (S6.4).
  void reset(int depth, int lines, int stride) {
    lines_ = lines, padded_ = round_up(lines, 16), stride_ = stride;
    acc_.grow((size_t)std::max(depth, 1) * lines * stride);
    l_.grow((size_t)(depth + 1) * padded_);
    m_.resize((size_t)(depth + 1) * padded_);
    if (depth) return;
    std::fill_n(acc(0).data, (size_t)lines * stride, -0.0f);
    std::fill_n(l(0), padded_, 0.0f);
    std::fill_n(m(0), padded_, TK_EMPTY);
  }
  Matrix acc(int slot) { return {acc_.data() + (size_t)slot * lines_ * stride_, stride_}; }
  float* l(int slot) { return l_.data() + (size_t)slot * padded_; }
  int32_t* m(int slot) { return m_.data() + (size_t)slot * padded_; }

  // ---- (l, M) of a batch, leaf by leaf

  void start_batch() { batch_.clear(), used_ = 0; }
  // Where the weights of the next leaf go: (l, M) a line, and what each line sees of it.
  struct Place {
    Weighed to;
    int32_t *from, *until;
  };
  Place open(const Leaf& leaf) {
    const size_t at = batch_.size() * padded_;
    from_.resize(at + padded_), until_.resize(at + padded_), own_m_.resize(at + padded_);
    batch_.push_back({&leaf, 0, false, false});
    const int top = leaf.slot + leaf.merges;
    return {{l(top), m(top)}, &from_[at], &until_[at]};
  }
  // ragged: some line does not see all keys of the leaf.
  void close(bool ragged) {
    Entry& entry = batch_.back();
    const Leaf& leaf = *entry.leaf;
    const int top = leaf.slot + leaf.merges;
    int32_t* own = &own_m_[(batch_.size() - 1) * padded_];
    std::copy_n(m(top), lines_, own);
    entry.ragged = ragged;
    entry.hollow = std::find(own, own + lines_, TK_EMPTY) != own + lines_;
    entry.factors = used_;
    used_ += (size_t)leaf.merges * 2 * padded_;
    factors_.grow(used_);
    for (int i = 0; i < leaf.merges; ++i) {
      const int low = top - 1 - i;
      float* a = factors_.data() + entry.factors + (size_t)i * 2 * padded_;
      merge_lines(l(low), m(low), l(low + 1), m(low + 1), a, a + padded_, lines_);
    }
  }

  // ---- columns [column, column + N vectors) of a batch for some lines (S6.3, S7)
  // p: the weights of those lines; y counts the keys of the batch from `first_key`, an index of plan.ids.

  template <int N, class Rows>
  void columns(int first_line, int lines, int column, Factors p, int first_key, Rows rows) {
    by_rows<kTileRows>(lines, [&](auto height, int i) {
      constexpr int R = height;
      const Factors factors = {p.data + i * p.row, p.row, p.step};
      for (size_t e = 0; e < batch_.size(); ++e)
        leaf_columns<R, N>(e, first_line + i, column, factors, first_key, rows);
    });
  }

 private:
  struct Entry {
    const Leaf* leaf;
    size_t factors;
    bool ragged, hollow;  // hollow: some line sees no finite key, so its columns are -0
  };

  template <int R, int N, class Rows>
  void leaf_columns(size_t e, int line, int column, Factors p, int first_key, Rows rows) {
    const Entry& entry = batch_[e];
    const Leaf& leaf = *entry.leaf;
    const int begin = leaf.begin - first_key, end = leaf.end - first_key;
    Sums<R, N> sums;
    sums.fill(0.0f);
    if (!entry.ragged) {
      sums.chain(p, rows, begin, end);
    } else {  // all lines together over what all see, each alone before and after that
      int32_t from[R], until[R];
      int low = begin, high = end;
      for (int i = 0; i < R; ++i) {
        from[i] = begin + from_[e * padded_ + line + i], until[i] = begin + until_[e * padded_ + line + i];
        low = std::max(low, from[i]), high = std::min(high, until[i]);
      }
      if (high < low) low = high = end;
      sums.chain_edges(p, rows, from, until, begin, low);
      sums.chain(p, rows, low, high);
      sums.chain_edges(p, rows, from, until, high, end);
    }
    if (entry.hollow) sums.fill_where(&own_m_[e * padded_ + line], TK_EMPTY, -0.0f);
    const int top = leaf.slot + leaf.merges;
    for (int i = 0; i < leaf.merges; ++i) {
      const float* a = factors_.data() + entry.factors + (size_t)i * 2 * padded_ + line;
      sums.merge({acc(top - 1 - i).at(line, column), stride_}, a, a + padded_);
    }
    sums.store_to({acc(leaf.slot).at(line, column), stride_});
  }
  static void merge_lines(float* __restrict la, int32_t* __restrict ma, const float* __restrict lb,
                          const int32_t* __restrict mb, float* __restrict fa, float* __restrict fb, int lines) {
    for (int i = 0; i < lines; ++i) {
      const tk_factors f = tk_merge_factors(ma[i], mb[i]);
      la[i] = tk_merge(la[i], f.a, lb[i], f.b);
      ma[i] = f.m;
      fa[i] = f.a;
      fb[i] = f.b;
    }
  }

  int lines_ = 0, padded_ = 0, stride_ = 0;
  Floats acc_, l_, factors_;
  std::vector<int32_t> m_, own_m_, from_, until_;
  std::vector<Entry> batch_;
  size_t used_ = 0;
};

}  // namespace tka1
#endif
