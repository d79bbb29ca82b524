#include "pool.hpp"

#include <fcntl.h>

#include <algorithm>
#include <bit>

namespace raycomm {
namespace {

constexpr uint64_t kSmallest = 4096;
constexpr uint64_t kStep = 64ull << 20;  // growth in steps of at most this much
constexpr uint64_t kFirstStep = 1ull << 20;

// Four sizes per power of two: at most a fifth of a block is unused, and few sizes mean much reuse.
uint64_t block_size(uint64_t bytes) {
  if (bytes <= kSmallest) return kSmallest;
  return align_up(bytes, std::max(kSmallest, std::bit_floor(bytes - 1) / 4));
}

}  // namespace

void Pool::make_free(uint32_t index) {
  Record& record = records_[index];
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
    const Record& record = records_[order[last]];
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
  while (committed_ < needed) {
    if (needed > limit) return false;
    const uint64_t least = align_up(std::min(needed - committed_, kStep), 4096);
    uint64_t step = std::min(align_up(std::clamp(committed_ / 2, std::max(least, kFirstStep), kStep), 4096), limit - committed_);
    if (!reserve(step) && !reserve(step = least)) return false;
    error = commit_bytes(own_->fd(), own_->pool_offset() + committed_, step);
    if (error != 0) {
      used.fetch_sub(step, std::memory_order_relaxed);
      return false;
    }
    committed_ += step;
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
  records_.push_back({0, 0, State::retired});
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
    std::map<uint32_t, uint64_t> holders;
    for (uint32_t i = 0; i < records_.size(); ++i)
      for (uint32_t w = 0; w < kHolderWords; ++w)
        for (uint64_t bits = own_->block(i).holders[w].load(std::memory_order_relaxed); bits != 0; bits &= bits - 1)
          holders[64 * w + static_cast<uint32_t>(std::countr_zero(bits))] += records_[i].bytes;
    report.holders.assign(holders.begin(), holders.end());
    throw report;
  }
  records_[index].state = State::filling;
  // A new generation each time: a descriptor of the block's former life no longer matches.
  own_->block(index).generation.fetch_add(1, std::memory_order_relaxed);
  return index;
}

void Pool::give_back(uint32_t index) { make_free(index); }

void Pool::publish(uint32_t index, const HolderSet& holders) {
  BlockHeader& block = own_->block(index);
  block.count.store(holders.count, std::memory_order_relaxed);
  for (uint32_t w = 0; w < kHolderWords; ++w) block.holders[w].store(holders.words[w], std::memory_order_relaxed);
  records_[index].state = State::published;  // ORDER publish: made visible by the release store of the ring's cursor
}

uint64_t Pool::in_use() const {
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
  } while (!top.compare_exchange_weak(head, uint64_t{index} + 1, std::memory_order_release, std::memory_order_relaxed));  // ORDER free-stack
}

void Lease::release() {
  if (mapping_->made_under() != fork_epoch()) return;
  if (refs_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  let_go(*mapping_, index_, process_);
  delete this;
}

}  // namespace raycomm
