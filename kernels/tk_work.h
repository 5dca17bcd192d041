// tk_work.h -- a launch is cut into tiles and, where these are few, into aligned runs of leaves; threads take them in
// turn (docs/tka1.md: S14, S15). Nothing here changes a bit: a run's node is a node of the same tree.
#ifndef TK_WORK_H
#define TK_WORK_H
#include <atomic>
#include <exception>
#include <thread>

#include "tk_clear.h"
#include "tk_mode.h"
#include "tk_schedule.h"
#include "tk_stream.h"
#include "tk_tile.h"

namespace tka1 {

// ---- where the rows of a run go: the outputs of the launch, or partials for a later merge

struct Partials {
  uint32_t* acc;  // binary32 bits [T, H, DV]
  uint32_t* l;    // [T, H]
  int32_t* m;     // [T, H]
};

static void store_output(const tk_args& a, size_t at, int head, const float* acc, float l, int32_t m) {
  const tk_end end = tk_finish(l, m, a.sink != nullptr, a.sink ? tk_f32(a.sink[head]) : 0.0f);
  const int64_t first = (int64_t)at * a.DV;
  if (end.kind == TK_VALUE && a.type == TK_BF16) {  // the same as the loop below, without its questions
    uint16_t* __restrict out = (uint16_t*)a.out + first;
    for (int c = 0; c < a.DV; ++c) out[c] = tk_to_bf16(tk_mul(tk_mul(acc[c], end.factor), end.reciprocal));
  } else {
    for (int c = 0; c < a.DV; ++c) tk_put(a.out, first + c, a.type, tk_output(end, acc[c]));
  }
  a.lse[at] = tk_bits(end.lse);
  a.lse_sink[at] = tk_bits(end.lse_sink);
}
static void store_partial(const tk_args& a, const Partials& to, size_t at, const float* acc, float l, int32_t m) {
  uint32_t* row = to.acc + at * a.DV;
  for (int c = 0; c < a.DV; ++c) row[c] = tk_is_nan(l) ? TK_NAN : tk_bits(tk_one_nan(acc[c]));
  to.l[at] = tk_bits(tk_one_nan(l));
  to.m[at] = m;
}
// A finished row, to whatever the launch asks for.
static void store_row(const tk_args& a, size_t at, int head, const float* acc, float l, int32_t m) {
  if (a.out) store_output(a, at, head, acc, l, m);
  if (a.acc) store_partial(a, {a.acc, a.l, a.m}, at, acc, l, m);
}

// ---- threads: each makes a worker and takes items until none is left. False without memory: an exception must not
// leave a thread.

template <class MakeWorker>
static bool in_threads(int threads, size_t items, MakeWorker make_worker) {
  std::atomic<size_t> taken(0);
  std::atomic<bool> failed(false);
  const auto work = [&] {
    try {
      const Ieee mode;
      auto worker = make_worker();
      for (size_t n; (n = taken.fetch_add(1)) < items;) worker(n);
    } catch (const std::exception&) {
      failed = true;
    }
  };
  const size_t wanted = std::min((size_t)threads, items);
  std::vector<std::thread> others;
  others.reserve(std::max(wanted, (size_t)1));  // nothing may throw between a thread that runs and its join
  try {
    for (size_t i = 1; i < wanted; ++i) others.emplace_back(work);
  } catch (const std::exception&) {  // no more threads, or no memory for one: fewer do the same work
  }
  work();
  for (std::thread& thread : others) thread.join();
  return !failed;
}

// ---- tiles

static bool streams(const tk_args& a, const tk_schedule& s) {
  if (a.type != TK_BF16 || a.H / a.Hkv > StreamWorker::kGroup || s.path == TK_TILES) return false;
  bool lists = false;
  for (int f = 0; f < a.families; ++f) lists |= a.family[f].ids != nullptr;
  return lists || a.T == 1 || s.path == TK_STREAMS;
}

// Rows with ranges share their keys; a row with a list stands alone.
static std::vector<Tile> cut(const tk_args& a, int threads, const tk_schedule& s) {
  std::vector<Tile> tiles;
  if (streams(a, s)) {
    for (int t = 0; t < a.T; ++t) tiles.push_back({t, 1, 0, a.H});
    return tiles;
  }
  bool lists = false;
  for (int f = 0; f < a.families; ++f) lists |= a.family[f].ids != nullptr;
  const int group = a.H / a.Hkv;
  int heads = std::min(group, TileWorker::kLines);
  int rows = lists ? 1 : TileWorker::kLines / heads;
  const auto pieces = [&] { return (int64_t)(a.T + rows - 1) / rows * a.Hkv * ((group + heads - 1) / heads); };
  while (pieces() < 4 * threads && rows > 1 && rows * heads > kWeighed) rows = (rows + 1) / 2;  // so that none waits long
  while (pieces() < threads && rows > 1 && rows * heads > 2 * kLanes) rows = (rows + 1) / 2;
  if (s.rows) rows = std::min(rows, (int)s.rows);
  if (s.heads) heads = std::min(heads, (int)s.heads);
  for (int t = 0, next; t < a.T; t = next) {
    for (next = t + 1; next < a.T && next < t + rows && a.request[next] == a.request[t];) ++next;
    for (int g = 0; g < a.Hkv; ++g)
      for (int h = 0; h < group; h += heads)
        tiles.push_back({t, next - t, g * group + h, std::min(heads, group - h)});
  }
  std::reverse(tiles.begin(), tiles.end());  // in a causal launch the last ones are the longest, and go first
  return tiles;
}

// Aligned runs of leaves that together hold every key: of so many leaves, or, with 0, a few runs for each thread.
static std::vector<Run> cut_leaves(const tk_args& a, int threads, int leaves) {
  std::vector<Run> runs;
  for (int f = 0; f < a.families; ++f) {
    const tk_family& family = a.family[f];
    int64_t low = INT64_MAX, high = 0;
    for (int t = 0; t < a.T; ++t) {
      const int64_t from = family.ids ? family.offsets[t] : 0, to = family.ids ? family.offsets[t + 1] : 0;
      if (family.ids ? from >= to : family.lo[t] >= family.hi[t]) continue;
      low = std::min(low, family.ids ? family.ids[from] : family.lo[t]);
      high = std::max(high, family.ids ? family.ids[to - 1] + 1 : family.hi[t]);
    }
    if (low >= high) continue;
    const int64_t first = low / TK_LEAF, last = (high - 1) / TK_LEAF;
    int level = 0;
    while (leaves ? 1 << level < leaves : (last >> level) - (first >> level) >= 4 * threads) ++level;
    for (int64_t i = first >> level; i <= last >> level; ++i) runs.push_back({f, (int32_t)(i << level), level});
  }
  return runs;
}

template <class Worker>
static bool compute(const tk_args& a, const std::vector<Tile>& tiles, const std::vector<Run>& runs,
                    const std::vector<Partials>& parts, int threads, int32_t order, Account& account) {
  const size_t items = tiles.size() * runs.size();
  return in_threads(threads, items, [&] {
    account.worker();
    return [&, worker = Worker(a)](size_t ticket) mutable {
      const size_t n = in_order(order, ticket, items);
      const Tile& tile = tiles[n / runs.size()];
      const size_t r = n % runs.size();
      worker.run(tile, runs[r]);
      Nodes& nodes = worker.nodes();
      for (int i = 0; i < tile.lines(); ++i) {
        const int head = tile.head + i % tile.heads;
        const size_t at = (size_t)(tile.row + i / tile.heads) * a.H + head;
        const float* acc = nodes.acc(0).at(i);
        if (parts.empty())
          store_row(a, at, head, acc, nodes.l(0)[i], nodes.m(0)[i]);
        else
          store_partial(a, parts[r], at, acc, nodes.l(0)[i], nodes.m(0)[i]);
      }
      account.item(ticket, n, tile);
    };
  });
}
static bool compute(const tk_args& a, const std::vector<Tile>& tiles, const std::vector<Run>& runs,
                    const std::vector<Partials>& parts, int threads, const tk_schedule& s, Account& account) {
  account.start(streams(a, s) ? TK_STREAMS : TK_TILES, runs.size());
  return streams(a, s) ? compute<StreamWorker>(a, tiles, runs, parts, threads, s.order, account)
                       : compute<TileWorker>(a, tiles, runs, parts, threads, s.order, account);
}

// ---- the merge of partials of disjoint runs, in ascending key (S14): the same stack as inside a tile

class Merger {
 public:
  Merger(const tk_args& args, const std::vector<Run>& runs, const std::vector<Partials>& parts)
      : a_(args), parts_(parts) {
    for (size_t i = 0; i < runs.size(); ++i)
      level_.push_back(i ? tk_meeting_level(runs[i - 1].key(), runs[i].key()) : kTop);
  }
  // One (row, head), to the outputs of the launch.
  void operator()(size_t at) {
    const int width = a_.DV;
    stack_.resize((parts_.size() + 1) * width);
    std::fill_n(stack_.begin(), width, -0.0f);
    l_.assign(1, 0.0f), m_.assign(1, TK_EMPTY), waits_.assign(1, kTop);
    for (size_t i = 0; i < parts_.size(); ++i) {
      merge_below(level_[i]);
      float* top = &stack_[l_.size() * width];
      for (int c = 0; c < width; ++c) top[c] = tk_f32(parts_[i].acc[at * width + c]);
      l_.push_back(tk_f32(parts_[i].l[at])), m_.push_back(parts_[i].m[at]), waits_.push_back(level_[i]);
    }
    merge_below(kTop + 1);
    store_row(a_, at, (int)(at % a_.H), stack_.data(), l_[0], m_[0]);
  }

 private:
  void merge_below(int level) {
    while (l_.size() >= 2 && waits_.back() < level) {
      const size_t b = l_.size() - 1, a = b - 1;
      const tk_factors f = tk_merge_factors(m_[a], m_[b]);
      float *__restrict to = &stack_[a * a_.DV], *from = &stack_[b * a_.DV];
      for (int c = 0; c < a_.DV; ++c) to[c] = tk_merge(to[c], f.a, from[c], f.b);
      l_[a] = tk_merge(l_[a], f.a, l_[b], f.b), m_[a] = f.m;
      l_.pop_back(), m_.pop_back(), waits_.pop_back();
    }
  }
  const tk_args& a_;
  const std::vector<Partials>& parts_;
  std::vector<int> level_, waits_;
  std::vector<float> stack_, l_;
  std::vector<int32_t> m_;
};

static bool merge(const tk_args& a, const std::vector<Run>& runs, const std::vector<Partials>& parts, int threads) {
  const size_t kPiece = 1 << 20;  // a thread costs more than the merge of fewer numbers
  const int useful = (int)std::min<size_t>(threads, 1 + (size_t)a.T * a.H * a.DV * runs.size() / kPiece);
  return in_threads(useful, (size_t)a.T * a.H, [&] { return Merger(a, runs, parts); });
}

// ---- a launch

// By the clear form, one thread.
static bool launch_clear(const tk_args& a) {
  return in_threads(1, (size_t)a.T * a.H, [&] {
    return [&, clear = Clear(a)](size_t at) mutable {
      const int head = (int)(at % a.H);
      const Node node = clear.row((int)(at / a.H), head);
      store_row(a, at, head, node.acc.data(), node.l, node.m);
    };
  });
}

// By the fast forms, in a schedule; what ran goes to `ran`, unless that is null.
static bool launch(const tk_args& a, int threads, const tk_schedule& s, tk_ran* ran) {
  Account account(ran);
  const std::vector<Tile> tiles = cut(a, threads, s);
  std::vector<Run> runs;
  const bool few = threads > 1 && tiles.size() < (size_t)threads * (streams(a, s) ? 4 : 1);
  if (few || s.leaves) runs = cut_leaves(a, threads, s.leaves);
  if (runs.size() < 2) return compute(a, tiles, {Run()}, {}, threads, s, account);

  const size_t rows = (size_t)a.T * a.H;
  std::vector<uint32_t> acc(runs.size() * rows * a.DV), l(runs.size() * rows);
  std::vector<int32_t> m(runs.size() * rows);
  std::vector<Partials> parts;
  for (size_t r = 0; r < runs.size(); ++r)
    parts.push_back({&acc[r * rows * a.DV], &l[r * rows], &m[r * rows]});
  return compute(a, tiles, runs, parts, threads, s, account) && merge(a, runs, parts, threads);
}

}  // namespace tka1
#endif
