#include "arena.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <bit>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

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

Mapping* Mapping::create(const std::vector<RingShape>& rings, uint32_t block_capacity, uint64_t pool_bytes, uint64_t budget_bytes,
                         std::span<const unsigned char, 16> nonce) {
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
  const uint64_t blocks_offset = align_up(cursor, 4096);
  const uint64_t pool_offset = align_up(blocks_offset + uint64_t{block_capacity} * sizeof(BlockHeader), 4096);
  const uint64_t file_bytes = align_up(pool_offset + pool_bytes, 4096);

  Mapping* mapping = new Mapping;
  MappingRef guard(mapping);
  mapping->epoch_ = fork_epoch();
  mapping->fd_ = make_memfd();
  if (mapping->fd_ < 0) fail("memfd_create", errno);
  if (ftruncate(mapping->fd_, static_cast<off_t>(file_bytes)) != 0) fail("ftruncate of the arena", errno);
  if (fcntl(mapping->fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fail("sealing the arena", errno);
  // Header and rings are committed now: a page that cannot be had later would be a SIGBUS in somebody's hot path.
  if (int error = commit_bytes(mapping->fd_, 0, blocks_offset); error != 0) fail("no memory for the rings", error);
  mapping->base_ = map(mapping->fd_, file_bytes);
  if (!mapping->base_) fail("mmap of the arena", errno);
  mapping->file_bytes_ = file_bytes;
  mapping->rings_offset_ = rings_offset;
  mapping->blocks_offset_ = blocks_offset;
  mapping->pool_offset_ = pool_offset;
  mapping->block_capacity_ = block_capacity;
  mapping->ring_count_ = static_cast<uint32_t>(rings.size());

  ArenaHeader& header = *new (mapping->base_) ArenaHeader{};
  header.layout_version = kLayoutVersion;
  header.owner_pid = static_cast<uint32_t>(getpid());
  std::memcpy(header.nonce, nonce.data(), nonce.size());
  header.file_bytes = file_bytes;
  header.rings_offset = rings_offset;
  header.blocks_offset = blocks_offset;
  header.pool_offset = pool_offset;
  header.ring_count = mapping->ring_count_;
  header.block_capacity = block_capacity;
  header.budget_limit = budget_bytes;
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
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || static_cast<uint64_t>(status.st_size) != copy.file_bytes ||
      copy.rings_offset < sizeof(ArenaHeader) + 8ull * copy.ring_count || copy.rings_offset > copy.blocks_offset ||
      copy.blocks_offset > copy.file_bytes || copy.blocks_offset % kLine != 0 || table_end > copy.pool_offset || copy.pool_offset > copy.file_bytes)
    throw ArenaError("the arena of process " + std::to_string(pid) + " has an impossible header");
  mapping->base_ = map(mapping->fd_, copy.file_bytes);
  if (!mapping->base_) fail("mmap of the arena of process " + std::to_string(pid), errno);
  mapping->file_bytes_ = copy.file_bytes;
  mapping->rings_offset_ = copy.rings_offset;
  mapping->blocks_offset_ = copy.blocks_offset;
  mapping->pool_offset_ = copy.pool_offset;
  mapping->block_capacity_ = copy.block_capacity;
  mapping->ring_count_ = copy.ring_count;
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
  header().doorbell.counter.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(header().doorbell.counter);
}

void Mapping::release() {
  if (epoch_ != fork_epoch()) return;
  if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
}

Mapping::~Mapping() {
  if (base_) munmap(base_, file_bytes_);
  if (fd_ >= 0) ::close(fd_);
  if (pidfd_ >= 0) ::close(pidfd_);
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
