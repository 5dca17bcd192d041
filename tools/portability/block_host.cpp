// The GPU body (kernels/tk_block.h) on the host: the threads of a block are a loop, in an order that may change
// between barriers. order: 0 forward, 1 reversed, 2 and more: shuffled with that seed.
#define TK_TYPE(args) (args).type
#include "tk_grad_block.h"

#include <algorithm>
#include <random>

#include "tk_mode.h"

namespace {

int how = 0;
std::mt19937 generator;

void reorder(int* order) {
  for (int i = 0; i < TK_THREADS; ++i) order[i] = how == 1 ? TK_THREADS - 1 - i : i;
  if (how > 1) std::shuffle(order, order + TK_THREADS, generator);
}

template <int COLUMNS, int HEADS>
void run_all(const tk_block& block, const tk_gpu_args& g) {
  static tk_shared<HEADS> shared;
  const int group = g.a.H / g.a.Hkv;
  for (int t = 0; t < g.a.T; ++t)
    for (int head = 0; head < g.a.H; head += std::min(HEADS, group - head % group))
      for (int run = 0; run < g.runs; ++run) {
        const int heads = std::min(HEADS, group - head % group);
        tk_run_block<COLUMNS, HEADS>(block, g, shared, t, head / group, head, heads, run);
      }
}

}  // namespace

extern "C" void tk_block_run(const tk_gpu_args* g, int order) {
  const tka1::Ieee mode;
  how = order;
  generator.seed(order);
  int threads[TK_THREADS];
  const tk_block block = {threads, reorder};
  if (g->a.DV <= 128)
    run_all<1, 4>(block, *g);
  else
    run_all<4, 8>(block, *g);
  for (int t = 0; t < g->a.T; ++t)
    for (int head = 0; head < g->a.H; ++head) tk_merge_block(block, *g, t, head);
}

extern "C" void tk_block_backward(const tk_gpu_grad_args* g, int items, int order) {
  const tka1::Ieee mode;
  how = order;
  generator.seed(order);
  int threads[TK_THREADS];
  const tk_block block = {threads, reorder};
  static tk_grad_shared shared;
  const tk_args& a = g->g.a;
  for (int t = 0; t < a.T; ++t)
    for (int head = 0; head < a.H; head += TK_THREADS) tk_grad_rows_block(block, *g, t, head);
  for (int t = 0; t < a.T; ++t)
    for (int head = 0; head < a.H; ++head) tk_grad_query_block(block, *g, shared, t, head, head / g->group);
  for (int item = 0; item < items; ++item)
    for (int head = 0; head < a.Hkv; ++head) tk_grad_key_block(block, *g, shared, item, head);
  for (int r = 0; g->g.d_sink && r < g->g.requests; ++r) tk_grad_sink_block(block, *g, r);
}
