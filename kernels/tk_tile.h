// tk_tile.h -- many query lines share their keys (prefill, or many heads on one kv head): docs/tka1.md, S4 to S9.
//
// Keys and values of a batch of leaves are widened once for all lines, and scored for a block of lines where one of them
// sees the key. Scores stand as [key][line], so that a lane is
// a line all the way from the score to l; for the columns a lane is a column.
#ifndef TK_TILE_H
#define TK_TILE_H
#include "tk_node.h"
#include "tk_rows.h"

namespace tka1 {

class TileWorker {
 public:
  static constexpr int kLines = 256;  // enough to pay for widening a leaf, small enough for the second cache

  explicit TileWorker(const tk_args& args) : a_(args), group_(args.H / args.Hkv) {
    key_stride_ = round_up(std::max(a_.D, a_.DV), 16) + 16;  // 2^n would hit few cache sets
    rows_.grow((size_t)TK_LEAF * key_stride_);
    columns_ = round_up(a_.DV, 16) + 16;
  }

  // Leaves the node of `run` in slot 0 of nodes(); false without keys.
  bool run(const Tile& tile, const Run& run) {
    tile_ = tile;
    kv_head_ = tile.head / group_;
    plan_.build(a_, tile, run);
    width_ = round_up(tile.lines());
    if (width_ > 2 * kLanes) width_ = round_up(width_, kTileLanes * kLanes);
    nodes_.reset(plan_.depth, tile.lines(), columns_);
    load_queries();
    const int leaves = (int)plan_.leaves.size();
    for (int first = 0, next; first < leaves; first = next) {
      for (next = first + 1; next < leaves && plan_.leaves[next].end - plan_.leaves[first].begin <= TK_LEAF;) ++next;
      batch(first, next);
    }
    return leaves > 0;
  }
  Nodes& nodes() { return nodes_; }

 private:
  struct Row {
    const void* rows;
    int64_t at;  // of its first element
  };
  Row row_of(int f, int64_t id, bool values) const {
    const tk_rows& rows = a_.family[f].requests[a_.request[tile_.row]];
    const int64_t at = (id - rows.first) * a_.Hkv + kv_head_;
    return values ? Row{rows.v, at * a_.DV} : Row{rows.k, at * a_.D};
  }

  // Queries as [d][line], so that a vector holds one d of many lines. Lines past the end repeat the last one.
  void load_queries() {
    float* q = queries_.grow((size_t)round_up(a_.D) * width_);
    for (int i = 0; i < width_; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const int line = std::min(i + lane, tile_.lines() - 1);
        const int64_t row = tile_.row + line / tile_.heads, head = tile_.head + line % tile_.heads;
        widen(a_.q, (row * a_.H + head) * a_.D, a_.type, a_.D, rows_.data() + (size_t)lane * key_stride_);
      }
      for (int d = 0; d < a_.D; d += kLanes)
        transpose(rows_.data() + d, key_stride_, q + (size_t)d * width_ + i, width_);
    }
  }

  void batch(int first, int next) {
    first_key_ = plan_.leaves[first].begin;
    keys_ = plan_.leaves[next - 1].end - first_key_;
    load_rows(first, next, false);
    scores_.grow((size_t)TK_LEAF * width_);
    scores(next);
    nodes_.start_batch();
    for (int s = first; s < next; ++s) weigh(plan_.leaves[s]);
    if (!values_are_keys(first, next)) load_rows(first, next, true);
    const Factors p = {scores_.data(), 1, width_};
    int c = 0;
    for (; c + kTileLanes * kLanes <= a_.DV; c += kTileLanes * kLanes) columns<kTileLanes>(c, p);
    for (; c < a_.DV; c += kLanes) columns<1>(c, p);
  }
  template <int N>
  void columns(int c, Factors p) {
    const float* values = rows_.data() + c;
    const ptrdiff_t stride = key_stride_;
    nodes_.columns<N>(0, tile_.lines(), c, p, first_key_, [=](int y, int n) {
      return load<Lanes>(values + y * stride + n * kLanes);
    });
  }

  void load_rows(int first, int next, bool values) {
    for (int s = first; s < next; ++s)
      for (int j = plan_.leaves[s].begin; j < plan_.leaves[s].end; ++j) {
        const Row row = row_of(plan_.leaves[s].family, plan_.ids[j], values);
        widen(row.rows, row.at, a_.type, values ? a_.DV : a_.D, rows_.data() + (size_t)(j - first_key_) * key_stride_);
      }
  }
  bool values_are_keys(int first, int next) const {
    bool same = a_.D == a_.DV;
    for (int s = first; s < next; ++s) {
      const tk_rows& rows = a_.family[plan_.leaves[s].family].requests[a_.request[tile_.row]];
      same &= rows.k == rows.v;
    }
    return same;
  }

  void scores(int next) {
    if (width_ % (kTileLanes * kLanes) == 0)
      scores_of<kTileLanes>(next);
    else if (width_ % (2 * kLanes) == 0)
      scores_of<2>(next);
    else
      scores_of<1>(next);
  }
  // A slab of d at a time: its queries stay in the first cache while all keys pass.
  template <int N>
  void scores_of(int next) {
    constexpr int kSlab = 128;
    for (int d = 0; d < a_.D; d += kSlab)
      for (int i = 0; i < width_; i += N * kLanes) {
        const float* q = queries_.data() + (size_t)d * width_ + i;
        const ptrdiff_t width = width_;
        const auto rows = [=](int y, int n) { return load<Lanes>(q + y * width + n * kLanes); };
        if (i == 0) fetch_next(next, d, std::min(kSlab, a_.D - d));
        const Span span = seen(next, i, N * kLanes);
        by_rows<kTileRows>(span.size(), [&](auto height, int from) {
          constexpr int R = height;
          const int j = span.from + from;
          const Matrix to = {scores_.data() + (size_t)j * width_ + i, width_};
          Sums<R, N> sums;
          if (d == 0)
            sums.fill(0.0f);
          else
            sums.load_from(to);
          sums.chain({rows_.data() + (size_t)j * key_stride_ + d, key_stride_, 1}, rows, 0, std::min(kSlab, a_.D - d));
          sums.store_to(to);
        });
      }
  }
  // While a slab of a batch is scored, the same one of the next leaf is on its way.
  void fetch_next(int next, int d, int width) {
    if (next == (int)plan_.leaves.size()) return;
    const Leaf& leaf = plan_.leaves[next];
    for (int i = leaf.begin; i < leaf.end; ++i) {
      const Row key = row_of(leaf.family, plan_.ids[i], false), value = row_of(leaf.family, plan_.ids[i], true);
      fetch(key.rows, key.at + d, a_.type, width);
      if (d < a_.DV) fetch(value.rows, value.at + d, a_.type, std::min(width, a_.DV - d));
    }
  }

  // Keys [from, until) of a leaf.
  struct Span {
    int from, until;
    int size() const { return until - from; }
  };
  // What a query row sees of a leaf, and what some of these lines see of it.
  Span seen_by(const Leaf& leaf, int row) const {
    const tk_family& family = a_.family[leaf.family];
    const int64_t first = plan_.ids[leaf.begin], keys = leaf.end - leaf.begin;
    if (family.ids) return {0, (int)keys};  // a list has one row
    const int64_t from = std::clamp<int64_t>(family.lo[row] - first, 0, keys);
    return {(int)from, (int)std::clamp<int64_t>(family.hi[row] - first, from, keys)};
  }
  Span seen_by(const Leaf& leaf, int line, int lines) const {
    Span all = {TK_LEAF, 0};
    const int last = std::min(line + lines, tile_.lines()) - 1;
    for (int r = line / tile_.heads; r <= last / tile_.heads; ++r) {
      const Span one = seen_by(leaf, tile_.row + r);
      if (one.size() > 0) all = {std::min(all.from, one.from), std::max(all.until, one.until)};
    }
    return all.until ? all : Span{0, 0};
  }
  // Keys of the batch that are scored for these lines: of one leaf those that somebody sees.
  Span seen(int next, int line, int lines) const {
    const Leaf& last = plan_.leaves[next - 1];
    return last.begin == first_key_ ? seen_by(last, line, lines) : Span{0, keys_};
  }

  void weigh(const Leaf& leaf) {
    const Nodes::Place place = nodes_.open(leaf);
    float* x = scores_.data() + (size_t)(leaf.begin - first_key_) * width_;
    const int lines = round_up(tile_.lines()), keys = leaf.end - leaf.begin;
    bool any_ragged = false;
    for (int i = 0; i < lines; i += kWeighed) {
      const int count = std::min(kWeighed, lines - i);
      const bool ragged = look(leaf, place, i, count);
      const Span span = ragged ? seen_by(leaf, i, count) : Span{0, keys};
      const auto weigh = ragged ? weigh_lines<false> : weigh_lines<true>;
      weigh(x + i, width_, count, span.from, span.until, tk_f32(a_.scale), {place.from + i, place.until + i},
            {place.to.l + i, place.to.m + i});
      any_ragged |= ragged;
    }
    nodes_.close(any_ragged);
  }
  // What each line sees of a leaf; true if some line does not see all of it.
  bool look(const Leaf& leaf, const Nodes::Place& place, int first, int count) const {
    bool ragged = false;
    for (int i = first; i < first + count; ++i) {
      const int line = std::min(i, tile_.lines() - 1);
      const Span span = seen_by(leaf, tile_.row + line / tile_.heads);
      ragged |= span.size() != leaf.end - leaf.begin;
      place.from[i] = span.from, place.until[i] = span.until;
    }
    return ragged;
  }

  const tk_args& a_;
  const int group_;
  int key_stride_, columns_, kv_head_ = 0, width_ = 0, first_key_ = 0, keys_ = 0;
  Tile tile_ = {};
  Plan plan_;
  Nodes nodes_;
  Floats queries_, rows_, scores_;
};

}  // namespace tka1
#endif
