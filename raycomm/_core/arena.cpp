#include "arena.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <bit>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "board.hpp"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace raycomm {
namespace {

std::atomic<uint32_t> g_fork_epoch{0};

[[noreturn]] void fail(const std::string& what, int error) { throw ArenaError(what + ": " + std::strerror(error)); }

int make_memfd() {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int fd = static_cast<int>(syscall(SYS_memfd_create, "raycomm", flags | MFD_NOEXEC_SEAL));
  if (fd < 0 && errno == EINVAL) fd = static_cast<int>(syscall(SYS_memfd_create, "raycomm", flags));  // before Linux 6.3
  return fd;
}

unsigned char* map(int fd, uint64_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  return p == MAP_FAILED ? nullptr : static_cast<unsigned char*>(p);
}

}  // namespace

uint32_t fork_epoch() { return g_fork_epoch.load(std::memory_order_relaxed); }

void install_fork_counter() {
  static const int installed = pthread_atfork(nullptr, nullptr, [] { g_fork_epoch.fetch_add(1, std::memory_order_relaxed); });
  (void)installed;
}

int commit_bytes(int fd, uint64_t offset, uint64_t bytes) {
  int error;
  do error = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  while (error == EINTR);
  return error;
}

Mapping* Mapping::create(const ArenaShape& shape, std::span<const unsigned char, 16> nonce) {
  const std::vector<RingShape>& rings = shape.rings;
  if ((shape.claims & (shape.claims - 1)) != 0 || (shape.records & (shape.records - 1)) != 0) throw ArenaError("claims and records are powers of two");
  std::vector<uint64_t> offsets;
  const uint64_t rings_offset = align_up(sizeof(ArenaHeader) + 8 * rings.size(), kLine);
  uint64_t cursor = rings_offset;
  for (const RingShape& ring : rings) {
    if (ring.slots == 0 || !std::has_single_bit(ring.slots) || ring.slots > kMaxSlots || ring.slot_bytes % kLine != 0 ||
        ring.slot_bytes < 2 * kLine || ring.slot_bytes > kMaxSlotBytes || ring.readers == 0 || ring.readers > kMaxProcesses)
      throw ArenaError("a ring needs a power of two of slots, slots of a multiple of 64 bytes and 1 to 256 readers");
    offsets.push_back(cursor);
    cursor = align_up(cursor + ring_bytes(ring.slots, ring.slot_bytes, ring.readers), kLine);
  }
  const auto section = [&cursor](uint64_t bytes) { return std::exchange(cursor, align_up(cursor + bytes, kLine)); };
  ArenaHeader plan{};
  plan.board_offset = section(uint64_t{shape.board_rows} * sizeof(BoardRow));
  plan.claims_offset = section(uint64_t{shape.claims} * 8);
  plan.records_offset = section(uint64_t{shape.records} * sizeof(Record));
  plan.nodes_offset = section(uint64_t{shape.nodes} * sizeof(NodeCounters));
  const uint64_t blocks_offset = align_up(cursor, 4096);
  const uint64_t pool_offset = align_up(blocks_offset + uint64_t{shape.block_capacity} * sizeof(BlockHeader), 4096);
  const uint64_t file_bytes = align_up(pool_offset + shape.pool_bytes, 4096);

  Mapping* mapping = new Mapping;
  MappingRef guard(mapping);
  mapping->epoch_ = fork_epoch();
  mapping->fd_ = make_memfd();
  if (mapping->fd_ < 0) fail("memfd_create", errno);
  if (ftruncate(mapping->fd_, static_cast<off_t>(file_bytes)) != 0) fail("ftruncate of the arena", errno);
  if (fcntl(mapping->fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("sealing the arena", errno);
  // All but blocks is committed now: a page that cannot be had later would be a SIGBUS in somebody's hot path.
  if (int error = commit_bytes(mapping->fd_, 0, blocks_offset); error != 0) fail("no memory for the rings", error);
  mapping->base_ = map(mapping->fd_, file_bytes);
  if (!mapping->base_) fail("mmap of the arena", errno);
  if (shape.waker) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) fail("a pipe for the event loop", errno);
    mapping->waker_end_ = ends[0];
    mapping->waker_ = ends[1];
  }

  ArenaHeader& header = *new (mapping->base_) ArenaHeader{};
  header.layout_version = kLayoutVersion;
  header.owner_pid = static_cast<uint32_t>(getpid());
  std::memcpy(header.nonce, nonce.data(), nonce.size());
  header.file_bytes = file_bytes;
  header.rings_offset = rings_offset;
  header.blocks_offset = blocks_offset;
  header.pool_offset = pool_offset;
  header.ring_count = static_cast<uint32_t>(rings.size());
  header.block_capacity = shape.block_capacity;
  header.board_offset = plan.board_offset;
  header.claims_offset = plan.claims_offset;
  header.records_offset = plan.records_offset;
  header.nodes_offset = plan.nodes_offset;
  header.board_count = shape.board_rows;
  header.claim_count = shape.claims;
  header.record_capacity = shape.records;
  header.node_count = shape.nodes;
  header.waker = mapping->waker_ < 0 ? kNoWaker : static_cast<uint32_t>(mapping->waker_);
  header.start_ticks = ticks();
  header.start_ns = static_cast<uint64_t>(now_ns());
  header.budget_limit = shape.budget_bytes;
  mapping->remember(header);
  for (size_t i = 0; i < rings.size(); ++i) {
    std::memcpy(mapping->base_ + sizeof(ArenaHeader) + 8 * i, &offsets[i], 8);
    RingHeader& ring = *new (mapping->base_ + offsets[i]) RingHeader{};
    ring.slots = rings[i].slots;
    ring.slot_bytes = rings[i].slot_bytes;
    ring.reader_count = rings[i].readers;
    ring.channel = rings[i].channel;
  }
  header.magic = kMagic;
  mapping->add_ref();
  return mapping;
}

void Mapping::remember(const ArenaHeader& header) {
  file_bytes_ = header.file_bytes;
  rings_offset_ = header.rings_offset;
  blocks_offset_ = header.blocks_offset;
  pool_offset_ = header.pool_offset;
  block_capacity_ = header.block_capacity;
  ring_count_ = header.ring_count;
  board_offset_ = header.board_offset;
  claims_offset_ = header.claims_offset;
  records_offset_ = header.records_offset;
  nodes_offset_ = header.nodes_offset;
  board_count_ = header.board_count;
  claim_count_ = header.claim_count;
  record_capacity_ = header.record_capacity;
  node_count_ = header.node_count;
}

Mapping* Mapping::attach(int pid, int fd, std::span<const unsigned char, 16> nonce) {
  Mapping* mapping = new Mapping;
  MappingRef guard(mapping);
  mapping->epoch_ = fork_epoch();
  // The pidfd first: if the nonce then matches, the process that holds it is the one the pidfd names, not a recycled pid.
  mapping->pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (mapping->pidfd_ < 0) fail("not reachable this way: pidfd_open of process " + std::to_string(pid), errno);
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
  // Opened without blocking, and read before it is mapped: whatever lies there, a fifo or a device, does no harm.
  mapping->fd_ = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (mapping->fd_ < 0) fail(std::string("not reachable this way: open of ") + path, errno);
  ArenaHeader copy{};
  struct stat status{};
  if (fstat(mapping->fd_, &status) != 0 || !S_ISREG(status.st_mode) ||
      pread(mapping->fd_, static_cast<void*>(&copy), sizeof copy, 0) != static_cast<ssize_t>(sizeof copy) || copy.magic != kMagic ||
      std::memcmp(copy.nonce, nonce.data(), nonce.size()) != 0)
    throw ArenaError("not reachable this way: " + std::string(path) + " is not the arena that was announced (other PID namespace, or a recycled pid)");
  const int seals = fcntl(mapping->fd_, F_GET_SEALS);
  const uint64_t table_end = copy.blocks_offset + uint64_t{copy.block_capacity} * sizeof(BlockHeader);
  if (copy.layout_version != kLayoutVersion)
    throw ArenaError("process " + std::to_string(pid) + " uses shared memory layout " + std::to_string(copy.layout_version) + ", this one " +
                     std::to_string(kLayoutVersion));
  // Rings, board, claims, records and node counters lie between header and block table, each inside of it.
  const auto inside = [&copy](uint64_t offset, uint64_t count, uint64_t size) {
    return offset % kLine == 0 && offset >= copy.rings_offset && offset <= copy.blocks_offset && count * size <= copy.blocks_offset - offset;
  };
  const bool sections = inside(copy.board_offset, copy.board_count, sizeof(BoardRow)) && inside(copy.claims_offset, copy.claim_count, 8) &&
                        inside(copy.records_offset, copy.record_capacity, sizeof(Record)) &&
                        inside(copy.nodes_offset, copy.node_count, sizeof(NodeCounters)) &&
                        (copy.claim_count & (copy.claim_count - 1)) == 0 && (copy.record_capacity & (copy.record_capacity - 1)) == 0;
  if (!sections || copy.board_count > kMaxProcesses || seals < 0 || (seals & F_SEAL_SHRINK) == 0 || static_cast<uint64_t>(status.st_size) != copy.file_bytes ||
      copy.rings_offset < sizeof(ArenaHeader) + 8ull * copy.ring_count || copy.rings_offset > copy.blocks_offset ||
      copy.blocks_offset > copy.file_bytes || copy.blocks_offset % kLine != 0 || table_end > copy.pool_offset || copy.pool_offset > copy.file_bytes)
    throw ArenaError("the arena of process " + std::to_string(pid) + " has an impossible header");
  mapping->base_ = map(mapping->fd_, copy.file_bytes);
  if (!mapping->base_) fail("mmap of the arena of process " + std::to_string(pid), errno);
  mapping->remember(copy);
  if (copy.waker != kNoWaker) {
    // Only speed depends on it: an event loop also looks by itself now and then.
    std::snprintf(path, sizeof path, "/proc/%d/fd/%u", pid, copy.waker);
    struct stat pipe_status{};
    mapping->waker_ = open(path, O_WRONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (mapping->waker_ >= 0 && (fstat(mapping->waker_, &pipe_status) != 0 || !S_ISFIFO(pipe_status.st_mode))) ::close(std::exchange(mapping->waker_, -1));
  }
  // Mapped: the descriptor is no longer needed, the pidfd is.
  ::close(std::exchange(mapping->fd_, -1));
  mapping->add_ref();
  return mapping;
}

RingHeader& Mapping::ring(uint32_t channel, RingShape& shape) const {
  for (uint32_t i = 0; i < ring_count_; ++i) {
    uint64_t offset;
    std::memcpy(&offset, base_ + sizeof(ArenaHeader) + 8ull * i, 8);
    if (offset < rings_offset_ || offset % kLine != 0 || offset > blocks_offset_ - sizeof(RingHeader))
      throw ArenaError("a ring lies outside its arena");
    RingHeader& ring = *reinterpret_cast<RingHeader*>(base_ + offset);
    if (ring.channel != channel) continue;
    shape = {channel, ring.slots, ring.slot_bytes, ring.reader_count};
    if (shape.slots == 0 || shape.slots > kMaxSlots || !std::has_single_bit(shape.slots) || shape.slot_bytes < 2 * kLine ||
        shape.slot_bytes > kMaxSlotBytes || shape.slot_bytes % kLine != 0 || shape.readers == 0 || shape.readers > kMaxProcesses ||
        offset + ring_bytes(shape.slots, shape.slot_bytes, shape.readers) > blocks_offset_)
      throw ArenaError("the ring of channel " + std::to_string(channel) + " has an impossible shape");
    return ring;
  }
  throw ArenaError("no ring for channel " + std::to_string(channel) + " in this arena");
}

void Mapping::close(Closed reason, uint32_t process) {
  uint64_t open = 0;
  header().closed.compare_exchange_strong(open, static_cast<uint64_t>(reason) | uint64_t{process} << 32, std::memory_order_seq_cst);
  ring_bell();
}

void Mapping::release() {
  if (epoch_ != fork_epoch()) return;
  if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

Mapping::~Mapping() {
  if (base_) munmap(base_, file_bytes_);
  if (fd_ >= 0) ::close(fd_);
  if (pidfd_ >= 0) ::close(pidfd_);
  if (waker_ >= 0) ::close(waker_);
  if (waker_end_ >= 0) ::close(waker_end_);
}

Neighbourhood::Neighbourhood(MappingRef own, uint32_t process)
    : own_(std::move(own)), driver_(own_), process_(process), board_(std::make_unique<Board>(own_, process)) {}

Neighbourhood::~Neighbourhood() = default;

void Neighbourhood::join(uint32_t driver) {
  driver_ = peer(driver);
  board_->hang(driver_);
}

MappingRef Neighbourhood::peer(uint32_t process) const {
  if (process == process_) return own_;
  for (const Peer& peer : peers_)
    if (peer.process == process) return peer.mapping;
  throw ArenaError("process " + std::to_string(process) + " of the graph is not attached");
}

void Neighbourhood::close_all(Closed reason, uint32_t process) const {
  if (own_->made_under() != fork_epoch()) return;  // a forked child must not end its parent's graph
  own_->close(reason, process);
  for (const Peer& peer : peers_) peer.mapping->close(reason, process);
}

bool Neighbourhood::alive(uint32_t process) const {
  for (const Peer& peer : peers_) {
    if (peer.process != process) continue;
    pollfd fd{peer.mapping->pidfd(), POLLIN, 0};
    return poll(&fd, 1, 0) == 0;
  }
  return true;
}

void Neighbourhood::look_now_and_then() const {
  const int64_t now = now_ns();
  if (now - looked_ns_.load(std::memory_order_relaxed) < 50'000'000) return;
  looked_ns_.store(now, std::memory_order_relaxed);
  look_for_dead();
}

std::optional<int> Neighbourhood::ended_with(uint32_t process) const {
  // PIDFD_GET_INFO with PIDFD_INFO_EXIT, since Linux 6.15 (include/uapi/linux/pidfd.h); the headers this is built with may be older. The kernel
  // knows it once the parent has reaped the process.
  struct Info {
    uint64_t mask, cgroup;
    uint32_t ids[11];
    int32_t exit_code;
  };
  static_assert(sizeof(Info) == 64);
  constexpr uint64_t kExit = 1u << 3;
  Info info{};
  info.mask = kExit;
  if (process == process_ || ioctl(peer(process)->pidfd(), _IOWR(0xFF, 11, Info), &info) != 0 || (info.mask & kExit) == 0) return std::nullopt;
  return info.exit_code;
}

bool Neighbourhood::look_for_dead() const {
  for (const Peer& peer : peers_) {
    pollfd fd{peer.mapping->pidfd(), POLLIN, 0};
    if (poll(&fd, 1, 0) > 0) {
      close_all(Closed::peer_died, peer.process);
      return true;
    }
  }
  return false;
}

}  // namespace raycomm
