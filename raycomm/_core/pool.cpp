#include "pool.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdlib>

namespace raycomm {
namespace {

constexpr uint64_t kStep = 64ull << 20;  // growth in steps of at most this much
constexpr uint64_t kFirstStep = 1ull << 20;
constexpr uint64_t kSpare = 64ull << 20;              // left to the cgroup: beyond its limit the kernel kills instead of refusing

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


}  // namespace

void Pool::make_free(uint32_t index) {
  Entry& entry = records_[index];
  BlockHeader& block = own_->block(index);
  if (entry.state == State::published) out_bytes_ -= entry.bytes;
  if (block.given_back.load(std::memory_order_relaxed) != 0) {
    // ORDER left-behind: pairs with the exchange in leave_to_holders and let_go; either they give it back or we do.
    const uint32_t mark = block.given_back.exchange(static_cast<uint32_t>(GivenBack::no), std::memory_order_seq_cst);
    // Believed only of blocks that were left to their holders: anything else is a reader's nonsense.
    if (mark == static_cast<uint32_t>(GivenBack::done) && entry.state == State::published && ended_.load(std::memory_order_relaxed)) {
      entry.hole = true;  // counted in pool_committed already
      memory_ -= entry.bytes;
      budget_->header().budget_used.fetch_sub(entry.bytes, std::memory_order_relaxed);
    }
  }
  entry.state = State::free;
  (entry.hole ? holes_ : free_)[entry.bytes].push_back(index);
  if (!entry.hole) free_bytes_ += entry.bytes;
}

void Pool::collect() {
  auto& top = own_->header().free_stack;
  if (top.load(std::memory_order_relaxed) == 0) return;
  uint64_t entry = top.exchange(0, std::memory_order_acquire);  // ORDER free-stack: pairs with the push in let_go
  // Bounded and checked: a reader killed in the middle of a push, or a mad one, may leave a loop or a wild index here.
  for (size_t steps = 0; entry != 0 && entry <= records_.size() && steps <= records_.size(); ++steps) {
    const uint32_t index = static_cast<uint32_t>(entry - 1);
    entry = own_->block(index).next_free.load(std::memory_order_relaxed);
    if (records_[index].state == State::published && !held(index)) make_free(index);
  }
}

void Pool::scan() {
  for (uint32_t index = 0; index < records_.size(); ++index)
    if (records_[index].state == State::published && !held(index)) make_free(index);
}

bool Pool::held(uint32_t index) const {
  bool any = false;
  for (auto& word : own_->block(index).holders) any |= word.load(std::memory_order_seq_cst) != 0;  // ORDER let-go: pairs with fetch_and in let_go
  return any;
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

// A free block without memory, which is taken anew for it.
bool Pool::fill_hole(uint64_t bytes, uint64_t at_most, uint32_t& index, int& error) {
  for (auto it = holes_.lower_bound(bytes); it != holes_.end() && it->first <= at_most; ++it) {
    if (it->second.empty()) continue;
    index = it->second.back();
    Entry& entry = records_[index];
    if (!back(entry.offset, entry.bytes, entry.bytes, error)) return false;
    entry.hole = false;
    it->second.pop_back();
    return true;
  }
  return false;
}

bool Pool::join(uint64_t bytes, uint32_t& index, int& error) {
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < records_.size(); ++i)
    if (records_[i].state == State::free) order.push_back(i);
  std::sort(order.begin(), order.end(), [this](uint32_t a, uint32_t b) { return records_[a].offset < records_[b].offset; });
  size_t first = 0, run = 0, holes = 0;
  for (size_t last = 0; last < order.size(); ++last) {
    const Entry& entry = records_[order[last]];
    if (last > first && records_[order[last - 1]].offset + records_[order[last - 1]].bytes != entry.offset) first = last, run = holes = 0;
    run += entry.bytes;
    if (entry.hole) holes += entry.bytes;
    if (run < bytes) continue;
    index = order[first];
    if (holes != 0 && !back(records_[index].offset, run, holes, error)) return false;
    for (size_t i = first; i <= last; ++i) {
      records_[order[i]].hole = false;
      if (i == first) continue;
      records_[order[i]].state = State::retired;
      retired_.push_back(order[i]);
    }
    resize(index, records_[index].offset, bytes);
    if (uint32_t rest; run > bytes && new_number(rest, error)) {  // what is left over is a block again
      resize(rest, records_[index].offset + bytes, run - bytes);
      records_[rest].hole = false;
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
  if (holes != 0 && !back(records_[order[first]].offset, run, holes, error)) return false;
  for (size_t i = first; i < order.size(); ++i) {
    records_[order[i]].state = State::retired;
    records_[order[i]].hole = false;
    retired_.push_back(order[i]);
  }
  cursor_ = records_[order[first]].offset - own_->pool_offset();
  list_free();
  return grow(bytes, index, error);
}

void Pool::list_free() {
  free_.clear();
  holes_.clear();
  free_bytes_ = 0;
  for (uint32_t i = 0; i < records_.size(); ++i)
    if (records_[i].state == State::free) make_free(i);
}

void Pool::resize(uint32_t index, uint64_t offset, uint64_t bytes) {
  records_[index].offset = own_->block(index).offset = offset;
  records_[index].bytes = own_->block(index).bytes = bytes;
}

bool Pool::reserve(uint64_t bytes) {
  ArenaHeader& header = budget_->header();
  if (header.budget_used.fetch_add(bytes, std::memory_order_relaxed) + bytes <= header.budget_limit) return true;
  header.budget_used.fetch_sub(bytes, std::memory_order_relaxed);
  return false;
}

bool Pool::back(uint64_t offset, uint64_t bytes, uint64_t reserved, int& error) {
  if (reserve(reserved)) return fill(offset, bytes, reserved, error);
  error = 0;  // what lacks now is budget, whatever an earlier attempt met
  ArenaHeader& header = budget_->header();
  const uint64_t now = static_cast<uint64_t>(now_ns());
  header.budget_wanted_ns.store(now, std::memory_order_relaxed);
  if (graph_->process() != kDriver) header.results_wanted_ns.store(now, std::memory_order_relaxed);
  return false;
}

bool Pool::fill(uint64_t offset, uint64_t bytes, uint64_t reserved, int& error) {
  error = 0;
  for (uint64_t done = 0; done < bytes && error == 0;) {  // in steps: the limit of a cgroup is looked at before each
    const uint64_t step = std::min(bytes - done, kStep);
    error = cgroups_have(limits_, step) ? commit_bytes(own_->fd(), offset + done, step) : ENOMEM;
    done += step;
  }
  if (error != 0) return budget_->header().budget_used.fetch_sub(reserved, std::memory_order_relaxed), false;
  count_committed(static_cast<int64_t>(reserved));
  return true;
}

bool Pool::commit(uint64_t needed, int& error) {
  const uint64_t limit = own_->file_bytes() - own_->pool_offset();
  if (committed_ >= needed) return true;
  if (needed > limit) return false;
  // All of it or nothing: two pools that each took a part of what is left would both fail.
  const uint64_t least = align_up(needed - committed_, 4096);
  const uint64_t ahead = std::min(align_up(std::clamp(committed_ / 2, kFirstStep, kStep), 4096), limit - committed_);
  const uint64_t at = own_->pool_offset() + committed_;
  // What is taken ahead is no need: if the budget refuses it, nobody is asked to make room.
  if (ahead > least && reserve(ahead) && fill(at, ahead, ahead, error)) return committed_ += ahead, true;
  return back(at, least, least, error) && (committed_ += least, true);
}

void Pool::count_committed(int64_t change) {
  memory_ = static_cast<uint64_t>(static_cast<int64_t>(memory_) + change);
  own_->header().pool_committed.fetch_add(static_cast<uint64_t>(change), std::memory_order_relaxed);  // others count there too, see let_go
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
  records_.push_back({0, 0, State::retired, false, kNoRoute, 0});
  own_->header().block_count.store(index + 1, std::memory_order_release);
  return true;
}

bool Pool::grow(uint64_t bytes, uint32_t& index, int& error) {
  if (!commit(cursor_ + bytes, error) || !new_number(index, error)) return false;
  resize(index, own_->pool_offset() + cursor_, bytes);
  records_[index].hole = false;
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
  const bool found = !ended_.load(std::memory_order_relaxed) && !yields() && !holds_back(size) && (take_free(size, 2 * size, index) || fill_hole(size, 2 * size, index, error) || grow(size, index, error) ||
                     (scan(), take_free(size, 2 * size, index)) || join(size, index, error));  // before giving up: neighbours become one
  if (!found) {
    PoolExhausted report{bytes, 0, std::min(budget_->header().budget_limit, own_->file_bytes() - own_->pool_offset()), 0, error, {}};
    const uint64_t used = budget_->header().budget_used.load(std::memory_order_relaxed);
    report.free = free_bytes_ + (report.limit > used ? report.limit - used : 0) + (committed_ - cursor_);
    report.others = used > memory_ ? used - memory_ : 0;
    report.holders = holders();
    throw report;
  }
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
  short_ = {};
  if (entry.state == State::published) {  // lent: this process holds it too, so the count cannot reach nothing meanwhile
    block.count.fetch_add(holders.count, std::memory_order_relaxed);
    for (uint32_t w = 0; w < kHolderWords; ++w) block.holders[w].fetch_or(holders.words[w], std::memory_order_relaxed);
    return;
  }
  block.count.store(holders.count, std::memory_order_relaxed);
  for (uint32_t w = 0; w < kHolderWords; ++w) block.holders[w].store(holders.words[w], std::memory_order_relaxed);
  entry.state = State::published;  // ORDER publish: made visible by the release store of the ring's cursor
  out_bytes_ += entry.bytes;
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
  out_bytes_ += records_[index].bytes;
  data = own_->at(records_[index].offset);
  lent_[data] = {index, bytes};
  return new Lease(own_, index, graph_->process());
}

bool Pool::claim_lent(const void* data, uint64_t bytes, uint32_t& index) {
  const std::lock_guard lock(mutex_);
  if (lent_.empty()) return false;
  const auto found = lent_.find(data);
  if (found == lent_.end()) return false;
  if (found->second.second != bytes) return false;  // a part of it is copied: the whole may come yet
  index = found->second.first;
  lent_.erase(found);
  const Entry& entry = records_[index];
  const uint64_t self = 1ull << (graph_->process() % 64);
  const bool held = (own_->block(index).holders[graph_->process() / 64].load(std::memory_order_acquire) & self) != 0;
  return held && entry.state == State::published && entry.route == kNoRoute && own_->at(entry.offset) == data;
}

void Pool::unclaim(uint32_t index, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  lent_[own_->at(records_[index].offset)] = {index, bytes};
}

uint64_t Pool::in_use() {
  const std::lock_guard lock(mutex_);
  uint64_t bytes = held_bytes(*own_);
  for (const Entry& entry : records_)
    if (entry.state == State::filling) bytes += entry.bytes;
  return bytes;
}

uint64_t held_bytes(const Mapping& mapping) {
  uint64_t bytes = 0;
  each_held(mapping, [&](const HeldBlock& block) { bytes += block.bytes; });
  return bytes;
}

namespace {

// The memory of a block that was left to its holders, once none is left. Nobody acquires it any more, so nobody can be writing to it either.
void give_memory_back(Mapping& mapping, BlockHeader& block) {
  for (auto& word : block.holders)
    if (word.load(std::memory_order_seq_cst) != 0) return;  // ORDER left-behind
  const uint64_t offset = block.offset, bytes = block.bytes;  // private copies, checked: whole pages of the pool
  if (offset < mapping.pool_offset() || offset > mapping.file_bytes() || bytes > mapping.file_bytes() - offset || (offset | bytes) % kSmallestBlock != 0) return;
  // Two that let go at the same moment both come here, and the owner may be at it as well: one of them does it.
  auto mark = static_cast<uint32_t>(GivenBack::by_last_holder);
  if (!block.given_back.compare_exchange_strong(mark, static_cast<uint32_t>(GivenBack::done), std::memory_order_seq_cst)) return;
  // Through the mapping: the descriptors of peers' arenas are not kept. Of a file in memory it fails for no reason but a seal, which there is not.
  madvise(mapping.at(offset), bytes, MADV_REMOVE);
  mapping.header().pool_committed.fetch_sub(bytes, std::memory_order_relaxed);
}

// While the graph runs its owner cannot have set that mark.
bool left_to_holders(const Mapping& mapping, const BlockHeader& block) {
  return block.given_back.load(std::memory_order_seq_cst) == static_cast<uint32_t>(GivenBack::by_last_holder) &&
         mapping.header().closed.load(std::memory_order_relaxed) != 0;
}

}  // namespace

void leave_to_holders(Mapping& mapping, uint32_t index) {
  BlockHeader& block = mapping.block(index);
  auto mark = static_cast<uint32_t>(GivenBack::no);
  // ORDER left-behind (Dekker): we set the mark, then look at the holders; who lets go clears its bit, then looks at the mark. seq_cst, so at
  // least one of the two sees both.
  block.given_back.compare_exchange_strong(mark, static_cast<uint32_t>(GivenBack::by_last_holder), std::memory_order_seq_cst);
  if (left_to_holders(mapping, block)) give_memory_back(mapping, block);
}

void let_go(Mapping& mapping, uint32_t index, uint32_t process) {
  BlockHeader& block = mapping.block(index);
  const uint64_t bit = 1ull << (process % 64);
  // ORDER let-go: release, so that the owner (collect, acquire) writes the block again only after our last read of it. seq_cst for ORDER
  // left-behind: the bit first, then the mark.
  if ((block.holders[process / 64].fetch_and(~bit, std::memory_order_seq_cst) & bit) == 0) return;
  if (left_to_holders(mapping, block)) return give_memory_back(mapping, block);
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
