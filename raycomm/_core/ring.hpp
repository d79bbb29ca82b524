// The two ends of a channel: a ring of slots in the writer's arena. First in, first out; every reader sees every message.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "arena.hpp"
#include "pool.hpp"

namespace raycomm {

// What is to be sent, gathered before anything is published. `payload` may lie in the slot itself (`in_slot`).
struct Outgoing {
  Kind kind = Kind::value;
  const unsigned char* payload = nullptr;
  size_t payload_bytes = 0;
  uint32_t pickles = 0;  // values in it that had to be pickled
  struct Buffer {
    const void* data;
    size_t bytes;
  };
  std::vector<Buffer> buffers;
};

// Buffers below this travel in the frame and are copied out by the reader; from it on each has a block of its own and is not copied.
inline constexpr size_t kBlockThreshold = 32768;

class RingWriter {
 public:
  // `readers[r]` is the process that reads through cursor r.
  RingWriter(const Neighbourhood& graph, uint32_t channel, const std::vector<uint32_t>& readers, Pool& pool);

  uint32_t channel() const { return shape_.channel; }
  uint64_t published() const { return ring_->published.value.load(std::memory_order_relaxed); }
  bool has_room() const;  // seq_cst: may be a waiter's second look
  void add_laggards(ProcessSet& processes) const;  // readers that keep it from having room
  void count_wait(uint64_t waited_ticks);

  // The inline part of the next slot, to encode straight into it.
  unsigned char* inline_begin() const { return slot(published()) + sizeof(SlotHeader); }
  size_t inline_bytes() const { return shape_.slot_bytes - sizeof(SlotHeader); }

  // A message laid out in slot and blocks but not yet visible; either publish() or abandon().
  struct Staged {
    SlotHeader header{};
    std::vector<uint32_t> blocks;
    std::vector<std::pair<uint32_t, uint64_t>> lent;  // memory the user filled in place, not copied: block, bytes
    size_t bytes = 0;                    // of the message
    uint32_t pickles = 0;
    struct Copy {
      void* to;
      const void* from;
      size_t bytes;
    };
    std::vector<Copy> copies;  // bulk bytes, to be copied by the caller (without the GIL if they are many)
    size_t copy_bytes = 0;
  };
  void stage(const Outgoing& message, Pool& pool, Staged& staged) const;  // throws PoolExhausted, nothing is held then
  void abandon(Staged& staged, Pool& pool) const;
  void commit(const Staged& staged, Pool& pool);  // writes the slot header and moves the cursor
  void notify() const;                            // wakes the readers that sleep

 private:
  unsigned char* slot(uint64_t number) const { return slots_ + (number & (shape_.slots - 1)) * shape_.slot_bytes; }
  MappingRef own_;
  RingHeader* ring_;
  RingShape shape_;
  Cursor* taken_;
  unsigned char* slots_;
  HolderSet holders_;
  std::vector<uint32_t> ids_;  // of the readers' processes, by cursor
  uint32_t route_;
  struct {
    uint64_t bytes = 0, in_blocks = 0, pickles = 0, failures = 0, waits = 0, waited = 0;
  } counted_;  // as in shared memory, which only this writer changes
  std::vector<MappingRef> readers_;
  mutable uint64_t known_free_until_ = 0;  // published may go up to here without looking at the readers' cursors again
};

// A message as the reader found it: private copies of header and table, checked; only bulk bytes still lie in shared memory.
struct Incoming {
  Kind kind = Kind::value;
  const unsigned char* payload = nullptr;
  size_t payload_bytes = 0;
  struct Buffer {
    const unsigned char* data;
    size_t bytes;
    uint32_t block;  // kInline, or the block that holds it
  };
  std::vector<Buffer> buffers;
  uint32_t frame_block = kInline;
  std::string problem;  // not empty: malformed, and why
};

class RingReader {
 public:
  RingReader(const Neighbourhood& graph, uint32_t writer, uint32_t channel, uint32_t reader);

  uint32_t channel() const { return shape_.channel; }
  uint64_t taken() const { return taken_->value.load(std::memory_order_relaxed); }
  uint64_t published() const { return ring_->published.value.load(std::memory_order_seq_cst); }
  void count_wait(uint64_t waited_ticks);
  bool ready() const { return ring_->published.value.load(std::memory_order_seq_cst) > next_; }  // ORDER publish, ORDER parking
  bool shared() const { return shape_.readers > 1; }

  void open(Incoming& message);      // requires ready()
  // A hold on a block of the open message; the process's bit is cleared when the last reference dies. To take once per block.
  Lease* lease(uint32_t block) const { return new Lease(source_, block, process_); }
  // Ends the message: frees the slot and the frame and wakes the writer. Blocks of buffers are let go by their leases.
  void close(const Incoming& message);
  // Ends a message nobody wants: lets go of all its blocks.
  void discard(const Incoming& message);

 private:
  bool locate(uint32_t block, uint32_t generation, uint64_t bytes, const unsigned char*& data) const;
  MappingRef own_, source_;
  RingHeader* ring_;
  RingShape shape_;
  Cursor* taken_;
  unsigned char* slots_;
  uint32_t process_;
  uint64_t next_;
  std::unique_ptr<unsigned char[]> scratch_;  // private copy of an inline frame
};

}  // namespace raycomm
