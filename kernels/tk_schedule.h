// tk_schedule.h -- legal ways to cut a launch and to order its work (docs/tka1.md: S15), and an account of what ran,
// written where it runs. Host only.
#ifndef TK_SCHEDULE_H
#define TK_SCHEDULE_H
#include <algorithm>
#include <mutex>

#include "tk_plan.h"

enum tk_order { TK_AS_PLANNED, TK_BACKWARD, TK_ALTERNATE };
enum tk_path { TK_CHOSEN, TK_TILES, TK_STREAMS };

// 0 everywhere is as planned.
struct tk_schedule {
  int32_t rows;    // most query rows of a tile
  int32_t heads;   // most query heads of a tile
  int32_t leaves;  // leaves of a run; a power of two
  int32_t order;   // tk_order, in which items (a tile and a run) are taken
  int32_t path;    // tk_path; one that does not take the launch is not followed
};

#define TK_TAKEN 8
struct tk_ran {
  int32_t threads;          // that worked, or looked for work
  int32_t path;             // tk_path
  int32_t items, runs;      // items that ran; runs of leaves into which keys were cut
  int32_t rows, heads;      // the most that one of them had
  int32_t taken[TK_TAKEN];  // the first of them, in the order in which they were taken
};

namespace tka1 {

class Account {
 public:
  explicit Account(tk_ran* ran) : ran_(ran) {
    if (ran_) *ran_ = {};
  }
  void start(int32_t path, size_t runs) {
    if (ran_) ran_->path = path, ran_->runs = (int32_t)runs;
  }
  void worker() {
    if (!ran_) return;
    const std::lock_guard<std::mutex> alone(lock_);
    ++ran_->threads;
  }
  // The item that was taken `ticket`-th.
  void item(size_t ticket, size_t item, const Tile& tile) {
    if (!ran_) return;
    const std::lock_guard<std::mutex> alone(lock_);
    ++ran_->items;
    ran_->rows = std::max(ran_->rows, tile.rows);
    ran_->heads = std::max(ran_->heads, tile.heads);
    if (ticket < TK_TAKEN) ran_->taken[ticket] = (int32_t)item;
  }

 private:
  tk_ran* ran_;
  std::mutex lock_;
};

static size_t in_order(int32_t order, size_t ticket, size_t items) {
  const size_t half = (items + 1) / 2;
  if (order == TK_BACKWARD) return items - 1 - ticket;
  if (order == TK_ALTERNATE) return ticket < half ? 2 * ticket : 2 * (ticket - half) + 1;
  return ticket;
}

}  // namespace tka1
#endif
