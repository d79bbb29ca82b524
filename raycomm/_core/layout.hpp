// Shared memory of one process and one graph: the arena. Everything here is plain data that several processes map at once, so
// every offset is fixed and checked (static_assert below; tests/unit/test_layout.py compares this drawing with the code).
//
//   arena (one memfd per process and graph, written mostly by its owner)
//   offset   what
//   0        ArenaHeader, 512 bytes
//     0        magic                 u64   "RAYCOMM1"
//     8        layout_version        u32
//     12       owner_pid             u32
//     16       nonce                 16 bytes, told to peers over Ray; checked before anything else
//     32       file_bytes            u64
//     40       rings_offset          u64
//     48       blocks_offset         u64   block table
//     56       pool_offset           u64   bulk bytes
//     64       ring_count            u32
//     68       block_capacity        u32
//     128      closed                u64   0 open, else reason | process << 32; set once, by anyone
//     192      doorbell.counter      u32   the futex word of this process
//     196      doorbell.sleepers     u32
//     256      free_stack            u64   block index + 1 of the block released last, 0 if none
//     320      activity              u64   what the owner does: kind | subject << 32
//     384      budget_limit          u64   of the whole graph; only the driver's arena's is used
//     392      budget_used           u64
//     448      loop_state            u32   0 none, 1 running, 2 left
//   rings_offset   ring 0, ring 1, ... each 64-byte aligned
//   blocks_offset  BlockHeader[block_capacity], 64 bytes each
//   pool_offset    bulk bytes, page aligned, committed by fallocate as the pool grows
//
//   ring (one per channel: one writer, the arena's owner, and a fixed set of readers)
//   0        slots u32 (a power of two), slot_bytes u32, reader_count u32, channel u32
//   64       published             u64   messages published so far; written by the writer only
//   128      taken[reader]         u64   messages taken so far; 64 bytes each, written by that reader only
//   128 + 64 * reader_count        slot 0, slot 1, ... slot_bytes each
//
//   slot
//   0        SlotHeader, 32 bytes
//     0        sequence              u32   low half of the message number
//     4        kind                  u32   1 value, 2 failure
//     8        payload_bytes         u64
//     16       buffer_count          u32
//     20       block_index           u32   kInline: the frame follows in the slot; else it lies in that block
//     24       block_generation      u32
//     28       reserved              u32   0
//   32       inline frame
//
//   frame    payload, padding to 8, BufferEntry[buffer_count] (16 bytes each), then the small buffers, each padded to 8
//
// Who may change what
//   state                    who                      when
//   published                writer                   after slot and blocks are complete
//   taken[r]                 reader r                 after the message was decoded or failed to decode
//   block holders, count     writer sets              before publishing
//                            reader process clears    its own bit, when its last view dies
//   free_stack               any reader process       pushes a block whose last bit it cleared
//                            writer                   takes the whole stack at once (so there is no ABA)
//   closed                   any process              once, 0 -> reason
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace raycomm {

inline constexpr uint64_t kMagic = 0x314d4d4f43594152ull;
inline constexpr uint32_t kLayoutVersion = 1;
inline constexpr size_t kLine = 64;
inline constexpr uint32_t kInline = 0xffffffffu;
inline constexpr uint32_t kMaxProcesses = 256;
inline constexpr uint32_t kHolderWords = kMaxProcesses / 64;

enum class Closed : uint32_t { open = 0, teardown = 1, peer_died = 2, failed = 3 };
enum class Kind : uint32_t { value = 1, failure = 2 };
enum class Activity : uint32_t { idle = 0, reading = 1, computing = 2, writing = 3 };
enum class LoopState : uint32_t { none = 0, running = 1, left = 2 };

struct alignas(kLine) Doorbell {
  std::atomic<uint32_t> counter;
  std::atomic<uint32_t> sleepers;
};

struct ArenaHeader {
  uint64_t magic;
  uint32_t layout_version;
  uint32_t owner_pid;
  unsigned char nonce[16];
  uint64_t file_bytes;
  uint64_t rings_offset;
  uint64_t blocks_offset;
  uint64_t pool_offset;
  uint32_t ring_count;
  uint32_t block_capacity;
  alignas(kLine) std::atomic<uint64_t> closed;
  Doorbell doorbell;
  alignas(kLine) std::atomic<uint64_t> free_stack;
  alignas(kLine) std::atomic<uint64_t> activity;
  alignas(kLine) uint64_t budget_limit;
  std::atomic<uint64_t> budget_used;
  alignas(kLine) std::atomic<uint32_t> loop_state;
};

struct alignas(kLine) Cursor {
  std::atomic<uint64_t> value;
};

struct RingHeader {
  uint32_t slots;
  uint32_t slot_bytes;
  uint32_t reader_count;
  uint32_t channel;
  alignas(kLine) Cursor published;
  // Cursor taken[reader_count], then the slots.
};

struct SlotHeader {
  uint32_t sequence;
  Kind kind;
  uint64_t payload_bytes;
  uint32_t buffer_count;
  uint32_t block_index;
  uint32_t block_generation;
  uint32_t reserved;
};

struct BufferEntry {
  uint64_t bytes;
  uint32_t block_index;
  uint32_t block_generation;
};

struct alignas(kLine) BlockHeader {
  std::atomic<uint64_t> holders[kHolderWords];  // one bit per reader process
  std::atomic<uint32_t> count;                  // bits set; who clears the last one pushes the block on free_stack
  std::atomic<uint32_t> generation;
  std::atomic<uint32_t> next_free;
  uint32_t reserved;
  uint64_t offset;  // of the bytes, from the start of the arena
  uint64_t bytes;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(ArenaHeader) == 512 && sizeof(BlockHeader) == 64 && sizeof(SlotHeader) == 32 && sizeof(BufferEntry) == 16);
static_assert(sizeof(RingHeader) == 128 && offsetof(RingHeader, published) == 64);

inline constexpr size_t align_up(size_t value, size_t to) { return (value + to - 1) & ~(to - 1); }
inline constexpr size_t frame_table_offset(size_t payload_bytes) { return align_up(payload_bytes, 8); }
inline constexpr size_t ring_bytes(uint32_t slots, uint32_t slot_bytes, uint32_t readers) {
  return sizeof(RingHeader) + readers * sizeof(Cursor) + static_cast<size_t>(slots) * slot_bytes;
}

}  // namespace raycomm
