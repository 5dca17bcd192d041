// tk_body.h -- TKA-1 on a CPU: the clear form (docs/tka1.md: S3 to S13).
//
// A tile is a few query rows of one request with some heads of one kv head; `lines` = rows * heads. Its leaves are
// walked in ascending order. Nothing is ever summed over lanes: a lane holds one chain, either of one score (over d)
// or of one output column (over keys). So the compiler may vectorise with any width and the bits stay (S15).
#ifndef TK_BODY_H
#define TK_BODY_H
#include <algorithm>
#include <vector>

#include "tk_row.h"

namespace tka1 {

constexpr int kLineLimit = 64;   // lines of a tile: enough to pay for the conversion of a leaf, small enough for L2
constexpr int kKeyStride = TK_LEAF + 16;  // floats between two d of transposed keys; 2^n would hit few cache sets
constexpr int kFamilyShift = 26;          // S9: tree key = family << 26 | leaf
constexpr int kTop = 33;                  // a level above every merge

struct Tile {
  int32_t row, rows;    // query rows [row, row + rows), all of one request; 1 where a family is a list
  int32_t head, heads;  // query heads [head, head + heads), all of one kv head
};

// ---- chains: c[i][x] = fma(a[i][y], b[y][x], c[i][x]) for y ascending (S4 with y = d, x = key; S6.3 with y = key,
// x = column). R lines and Y steps at once only save loads and stores; each c[i][x] still sees its y in order.
template <int R, int Y>
static void chain_block(float* __restrict c, int c_stride, const float* __restrict a, int a_stride,
                        const float* __restrict b, int b_stride, int width) {
  float factor[R][Y];
  for (int i = 0; i < R; ++i)
    for (int y = 0; y < Y; ++y) factor[i][y] = a[i * a_stride + y];
  for (int x = 0; x < width; ++x) {
    float sum[R];
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) sum[i] = c[i * c_stride + x];
#pragma GCC unroll 8
    for (int y = 0; y < Y; ++y) {
      const float value = b[y * b_stride + x];
#pragma GCC unroll 8
      for (int i = 0; i < R; ++i) sum[i] = tk_fma(factor[i][y], value, sum[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) c[i * c_stride + x] = sum[i];
  }
}
template <int R>
static void chain_lines(float* c, int c_stride, const float* a, int a_stride, const float* b, int b_stride, int depth,
                        int width) {
  int y = 0;
  for (; y + 4 <= depth; y += 4) chain_block<R, 4>(c, c_stride, a + y, a_stride, b + y * b_stride, b_stride, width);
  for (; y < depth; ++y) chain_block<R, 1>(c, c_stride, a + y, a_stride, b + y * b_stride, b_stride, width);
}
static void chains(float* c, int c_stride, const float* a, int a_stride, const float* b, int b_stride, int lines,
                   int depth, int width) {
#if defined(__AVX512F__) || defined(__aarch64__)
  constexpr int R = 4;  // 32 vector registers
#else
  constexpr int R = 2;  // 16
#endif
  constexpr int kSlab = 16;  // steps of b that stay in L1 while the lines pass
  for (int y = 0; y < depth; y += kSlab) {
    const int steps = std::min(kSlab, depth - y);
    int i = 0;
    for (; i + R <= lines; i += R)
      chain_lines<R>(c + i * c_stride, c_stride, a + i * a_stride + y, a_stride, b + y * b_stride, b_stride, steps, width);
    for (; i < lines; ++i)
      chain_lines<1>(c + i * c_stride, c_stride, a + i * a_stride + y, a_stride, b + y * b_stride, b_stride, steps, width);
  }
}

// ---- S5, S6.1, S6.2: scores of one line in a leaf become P, in place; returns M, sets poison
static int32_t weigh(float* __restrict line, int32_t* __restrict exponent, int keys, float scale, bool* poison) {
  int32_t m = TK_EMPTY, bad = 0;
  for (int j = 0; j < keys; ++j) {
    const tk_key key = tk_weigh(line[j], scale);
    line[j] = key.p;
    exponent[j] = key.n;
    m = tk_max(m, key.n);
    bad |= key.poison;
  }
  for (int j = 0; j < keys; ++j) line[j] = tk_scale(line[j], exponent[j] - m);
  *poison = bad != 0;
  return m;
}

// ---- the unfinished nodes of the tree (S8): at most one a level, because leaves come in ascending order.
// Column DV of a line is l: its chain is fma(P, 1, l) = l + P, and S7 treats it like any other column.
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
    slot.acc.resize((size_t)lines_ * stride_);
    slot.m.resize(lines_);
    slot.level = level;
    last_ = key;
  }
  void close() { merge_below(kTop); }
  bool empty() const { return depth_ == 0; }
  float* acc(int line) { return slots_[depth_ - 1].acc.data() + (size_t)line * stride_; }
  int32_t& m(int line) { return slots_[depth_ - 1].m[line]; }

 private:
  struct Slot {
    std::vector<float> acc;
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
        merge_line(a.acc.data() + (size_t)i * stride_, f.a, b.acc.data() + (size_t)i * stride_, f.b, stride_);
        a.m[i] = f.m;
      }
      --depth_;
    }
  }
  static void merge_line(float* __restrict a, float fa, const float* __restrict b, float fb, int width) {
    for (int c = 0; c < width; ++c) a[c] = tk_merge(a[c], fa, b[c], fb);
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
        columns_((args.DV + 1 + 15) / 16 * 16),
        value_stride_(columns_ % 256 ? columns_ : columns_ + 16),
        q_((size_t)kLineLimit * args.D),
        keys_((size_t)args.D * kKeyStride),
        values_((size_t)TK_LEAF * value_stride_),
        p_((size_t)kLineLimit * kKeyStride) {
    for (int j = 0; j < TK_LEAF; ++j) values_[(size_t)j * value_stride_ + args.DV] = 1.0f;
  }

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

  void load_queries() {
    for (int r = 0; r < tile_.rows; ++r) {
      const uint16_t* from = a_.q + ((size_t)(tile_.row + r) * a_.H + tile_.head) * a_.D;
      float* to = q_.data() + (size_t)r * tile_.heads * a_.D;
      for (int x = 0; x < tile_.heads * a_.D; ++x) to[x] = tk_from_bf16(from[x]);
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

  void leaf_lines(int first, int lines, int key, int keys) {
    float* p = p_.data();
    for (int i = 0; i < lines; ++i) std::fill_n(p + i * kKeyStride, keys, 0.0f);
    chains(p, kKeyStride, q_.data() + (size_t)first * a_.D, a_.D, keys_.data() + key, kKeyStride, lines, a_.D, keys);
    bool poison[kLineLimit];
    for (int i = 0; i < lines; ++i)
      stack_.m(first + i) = weigh(p + i * kKeyStride, exponent_, keys, tk_f32(a_.scale), &poison[i]);
    float* acc = stack_.acc(first);
    std::fill_n(acc, (size_t)lines * value_stride_, 0.0f);
    chains(acc, value_stride_, p, kKeyStride, values_.data() + (size_t)key * value_stride_, value_stride_, lines, keys,
           columns_);
    for (int i = 0; i < lines; ++i) {
      if (stack_.m(first + i) == TK_EMPTY)
        set_empty(first + i, poison[i]);
      else if (poison[i])
        stack_.acc(first + i)[a_.DV] = tk_f32(TK_NAN);
    }
  }

  void set_empty(int line, bool poison) {  // S6.4
    std::fill_n(stack_.acc(line), value_stride_, -0.0f);
    stack_.acc(line)[a_.DV] = poison ? tk_f32(TK_NAN) : 0.0f;
    stack_.m(line) = TK_EMPTY;
  }

  // Keys transposed to [d][key], values as they lie, both in binary32.
  void load_leaf(int f, int64_t begin, int keys) {
    const tk_family& family = a_.family[f];
    const tk_rows& rows = family.requests[a_.request[tile_.row]];
    for (int j = 0; j < keys; ++j) {
      const int64_t id = family.ids ? family.ids[begin + j] : begin + j;
      const size_t at = (size_t)(id - rows.first) * a_.Hkv + kv_head_;
      const uint16_t* __restrict k = rows.k + at * a_.D;
      const uint16_t* __restrict v = rows.v + at * a_.DV;
      float* __restrict key = keys_.data() + j;
      float* __restrict value = values_.data() + (size_t)j * value_stride_;
      for (int d = 0; d < a_.D; ++d) key[d * kKeyStride] = tk_from_bf16(k[d]);
      for (int c = 0; c < a_.DV; ++c) value[c] = tk_from_bf16(v[c]);
    }
  }

  void store() {
    for (int i = 0; i < tile_.rows * tile_.heads; ++i) {
      const int head = tile_.head + i % tile_.heads;
      const size_t at = (size_t)(tile_.row + i / tile_.heads) * a_.H + head;
      const float* acc = stack_.empty() ? nullptr : stack_.acc(i);
      const float l = acc ? acc[a_.DV] : 0.0f;
      const int32_t m = acc ? stack_.m(i) : TK_EMPTY;
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
  const int group_, columns_, value_stride_;
  Tile tile_ = {};
  int kv_head_ = 0;
  Stack stack_;
  Span span_[kLineLimit];
  int32_t exponent_[TK_LEAF];
  std::vector<float> q_, keys_, values_, p_;
};

}  // namespace tka1
#endif
