// An arena as one process sees it: its own (created) or a peer's (attached). See layout.hpp for the bytes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "layout.hpp"
#include "wait.hpp"

namespace raycomm {

// Counts forks of this process. An endpoint remembers the value it was made under and refuses to work under another; deleters of
// views do nothing then (a forked DataLoader worker inherits the tensors, but not the right to free the parent's blocks).
// The counter only ever changes in a child, between fork and the return to user code.
uint32_t fork_epoch();
void install_fork_counter();

struct ArenaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr uint32_t kMaxSlots = 1u << 16;
inline constexpr uint32_t kMaxSlotBytes = 1u << 22;

struct RingShape {
  uint32_t channel;
  uint32_t slots;       // a power of two
  uint32_t slot_bytes;  // header included, a multiple of 64
  uint32_t readers;
};

// What an arena is to hold.
struct ArenaShape {
  std::vector<RingShape> rings;
  uint32_t block_capacity = 0;
  uint64_t pool_bytes = 0, budget_bytes = 0;
  uint32_t board_rows = 0, claims = 0, records = 0, nodes = 0;  // claims and records: 0 or a power of two
  bool waker = false;                                           // a pipe that wakes the owner's event loops
};

// Takes pages for a range of a memfd now, so that touching them later cannot fail. 0, or what the system said.
int commit_bytes(int fd, uint64_t offset, uint64_t bytes);

// One mapping of one memfd. Shared by the endpoints and by every view of a block in it; unmapped when the last of them is gone,
// which may be long after teardown.
class Mapping {
 public:
  static Mapping* create(const ArenaShape& shape, std::span<const unsigned char, 16> nonce);
  // Opens /proc/<pid>/fd/<fd>. Throws ArenaError ("not reachable this way: ...") if that is not the arena with this nonce.
  static Mapping* attach(int pid, int fd, std::span<const unsigned char, 16> nonce);

  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void add_ref() { refs_.fetch_add(1, std::memory_order_relaxed); }
  void release();  // any thread, no Python; does nothing in a forked child

  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(base_); }
  unsigned char* at(uint64_t offset) const { return base_ + offset; }
  // Sizes and offsets as they were when the mapping was made and checked; shared bytes may change later, these do not.
  uint64_t file_bytes() const { return file_bytes_; }
  uint64_t pool_offset() const { return pool_offset_; }
  uint32_t block_capacity() const { return block_capacity_; }
  BlockHeader& block(uint32_t index) const { return reinterpret_cast<BlockHeader*>(base_ + blocks_offset_)[index]; }
  uint32_t board_count() const { return board_count_; }
  BoardRow& board_row(uint32_t index) const { return reinterpret_cast<BoardRow*>(base_ + board_offset_)[index]; }
  uint32_t claim_count() const { return claim_count_; }
  std::atomic<uint64_t>& claim(uint64_t execution) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(base_ + claims_offset_)[execution & (claim_count_ - 1)];
  }
  uint32_t record_capacity() const { return record_capacity_; }
  Record& record(uint32_t index) const { return reinterpret_cast<Record*>(base_ + records_offset_)[index]; }
  uint32_t node_count() const { return node_count_; }
  NodeCounters& node(uint32_t index) const { return reinterpret_cast<NodeCounters*>(base_ + nodes_offset_)[index]; }
  // After a seq_cst store that the owner may be waiting for.
  void ring_bell() const { raycomm::ring_bell(header().doorbell, waker_); }
  int waker_end() const { return waker_end_; }  // the reading end, in the owner; -1: none
  RingHeader& ring(uint32_t channel, RingShape& shape) const;  // found by channel id; shape is a checked private copy
  int fd() const { return fd_; }
  int pidfd() const { return pidfd_; }
  uint32_t made_under() const { return epoch_; }

  // Closes for everyone: sets the reason once and wakes every sleeper of the owner. Only stores; safe in a signal handler.
  void close(Closed reason, uint32_t process);

 private:
  Mapping() = default;
  ~Mapping();
  void remember(const ArenaHeader& header);  // a checked or own one
  unsigned char* base_ = nullptr;
  uint64_t file_bytes_ = 0, blocks_offset_ = 0, pool_offset_ = 0;
  uint32_t block_capacity_ = 0, ring_count_ = 0, epoch_ = 0;
  uint64_t rings_offset_ = 0, board_offset_ = 0, claims_offset_ = 0, records_offset_ = 0, nodes_offset_ = 0;
  uint32_t board_count_ = 0, claim_count_ = 0, record_capacity_ = 0, node_count_ = 0;
  int fd_ = -1, pidfd_ = -1, waker_ = -1, waker_end_ = -1;
  std::atomic<uint32_t> refs_{1};
};

// Intrusive pointer to a Mapping.
class MappingRef {
 public:
  MappingRef() = default;
  explicit MappingRef(Mapping* owned) : mapping_(owned) {}
  MappingRef(const MappingRef& other) : mapping_(other.mapping_) {
    if (mapping_) mapping_->add_ref();
  }
  MappingRef(MappingRef&& other) noexcept : mapping_(std::exchange(other.mapping_, nullptr)) {}
  MappingRef& operator=(MappingRef other) noexcept {
    std::swap(mapping_, other.mapping_);
    return *this;
  }
  ~MappingRef() {
    if (mapping_) mapping_->release();
  }
  Mapping* operator->() const { return mapping_; }
  Mapping& operator*() const { return *mapping_; }
  explicit operator bool() const { return mapping_ != nullptr; }

 private:
  Mapping* mapping_ = nullptr;
};

class Board;
class Pool;

// The processes of a graph as one of them knows them: its own arena and those of its peers, by process index.
class Neighbourhood {
 public:
  Neighbourhood(MappingRef own, uint32_t process);
  ~Neighbourhood();

  Mapping& own() const { return *own_; }
  MappingRef own_ref() const { return own_; }
  uint32_t process() const { return process_; }
  void add_peer(uint32_t process, MappingRef mapping) { peers_.push_back({process, std::move(mapping)}); }
  MappingRef peer(uint32_t process) const;
  template <class Visit>
  void each_peer(const Visit& visit) const {
    for (const Peer& peer : peers_) visit(peer.process, *peer.mapping);
  }

  uint64_t closed() const { return own_->header().closed.load(std::memory_order_seq_cst); }
  // Closes the own arena and every peer's. Closing travels on: a loop that leaves does the same for its neighbours.
  void close_all(Closed reason, uint32_t process) const;
  // Looks at the pidfds of all peers without waiting; closes everything if one has died. Runs at the end of each park slice.
  bool look_for_dead() const;
  // The same, but not more often than every 50 ms: it costs a system call per peer.
  void look_now_and_then() const;
  bool alive(uint32_t process) const;
  // How a process that is gone ended, as wait(2) gives it; nothing where this kernel does not say, or not yet.
  std::optional<int> ended_with(uint32_t process) const;

  Board& board() const { return *board_; }
  // From now on `driver`'s arena is the one with the board, the claims and the budget.
  void join(uint32_t driver);
  MappingRef driver() const { return driver_; }  // the own one before

  WaitPolicy policy;
  std::weak_ptr<Pool> pool;  // of this process, to be trimmed while it waits

 private:
  struct Peer {
    uint32_t process;
    MappingRef mapping;
  };
  MappingRef own_, driver_;
  uint32_t process_;
  std::vector<Peer> peers_;
  std::unique_ptr<Board> board_;
  mutable std::atomic<int64_t> looked_ns_{0};
};

}  // namespace raycomm
