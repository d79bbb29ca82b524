// When a pool has no block to give: who holds them, whether waiting helps, and returning what is free to the graph's budget.
#include <fcntl.h>

#include <algorithm>
#include <bit>

#include "pool.hpp"

namespace raycomm {
namespace {
// How long a shortage must look hopeless before it is called so. Pinned: not at once, a loop lets go of what it was given a moment after its
// result can be seen. Circular: nobody in the circle may have moved meanwhile.
constexpr int64_t kPinnedNs = 100'000'000;
constexpr int64_t kCircularNs = 1'000'000'000;
constexpr int64_t kOthersTrimNs = 500'000'000;    // how long other processes get to return memory: two and a half park slices
constexpr int64_t kOthersBusyNs = 5'000'000'000;  // and one that has some, or is in a method
constexpr int64_t kYieldNs = 100'000'000;            // they ask again every 20 ms
constexpr int64_t kForgottenNs = 1'500'000'000;      // a shortage nobody asks about for so long is over
}  // namespace

bool Pool::on_its_way(uint32_t index, ProcessSet& waits_for) const {
  const Entry& entry = records_[index];
  bool any = false;
  if (entry.route == kNoRoute) return false;
  const Route& route = routes_[entry.route];
  for (size_t r = 0; r < route.readers.size(); ++r) {
    const uint32_t process = route.readers[r];
    if ((own_->block(index).holders[process / 64].load(std::memory_order_relaxed) >> (process % 64) & 1) == 0) continue;
    // Not taken yet; or in the hands of a loop that has not finished this execution (a channel has one message per execution).
    if (route.taken[r].value.load(std::memory_order_relaxed) > entry.number &&
        (process == kDriver || graph_->board().iteration_of(process) > entry.number))
      continue;
    add_to(waits_for, process);
    any = true;
  }
  return any;
}

Shortage Pool::shortage(uint64_t wanted, uint64_t began, bool patient) {
  const std::lock_guard lock(mutex_);
  const int64_t now = now_ns();
  if (now - short_.last_ns > kForgottenNs) short_ = {};
  if (short_.first_ns == 0) short_.first_ns = now;
  short_.last_ns = now;
  uint64_t changes = 0;
  const Shortage kind = look(wanted, began, now - short_.first_ns, changes);
  if (kind != short_.kind || (kind == Shortage::circular && changes != short_.changes) || short_.since_ns == 0) short_.since_ns = now;
  short_.kind = kind;
  short_.changes = changes;
  const int64_t patience = kind == Shortage::circular ? kCircularNs : kind == Shortage::pinned ? kPinnedNs : 0;
  if (patient && now - short_.since_ns < patience) return Shortage::passing;
  if (kind != Shortage::passing) short_ = {};  // it is raised; the next message has a wait of its own
  return kind;
}

bool Pool::yields() const {
  if (graph_->process() != kDriver) return false;
  const uint64_t wanted = budget_->header().results_wanted_ns.load(std::memory_order_relaxed);
  return wanted != 0 && now_ns() - static_cast<int64_t>(wanted) < kYieldNs;
}

bool Pool::holds_back(uint64_t bytes) const {
  const ArenaHeader& header = budget_->header();
  const uint64_t most = header.budget_limit - header.budget_limit / 4;
  if (graph_->process() != kDriver || header.budget_used.load(std::memory_order_relaxed) + bytes <= most) return false;
  if (out_bytes_ + bytes <= most) return false;  // which spares looking at every block
  uint64_t under_way = 0;
  ProcessSet ignored{};
  for (uint32_t i = 0; i < records_.size(); ++i)
    if (records_[i].state == State::published && on_its_way(i, ignored)) under_way += records_[i].bytes;
  return under_way != 0 && under_way + bytes > most;
}

Shortage Pool::look(uint64_t wanted, uint64_t began, int64_t waited_ns, uint64_t& changes) {
  const uint64_t limit = std::min(budget_->header().budget_limit, own_->file_bytes() - own_->pool_offset());
  if (block_size(wanted) > limit) return Shortage::too_large;
  if (yields()) return Shortage::passing;
  Board& board = graph_->board();
  ProcessSet waits_for{};
  bool moving = false;
  for (uint32_t i = 0; i < records_.size(); ++i)
    if (records_[i].state == State::published) moving |= on_its_way(i, waits_for);
  board.set_waiting(Activity::memory, 0, waits_for, began);
  if (moving) {
    // Who reads a channel of ours that has something for it only has not woken up yet.
    std::vector<uint32_t> awake;
    for (const Route& route : routes_)
      for (size_t r = 0; r < route.readers.size(); ++r) {
        const Doing doing = board.doing(route.readers[r]);
        if (doing.kind == Activity::reading && doing.subject == route.channel &&
            route.taken[r].value.load(std::memory_order_relaxed) < route.published->load(std::memory_order_relaxed))
          awake.push_back(route.readers[r]);
      }
    return board.can_move(graph_->process(), awake, changes) ? Shortage::passing : Shortage::circular;
  }
  if (budget_->header().budget_used.load(std::memory_order_relaxed) <= memory_) return Shortage::pinned;
  return waited_ns < may_return_within() ? Shortage::passing : Shortage::pinned;
}

int64_t Pool::may_return_within() const {
  Board& board = graph_->board();
  int64_t longest = 0;
  for (uint32_t p = 0; p < board.rows(); ++p) {
    if (p == graph_->process()) continue;
    const Activity activity = board.doing(p).kind;
    try {
      const MappingRef peer = graph_->peer(p);
      if (peer->header().pool_committed.load(std::memory_order_relaxed) <= held_bytes(*peer)) continue;  // it has nothing to return
      // What it has it returns when it next waits: in a park slice, but who knows when a loaded machine lets it run. A driver in other code
      // may not come back.
      longest = std::max(longest, activity == Activity::idle && p == kDriver ? kOthersTrimNs : kOthersBusyNs);
    } catch (const ArenaError&) {  // no neighbour: its memory cannot be seen
      longest = std::max(longest, activity == Activity::computing ? kOthersBusyNs : kOthersTrimNs);
    }
  }
  return longest;
}

void Pool::trim_if_wanted() {
  const int64_t wanted = static_cast<int64_t>(budget_->header().budget_wanted_ns.load(std::memory_order_relaxed));
  if (wanted == 0 || now_ns() - wanted > kForgottenNs) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  // Looking at every block is for a new wish; until it is forgotten, what has become free since goes as well.
  if (lock && (wanted > trimmed_ns_ || free_bytes_ != 0 || own_->header().free_stack.load(std::memory_order_relaxed) != 0)) trim_locked();
}

void Pool::trim_locked() {
  trimmed_ns_ = now_ns();
  collect();
  scan();
  // Nobody reads a free block; and the file keeps its size, so that a stray look finds zeros, never a fault.
  const auto punch = [this](uint64_t offset, uint64_t bytes) {
    if (fallocate(own_->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) return false;
    budget_->header().budget_used.fetch_sub(bytes, std::memory_order_relaxed);
    count_committed(-static_cast<int64_t>(bytes));
    return true;
  };
  for (Entry& entry : records_)
    if (entry.state == State::free && !entry.hole) entry.hole = punch(entry.offset, entry.bytes);
  if (cursor_ < committed_ && punch(own_->pool_offset() + cursor_, committed_ - cursor_)) committed_ = cursor_;
  list_free();
}

std::vector<std::pair<uint32_t, uint64_t>> Pool::holders() {
  std::map<uint32_t, uint64_t> holders;
  each_held(*own_, [&](const HeldBlock& block) { block.each_holder([&](uint32_t process) { holders[process] += block.bytes; }); });
  return {holders.begin(), holders.end()};
}

}  // namespace raycomm
