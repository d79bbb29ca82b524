// Blocks: bulk memory of one writing process and graph, reference-counted by one bit per reader process.
//
// The owner keeps all bookkeeping private; shared memory holds only what readers need (where a block lies, its generation, who still
// holds it). So a reader that goes mad can at worst free a block early, never make the owner follow a wild offset.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "arena.hpp"

namespace raycomm {

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
  uint64_t wanted = 0, free = 0, limit = 0;
  int system_error = 0;                                // of fallocate, 0 if the budget is what ran out
  std::vector<std::pair<uint32_t, uint64_t>> holders;  // process, bytes it holds in this pool
};

// Used by the owning process only, one thread at a time.
class Pool {
 public:
  // `budget` is the arena whose header counts the memory of the whole graph (the driver's).
  Pool(MappingRef own, MappingRef budget) : own_(std::move(own)), budget_(std::move(budget)) {}

  // A block of at least `bytes`, most recently released first (a fresh 16 MiB block costs 8 ms of page faults, a reused one 1 ms).
  // Throws PoolExhausted.
  uint32_t acquire(uint64_t bytes);
  void give_back(uint32_t index);                          // acquired, but not published
  void publish(uint32_t index, const HolderSet& holders);  // before the ring's cursor moves
  unsigned char* bytes(uint32_t index) const { return own_->at(records_[index].offset); }  // not the shared copy: a reader could have changed it
  uint32_t generation(uint32_t index) const { return own_->block(index).generation.load(std::memory_order_relaxed); }

  uint64_t committed() const { return committed_; }
  uint64_t in_use() const;  // bytes of blocks that are not free, after collecting what readers released

 private:
  enum class State : uint8_t { free, filling, published, retired };  // retired: its bytes belong to another block now
  struct Record {
    uint64_t offset, bytes;
    State state;
  };
  void collect();                        // takes what readers pushed on the free stack
  void scan();                           // looks at every block: what a reader that died between two stores left behind
  bool take_free(uint64_t bytes, uint64_t at_most, uint32_t& index);
  bool grow(uint64_t bytes, uint32_t& index, int& error);
  bool new_number(uint32_t& index, int& error);  // a record to fill in
  // A block of `bytes` from free neighbours, or from a larger free one: the pool is full, and what is free lies in the wrong sizes.
  bool join(uint64_t bytes, uint32_t& index, int& error);
  void list_free();  // writes free_ anew from the records
  void resize(uint32_t index, uint64_t offset, uint64_t bytes);
  bool commit(uint64_t needed, int& error);
  void make_free(uint32_t index);

  MappingRef own_, budget_;
  std::vector<Record> records_;
  std::vector<uint32_t> retired_;
  std::map<uint64_t, std::vector<uint32_t>> free_;  // by block size; last in, first out
  uint64_t cursor_ = 0, committed_ = 0, free_bytes_ = 0;
};

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

// Clears `process`'s bit on a block; whoever clears the last bit pushes the block on its owner's free stack. Idempotent.
void let_go(Mapping& mapping, uint32_t index, uint32_t process);

}  // namespace raycomm
