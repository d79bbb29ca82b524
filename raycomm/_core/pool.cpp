#include "pool.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>

namespace raycomm {
namespace {

constexpr uint64_t kSmallest = 4096;
constexpr uint64_t kStep = 64ull << 20;  // growth in steps of at most this much
constexpr uint64_t kFirstStep = 1ull << 20;
constexpr uint64_t kSpare = 64ull << 20;              // left to the cgroup: beyond its limit the kernel kills instead of refusing
constexpr int64_t kOthersTrimNs = 500'000'000;        // how long other processes get to return memory: two and a half park slices

// Whether every cgroup of this process has room for `bytes` more. Looked at before each step of growth: others use memory too.
bool cgroups_have(const std::vector<MemoryLimit>& limits, uint64_t bytes) {
  for (const MemoryLimit& limit : limits) {
    const int fd = open(limit.used.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) continue;
    char text[32] = {};
    const ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    const uint64_t used = n > 0 ? std::strtoull(text, nullptr, 10) : 0;
    if (used + bytes + std::min(kSpare, limit.bytes / 16) > limit.bytes) return false;
  }
  return true;
}

// Four sizes per power of two: at most a fifth of a block is unused, and few sizes mean much reuse.
uint64_t block_size(uint64_t bytes) {
  if (bytes <= kSmallest) return kSmallest;
  return align_up(bytes, std::max(kSmallest, std::bit_floor(bytes - 1) / 4));
}

}  // namespace

void Pool::make_free(uint32_t index) {
  Entry& record = records_[index];
  record.state = State::free;
  free_[record.bytes].push_back(index);
  free_bytes_ += record.bytes;
}

void Pool::collect() {
  auto& top = own_->header().free_stack;
  if (top.load(std::memory_order_relaxed) == 0) return;
  uint64_t entry = top.exchange(0, std::memory_order_acquire);  // ORDER free-stack: pairs with the push in let_go
  // Bounded and checked: a reader killed in the middle of a push, or a mad one, may leave a loop or a wild index here.
  for (size_t steps = 0; entry != 0 && entry <= records_.size() && steps <= records_.size(); ++steps) {
    const uint32_t index = static_cast<uint32_t>(entry - 1);
    BlockHeader& block = own_->block(index);
    entry = block.next_free.load(std::memory_order_relaxed);
    bool held = false;
    for (auto& word : block.holders) held |= word.load(std::memory_order_acquire) != 0;  // ORDER let-go: pairs with fetch_and in let_go
    if (records_[index].state == State::published && !held) make_free(index);
  }
}

void Pool::scan() {
  for (uint32_t index = 0; index < records_.size(); ++index) {
    if (records_[index].state != State::published) continue;
    bool held = false;
    for (auto& word : own_->block(index).holders) held |= word.load(std::memory_order_acquire) != 0;  // ORDER let-go, as in collect
    if (!held) make_free(index);
  }
}

bool Pool::take_free(uint64_t bytes, uint64_t at_most, uint32_t& index) {
  for (auto it = free_.lower_bound(bytes); it != free_.end() && it->first <= at_most; ++it) {
    if (it->second.empty()) continue;
    index = it->second.back();
    it->second.pop_back();
    free_bytes_ -= records_[index].bytes;
    return true;
  }
  return false;
}

bool Pool::join(uint64_t bytes, uint32_t& index, int& error) {
  std::vector<uint32_t> order;
  for (const auto& [size, indices] : free_) order.insert(order.end(), indices.begin(), indices.end());
  std::sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) { return records_[a].offset < records_[b].offset; });
  size_t first = 0, run = 0;
  for (size_t last = 0; last < order.size(); ++last) {
    const Entry& record = records_[order[last]];
    if (last > first && records_[order[last - 1]].offset + records_[order[last - 1]].bytes != record.offset) first = last, run = 0;
    run += record.bytes;
    if (run < bytes) continue;
    index = order[first];
    for (size_t i = first + 1; i <= last; ++i) {
      records_[order[i]].state = State::retired;
      retired_.push_back(order[i]);
    }
    resize(index, records_[index].offset, bytes);
    if (uint32_t rest; run > bytes && new_number(rest, error)) {  // what is left over is a block again
      resize(rest, records_[index].offset + bytes, run - bytes);
      records_[rest].state = State::free;
    } else {
      resize(index, records_[index].offset, run);
    }
    records_[index].state = State::filling;
    list_free();
    return true;
  }
  // Or the last free ones and what has not been cut yet.
  if (order.empty() || records_[order.back()].offset + records_[order.back()].bytes != own_->pool_offset() + cursor_) return false;
  for (size_t i = first; i < order.size(); ++i) {
    records_[order[i]].state = State::retired;
    retired_.push_back(order[i]);
  }
  cursor_ = records_[order[first]].offset - own_->pool_offset();
  list_free();
  return grow(bytes, index, error);
}

void Pool::list_free() {
  free_.clear();
  free_bytes_ = 0;
  for (uint32_t i = 0; i < records_.size(); ++i)
    if (records_[i].state == State::free) make_free(i);
}

void Pool::resize(uint32_t index, uint64_t offset, uint64_t bytes) {
  records_[index].offset = own_->block(index).offset = offset;
  records_[index].bytes = own_->block(index).bytes = bytes;
}

bool Pool::commit(uint64_t needed, int& error) {
  const uint64_t limit = own_->file_bytes() - own_->pool_offset();
  auto& used = budget_->header().budget_used;
  const auto reserve = [&](uint64_t step) {
    if (used.fetch_add(step, std::memory_order_relaxed) + step <= budget_->header().budget_limit) return true;
    used.fetch_sub(step, std::memory_order_relaxed);
    return false;
  };
  const auto refused = [&] {
    const int64_t now = now_ns();
    budget_->header().budget_wanted_ns.store(static_cast<uint64_t>(now), std::memory_order_relaxed);
    if (short_since_ == 0) short_since_ = now;
    return false;
  };
  while (committed_ < needed) {
    if (needed > limit) return false;
    const uint64_t least = align_up(std::min(needed - committed_, kStep), 4096);
    uint64_t step = std::min(align_up(std::clamp(committed_ / 2, std::max(least, kFirstStep), kStep), 4096), limit - committed_);
    if (!reserve(step) && !reserve(step = least)) return refused();
    error = cgroups_have(limits_, step) ? commit_bytes(own_->fd(), own_->pool_offset() + committed_, step) : ENOMEM;
    if (error != 0) {
      used.fetch_sub(step, std::memory_order_relaxed);
      return false;
    }
    committed_ += step;
    own_->header().pool_committed.store(committed_, std::memory_order_relaxed);
  }
  return true;
}

bool Pool::new_number(uint32_t& index, int& error) {
  if (!retired_.empty()) {
    index = retired_.back();
    retired_.pop_back();
    return true;
  }
  if (records_.size() >= own_->block_capacity()) return false;
  index = static_cast<uint32_t>(records_.size());
  if (index % 64 == 0) {  // the next page of the block table
    const uint64_t at = reinterpret_cast<unsigned char*>(&own_->block(index)) - own_->at(0);
    if ((error = commit_bytes(own_->fd(), at, 64 * sizeof(BlockHeader))) != 0) return false;
  }
  records_.push_back({0, 0, State::retired, kNoRoute, 0});
  own_->header().block_count.store(index + 1, std::memory_order_release);
  return true;
}

bool Pool::grow(uint64_t bytes, uint32_t& index, int& error) {
  if (!commit(cursor_ + bytes, error) || !new_number(index, error)) return false;
  resize(index, own_->pool_offset() + cursor_, bytes);
  records_[index].state = State::filling;
  cursor_ += bytes;
  return true;
}

uint32_t Pool::acquire(uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  return acquire_locked(bytes);
}

uint32_t Pool::acquire_locked(uint64_t bytes) {
  const uint64_t size = block_size(bytes);
  uint32_t index = 0;
  int error = 0;
  collect();
  const bool found = take_free(size, 2 * size, index) || grow(size, index, error) ||
                     (scan(), take_free(size, 2 * size, index)) || join(size, index, error);  // before giving up: neighbours become one
  if (!found) {
    PoolExhausted report{bytes, 0, std::min(budget_->header().budget_limit, own_->file_bytes() - own_->pool_offset()), error, {}};
    const uint64_t used = budget_->header().budget_used.load(std::memory_order_relaxed);
    report.free = free_bytes_ + (report.limit > used ? report.limit - used : 0) + (committed_ - cursor_);
    report.holders = holders();
    throw report;
  }
  short_since_ = 0;
  Entry& entry = records_[index];
  entry.state = State::filling;
  entry.route = kNoRoute;
  // A new generation each time: a descriptor of the block's former life no longer matches.
  own_->block(index).generation.fetch_add(1, std::memory_order_relaxed);
  return index;
}

void Pool::give_back(uint32_t index) {
  const std::lock_guard lock(mutex_);
  make_free(index);
}

uint32_t Pool::add_route(Route route) {
  const std::lock_guard lock(mutex_);
  routes_.push_back(std::move(route));
  return static_cast<uint32_t>(routes_.size() - 1);
}

void Pool::publish(uint32_t index, const HolderSet& holders, uint32_t route, uint64_t number) {
  const std::lock_guard lock(mutex_);
  BlockHeader& block = own_->block(index);
  Entry& entry = records_[index];
  entry.route = route;
  entry.number = number;
  if (entry.state == State::published) {  // lent: this process holds it too, so the count cannot reach nothing meanwhile
    block.count.fetch_add(holders.count, std::memory_order_relaxed);
    for (uint32_t w = 0; w < kHolderWords; ++w) block.holders[w].fetch_or(holders.words[w], std::memory_order_relaxed);
    return;
  }
  block.count.store(holders.count, std::memory_order_relaxed);
  for (uint32_t w = 0; w < kHolderWords; ++w) block.holders[w].store(holders.words[w], std::memory_order_relaxed);
  entry.state = State::published;  // ORDER publish: made visible by the release store of the ring's cursor
}

Lease* Pool::lend(uint64_t bytes, unsigned char*& data) {
  const std::lock_guard lock(mutex_);
  const uint32_t index = acquire_locked(bytes);
  BlockHeader& block = own_->block(index);
  HolderSet self;
  self.add(graph_->process());
  block.count.store(self.count, std::memory_order_relaxed);
  for (uint32_t w = 0; w < kHolderWords; ++w) block.holders[w].store(self.words[w], std::memory_order_relaxed);
  records_[index].state = State::published;
  data = own_->at(records_[index].offset);
  lent_[data] = index;
  return new Lease(own_, index, graph_->process());
}

bool Pool::claim_lent(const void* data, uint64_t bytes, uint32_t& index) {
  const std::lock_guard lock(mutex_);
  if (lent_.empty()) return false;
  const auto found = lent_.find(data);
  if (found == lent_.end()) return false;
  index = found->second;
  lent_.erase(found);
  const Entry& entry = records_[index];
  const uint64_t self = 1ull << (graph_->process() % 64);
  const bool held = (own_->block(index).holders[graph_->process() / 64].load(std::memory_order_acquire) & self) != 0;
  return held && entry.state == State::published && entry.route == kNoRoute && own_->at(entry.offset) == data && bytes <= entry.bytes;
}

void Pool::unclaim(uint32_t index) {
  const std::lock_guard lock(mutex_);
  lent_[own_->at(records_[index].offset)] = index;
}

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

Shortage Pool::shortage(uint64_t wanted, uint64_t began, ProcessSet& waits_for, uint64_t& changes) {
  const std::lock_guard lock(mutex_);
  waits_for = {};
  changes = 0;
  const uint64_t limit = std::min(budget_->header().budget_limit, own_->file_bytes() - own_->pool_offset());
  if (block_size(wanted) > limit) return Shortage::too_large;
  bool moving = false;
  for (uint32_t i = 0; i < records_.size(); ++i)
    if (records_[i].state == State::published) moving |= on_its_way(i, waits_for);
  if (moving) {
    graph_->board().set_waiting(Activity::memory, 0, waits_for, began);
    return graph_->board().can_move(graph_->process(), changes) ? Shortage::passing : Shortage::circular;
  }
  const bool others = budget_->header().budget_used.load(std::memory_order_relaxed) > committed_;
  if (short_since_ != 0 && others && now_ns() - short_since_ < kOthersTrimNs) return Shortage::passing;
  return Shortage::pinned;
}

void Pool::trim_if_wanted() {
  const int64_t wanted = static_cast<int64_t>(budget_->header().budget_wanted_ns.load(std::memory_order_relaxed));
  if (wanted == 0 || now_ns() - wanted > 2 * kOthersTrimNs) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || short_since_ != 0) return;
  collect();
  scan();
  // Only what lies at the end can go: the pool is committed from its beginning on.
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < records_.size(); ++i)
    if (records_[i].state == State::free) order.push_back(i);
  std::sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) { return records_[a].offset > records_[b].offset; });
  for (uint32_t index : order) {
    if (records_[index].offset + records_[index].bytes != own_->pool_offset() + cursor_) break;
    cursor_ = records_[index].offset - own_->pool_offset();
    records_[index].state = State::retired;
    retired_.push_back(index);
  }
  list_free();
  const uint64_t keep = align_up(cursor_, 4096);
  if (keep >= committed_) return;
  if (fallocate(own_->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(own_->pool_offset() + keep),
                static_cast<off_t>(committed_ - keep)) != 0)
    return;
  budget_->header().budget_used.fetch_sub(committed_ - keep, std::memory_order_relaxed);
  committed_ = keep;
  own_->header().pool_committed.store(committed_, std::memory_order_relaxed);
}

std::vector<std::pair<uint32_t, uint64_t>> Pool::holders() {
  std::map<uint32_t, uint64_t> holders;
  for (uint32_t i = 0; i < records_.size(); ++i)
    for (uint32_t w = 0; w < kHolderWords; ++w)
      for (uint64_t bits = own_->block(i).holders[w].load(std::memory_order_relaxed); bits != 0; bits &= bits - 1)
        holders[64 * w + static_cast<uint32_t>(std::countr_zero(bits))] += records_[i].bytes;
  return {holders.begin(), holders.end()};
}

uint64_t Pool::in_use() {
  const std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < records_.size(); ++i) {
    bool held = records_[i].state == State::filling;
    for (auto& word : own_->block(i).holders) held |= word.load(std::memory_order_relaxed) != 0;
    if (held) bytes += records_[i].bytes;
  }
  return bytes;
}

void let_go(Mapping& mapping, uint32_t index, uint32_t process) {
  BlockHeader& block = mapping.block(index);
  const uint64_t bit = 1ull << (process % 64);
  // ORDER let-go: release, so that the owner (collect, acquire) writes the block again only after our last read of it.
  if ((block.holders[process / 64].fetch_and(~bit, std::memory_order_acq_rel) & bit) == 0) return;
  if (block.count.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  auto& top = mapping.header().free_stack;
  uint64_t head = top.load(std::memory_order_relaxed);
  do {
    block.next_free.store(static_cast<uint32_t>(head), std::memory_order_relaxed);
  } while (!top.compare_exchange_weak(head, uint64_t{index} + 1, std::memory_order_seq_cst, std::memory_order_relaxed));  // ORDER free-stack; ORDER parking: wait_until looks at it
  mapping.ring_bell();
}

void Lease::release() {
  if (mapping_->made_under() != fork_epoch()) return;
  if (refs_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  let_go(*mapping_, index_, process_);
  delete this;
}

}  // namespace raycomm
