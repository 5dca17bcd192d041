// tk_backward.h -- the backward on a CPU (docs/tka1.md: S16). Two passes, each of which owns what it writes: one over
// query rows for dQ, one over rows of KV for dK and dV, so nothing is added in the order in which threads arrive.
#ifndef TK_BACKWARD_H
#define TK_BACKWARD_H
#include "tk_leaf.h"
#include "tk_work.h"

namespace tka1 {

// One sum of `width` numbers: leaves enter in ascending order of their keys and meet in the tree of S8. A merge is an
// add, and what has no terms is -0.
class GradSum {
 public:
  void reset(int width) { width_ = width, level_.clear(), nodes_.clear(); }
  float* at(uint32_t key) {  // the chain of the leaf `key`
    if (!level_.empty() && key == last_) return top();
    const int level = level_.empty() ? kTop : tk_meeting_level(last_, key);
    merge_below(level);
    level_.push_back(level);
    nodes_.resize(level_.size() * width_, -0.0f);
    std::fill_n(top(), width_, -0.0f);
    last_ = key;
    return top();
  }
  const float* total() {  // null where nothing entered
    if (level_.empty()) return nullptr;
    merge_below(kTop);
    return nodes_.data();
  }
  float total_at(int x) { return level_.empty() ? -0.0f : nodes_[x]; }  // after total()

 private:
  float* top() { return nodes_.data() + (level_.size() - 1) * width_; }
  void merge_below(int level) {
    while (level_.size() >= 2 && level_.back() < level) {
      float* high = top();
      float* low = high - width_;
      for (size_t x = 0; x < width_; ++x) low[x] = tk_add(low[x], high[x]);
      level_.pop_back();
    }
  }
  std::vector<float> nodes_;
  std::vector<int> level_;
  size_t width_ = 0;
  uint32_t last_ = 0;
};

// What both passes share: the ends of all rows, delta, and the rows of each request by position.
struct GradRows {
  const tk_grad_args& g;
  std::vector<tk_end> end;               // [T, H]
  std::vector<float> delta;              // [T, H]
  std::vector<std::vector<int>> rows;    // [requests]

  explicit GradRows(const tk_grad_args& args)
      : g(args), end((size_t)args.a.T * args.a.H), delta(end.size()), rows(args.requests) {
    for (int t = 0; t < g.a.T; ++t) rows[g.a.request[t]].push_back(t);
    for (std::vector<int>& mine : rows)
      std::sort(mine.begin(), mine.end(), [&](int x, int y) { return g.positions[x] < g.positions[y]; });
  }
  void finish(size_t at) {               // S16.1
    end[at] = tk_grad_end(g, (int64_t)at, (int)(at % g.a.H));
    delta[at] = tk_delta(g, end[at], (int64_t)at);
  }
  bool live(size_t at) const { return end[at].kind != TK_ZERO; }
  uint32_t leaf(int t) const { return (uint32_t)(g.positions[t] / TK_LEAF); }
};

// q and dO of one row and the heads of one kv head, as binary32.
class Heads {
 public:
  explicit Heads(const tk_grad_args& g) : g_(g), group_(g.a.H / g.a.Hkv) {
    q_.grow((size_t)group_ * g.a.D);
    d_out_.grow((size_t)group_ * g.a.DV);
  }
  void open(int t, int kv_head) {
    const int64_t first = (int64_t)t * g_.a.H + kv_head * group_;
    widen(g_.a.q, first * g_.a.D, g_.a.type, group_ * g_.a.D, q_.data());
    widen(g_.d_out, first * g_.a.DV, g_.d_type, group_ * g_.a.DV, d_out_.data());
  }
  const float* q(int h) { return q_.data() + (size_t)h * g_.a.D; }
  const float* d_out(int h) { return d_out_.data() + (size_t)h * g_.a.DV; }

 private:
  const tk_grad_args& g_;
  int group_;
  Floats q_, d_out_;
};

static inline void add_terms(float factor, const float* __restrict row, int count, float* __restrict to) {
  for (int x = 0; x < count; ++x) to[x] = tk_fma(factor, row[x], to[x]);
}

// ---- dQ: some rows of one request and one kv head; leaf by leaf, because the rows share them (S16.3)

constexpr int kQueryRows = 32;

class QueryGrads {
 public:
  explicit QueryGrads(const GradRows& all) : all_(all), leaf_(all.g), heads_(all.g) {}

  void operator()(int request, size_t begin, size_t end, int kv_head) {
    const tk_args& a = all_.g.a;
    const int group = a.H / a.Hkv, count = (int)(end - begin);
    const int* rows = all_.rows[request].data() + begin;
    sums_.resize(std::max(sums_.size(), (size_t)count * group));
    for (int i = 0; i < count * group; ++i) sums_[i].reset(a.D);
    for (int f = 0; f < a.families; ++f)
      for (const int64_t leaf : leaves(a.family[f], rows, count)) {
        leaf_.open(f, request, kv_head, leaf);
        const uint32_t key = (uint32_t)f << kFamilyShift | (uint32_t)leaf;
        for (int i = 0; i < count; ++i) row(a.family[f], rows[i], kv_head, key, &sums_[(size_t)i * group]);
      }
    for (int i = 0; i < count * group; ++i) {
      const int64_t at = ((int64_t)rows[i / group] * a.H + kv_head * group + i % group) * a.D;
      sums_[i].total();
      for (int d = 0; d < a.D; ++d) all_.g.d_q[at + d] = tk_end_of_sum(sums_[i].total_at(d), all_.g.last);
    }
  }

 private:
  void row(const tk_family& family, int t, int kv_head, uint32_t key, GradSum* sums) {
    const tk_args& a = all_.g.a;
    const int group = a.H / a.Hkv;
    places_.find(family, t, leaf_.first, leaf_.end);
    if (!places_.count) return;
    heads_.open(t, kv_head);
    for (int h = 0; h < group; ++h) {
      const size_t at = (size_t)t * a.H + kv_head * group + h;
      if (!all_.live(at)) continue;
      leaf_.slopes(heads_.q(h), heads_.d_out(h), all_.end[at], all_.delta[at], places_.from(), places_.to());
      float* to = sums[h].at(key);
      for (int j = 0; j < places_.count; ++j)
        add_terms(leaf_.g[places_.at[j]], leaf_.key(places_.at[j]), a.D, to);
    }
  }
  // The leaves that some of the rows see, ascending.
  const std::vector<int64_t>& leaves(const tk_family& family, const int* rows, int count) {
    found_.clear();
    for (int i = 0; i < count; ++i) {
      const int t = rows[i];
      if (family.ids)
        for (int64_t at = family.offsets[t]; at < family.offsets[t + 1]; ++at) note(family.ids[at] / TK_LEAF);
      else if (family.lo[t] < family.hi[t])
        for (int64_t leaf = family.lo[t] / TK_LEAF; leaf <= (family.hi[t] - 1) / TK_LEAF; ++leaf) note(leaf);
    }
    std::sort(found_.begin(), found_.end());
    found_.erase(std::unique(found_.begin(), found_.end()), found_.end());
    return found_;
  }
  void note(int64_t leaf) {
    if (found_.empty() || found_.back() != leaf) found_.push_back(leaf);
  }
  const GradRows& all_;
  OpenLeaf leaf_;
  Heads heads_;
  Places places_;
  std::vector<GradSum> sums_;
  std::vector<int64_t> found_;
};

// ---- dK and dV: one leaf of one family, request and kv head; over the query rows that see it, by position (S16.4)

struct KeyItem {
  int family, request, kv_head;
  int64_t leaf;
};

class KeyGrads {
 public:
  explicit KeyGrads(const GradRows& all) : all_(all), leaf_(all.g), heads_(all.g) {}

  void operator()(const KeyItem& item) {
    const tk_args& a = all_.g.a;
    const int group = a.H / a.Hkv;
    leaf_.open(item.family, item.request, item.kv_head, item.leaf);
    const int held = (int)(leaf_.end - leaf_.first);
    keys_.reset(held * a.D);
    values_.reset(held * a.DV);
    for (const int t : all_.rows[item.request]) {
      places_.find(a.family[item.family], t, leaf_.first, leaf_.end);
      if (!places_.count) continue;
      heads_.open(t, item.kv_head);
      for (int h = 0; h < group; ++h) {
        const size_t at = (size_t)t * a.H + item.kv_head * group + h;
        if (!all_.live(at)) continue;
        leaf_.slopes(heads_.q(h), heads_.d_out(h), all_.end[at], all_.delta[at], places_.from(), places_.to());
        float *d_k = keys_.at(all_.leaf(t)), *d_v = values_.at(all_.leaf(t));
        for (int i = 0; i < places_.count; ++i) {
          const int j = places_.at[i];
          add_terms(leaf_.g[j], heads_.q(h), a.D, d_k + (size_t)j * a.D);
          add_terms(leaf_.p[j], heads_.d_out(h), a.DV, d_v + (size_t)j * a.DV);
        }
      }
    }
    write(item, held);
  }

 private:
  void write(const KeyItem& item, int held) {
    const tk_args& a = all_.g.a;
    const tk_grad_rows& to = all_.g.rows[item.family][item.request];
    const int64_t first = leaf_.first - a.family[item.family].requests[item.request].first;
    keys_.total(), values_.total();
    for (int j = 0; j < held; ++j) {
      const int64_t at = (first + j) * a.Hkv + item.kv_head;
      for (int d = 0; d < a.D; ++d) {
        const float both = to.v ? -0.0f : values_.total_at(j * a.DV + d);
        to.k[at * a.D + d] = tk_end_of_sum(tk_add(keys_.total_at(j * a.D + d), both), all_.g.last);
      }
      for (int c = 0; to.v && c < a.DV; ++c)
        to.v[at * a.DV + c] = tk_end_of_sum(values_.total_at(j * a.DV + c), all_.g.last);
    }
  }
  const GradRows& all_;
  OpenLeaf leaf_;
  Heads heads_;
  Places places_;
  GradSum keys_, values_;
};

// ---- dsink of a request (S16.5)

static void sink_grads(const GradRows& all, int request) {
  const tk_grad_args& g = all.g;
  GradSum sum;
  sum.reset(g.a.H);
  for (const int t : all.rows[request]) {
    float* to = sum.at(all.leaf(t));
    for (int h = 0; h < g.a.H; ++h) {
      const size_t at = (size_t)t * g.a.H + h;
      if (tk_sink_counts(all.end[at], g.a.sink[h])) to[h] = tk_fma(-tk_sink_slope(all.end[at]), all.delta[at], to[h]);
    }
  }
  sum.total();
  for (int h = 0; h < g.a.H; ++h) g.d_sink[(size_t)request * g.a.H + h] = tk_end_of_sum(sum.total_at(h), g.last);
}

static std::vector<KeyItem> key_items(const tk_grad_args& g) {
  std::vector<KeyItem> items;
  for (int f = 0; f < g.a.families; ++f)
    for (int r = 0; r < g.requests; ++r) {
      const int64_t first = g.a.family[f].requests[r].first, end = first + g.rows[f][r].count;
      for (int64_t leaf = first / TK_LEAF; leaf * TK_LEAF < end; ++leaf)
        for (int head = 0; head < g.a.Hkv; ++head) items.push_back({f, r, head, leaf});
    }
  return items;
}

static bool launch_backward(const tk_grad_args& g, int threads) {
  GradRows all(g);
  struct Queries {
    int request, kv_head;
    size_t begin, end;
  };
  std::vector<Queries> queries;
  for (int r = 0; r < g.requests; ++r)
    for (size_t i = 0; i < all.rows[r].size(); i += kQueryRows)
      for (int head = 0; head < g.a.Hkv; ++head)
        queries.push_back({r, head, i, std::min(i + kQueryRows, all.rows[r].size())});
  const std::vector<KeyItem> keys = key_items(g);
  return in_threads(threads, (size_t)g.a.T * g.a.H, [&] { return [&](size_t at) { all.finish(at); }; }) &&
         in_threads(threads, queries.size(), [&] {
           return [&, worker = QueryGrads(all)](size_t n) mutable {
             worker(queries[n].request, queries[n].begin, queries[n].end, queries[n].kv_head);
           };
         }) &&
         in_threads(threads, keys.size(), [&] {
           return [&, worker = KeyGrads(all)](size_t n) mutable { worker(keys[n]); };
         }) &&
         (!g.d_sink || in_threads(threads, g.requests, [&] {
           return [&](size_t r) { sink_grads(all, (int)r); };
         }));
}

}  // namespace tka1
#endif
