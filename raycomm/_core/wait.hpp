// Waiting: a short pause-spin, a bounded sched_yield spin, then a park on a futex in slices. A message that comes at regular intervals is met
// awake: the park ends shortly before it is due, and a second bounded sched_yield spin follows.
//
// Alternatives that lost, all measured (docs/performance.md): parking at once costs 15 us a wake-up; a longer pause-spin starves chains
// with more processes than cores (366 us a round trip against 10); std::atomic::wait uses the process-private futex, so it never wakes
// another process; eventfd, pipe and semaphore cost 32 to 52 us a round trip.
//
// ORDER parking (a Dekker pair; release/acquire alone loses wake-ups, so all four are seq_cst operations, not fences, which
// ThreadSanitizer does not see):
//   peer    stores its cursor (ring.hpp publish, release), then loads doorbell.sleepers   (ring_bell below)
//   waiter  stores doorbell.sleepers, then loads the cursor again                        (park_until below)
#pragma once

#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdint>

#include "layout.hpp"

namespace raycomm {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Process-shared futex calls (no FUTEX_PRIVATE_FLAG): the word lies in a memfd that several processes map.
inline int futex_wait(std::atomic<uint32_t>& word, uint32_t expected, int64_t timeout_ns) {
  timespec t{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  return static_cast<int>(syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &t, nullptr, 0));
}
inline void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// A full pipe has been noticed already. One whose reader has died raises SIGPIPE; Python ignores that from its start, but a program may not.
inline void wake_event_loop(int waker) {
  if (waker < 0) return;
  sigset_t pipe, before;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, &before);
  const char one = 1;
  if (::write(waker, &one, 1) < 0 && errno == EPIPE && !sigismember(&before, SIGPIPE)) {
    const timespec at_once{};
    sigtimedwait(&pipe, nullptr, &at_once);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// To call after a seq_cst store that a sleeper on this doorbell may be waiting for. `waker`: descriptor of a pipe that wakes the event loops
// of the bell's owner, or -1. An armed event loop counts as a sleeper, so that nothing more is looked at while nobody waits.
inline void ring_bell(Doorbell& bell, int waker = -1) {
  if (bell.sleepers.load(std::memory_order_seq_cst) == 0) return;  // ORDER parking: peer, against the fetch_add in wait_until and arm
  bell.counter.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(bell.counter);
  if (bell.armed.exchange(0, std::memory_order_seq_cst) != 0) {
    bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    wake_event_loop(waker);
  }
}

// The event loop's side: from now on the next ring_bell writes to the pipe, once. The caller looks at every cursor again afterwards.
inline void arm(Doorbell& bell) {
  // Counted first: a bell rung between the two only finds nobody armed yet, and is noticed by the caller's second look.
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);  // ORDER parking: waiter, against the load in ring_bell
  if (bell.armed.exchange(1, std::memory_order_seq_cst) != 0) bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

inline void disarm(Doorbell& bell) {
  if (bell.armed.exchange(0, std::memory_order_seq_cst) != 0) bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

// A counter that is cheap to read and runs alike on all cores; the arena's header says how it relates to the clock.
inline uint64_t ticks() {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t value;
  asm volatile("mrs %0, cntvct_el0" : "=r"(value));
  return value;
#else
  return static_cast<uint64_t>(now_ns());
#endif
}

struct WaitPolicy {
  int64_t spin_ns = 2'000;
  int64_t yield_ns = 100'000;
  double due_share = 0.0;  // of the time between regular messages, at most, to be awake for the next; 0: parked until it comes
  int64_t slice_ns = 200'000'000;  // a park never lasts longer: a lost notice, a signal or a death is seen at its end
};

inline constexpr int64_t kNoDeadline = INT64_MAX;

enum class Wake { ready, timed_out, slice_ended };

// Remembers how long recent waits took, so that an endpoint whose peer is slow parks soon instead of spinning its window away each time.
// A wait that lasted longer than kThrottled is not learned from: under a CPU quota it measures the quota, not the peer.
class RecentWaits {
 public:
  // A pause-spin pays only where answers come within it. Elsewhere it keeps the core from the very process that is waited for: in a chain
  // with more processes than cores the next one cannot start before this one yields. The limit lies above the spin, because waits that yield
  // last longer: one slow moment must not keep a pair of processes yielding that would answer each other within the spin.
  int64_t spin(const WaitPolicy& policy) const { return 2 * average_ns_ <= 3 * policy.spin_ns ? policy.spin_ns : 0; }
  int64_t window(const WaitPolicy& policy) const { return average_ns_ <= policy.yield_ns ? policy.yield_ns : policy.yield_ns / 8; }
  void learn(int64_t waited_ns) {
    if (waited_ns >= kThrottled) return;
    average_ns_ += (waited_ns - average_ns_) / 8;
    last_ns_[learned_++ % kLast] = waited_ns;
  }

  // Nothing came for a whole slice: what came regularly does so no longer, and an idle graph wakes up for nothing.
  void lapse() { learned_ = 0; }

  // When to be awake, counted from the beginning of the wait. Empty where recent waits were short, or so unlike that it would not pay.
  struct Due {
    int64_t from = 0, until = 0;
    explicit operator bool() const { return until != 0; }
  };
  Due due(const WaitPolicy& policy) const {
    if (policy.due_share <= 0 || policy.yield_ns <= 0 || learned_ < kLast || average_ns_ < kWorthwhile) return {};
    std::array<int64_t, kLast> ordered = last_ns_;
    std::sort(ordered.begin(), ordered.end());
    const int64_t soonest = ordered[1];  // one that came at once, because its reader was late, says nothing of the next
    const int64_t half = std::min(static_cast<int64_t>(static_cast<double>(soonest) * policy.due_share), 3 * policy.yield_ns) / 2;
    if (soonest < kWorthwhile || ordered[kLast - 2] > soonest + half) return {};
    return {soonest - half, soonest + half};
  }

 private:
  static constexpr int64_t kThrottled = 20'000'000;
  static constexpr int64_t kWorthwhile = 300'000;  // a wake-up is tens of microseconds late
  static constexpr uint32_t kLast = 8;
  int64_t average_ns_ = 0;
  std::array<int64_t, kLast> last_ns_{};
  uint32_t learned_ = 0;
};

// Timers of this thread are late by its slack, 50 us as a rule: half of what being awake in time is to save.
class PreciseTimers {
 public:
  PreciseTimers() : before_(prctl(PR_GET_TIMERSLACK)) { set(1); }
  ~PreciseTimers() { set(before_); }
  PreciseTimers(const PreciseTimers&) = delete;
  PreciseTimers& operator=(const PreciseTimers&) = delete;

 private:
  void set(int slack_ns) const {
    if (before_ > 1) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_ns));
  }
  int before_;
};

template <class Done>
bool yield_until(const Done& done, int64_t end_ns) {
  while (now_ns() < end_ns) {
    sched_yield();
    if (done()) return true;
  }
  return false;
}

// Sleeps until the bell rings or the time comes; whether done().
template <class Done>
bool park_until(const Done& done, Doorbell& bell, int64_t end_ns) {
  const uint32_t seen = bell.counter.load(std::memory_order_seq_cst);
  bell.sleepers.fetch_add(1, std::memory_order_seq_cst);  // ORDER parking: waiter, against the load in ring_bell
  bool is_done = done();
  if (const int64_t left = end_ns - now_ns(); !is_done && left > 0) futex_wait(bell.counter, seen, left);
  bell.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return is_done || done();
}

// Waits until done() is true, the deadline passes or one slice has ended. done() must use seq_cst loads.
// The caller has released the GIL. Spurious `slice_ended` are fine: callers look around and call again.
template <class Done>
Wake wait_until(const Done& done, Doorbell& bell, const WaitPolicy& policy, RecentWaits& recent, int64_t deadline_ns) {
  if (done()) return Wake::ready;
  const int64_t begin = now_ns();
  if (deadline_ns <= begin) return Wake::timed_out;
  for (const int64_t until = std::min(begin + recent.spin(policy), deadline_ns); now_ns() < until;) {
    for (int i = 0; i < 4; ++i) cpu_pause();
    if (done()) {
      recent.learn(now_ns() - begin);
      return Wake::ready;
    }
  }
  const auto ready = [&] {
    recent.learn(now_ns() - begin);
    return Wake::ready;
  };
  if (yield_until(done, std::min(begin + recent.window(policy), deadline_ns))) return ready();
  if (const RecentWaits::Due due = recent.due(policy); due && begin + due.until <= deadline_ns) {
    {
      const PreciseTimers precise;
      if (park_until(done, bell, begin + due.from)) return ready();
    }
    if (now_ns() < begin + due.from) return Wake::slice_ended;  // the bell or a signal, for something that the caller looks at
    if (yield_until(done, begin + due.until)) return ready();
  }
  const int64_t parked = now_ns();
  if (park_until(done, bell, std::min(parked + policy.slice_ns, deadline_ns))) return ready();
  const int64_t now = now_ns();
  if (now - parked >= policy.slice_ns) recent.lapse();
  return now >= deadline_ns ? Wake::timed_out : Wake::slice_ended;
}

}  // namespace raycomm
