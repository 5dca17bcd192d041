// tk_plan.h -- what a tile visits: its keys, cut into leaves, and when the leaves merge (docs/tka1.md: S3, S6, S8, S9).
//
// Leaves come in ascending order, so the tree needs no tree: unfinished nodes wait on a stack, at most one a level,
// as the digits of a binary counter do. A leaf is merged with every node whose sibling it completes.
#ifndef TK_PLAN_H
#define TK_PLAN_H
#include <algorithm>
#include <vector>

#include "tk_row.h"

namespace tka1 {

constexpr int kFamilyShift = 26;  // S9: tree key = family << 26 | leaf
constexpr int kTop = 33;          // a level above every merge

// An aligned run of 2^level leaves of one family (S14); family -1 is everything.
struct Run {
  int32_t family = -1;
  int32_t first = 0;
  int32_t level = 0;
  uint32_t key() const { return (uint32_t)family << kFamilyShift | (uint32_t)first; }
};

struct Leaf {
  int32_t family;
  uint32_t key;
  int begin, end;    // the keys ids[begin .. end) of the plan
  int slot, merges;  // it merges with that many nodes of the stack, and the result waits at `slot`
};

// Query rows [row, row + rows) of one request with query heads [head, head + heads) of one kv head.
// `lines` are the pairs (row, head). rows is 1 where a family is a list.
struct Tile {
  int32_t row, rows, head, heads;
  int lines() const { return rows * heads; }
};

class Plan {
 public:
  std::vector<int64_t> ids;  // row ids, ascending inside a family; of ranges the union over the tile's rows
  std::vector<Leaf> leaves;
  int depth = 0;             // slots that the stack needs

  void build(const tk_args& args, const Tile& tile, const Run& run) {
    ids.clear();
    leaves.clear();
    for (int f = 0; f < args.families; ++f)
      if (run.family < 0 || run.family == f) add(f, args.family[f], tile, run);
    order_merges();
  }

 private:
  void add(int f, const tk_family& family, const Tile& tile, const Run& run) {
    const int64_t first = run.family < 0 ? 0 : (int64_t)run.first * TK_LEAF;
    const int64_t last = run.family < 0 ? INT64_MAX : first + ((int64_t)TK_LEAF << run.level);
    if (family.ids) {
      const int64_t* begin = family.ids + family.offsets[tile.row];
      const int64_t* end = family.ids + family.offsets[tile.row + 1];
      begin = std::lower_bound(begin, end, first);
      end = std::lower_bound(begin, end, last);
      for (; begin < end; ++begin) add_key(f, *begin);
      return;
    }
    int64_t low = INT64_MAX, high = 0;
    for (int t = tile.row; t < tile.row + tile.rows; ++t) {
      const int64_t lo = std::max(family.lo[t], first), hi = std::min(family.hi[t], last);
      if (lo >= hi) continue;
      low = std::min(low, lo);
      high = std::max(high, hi);
    }
    for (int64_t id = low; id < high; ++id) add_key(f, id);
  }
  void add_key(int f, int64_t id) {
    const uint32_t key = (uint32_t)f << kFamilyShift | (uint32_t)(id / TK_LEAF);
    const int at = (int)ids.size();
    if (leaves.empty() || leaves.back().key != key) leaves.push_back({f, key, at, at, 0, 0});
    ids.push_back(id);
    leaves.back().end = at + 1;
  }
  void order_merges() {
    std::vector<int> level;  // where each node on the stack meets the one below it
    depth = 0;
    for (size_t i = 0; i < leaves.size(); ++i) {
      level.push_back(i ? tk_meeting_level(leaves[i - 1].key, leaves[i].key) : kTop);
      depth = std::max(depth, (int)level.size());
      const int next = i + 1 < leaves.size() ? tk_meeting_level(leaves[i].key, leaves[i + 1].key) : kTop;
      for (; level.size() >= 2 && level.back() < next; level.pop_back()) ++leaves[i].merges;
      leaves[i].slot = (int)level.size() - 1;
    }
  }
};

}  // namespace tka1
#endif
