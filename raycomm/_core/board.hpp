// The status board and the flight recorder: what every process of a graph does now, and what this one did of late. Diagnosis only; all
// stores are relaxed and order nothing. The board lies in the driver's arena, which every process of the graph has mapped, so each sees
// all of them; the recorder lies in the process's own and outlives it as long as a peer has it mapped.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "arena.hpp"

namespace raycomm {

using ProcessSet = std::array<uint64_t, kHolderWords>;  // one bit per process
inline void add_to(ProcessSet& set, uint32_t process) { set[process / 64] |= 1ull << (process % 64); }
inline bool is_in(const ProcessSet& set, uint32_t process) { return (set[process / 64] >> (process % 64) & 1) != 0; }

struct Doing {
  Activity kind = Activity::idle;
  uint32_t subject = 0;       // reading, writing: a channel; computing: a place in the list of actions
  double seconds = 0;         // since it began
  uint64_t iteration = 0;
  ProcessSet waits_for{};     // of a wait
};

class Board {
 public:
  Board(MappingRef own, uint32_t process) : own_(std::move(own)), process_(process) { row_ = &nobody_; }

  // From now on this process's row is the one in the driver's arena.
  void hang(MappingRef driver);

  void set(Activity kind, uint32_t subject, uint64_t at) {
    row_->activity.store(static_cast<uint64_t>(kind) | uint64_t{subject & 0xffff} << 4 | (at >> 16) << 20, std::memory_order_relaxed);
  }
  void set_waiting(Activity kind, uint32_t subject, const ProcessSet& peers, uint64_t at) {
    if (peers != waits_for_) {  // mostly the same as last time: the one writer of an only input
      waits_for_ = peers;
      for (uint32_t w = 0; w < kHolderWords; ++w) row_->waits_for[w].store(peers[w], std::memory_order_relaxed);
    }
    set(kind, subject, at);
  }
  // After a wait: back in the call that it happened in, or between two steps.
  void resume(uint64_t at) {
    if (call_began_ != 0) set(Activity::computing, call_, call_began_);
    else set(Activity::idle, 0, at);
  }
  void finished(uint64_t iterations) { row_->iteration.store(iterations, std::memory_order_relaxed); }
  uint64_t iteration() const { return row_->iteration.load(std::memory_order_relaxed); }

  void record(Activity kind, uint32_t subject, uint64_t iteration, uint64_t start, uint64_t end, uint64_t bytes);
  // A call of a method: open when it begins, closed by the next read, write or call. One thread (the loop) only.
  void open_call(uint32_t place, uint64_t at) {
    call_ = place;
    call_began_ = at;
    set(Activity::computing, place, at);
  }
  void close_call(uint64_t at) {
    if (call_began_ == 0) return;
    close_open_call(at);
  }

  // For reports.
  Doing doing(uint32_t process) const;
  uint32_t rows() const { return driver_ ? driver_->board_count() : 0; }
  // Executions that `process` has finished; what it holds of a later one it will let go of by itself.
  uint64_t iteration_of(uint32_t process) const;
  // Whether `process` is not part of a circle of waits. `awake`: known to have what their rows wait for. `changes`: differs from look to look
  // while anybody in the circle moves.
  bool can_move(uint32_t process, const std::vector<uint32_t>& awake, uint64_t& changes) const;

 private:
  void close_open_call(uint64_t at);
  MappingRef own_, driver_;
  uint32_t process_;
  BoardRow* row_;
  BoardRow nobody_{};  // where there is no board
  ProcessSet waits_for_{};
  uint32_t call_ = 0;
  uint64_t call_began_ = 0;
};

// Ticks of `mapping`'s machine as nanoseconds of CLOCK_MONOTONIC.
class TickScale {
 public:
  explicit TickScale(const Mapping& mapping);
  int64_t clock_ns(uint64_t at) const { return static_cast<int64_t>(start_ns_ + (static_cast<double>(at) - start_ticks_) * ns_per_tick_); }
  double ns(uint64_t duration) const { return static_cast<double>(duration) * ns_per_tick_; }

 private:
  double start_ticks_, start_ns_, ns_per_tick_;
};

struct Operation {
  uint64_t start, end, bytes;
  uint32_t iteration, subject;
  Activity kind;
};

// The recorder's contents, oldest first. What is overwritten while it is being copied is left out.
std::vector<Operation> recent_operations(const Mapping& mapping);

}  // namespace raycomm
