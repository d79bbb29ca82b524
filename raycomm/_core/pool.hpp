// Blocks: bulk memory of one writing process and graph, reference-counted by one bit per reader process.
//
// The owner keeps all bookkeeping private; shared memory holds only what readers need (where a block lies, its generation, who still
// holds it). So a reader that goes mad can at worst free a block early, never make the owner follow a wild offset.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "arena.hpp"
#include "board.hpp"

namespace raycomm {

// A block of a process's table that somebody holds, as shared memory tells. What its owner fills and has not sent is in nobody's hands.
struct HeldBlock {
  uint32_t index;
  uint64_t bytes;
  std::array<uint64_t, kHolderWords> holders;

  template <class Visit>
  void each_holder(const Visit& visit) const {
    for (uint32_t w = 0; w < kHolderWords; ++w)
      for (uint64_t bits = holders[w]; bits != 0; bits &= bits - 1) visit(64 * w + static_cast<uint32_t>(std::countr_zero(bits)));
  }
};

// For reports: a moment later it may be otherwise.
template <class Visit>
void each_held(const Mapping& mapping, const Visit& visit) {
  const uint32_t count = std::min(mapping.header().block_count.load(std::memory_order_acquire), mapping.block_capacity());
  for (uint32_t i = 0; i < count; ++i) {
    const BlockHeader& block = mapping.block(i);
    HeldBlock held{i, block.bytes, {}};
    uint64_t any = 0;
    for (uint32_t w = 0; w < kHolderWords; ++w) any |= held.holders[w] = block.holders[w].load(std::memory_order_relaxed);
    if (any != 0) visit(held);
  }
}

// Bytes of its blocks that somebody holds.
uint64_t held_bytes(const Mapping& mapping);

// One process's hold on one received block. Freed by any thread, without the GIL, even at interpreter exit.
class Lease {
 public:
  Lease(MappingRef mapping, uint32_t index, uint32_t process) : mapping_(std::move(mapping)), index_(index), process_(process) {}
  void add_ref() { refs_.fetch_add(1, std::memory_order_relaxed); }
  void release();

 private:
  ~Lease() = default;
  MappingRef mapping_;
  uint32_t index_, process_;
  std::atomic<uint32_t> refs_{1};
};

struct HolderSet {
  std::array<uint64_t, kHolderWords> words{};
  uint32_t count = 0;
  void add(uint32_t process) {
    uint64_t& word = words[process / 64];
    const uint64_t bit = 1ull << (process % 64);
    if (!(word & bit)) ++count;
    word |= bit;
  }
};

struct PoolExhausted {
  uint64_t wanted = 0, free = 0, limit = 0, others = 0;  // others: memory that the pools of other processes have taken
  int system_error = 0;                                // of fallocate or the cgroup, 0 if the budget is what ran out
  std::vector<std::pair<uint32_t, uint64_t>> holders;  // process, bytes it holds in this pool
};

inline constexpr uint64_t kSmallestBlock = 4096;
// Four sizes per power of two: at most a fifth of a block is unused, and few sizes mean much reuse.
inline uint64_t block_size(uint64_t bytes) {
  if (bytes <= kSmallestBlock) return kSmallestBlock;
  return align_up(bytes, std::max(kSmallestBlock, std::bit_floor(bytes - 1) / 4));
}

// Why no block can be had.
enum class Shortage : uint32_t {
  passing = 0,    // messages on their way hold blocks, or others have been asked to return memory: wait
  pinned = 1,     // all of it is held by views that users hold
  circular = 2,   // those who hold messages wait, directly or not, for this process
  too_large = 3,  // more than the limit
};

// Where messages of one channel go: who takes them, and how far each has come.
struct Route {
  const Cursor* taken;
  const std::atomic<uint64_t>* published;
  uint32_t channel;
  std::vector<uint32_t> readers;
};

// A cgroup's memory limit and the file that says how much of it is used.
struct MemoryLimit {
  uint64_t bytes;
  std::string used;
};

// Used by the owning process only. Its threads take turns at a lock: a loop or the driver's submit, whoever takes memory from it by name
// (raycomm.empty), and whoever trims it while waiting.
class Pool {
 public:
  // The budget of the whole graph is counted in the header of the driver's arena.
  Pool(std::shared_ptr<const Neighbourhood> graph, std::vector<MemoryLimit> limits)
      : graph_(std::move(graph)), own_(graph_->own_ref()), budget_(graph_->driver()), limits_(std::move(limits)) {}

  // A block of at least `bytes`, most recently released first (a fresh 16 MiB block costs 8 ms of page faults, a reused one 1 ms).
  // Throws PoolExhausted.
  uint32_t acquire(uint64_t bytes);
  void give_back(uint32_t index);                          // acquired, but not published
  // Before the ring's cursor moves; `number` of the message on its route.
  void publish(uint32_t index, const HolderSet& holders, uint32_t route, uint64_t number);
  uint32_t add_route(Route route);
  // Says why acquire found nothing, and on the board (since tick `began`) who has to move for that to change.
  // With patience it is hopeless (anything but passing) only once it has looked so for a while; a wait may consist of many short ones.
  Shortage shortage(uint64_t wanted, uint64_t began, bool patient);
  // Gives the memory of free blocks back to the budget if some other process has lately found it used up. Any thread, without the GIL.
  void trim_if_wanted();
  // This process writes nothing more: the memory of free blocks goes back to the system now, that of held ones when their last holder lets go.
  // Nothing can be acquired any more. To be called again after what was published nevertheless.
  void end();
  bool ended() const { return ended_.load(std::memory_order_seq_cst); }

  // Memory handed to the user to be filled in place: a block held by this process until the last view of it dies.
  Lease* lend(uint64_t bytes, unsigned char*& data);
  // The block lent at `data` if it has not been sent yet; it counts as sent from now on.
  bool claim_lent(const void* data, uint64_t bytes, uint32_t& index);
  void unclaim(uint32_t index, uint64_t bytes);  // it was not sent after all
  unsigned char* bytes(uint32_t index) const { return own_->at(records_[index].offset); }  // not the shared copy: a reader could have changed it
  uint32_t generation(uint32_t index) const { return own_->block(index).generation.load(std::memory_order_relaxed); }

  std::vector<std::pair<uint32_t, uint64_t>> holders();  // process, bytes of blocks it holds
  uint64_t committed() const { return memory_; }
  uint64_t in_use();  // bytes of blocks that are not free, after collecting what readers released

 private:
  enum class State : uint8_t { free, filling, published, retired };  // retired: its bytes belong to another block now
  struct Entry {
    uint64_t offset, bytes;
    State state;
    bool hole;       // of a free block: it has no memory behind it
    uint32_t route;  // of a published block: kNoRoute until it is sent
    uint64_t number;
  };
  static constexpr uint32_t kNoRoute = 0xffffffffu;
  uint32_t acquire_locked(uint64_t bytes);
  bool on_its_way(uint32_t index, ProcessSet& waits_for) const;
  void collect();                        // takes what readers pushed on the free stack
  void scan();                           // looks at every block: what a reader that died between two stores left behind
  bool take_free(uint64_t bytes, uint64_t at_most, uint32_t& index);
  bool fill_hole(uint64_t bytes, uint64_t at_most, uint32_t& index, int& error);
  void count_committed(int64_t change);
  bool grow(uint64_t bytes, uint32_t& index, int& error);
  bool new_number(uint32_t& index, int& error);  // a record to fill in
  // A block of `bytes` from free neighbours, or from a larger free one: the pool is full, and what is free lies in the wrong sizes.
  bool join(uint64_t bytes, uint32_t& index, int& error);
  void list_free();  // writes free_ anew from the records
  void resize(uint32_t index, uint64_t offset, uint64_t bytes);
  bool commit(uint64_t needed, int& error);
  bool reserve(uint64_t bytes);  // of the budget
  // Takes memory for a range, `reserved` bytes of it new to the budget; asks the other processes for theirs if the budget has no more.
  bool back(uint64_t offset, uint64_t bytes, uint64_t reserved, int& error);
  bool fill(uint64_t offset, uint64_t bytes, uint64_t reserved, int& error);  // the same, with what reserve() has got
  void trim_locked();  // gives the memory of free blocks back to the system
  void let_go_for_left(uint32_t index);
  void make_free(uint32_t index);
  bool held(uint32_t index) const;  // by anybody; if not, all reads of it are over

  std::shared_ptr<const Neighbourhood> graph_;
  MappingRef own_, budget_;
  std::vector<MemoryLimit> limits_;
  std::mutex mutex_;
  std::vector<Route> routes_;
  std::unordered_map<const void*, std::pair<uint32_t, uint64_t>> lent_;  // not yet sent: block and bytes asked for
  struct {
    Shortage kind = Shortage::passing;  // as it looks
    int64_t first_ns = 0;               // 0: no shortage
    int64_t since_ns = 0, last_ns = 0;  // since when it has looked so; the last look
    uint64_t changes = 0;
  } short_;
  // The driver takes no memory for further input while an actor lacks some for a result: else inputs, which are many and come first, would
  // take each block that a finished execution leaves.
  bool yields() const;
  // And while earlier input is on its way, further input leaves a quarter of the budget to results: with all of it taken by input before an
  // actor has got to run once, no execution could end.
  bool holds_back(uint64_t bytes) const;
  int64_t may_return_within() const;  // how long, in ns, others may take to return free memory; 0: they have none
  Shortage look(uint64_t wanted, uint64_t began, int64_t waited_ns, uint64_t& changes);
  std::vector<Entry> records_;
  std::vector<uint32_t> retired_;
  std::map<uint64_t, std::vector<uint32_t>> free_, holes_;  // by block size; last in, first out
  uint64_t cursor_ = 0;     // cut into blocks so far
  uint64_t committed_ = 0;  // the beginning of the pool up to here has been given memory once; holes may have lost theirs
  uint64_t memory_ = 0;     // bytes that have memory now
  uint64_t free_bytes_ = 0; // in free blocks that have memory
  uint64_t out_bytes_ = 0;  // in published blocks, as far as is known: some may be free already
  int64_t trimmed_ns_ = 0;  // the last trim, on the clock of budget_wanted_ns
  std::atomic<bool> ended_{false};
};

// Clears `process`'s bit on a block; whoever clears the last bit pushes the block on its owner's free stack, or gives its memory back to the
// system if the owner has left. Idempotent.
void let_go(Mapping& mapping, uint32_t index, uint32_t process);
// The owner has left or died: from now on whoever lets go of the block last gives its memory back. If nobody holds it, that happens here.
void leave_to_holders(Mapping& mapping, uint32_t index);
// Lets go of what processes that have died hold, in every arena that this process has mapped. The driver also gives back what memory the
// arenas of the dead have that nobody else holds.
void let_go_for_dead(const Neighbourhood& graph);

}  // namespace raycomm
