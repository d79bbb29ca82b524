// Waiting as Python sees it: without the GIL, in slices, with typed errors; and taking turns at an endpoint.
#pragma once

#include <Python.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>

#include "board.hpp"
#include "gil.hpp"
#include "pool.hpp"

namespace raycomm {

// Raised to Python; runtime code turns them into errors that name graph, edge and execution.
extern PyObject *g_timed_out, *g_closed, *g_pool_full, *g_pool_busy, *g_misuse, *g_overfull;

void raise_closed(uint64_t closed);
void raise_pool_full(const PoolExhausted& report, Shortage shortage);
bool in_its_process(const Neighbourhood& graph);  // a forked child must not touch the parent's rings; false: error set

// Seconds to a deadline; negative: none, 0: already over, so that only one look is taken.
int64_t deadline_after(double seconds);

inline bool on_main_thread() { return getpid() == static_cast<pid_t>(syscall(SYS_gettid)); }

enum class Waited { done, timed_out, raised };

// Waits with the GIL released, in slices: at the end of each, dead peers are looked for, memory that another process wants is returned and,
// on the main thread, signals are handled.
template <class Done>
Waited wait_in_slices(const Neighbourhood& graph, RecentWaits& recent, int64_t deadline, const Done& done) {
  const bool handles_signals = on_main_thread();
  for (;;) {
    Wake wake;
    {
      GilRelease released;
      do {
        wake = wait_until(done, graph.own().header().doorbell, graph.policy, recent, deadline);
        if (wake == Wake::slice_ended) {
          graph.look_for_dead();
        }
        if (wake != Wake::ready)
          if (const std::shared_ptr<Pool> pool = graph.pool.lock()) pool->trim_if_wanted();
      } while (wake == Wake::slice_ended && !handles_signals);
    }
    if (wake == Wake::ready) return Waited::done;
    if (wake == Wake::timed_out) graph.look_now_and_then();  // who polls with short limits must see a death as well
    if (handles_signals && PyErr_CheckSignals() != 0) return Waited::raised;
    if (wake == Wake::timed_out) return done() ? Waited::done : Waited::timed_out;
  }
}

// A wait for memory, from the first PoolExhausted on. Goes on while messages on their way hold blocks, however long; ends when what holds them
// is pinned or waits, directly or not, for this process.
class MemoryWait {
 public:
  MemoryWait(const Neighbourhood& graph, Pool& pool) : graph_(graph), pool_(pool), began_(ticks()) {}
  MemoryWait(const MemoryWait&) = delete;
  ~MemoryWait();
  void over() { over_ = true; }  // there was memory
  // One step: true, try again; false, a Python error is set (PoolFull, TimedOut, Closed, or a signal's). `interrupted()` ends the step early.
  template <class Interrupted>
  bool step(const PoolExhausted& report, int64_t deadline, const Interrupted& interrupted) {
    if (!judge(report, deadline)) return false;
    const auto& free_stack = graph_.own().header().free_stack;
    RecentWaits unlearned;
    const Waited waited = wait_in_slices(graph_, unlearned, std::min(now_ns() + kLookNs, deadline), [&] {
      return free_stack.load(std::memory_order_seq_cst) != 0 || graph_.closed() != 0 || interrupted();  // ORDER parking: let_go
    });
    graph_.look_for_dead();
    return waited != Waited::raised;
  }
  uint64_t began() const { return began_; }

 private:
  static constexpr int64_t kLookNs = 20'000'000;
  bool judge(const PoolExhausted& report, int64_t deadline);
  const Neighbourhood& graph_;
  Pool& pool_;
  uint64_t began_;  // ticks
  bool over_ = false;  // there was memory, or there will be none
};

// The Python error that is set, out of the way of other calls for a while.
class KeptError {
 public:
  KeptError() { PyErr_Fetch(&type_, &value_, &trace_); }
  KeptError(const KeptError&) = delete;
  ~KeptError() { PyErr_Restore(type_, value_, trace_); }

 private:
  PyObject *type_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
};

// One thread at a time and only in the process that made it; anything else is a clear error, not corruption.
class Turn {
 public:
  Turn(std::atomic<bool>& busy, uint32_t made_under, const char* what);
  ~Turn() {
    if (held_) busy_.store(false, std::memory_order_release);
  }
  explicit operator bool() const { return held_; }

 private:
  std::atomic<bool>& busy_;
  bool held_ = false;
};

// For the driver, where any thread may come: waits for its turn, up to the deadline, in slices so that signals are seen.
// All of it is native because Ctrl-C can strike between any two Python instructions, and a lock taken there would stay taken.
class Queue {
 public:
  enum class Entered { yes, timed_out, raised };
  // `served()` is asked with the GIL held after each slice; true: there is nothing left to wait for (counts as timed_out).
  template <class Served>
  Entered enter(int64_t deadline, const Served& served);

  bool try_enter() {
    if (!mutex_.try_lock()) return false;
    return mine(), true;
  }

  // Leaves on every way out, also by a C++ exception.
  class Turn {
   public:
    explicit Turn(Queue& queue) : queue_(queue) {}
    Turn(const Turn&) = delete;
    ~Turn() {
      queue_.held_.store(false, std::memory_order_release);
      queue_.mutex_.unlock();
    }

   private:
    Queue& queue_;
  };

 private:
  Entered mine() {
    owner_ = pthread_self();
    held_.store(true, std::memory_order_release);
    return Entered::yes;
  }
  std::timed_mutex mutex_;
  std::atomic<bool> held_{false};
  pthread_t owner_{};  // looked at only to recognise oneself
};

template <class Served>
Queue::Entered Queue::enter(int64_t deadline, const Served& served) {
  if (held_.load(std::memory_order_acquire) && pthread_equal(owner_, pthread_self())) {
    PyErr_SetString(g_misuse, "the graph is called from inside one of its own calls on this thread (a signal handler, a reducer or a finalizer)");
    return Entered::raised;
  }
  if (mutex_.try_lock()) return mine();
  for (;;) {
    bool entered;
    {
      GilRelease released;
      const int64_t slice = std::min<int64_t>(20'000'000, deadline == kNoDeadline ? INT64_MAX : std::max<int64_t>(0, deadline - now_ns()));
      entered = mutex_.try_lock_for(std::chrono::nanoseconds(slice));
    }
    if (entered) return mine();
    if (served()) return Entered::timed_out;
    if (PyErr_CheckSignals() != 0) return Entered::raised;
    if (now_ns() >= deadline) return Entered::timed_out;
  }
}

}  // namespace raycomm
