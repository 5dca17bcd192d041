// tk_stream.h -- few query lines a kv head (decode, lists of a grouped layout): docs/tka1.md, S4 to S9.
//
// A key is used by a few heads only, so K and V are the work: they are read once, in the order in which they lie, all
// kv heads of a key together. For scores a lane is a key (K is transposed in registers), for columns it is a column.
// bf16 only; the other types are tiles.
#ifndef TK_STREAM_H
#define TK_STREAM_H
#include "tk_node.h"
#include "tk_rows.h"

namespace tka1 {

class StreamWorker {
 public:
  static constexpr int kGroup = 8;  // query heads of a kv head, at most; more are a tile (tk_tile.h)

  explicit StreamWorker(const tk_args& args) : a_(args), group_(args.H / args.Hkv) {
    queries_.grow((size_t)a_.H * a_.D);
    scores_.grow((size_t)a_.H * kScoreStride);
    columns_ = round_up(a_.DV, 16);
  }

  // Leaves the node of `run` in slot 0 of nodes(); false without keys. The tile is one row with all heads.
  bool run(const Tile& tile, const Run& run) {
    row_ = tile.row;
    plan_.build(a_, tile, run);
    nodes_.reset(plan_.depth, a_.H, columns_);
    widen(a_.q, (int64_t)row_ * a_.H * a_.D, TK_BF16, a_.H * a_.D, queries_.data());
    const int leaves = (int)plan_.leaves.size();
    for (int first = 0, next; first < leaves; first = next) {
      for (next = first + 1; next < leaves && plan_.leaves[next].end - plan_.leaves[first].begin <= TK_LEAF;) ++next;
      batch(first, next);
    }
    return leaves > 0;
  }
  Nodes& nodes() { return nodes_; }

 private:
  static constexpr int kKeys = kTileLanes * kLanes;  // keys that are transposed together
  static constexpr int kSlab = 128;                  // and how many d of them
  static constexpr int kScoreStride = TK_LEAF + kKeys + 16;

  void batch(int first, int next) {
    first_key_ = plan_.leaves[first].begin;
    keys_ = plan_.leaves[next - 1].end - first_key_;
    find_rows(first, next);
    for (int j = 0; j < keys_; j += kKeys)
      for (int g = 0; g < a_.Hkv; ++g) scores(g, j);
    nodes_.start_batch();
    for (int s = first; s < next; ++s) weigh(plan_.leaves[s]);
    for (int g = 0; g < a_.Hkv; ++g) columns_of(g);
  }

  // The rows of the batch, all kv heads of each; those of the last key stand in for keys past the end.
  void find_rows(int first, int next) {
    int at = 0;
    for (int s = first; s < next; ++s) {
      const tk_rows& rows = a_.family[plan_.leaves[s].family].requests[a_.request[row_]];
      for (int j = plan_.leaves[s].begin; j < plan_.leaves[s].end; ++j, ++at) {
        const size_t row = (size_t)(plan_.ids[j] - rows.first) * a_.Hkv;
        key_[at] = (const uint16_t*)rows.k + row * a_.D;
        value_[at] = (const uint16_t*)rows.v + row * a_.DV;
      }
    }
    std::fill(key_ + at, key_ + round_up(keys_, kKeys), key_[at - 1]);
    std::fill(value_ + at, value_ + round_up(keys_, kKeys), value_[at - 1]);
  }

  void scores(int g, int j) {
    float* to = scores_.data() + (size_t)g * group_ * kScoreStride + j;
    for (int d = 0; d < a_.D; d += kSlab) {
      const int width = std::min(kSlab, a_.D - d);
      float* keys = transposed_.grow((size_t)kSlab * kKeys);
      for (int i = 0; i < kKeys; i += kLanes) {
        for (int k = 0; k < kLanes; ++k) {  // the same keys of the next kv head, and the values
          if (g + 1 < a_.Hkv) fetch(key_[j + i + k], (int64_t)(g + 1) * a_.D + d, TK_BF16, width);
          if (d < a_.DV) fetch(value_[j + i + k], (int64_t)g * a_.DV + d, TK_BF16, std::min(width, a_.DV - d));
        }
        transpose_pairs(key_ + j + i, (ptrdiff_t)g * a_.D + d, width, keys + i, kKeys);
      }
      const auto rows = [=](int y, int n) { return load<Lanes>(keys + y * kKeys + n * kLanes); };
      by_rows<kTileRows>(group_, [&](auto height, int h) {
        constexpr int R = height;
        const Matrix block = {to + h * kScoreStride, kScoreStride};
        Sums<R, kTileLanes> sums;
        if (d == 0)
          sums.fill(0.0f);
        else
          sums.load_from(block);
        sums.chain({queries_.data() + (size_t)(g * group_ + h) * a_.D + d, a_.D, 1}, rows, 0, width);
        sums.store_to(block);
      });
    }
  }

  void weigh(const Leaf& leaf) {
    const Nodes::Place place = nodes_.open(leaf);
    float* x = scores_.data() + (leaf.begin - first_key_);
    const int keys = leaf.end - leaf.begin;
    poison_.resize(a_.H);
    for (int h = 0; h < a_.H; ++h) {
      bool poison;
      place.to.m[h] = weigh_keys(x + h * kScoreStride, keys, tk_f32(a_.scale), exponent_, &poison);
      poison_[h] = poison;
    }
    sum_keys(x, kScoreStride, a_.H, keys, place.to.l);
    for (int h = 0; h < a_.H; ++h) {
      if (place.to.m[h] == TK_EMPTY) place.to.l[h] = 0.0f;
      if (poison_[h]) place.to.l[h] = tk_f32(TK_NAN);
    }
    nodes_.close(false);
  }

  void columns_of(int g) {
    const Factors p = {scores_.data() + (size_t)g * group_ * kScoreStride, kScoreStride, 1};
    const size_t at = (size_t)g * a_.DV;
    const uint16_t* const* value = value_;
    int c = 0;
    for (; c + kTileLanes * kLanes <= a_.DV; c += kTileLanes * kLanes)
      nodes_.columns<kTileLanes>(g * group_, group_, c, p, first_key_,
                                 [=](int y, int n) { return load_bf16(value[y] + at + c + n * kLanes); });
    for (; c + kLanes <= a_.DV; c += kLanes)
      nodes_.columns<1>(g * group_, group_, c, p, first_key_, [=](int y, int) { return load_bf16(value[y] + at + c); });
    if (c == a_.DV) return;
    float* tail = tail_.grow((size_t)TK_LEAF * kLanes);  // a whole vector would read past the row
    for (int j = 0; j < keys_; ++j) widen(value_[j], (int64_t)at + c, TK_BF16, a_.DV - c, tail + j * kLanes);
    nodes_.columns<1>(g * group_, group_, c, p, first_key_, [=](int y, int) { return load<Lanes>(tail + y * kLanes); });
  }

  const tk_args& a_;
  const int group_;
  int columns_, row_ = 0, first_key_ = 0, keys_ = 0;
  Plan plan_;
  Nodes nodes_;
  Floats queries_, scores_, transposed_, tail_;
  const uint16_t *key_[TK_LEAF + kKeys], *value_[TK_LEAF + kKeys];
  int32_t exponent_[TK_LEAF];
  std::vector<char> poison_;
};

}  // namespace tka1
#endif
