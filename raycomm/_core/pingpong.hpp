// The floor: bare wait and post on shared words with the product's wait policy, nothing else. For benches and the lost wake-up test.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>

#include <cstdio>
#include <memory>
#include <stdexcept>

#include "wait.hpp"

namespace raycomm {

// One 256-byte cell per party: {value, doorbell}. A party waits for a value in its own cell; others post it there.
class PingPong {
 public:
  PingPong(uint32_t parties, double spin_us, double yield_us, bool slices) : PingPong(spin_us, yield_us, slices) {
    fd_ = static_cast<int>(syscall(SYS_memfd_create, "raycomm-pingpong", MFD_CLOEXEC));
    if (fd_ < 0 || ftruncate(fd_, static_cast<off_t>(parties * sizeof(Cell))) != 0) throw std::runtime_error("no memory for a ping-pong");
    map(parties);
  }
  static std::unique_ptr<PingPong> attach(int pid, int fd, double spin_us, double yield_us, bool slices) {
    std::unique_ptr<PingPong> self(new PingPong(spin_us, yield_us, slices));
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    self->fd_ = open(path, O_RDWR | O_CLOEXEC);
    const off_t bytes = self->fd_ < 0 ? -1 : lseek(self->fd_, 0, SEEK_END);
    if (bytes <= 0) throw std::runtime_error("cannot attach to the ping-pong");
    self->map(static_cast<uint32_t>(static_cast<size_t>(bytes) / sizeof(Cell)));
    return self;
  }
  PingPong(const PingPong&) = delete;
  ~PingPong() {
    if (cells_) munmap(cells_, parties_ * sizeof(Cell));
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }

  // False if the deadline passed. Parks for as long as it takes: with slices off, a lost wake-up shows as a hang.
  bool wait(uint32_t party, uint64_t value, int64_t deadline) {
    Cell& cell = at(party);
    const auto done = [&] { return cell.value.load(std::memory_order_seq_cst) >= value; };
    for (;;) {
      const Wake wake = wait_until(done, cell.bell, policy_, recent_, deadline);
      if (wake != Wake::slice_ended) return wake == Wake::ready;
    }
  }
  void post(uint32_t party, uint64_t value) {
    Cell& cell = at(party);
    cell.value.store(value, std::memory_order_seq_cst);
    ring_bell(cell.bell);
  }
  // Plays `rounds` rounds with another party: one serves (posts the round's number, then waits for the answer), the other waits, then answers.
  // A pause of random length before each wait lets the other's post fall on each moment of the way to the park, and nobody posts twice
  // before the answer has come, so that nothing makes up for a wake-up that was lost. Returns the rounds played; fewer: one was lost, or
  // the other did not come within `timeout_ns` (of one round).
  uint64_t rally(uint32_t party, uint32_t other, bool serves, uint64_t rounds, uint32_t pauses, uint64_t seed, int64_t timeout_ns) {
    uint64_t random = seed | 1;
    for (uint64_t round = 1; round <= rounds; ++round) {
      random ^= random << 13, random ^= random >> 7, random ^= random << 17;
      if (serves) post(other, round);
      for (uint64_t n = pauses == 0 ? 0 : random % pauses; n > 0; --n) cpu_pause();
      if (!wait(party, round, now_ns() + timeout_ns)) return round - 1;
      if (!serves) post(other, round);
    }
    return rounds;
  }

 private:
  struct Cell {
    alignas(128) std::atomic<uint64_t> value;
    alignas(128) Doorbell bell;
  };
  PingPong(double spin_us, double yield_us, bool slices) {
    policy_.spin_ns = static_cast<int64_t>(spin_us * 1e3);
    policy_.yield_ns = static_cast<int64_t>(yield_us * 1e3);
    if (!slices) policy_.slice_ns = 3'600'000'000'000;
  }
  void map(uint32_t parties) {
    parties_ = parties;
    void* p = mmap(nullptr, parties * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (p == MAP_FAILED) throw std::runtime_error("cannot map the ping-pong");
    cells_ = static_cast<Cell*>(p);
  }
  Cell& at(uint32_t party) {
    if (party >= parties_) throw std::out_of_range("no such party");
    return cells_[party];
  }
  WaitPolicy policy_;
  RecentWaits recent_;
  Cell* cells_ = nullptr;
  uint32_t parties_ = 0;
  int fd_ = -1;
};

}  // namespace raycomm
