// tk_body.h -- TKA-1 on a CPU: the clear form (docs/tka1.md: S3 to S13).
//
// A tile is a few query rows of one request with some heads of one kv head; its `lines` are the pairs (row, head).
// Its leaves are walked in ascending order; keys and values of a leaf are converted once for all its lines.
#ifndef TK_BODY_H
#define TK_BODY_H
#include "tk_lanes.h"

namespace tka1 {

constexpr int kLineLimit = 64;   // lines of a tile: enough to pay for the conversion of a leaf, small enough for L2
constexpr int kKeyStride = TK_LEAF + 16;  // floats between two d of transposed keys; 2^n would hit few cache sets
constexpr int kFamilyShift = 26;          // S9: tree key = family << 26 | leaf
constexpr int kTop = 33;                  // a level above every merge

struct Tile {
  int32_t row, rows;    // query rows [row, row + rows), all of one request; 1 where a family is a list
  int32_t head, heads;  // query heads [head, head + heads), all of one kv head
};

// ---- the unfinished nodes of the tree (S8): at most one a level, because leaves come in ascending order
class Stack {
 public:
  void reset(int lines, int stride) {
    lines_ = lines, stride_ = stride, depth_ = 0;
  }
  // Merges what the next leaf proves to be complete and opens a slot for it.
  void open(uint32_t key) {
    const int level = depth_ ? meeting_level(last_, key) : kTop;
    merge_below(level);
    if ((int)slots_.size() <= depth_) slots_.emplace_back();
    Slot& slot = slots_[depth_++];
    slot.acc.grow((size_t)lines_ * stride_);
    slot.l.resize(lines_);
    slot.m.resize(lines_);
    slot.level = level;
    last_ = key;
  }
  void close() { merge_below(kTop); }
  bool empty() const { return depth_ == 0; }
  View acc(int line) { return {slots_[depth_ - 1].acc.data() + (size_t)line * stride_, stride_}; }
  float* l(int line) { return &slots_[depth_ - 1].l[line]; }
  int32_t* m(int line) { return &slots_[depth_ - 1].m[line]; }

 private:
  struct Slot {
    Floats acc;
    std::vector<float> l;
    std::vector<int32_t> m;
    int level;  // where this node meets the one below it on the stack
  };
  // Two leaves x != y meet at 1 + the highest bit in which they differ.
  static int meeting_level(uint32_t x, uint32_t y) { return 32 - __builtin_clz(x ^ y); }
  void merge_below(int level) {
    while (depth_ >= 2 && slots_[depth_ - 1].level < level) {
      Slot &a = slots_[depth_ - 2], &b = slots_[depth_ - 1];
      for (int i = 0; i < lines_; ++i) {
        const tk_factors f = tk_merge_factors(a.m[i], b.m[i]);
        merge_row(a.acc.data() + (size_t)i * stride_, f.a, b.acc.data() + (size_t)i * stride_, f.b, stride_);
        a.l[i] = tk_merge(a.l[i], f.a, b.l[i], f.b);
        a.m[i] = f.m;
      }
      --depth_;
    }
  }
  std::vector<Slot> slots_;
  int lines_ = 0, stride_ = 0, depth_ = 0;
  uint32_t last_ = 0;
};

// ---- one thread's workspace and the walk over a tile
class Worker {
 public:
  explicit Worker(const tk_args& args)
      : a_(args),
        group_(args.H / args.Hkv),
        query_stride_(args.D + 16),
        value_stride_(round_up(args.DV) % 64 ? round_up(args.DV) : round_up(args.DV) + 16),
        queries_((size_t)kLineLimit * query_stride_),
        keys_((size_t)args.D * kKeyStride),
        values_((size_t)TK_LEAF * value_stride_),
        weights_((size_t)kLineLimit * kKeyStride) {}

  void run(const Tile& tile) {
    tile_ = tile;
    kv_head_ = tile.head / group_;
    stack_.reset(tile.rows * tile.heads, value_stride_);
    load_queries();
    for (int f = 0; f < a_.families; ++f) walk(f);
    stack_.close();
    store();
  }

 private:
  // The keys of one row in the leaf at hand: [begin, end) of its list, or a range of row ids.
  struct Span {
    int64_t begin, end;
    bool operator==(const Span& other) const { return begin == other.begin && end == other.end; }
  };

  View queries() { return {queries_.data(), query_stride_}; }
  View keys() { return {keys_.data(), kKeyStride}; }
  View values() { return {values_.data(), value_stride_}; }
  View weights() { return {weights_.data(), kKeyStride}; }

  void load_queries() {
    for (int i = 0; i < tile_.rows * tile_.heads; ++i) {
      const int row = tile_.row + i / tile_.heads, head = tile_.head + i % tile_.heads;
      widen(a_.q + ((size_t)row * a_.H + head) * a_.D, a_.D, queries().row(i));
    }
  }

  void walk(int f) {
    const tk_family& family = a_.family[f];
    if (family.ids) {
      int64_t at = family.offsets[tile_.row];
      const int64_t end = family.offsets[tile_.row + 1];
      while (at < end) {
        const int64_t leaf = family.ids[at] / TK_LEAF;
        const int64_t begin = at;
        while (at < end && family.ids[at] / TK_LEAF == leaf) ++at;
        span_[0] = {begin, at};
        visit(f, leaf, begin, at);
      }
      return;
    }
    int64_t low = INT64_MAX, high = 0;
    for (int t = tile_.row; t < tile_.row + tile_.rows; ++t) {
      if (family.lo[t] >= family.hi[t]) continue;
      low = std::min(low, family.lo[t]);
      high = std::max(high, family.hi[t]);
    }
    for (int64_t leaf = low / TK_LEAF; leaf * TK_LEAF < high; ++leaf) {
      int64_t begin = INT64_MAX, end = 0;
      for (int r = 0; r < tile_.rows; ++r) {
        const int64_t from = std::max(family.lo[tile_.row + r], leaf * TK_LEAF);
        const int64_t to = std::min(family.hi[tile_.row + r], (leaf + 1) * TK_LEAF);
        span_[r] = {from, std::max(from, to)};
        if (from >= to) continue;
        begin = std::min(begin, from);
        end = std::max(end, to);
      }
      if (begin < end) visit(f, leaf, begin, end);
    }
  }

  // One leaf (S6): keys and values of [begin, end) once for the tile, then each row with its own span.
  void visit(int f, int64_t leaf, int64_t begin, int64_t end) {
    load_leaf(f, begin, (int)(end - begin));
    stack_.open((uint32_t)f << kFamilyShift | (uint32_t)leaf);
    for (int r = 0, next; r < tile_.rows; r = next) {
      for (next = r + 1; next < tile_.rows && span_[next] == span_[r];) ++next;
      const int keys = (int)(span_[r].end - span_[r].begin);
      const int first = r * tile_.heads, lines = (next - r) * tile_.heads;
      if (keys > 0)
        leaf_lines(first, lines, (int)(span_[r].begin - begin), keys);
      else
        for (int i = first; i < first + lines; ++i) set_empty(i, false);
    }
  }

  void leaf_lines(int first, int lines, int key, int count) {
    const View p = weights(), acc = stack_.acc(first);
    for (int i = 0; i < lines; ++i) std::fill_n(p.row(i), round_up(count), 0.0f);
    chains(p, queries().at(first, 0), keys().at(0, key), lines, a_.D, round_up(count));
    bool poison[kLineLimit];
    for (int i = 0; i < lines; ++i)
      *stack_.m(first + i) = weigh(p.row(i), exponent_, count, tk_f32(a_.scale), &poison[i]);
    std::fill_n(acc.data, (size_t)lines * value_stride_, 0.0f);
    chains(acc, p, values().at(key, 0), lines, count, round_up(a_.DV));
    sum_rows(p, lines, count, stack_.l(first));
    for (int i = 0; i < lines; ++i) {
      if (*stack_.m(first + i) == TK_EMPTY)
        set_empty(first + i, poison[i]);
      else if (poison[i])
        *stack_.l(first + i) = tk_f32(TK_NAN);
    }
  }

  void set_empty(int line, bool poison) {  // S6.4
    std::fill_n(stack_.acc(line).data, value_stride_, -0.0f);
    *stack_.l(line) = poison ? tk_f32(TK_NAN) : 0.0f;
    *stack_.m(line) = TK_EMPTY;
  }

  // Keys transposed to [d][key], values as they lie, both in binary32.
  void load_leaf(int f, int64_t begin, int count) {
    const tk_family& family = a_.family[f];
    const tk_rows& rows = family.requests[a_.request[tile_.row]];
    const uint16_t* key[TK_LEAF];
    for (int j = 0; j < count; ++j) {
      const int64_t id = family.ids ? family.ids[begin + j] : begin + j;
      const size_t at = (size_t)(id - rows.first) * a_.Hkv + kv_head_;
      key[j] = rows.k + at * a_.D;
      widen(rows.v + at * a_.DV, a_.DV, values().row(j));
    }
    for (int j = count; j < round_up(count); ++j) key[j] = key[count - 1];  // lanes that nobody reads
    for (int j = 0; j < count; j += kLanes) load_transposed(key + j, a_.D, keys_.data() + j, kKeyStride);
  }

  static void widen(const uint16_t* __restrict from, int count, float* __restrict to) {
    for (int x = 0; x < count; ++x) to[x] = tk_from_bf16(from[x]);
  }

  void store() {
    for (int i = 0; i < tile_.rows * tile_.heads; ++i) {
      const int head = tile_.head + i % tile_.heads;
      const size_t at = (size_t)(tile_.row + i / tile_.heads) * a_.H + head;
      const float* acc = stack_.empty() ? nullptr : stack_.acc(i).data;
      const float l = acc ? *stack_.l(i) : 0.0f;
      const int32_t m = acc ? *stack_.m(i) : TK_EMPTY;
      if (a_.acc) {
        for (int c = 0; c < a_.DV; ++c)
          a_.acc[at * a_.DV + c] = tk_is_nan(l) ? TK_NAN : tk_bits(tk_one_nan(acc ? acc[c] : -0.0f));
        a_.l[at] = tk_bits(tk_one_nan(l));
        a_.m[at] = m;
      }
      if (a_.out) {
        const tk_end end = tk_finish(l, m, a_.sink != nullptr, a_.sink ? tk_f32(a_.sink[head]) : 0.0f);
        for (int c = 0; c < a_.DV; ++c) a_.out[at * a_.DV + c] = tk_output(end, acc ? acc[c] : -0.0f);
        a_.lse[at] = tk_bits(end.lse);
        a_.lse_sink[at] = tk_bits(end.lse_sink);
      }
    }
  }

  const tk_args& a_;
  const int group_, query_stride_, value_stride_;
  Tile tile_ = {};
  int kv_head_ = 0;
  Stack stack_;
  Span span_[kLineLimit];
  int32_t exponent_[TK_LEAF];
  Floats queries_, keys_, values_, weights_;
};

}  // namespace tka1
#endif
