#include "board.hpp"

#include <algorithm>

namespace raycomm {

void Board::hang(MappingRef driver) {
  driver_ = std::move(driver);
  if (process_ >= driver_->board_count()) return;
  row_ = &driver_->board_row(process_);
  waits_for_ = {};
}

void Board::record(Activity kind, uint32_t subject, uint64_t iteration, uint64_t start, uint64_t end, uint64_t bytes) {
  const uint32_t capacity = own_->record_capacity();
  if (capacity == 0) return;
  // Several threads of a driver may record at once, so each takes a number of its own.
  const uint64_t number = own_->header().record_count.fetch_add(1, std::memory_order_relaxed);
  Record& record = own_->record(static_cast<uint32_t>(number) & (capacity - 1));
  record = {start, end, bytes, static_cast<uint32_t>(iteration), static_cast<uint16_t>(kind), static_cast<uint16_t>(subject)};
}

void Board::close_open_call(uint64_t at) {
  record(Activity::computing, call_, iteration(), call_began_, at, 0);
  if (call_ < own_->node_count()) {
    NodeCounters& node = own_->node(call_);
    const uint64_t took = at - call_began_;
    node.calls.store(node.calls.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    node.ticks.store(node.ticks.load(std::memory_order_relaxed) + took, std::memory_order_relaxed);
    if (took > node.longest.load(std::memory_order_relaxed)) node.longest.store(took, std::memory_order_relaxed);
  }
  call_began_ = 0;
}

Doing Board::doing(uint32_t process) const {
  Doing doing;
  if (!driver_ || process >= driver_->board_count()) return doing;
  const BoardRow& row = driver_->board_row(process);
  const uint64_t activity = row.activity.load(std::memory_order_relaxed);
  doing.kind = static_cast<Activity>(activity & 15);
  doing.subject = static_cast<uint32_t>(activity >> 4) & 0xffff;
  const uint64_t now = ticks() >> 16, since = activity >> 20;
  if (since != 0 && now > since) doing.seconds = TickScale(*driver_).ns((now - since) << 16) * 1e-9;
  doing.iteration = row.iteration.load(std::memory_order_relaxed);
  for (uint32_t w = 0; w < kHolderWords; ++w) doing.waits_for[w] = row.waits_for[w].load(std::memory_order_relaxed);
  return doing;
}

uint64_t Board::iteration_of(uint32_t process) const {
  if (!driver_ || process >= driver_->board_count()) return UINT64_MAX;
  return driver_->board_row(process).iteration.load(std::memory_order_relaxed);
}

bool Board::can_move(uint32_t process, uint64_t& changes) const {
  const uint32_t count = rows();
  std::vector<Doing> rows;
  std::vector<bool> moves;
  changes = 0;
  for (uint32_t p = 0; p < count; ++p) {
    rows.push_back(doing(p));
    const Activity kind = rows.back().kind;
    // The driver takes results aside while it waits for room or memory, so it always moves in the end.
    moves.push_back(p == 0 || (kind != Activity::reading && kind != Activity::writing && kind != Activity::memory));
    changes = changes * 1099511628211ull + driver_->board_row(p).activity.load(std::memory_order_relaxed) + rows.back().iteration;
  }
  // Whoever waits for somebody that moves will move: a read has one writer, room needs every reader, memory needs any holder.
  for (bool more = true; more;) {
    more = false;
    for (uint32_t p = 0; p < count; ++p) {
      if (moves[p]) continue;
      bool any = false, all = true;
      for (uint32_t q = 0; q < count; ++q)
        if (is_in(rows[p].waits_for, q)) any |= moves[q], all &= moves[q];
      if (rows[p].kind == Activity::memory ? any : all) moves[p] = more = true;
    }
  }
  return process >= count || moves[process];
}

TickScale::TickScale(const Mapping& mapping) {
  start_ticks_ = static_cast<double>(mapping.header().start_ticks);
  start_ns_ = static_cast<double>(mapping.header().start_ns);
  const double passed = static_cast<double>(ticks()) - start_ticks_;
  ns_per_tick_ = passed > 0 ? std::max(0.0, static_cast<double>(now_ns()) - start_ns_) / passed : 1.0;
}

std::vector<Record> recent_records(const Mapping& mapping) {
  const uint64_t capacity = mapping.record_capacity();
  std::vector<Record> copied;
  if (capacity == 0) return copied;
  const uint64_t until = mapping.header().record_count.load(std::memory_order_acquire);
  const uint64_t from = until > capacity ? until - capacity : 0;
  for (uint64_t number = from; number < until; ++number) copied.push_back(mapping.record(static_cast<uint32_t>(number) & (capacity - 1)));
  const uint64_t now = mapping.header().record_count.load(std::memory_order_acquire);
  const uint64_t overwritten = now > capacity ? std::min(until, now - capacity + 1) : 0;
  if (overwritten > from) copied.erase(copied.begin(), copied.begin() + static_cast<ptrdiff_t>(overwritten - from));
  return copied;
}

}  // namespace raycomm
