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
//     64       ring_count           u32
//     68       block_capacity       u32
//     72       board_offset         u64
//     80       claims_offset        u64
//     88       records_offset       u64
//     96       nodes_offset         u64
//     104      board_count          u32   rows; only the driver's arena has any
//     108      claim_count          u32   likewise; a power of two
//     112      record_capacity      u32   a power of two
//     116      node_count           u32
//     120      waker                u32   descriptor of a pipe's writing end in the owner, kNoWaker: none
//     128      closed               u64   0 open, else reason | process << 32; set once, by anyone
//     192      doorbell.counter     u32   the futex word of this process
//     196      doorbell.sleepers    u32
//     200      doorbell.armed       u32   1: an event loop waits at the waker's reading end
//     256      free_stack           u64   block index + 1 of the block released last, 0 if none
//     320      record_count         u64   records written so far; by the owner only
//     328      start_ticks          u64   the tick counter and the clock when the arena was made
//     336      start_ns             u64
//     344      pool_committed       u64   bytes of the pool that are backed by memory
//     352      block_count          u32   entries of the block table in use
//     384      budget_limit         u64   of the whole graph; only the driver's arena's is used
//     392      budget_used          u64
//     400      budget_wanted_ns     u64   when a process last found the budget used up
//     408      results_wanted_ns    u64   the same, of processes other than the driver
//     448      loop_state           u32   0 none, 1 running, 2 left
//   rings_offset   ring 0, ring 1, ... each 64-byte aligned
//   board_offset   BoardRow[board_count], 128 bytes each: what each process of the graph does now
//   claims_offset  u64[claim_count]: execution * 4 + 1 started, + 2 cancelled; at execution modulo claim_count
//   records_offset Record[record_capacity], 32 bytes each: the flight recorder, oldest overwritten first
//   nodes_offset   NodeCounters[node_count], 64 bytes each, by place in the owner's list of actions
//   blocks_offset  BlockHeader[block_capacity], 64 bytes each
//   pool_offset    bulk bytes, page aligned, committed by fallocate as the pool grows
//
//   ring (one per channel: one writer, the arena's owner, and a fixed set of readers)
//   0        slots u32 (a power of two), slot_bytes u32, reader_count u32, channel u32
//   64       published             u64   messages published so far; written by the writer only, like the rest of this line
//   72       counters: bytes, messages in blocks, pickled values, failures, waits for room, ticks waited, u64 each
//   128      taken[reader]         u64   messages taken so far; 64 bytes each, written by that reader only
//            behind it on its line: reads that found nothing and waited, and ticks they waited, u64 each
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
//   block given_back         writer                   0 -> 1 for a block that is held when it leaves: it is its holders' now
//                            reader process           1 -> 2 once nobody holds it, then gives its memory back to the system
//                            writer                   -> 0 when it learns of that
//   free_stack               any reader process       pushes a block whose last bit it cleared
//                            writer                   takes the whole stack at once (so there is no ABA)
//   closed                   any process              once, 0 -> reason
//   board row, records       its process              relaxed stores: they say how things stand, and order nothing
//   claims                   who reads the input      compare-and-swap, when an execution begins
//                            driver                   compare-and-swap, when it cancels one that has not begun
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace raycomm {

inline constexpr uint64_t kMagic = 0x314d4d4f43594152ull;
inline constexpr uint32_t kLayoutVersion = 3;
inline constexpr size_t kLine = 64;
inline constexpr uint32_t kInline = 0xffffffffu;
inline constexpr uint32_t kNoWaker = 0xffffffffu;
inline constexpr uint32_t kDriver = 0;
inline constexpr uint32_t kMaxProcesses = 256;
inline constexpr uint32_t kHolderWords = kMaxProcesses / 64;

enum class Closed : uint32_t { open = 0, teardown = 1, peer_died = 2, failed = 3 };
enum class Kind : uint32_t { value = 1, failure = 2 };
// What a process does. Reading, writing (waiting for room), memory and arriving (waiting for what comes over a link, beside a
// message that it has read) are waits: the board row says for whom.
enum class Activity : uint32_t { idle = 0, reading = 1, computing = 2, writing = 3, memory = 4, arriving = 5 };
enum class LoopState : uint32_t { none = 0, running = 1, left = 2 };
// Of a block's memory: its owner sees to it; the owner has left, and whoever lets go of it last gives it back; that has happened.
enum class GivenBack : uint32_t { no = 0, by_last_holder = 1, done = 2 };

struct alignas(kLine) Doorbell {
  std::atomic<uint32_t> counter;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> armed;
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
  uint64_t board_offset;
  uint64_t claims_offset;
  uint64_t records_offset;
  uint64_t nodes_offset;
  uint32_t board_count;
  uint32_t claim_count;
  uint32_t record_capacity;
  uint32_t node_count;
  uint32_t waker;
  alignas(kLine) std::atomic<uint64_t> closed;
  Doorbell doorbell;
  alignas(kLine) std::atomic<uint64_t> free_stack;
  alignas(kLine) std::atomic<uint64_t> record_count;
  uint64_t start_ticks;
  uint64_t start_ns;
  std::atomic<uint64_t> pool_committed;
  std::atomic<uint32_t> block_count;
  alignas(kLine) uint64_t budget_limit;
  std::atomic<uint64_t> budget_used;
  std::atomic<uint64_t> budget_wanted_ns;
  std::atomic<uint64_t> results_wanted_ns;
  alignas(kLine) std::atomic<uint32_t> loop_state;
};

struct alignas(kLine) Cursor {
  std::atomic<uint64_t> value;
  std::atomic<uint64_t> waits;
  std::atomic<uint64_t> waited;
};

struct alignas(kLine) Published {
  std::atomic<uint64_t> value;
  std::atomic<uint64_t> bytes;
  std::atomic<uint64_t> in_blocks;
  std::atomic<uint64_t> pickles;
  std::atomic<uint64_t> failures;
  std::atomic<uint64_t> waits;
  std::atomic<uint64_t> waited;
};

struct RingHeader {
  uint32_t slots;
  uint32_t slot_bytes;
  uint32_t reader_count;
  uint32_t channel;
  Published published;
  // Cursor taken[reader_count], then the slots.
};

// What a process does now. One store per change of state: kind, subject and since when lie in one word.
struct alignas(kLine) BoardRow {
  std::atomic<uint64_t> activity;                             // kind | subject << 4 | (ticks >> 16) << 20; see board.hpp
  std::atomic<uint64_t> iteration;                            // executions finished; the one under way has this number
  alignas(kLine) std::atomic<uint64_t> waits_for[kHolderWords];  // processes, one bit each; of use while the kind is a wait
};

// One operation of the flight recorder. `what` is 0 while the others change: iteration << 32 | subject << 8 | kind, where the kind is
// reading or writing (waits included; the subject is a channel) or computing (the subject is a place in the list of actions).
struct Record {
  std::atomic<uint64_t> start, end;  // ticks
  std::atomic<uint64_t> bytes;
  std::atomic<uint64_t> what;
};

struct alignas(kLine) NodeCounters {
  std::atomic<uint64_t> calls, ticks, longest;
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
  std::atomic<uint32_t> given_back;             // see GivenBack
  uint64_t offset;  // of the bytes, from the start of the arena
  uint64_t bytes;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(ArenaHeader) == 512 && sizeof(BlockHeader) == 64 && sizeof(SlotHeader) == 32 && sizeof(BufferEntry) == 16);
static_assert(sizeof(RingHeader) == 128 && sizeof(BoardRow) == 128 && sizeof(Record) == 32 && sizeof(NodeCounters) == 64 && offsetof(RingHeader, published) == 64);

inline constexpr size_t align_up(size_t value, size_t to) { return (value + to - 1) & ~(to - 1); }
inline constexpr size_t frame_table_offset(size_t payload_bytes) { return align_up(payload_bytes, 8); }
inline constexpr size_t ring_bytes(uint32_t slots, uint32_t slot_bytes, uint32_t readers) {
  return sizeof(RingHeader) + readers * sizeof(Cursor) + static_cast<size_t>(slots) * slot_bytes;
}

}  // namespace raycomm
