// How a wait decides when to be awake, and that it ends whatever comes: the message when it is due, early, late or never, the deadline, or
// the bell for something else.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "wait.hpp"

using namespace raycomm;

namespace {

constexpr int64_t kUs = 1'000, kMs = 1'000'000;

void expect(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

RecentWaits after(std::initializer_list<int64_t> waits) {
  RecentWaits recent;
  for (const int64_t wait : waits) recent.learn(wait);
  return recent;
}

WaitPolicy shared(double share) {
  WaitPolicy policy;
  policy.due_share = share;
  return policy;
}

void due() {
  const WaitPolicy policy = shared(0.1);
  const int64_t w = 2 * kMs;
  const RecentWaits regular = after({w, w + 10 * kUs, w + 30 * kUs, w, w + 20 * kUs, w + 50 * kUs, w, w + 40 * kUs, w});
  const RecentWaits::Due found = regular.due(policy);
  expect(static_cast<bool>(found), "regular messages are expected");
  expect(found.from < w && w < found.until, "the message is due within");
  expect(found.until - found.from <= w / 10, "no more than its share is spent");
  expect(!regular.due(shared(0)), "no share, nothing expected");
  WaitPolicy without_yield = policy;
  without_yield.yield_ns = 0;
  expect(!regular.due(without_yield), "who may not yield is not awake before time");
  expect(!after({w, w, w, w, w, w, w}).due(policy), "too few to know");
  expect(!after({w, 3 * w, w / 2, 2 * w, w, 4 * w, w / 3, w}).due(policy), "irregular ones are not expected");
  expect(!after({50 * kUs, 50 * kUs, 50 * kUs, 50 * kUs, 50 * kUs, 50 * kUs, 50 * kUs, 50 * kUs}).due(policy), "short waits end awake anyway");
  expect(static_cast<bool>(after({w, w, w, 5, w, w, w, w, w}).due(policy)), "one that came at once does not count");
  expect(static_cast<bool>(after({w, w, w, 9 * w, w, w, w, w, w}).due(policy)), "nor one that came late");
  RecentWaits throttled;
  for (int i = 0; i < 20; ++i) throttled.learn(100 * kMs);
  expect(!throttled.due(policy), "nothing is learned from waits that long");
  WaitPolicy wide = shared(1.0);
  const RecentWaits::Due most = after({15 * kMs, 15 * kMs, 15 * kMs, 15 * kMs, 15 * kMs, 15 * kMs, 15 * kMs, 15 * kMs}).due(wide);
  expect(most && most.until - most.from <= 3 * wide.yield_ns, "nor more than three times the yield spin");
}

RecentWaits expecting(int64_t wait) {
  RecentWaits recent;
  for (int i = 0; i < 16; ++i) recent.learn(wait);
  return recent;
}

// A wait for a word that another thread sets after `after_ns`, if at all, ringing the bell.
// But for the last, a slice never ends: a bell that is not heard is a hang, which the runner's limit reports.
Wake wait(int64_t after_ns, bool set, int64_t deadline_ns, int64_t& took_ns, RecentWaits& recent, int64_t slice_ns = 3'600'000'000'000) {
  Doorbell bell{};
  std::atomic<uint32_t> word{0};
  WaitPolicy policy = shared(0.1);
  policy.slice_ns = slice_ns;
  const int slack = prctl(PR_GET_TIMERSLACK);
  std::thread peer;
  if (after_ns >= 0)
    peer = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::nanoseconds(after_ns));
      if (set) word.store(1, std::memory_order_seq_cst);
      ring_bell(bell);
    });
  const int64_t begin = now_ns();
  const Wake wake = wait_until([&] { return word.load(std::memory_order_seq_cst) == 1; }, bell, policy, recent, deadline_ns);
  took_ns = now_ns() - begin;
  if (peer.joinable()) peer.join();
  expect(prctl(PR_GET_TIMERSLACK) == slack, "the timers of this thread are as they were");
  expect(bell.sleepers.load() == 0, "nobody counts as asleep");
  return wake;
}

void ends() {
  int64_t took = 0;
  bool heard_early = false;
  for (int i = 0; i < 5; ++i) {
    const auto fresh = [&](int64_t after_ns, bool set, int64_t deadline_ns) {
      RecentWaits recent = expecting(4 * kMs);
      return wait(after_ns, set, deadline_ns, took, recent);
    };
    expect(fresh(4 * kMs, true, kNoDeadline) == Wake::ready, "it comes when it is due");
    expect(fresh(1 * kMs, true, kNoDeadline) == Wake::ready, "it comes early");
    heard_early |= took < 3 * kMs;
    expect(fresh(20 * kMs, true, kNoDeadline) == Wake::ready, "it comes late");
    expect(fresh(-1, false, now_ns() + 2 * kMs) == Wake::timed_out && took >= 1 * kMs, "the deadline is before it is due");
    expect(fresh(-1, false, now_ns() + 30 * kMs) == Wake::timed_out && took >= 29 * kMs, "the deadline is after it was due");
    expect(fresh(1 * kMs, false, kNoDeadline) == Wake::slice_ended, "the bell rings for something else, early");
    expect(fresh(20 * kMs, false, kNoDeadline) == Wake::slice_ended, "and late");
  }
  expect(heard_early, "the bell is heard in the park that ends when the message is due");
  RecentWaits recent = expecting(4 * kMs);
  expect(wait(-1, false, kNoDeadline, took, recent, 50 * kMs) == Wake::slice_ended && took >= 50 * kMs, "it never comes");
  expect(!recent.due(shared(0.1)), "and is expected no longer");
}

}  // namespace

int main() {
  due();
  ends();
  std::puts("waits end as they should");
  return 0;
}
