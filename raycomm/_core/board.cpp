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
  // ORDER record: who finds the same `what` before and after copying has copied one operation (recent_operations).
  record.what.store(0, std::memory_order_relaxed);
  record.start.store(start, std::memory_order_release);
  record.end.store(end, std::memory_order_release);
  record.bytes.store(bytes, std::memory_order_release);
  record.what.store(iteration << 32 | uint64_t{subject & 0xffff} << 8 | static_cast<uint64_t>(kind), std::memory_order_release);
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

bool Board::can_move(uint32_t process, const std::vector<uint32_t>& awake, uint64_t& changes) const {
  const uint32_t count = rows();
  std::vector<Doing> rows;
  std::vector<bool> moves;
  changes = 0;
  for (uint32_t p = 0; p < count; ++p) {
    rows.push_back(doing(p));
    const Activity kind = rows.back().kind;
    // The driver takes results aside while it waits for room or memory, so it always moves in the end.
    moves.push_back(p == 0 || kind == Activity::idle || kind == Activity::computing);
  }
  for (uint32_t p : awake)
    if (p < count) moves[p] = true;
  // Whoever waits for somebody that moves counts as moving. Room needs every reader, but those that move stop once they have caught up, and
  // then the others are left. A wait for memory that names nobody ends by itself.
  for (bool more = true; more;) {
    more = false;
    for (uint32_t p = 0; p < count; ++p) {
      if (moves[p]) continue;
      bool any = rows[p].waits_for == ProcessSet{};
      for (uint32_t q = 0; q < count; ++q) any |= is_in(rows[p].waits_for, q) && moves[q];
      if (any) moves[p] = more = true;
    }
  }
  for (uint32_t p = 0; p < count; ++p)  // of the circle alone: others may come and go
    if (!moves[p]) changes = changes * 1099511628211ull + driver_->board_row(p).activity.load(std::memory_order_relaxed) + rows[p].iteration;
  return process >= count || moves[process];
}

TickScale::TickScale(const Mapping& mapping) {
  start_ticks_ = static_cast<double>(mapping.header().start_ticks);
  start_ns_ = static_cast<double>(mapping.header().start_ns);
  const double passed = static_cast<double>(ticks()) - start_ticks_;
  ns_per_tick_ = passed > 0 ? std::max(0.0, static_cast<double>(now_ns()) - start_ns_) / passed : 1.0;
}

std::vector<Operation> recent_operations(const Mapping& mapping) {
  const uint64_t capacity = mapping.record_capacity();
  std::vector<Operation> copied;
  if (capacity == 0) return copied;
  const uint64_t until = mapping.header().record_count.load(std::memory_order_relaxed);
  for (uint64_t number = until > capacity ? until - capacity : 0; number < until; ++number) {
    const Record& record = mapping.record(static_cast<uint32_t>(number) & (capacity - 1));
    const uint64_t what = record.what.load(std::memory_order_acquire);  // ORDER record: pairs with the stores in Board::record
    Operation operation{record.start.load(std::memory_order_acquire), record.end.load(std::memory_order_acquire), record.bytes.load(std::memory_order_acquire),
                        static_cast<uint32_t>(what >> 32), static_cast<uint32_t>(what >> 8) & 0xffff, static_cast<Activity>(what & 0xff)};
    if (what != 0 && record.what.load(std::memory_order_relaxed) == what) copied.push_back(operation);
  }
  std::sort(copied.begin(), copied.end(), [](const Operation& a, const Operation& b) { return a.end < b.end; });
  return copied;
}

}  // namespace raycomm
