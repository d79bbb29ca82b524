// The ring, the pool, the board and the waker under threads that share one mapping, without Python: for the sanitizers, which are blind
// to one memfd mapped twice. One writer, three readers that keep blocks for random times and let other threads release them; every byte
// is checked. One of the readers waits as an event loop does, at the waker's pipe. Park slices are off, so a lost wake-up is a hang, which
// the watchdog reports. One more thread looks at the board and the recorder all the time.
#include <poll.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <thread>

#include "pool.hpp"
#include "ring.hpp"

using namespace raycomm;

namespace {

constexpr uint32_t kReaders = 3;
constexpr uint32_t kSlotBytes = 1024;
constexpr unsigned char kNonce[16] = {1, 2, 3};

std::atomic<uint64_t> g_progress{0};

[[noreturn]] void fail(const char* what, uint64_t a = 0, uint64_t b = 0) {
  std::fprintf(stderr, "FAILED: %s (%llu, %llu)\n", what, static_cast<unsigned long long>(a), static_cast<unsigned long long>(b));
  std::fflush(stderr);
  std::_Exit(1);
}

unsigned char pattern(uint64_t message, size_t buffer, size_t at) { return static_cast<unsigned char>(message * 131 + buffer * 31 + at * 7 + (at >> 8)); }

void fill(std::vector<unsigned char>& bytes, uint64_t message, size_t buffer) {
  for (size_t at = 0; at < bytes.size(); ++at) bytes[at] = pattern(message, buffer, at);
}

void check(const unsigned char* bytes, size_t size, uint64_t message, size_t buffer) {
  for (size_t at = 0; at < size; ++at)
    if (bytes[at] != pattern(message, buffer, at)) fail("a byte of a message is not what was written", message, at);
}

// Sizes around the thresholds of the ring, else of any magnitude.
size_t size_of(std::mt19937_64& random) {
  static constexpr size_t kEdges[] = {0, 1, 7, 8, kSlotBytes - sizeof(SlotHeader), kBlockThreshold - 1, kBlockThreshold, kBlockThreshold + 1, 4096, 40960, 65536};
  if (random() % 3 == 0) return kEdges[random() % std::size(kEdges)];
  return random() % (size_t{1} << (random() % 18));
}

// What a reader goes on holding after it closed a message. Any thread may end it.
struct Held {
  Lease* lease;
  const unsigned char* data;
  size_t bytes;
  uint64_t message;
  size_t buffer;
};

class Shelf {
 public:
  void put(const Held& held) {
    std::lock_guard lock(mutex_);
    shelf_.push_back(held);
  }
  // Checks and releases one at random; false if there is none.
  bool release_one(std::mt19937_64& random) {
    Held held;
    {
      std::lock_guard lock(mutex_);
      if (shelf_.empty()) return false;
      std::swap(shelf_[random() % shelf_.size()], shelf_.back());
      held = shelf_.back();
      shelf_.pop_back();
    }
    check(held.data, held.bytes, held.message, held.buffer);
    held.lease->release();
    return true;
  }
  size_t size() {
    std::lock_guard lock(mutex_);
    return shelf_.size();
  }

 private:
  std::mutex mutex_;
  std::vector<Held> shelf_;
};

struct Round {
  uint32_t slots;
  uint64_t pool_bytes;
  uint64_t messages;  // 0: until closed by another thread
  size_t keep;        // a reader lets go above this many
  uint32_t pause_us;  // of the thread that releases what they keep
};

std::unique_ptr<Neighbourhood> neighbour(Mapping* mapping, uint32_t process) {
  mapping->add_ref();
  auto graph = std::make_unique<Neighbourhood>(MappingRef(mapping), process);
  for (uint32_t other = 0; other <= kReaders; ++other) {
    if (other == process) continue;
    mapping->add_ref();
    graph->add_peer(other, MappingRef(mapping));
  }
  graph->policy = WaitPolicy{200, process % 2 ? 20'000 : 0, 0.1, 3'600'000'000'000};
  return graph;
}

// True if the condition came, false if the arena was closed.
template <class Done>
bool wait_for(const Neighbourhood& graph, RecentWaits& recent, const Done& done) {
  for (;;) {
    const Wake wake = wait_until([&] { return done() || graph.closed() != 0; }, graph.own().header().doorbell, graph.policy, recent, kNoDeadline);
    if (wake == Wake::ready) return done();
  }
}

// The same in an event loop: arm, look again, sleep at the pipe.
template <class Done>
bool await(const Neighbourhood& graph, const Done& done) {
  const auto over = [&] { return done() || graph.closed() != 0; };
  const int pipe = graph.own().waker_end();
  while (!over()) {
    arm(graph.own().header().doorbell);
    if (over()) break;
    pollfd fd{pipe, POLLIN, 0};
    poll(&fd, 1, -1);
    char bytes[64];
    [[maybe_unused]] const ssize_t drained = read(pipe, bytes, sizeof bytes);
  }
  disarm(graph.own().header().doorbell);
  return done();
}

void watch(const Neighbourhood& graph, const std::atomic<bool>& over) {
  while (!over.load()) {
    for (uint32_t process = 0; process <= kReaders; ++process) {
      uint64_t changes;
      graph.board().can_move(process, {}, changes);
    }
    for (const Operation& operation : recent_operations(graph.own()))
      if (operation.kind != Activity::writing || operation.subject != 7 || operation.start != operation.end || operation.bytes < 8)
        fail("an operation that nobody recorded", operation.subject, operation.bytes);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void write_messages(const Neighbourhood& graph, RingWriter& ring, Pool& pool, Shelf& shelf, const Round& round, uint64_t seed, uint64_t& full) {
  std::mt19937_64 random(seed);
  RecentWaits recent;
  RingWriter::Staged staged;
  std::vector<unsigned char> payload;
  std::vector<std::vector<unsigned char>> buffers;
  for (uint64_t message = 0; round.messages == 0 || message < round.messages; ++message) {
    if (!wait_for(graph, recent, [&] { return ring.has_room(); })) return;
    payload.resize(8 + size_of(random) % 3000);
    fill(payload, message, 99);
    std::memcpy(payload.data(), &message, 8);
    buffers.resize(random() % 4);
    Outgoing outgoing;
    outgoing.payload = payload.data();
    outgoing.payload_bytes = payload.size();
    for (size_t i = 0; i < buffers.size(); ++i) {
      buffers[i].resize(size_of(random));
      fill(buffers[i], message, i);
      outgoing.buffers.push_back({buffers[i].data(), buffers[i].size()});
    }
    for (int tries = 0;; ++tries) {
      try {
        ring.stage(outgoing, pool, staged);
        break;
      } catch (const PoolExhausted& report) {  // held by the shelf or by messages under way: make room, try again
        ++full;
        if (report.system_error != 0) fail("fallocate", static_cast<uint64_t>(report.system_error));
        if (!staged.blocks.empty()) fail("a refused message holds blocks");
        if (graph.closed() != 0) return;
        pool.shortage(report.wanted, ticks(), true);
        if (!shelf.release_one(random)) {
          const auto released = [&] { return graph.own().header().free_stack.load(std::memory_order_seq_cst) != 0 || graph.closed() != 0; };
          wait_until(released, graph.own().header().doorbell, graph.policy, recent, now_ns() + 1'000'000);
        }
        pool.trim_if_wanted();
        if (tries > 2000) outgoing.buffers.clear();  // blocks are not joined: all of them may be free, and none large enough
      }
    }
    if (random() % 8 == 0 && outgoing.buffers.empty()) {  // staged and given up, as after an interrupt
      ring.abandon(staged, pool);
      ring.stage(outgoing, pool, staged);
    }
    for (const auto& copy : staged.copies) std::memcpy(copy.to, copy.from, copy.bytes);
    const uint64_t now = ticks();
    graph.board().record(Activity::writing, 7, message, now, now, staged.bytes);
    graph.board().set(Activity::writing, 7, now);
    ring.commit(staged, pool);
    ring.notify();
    g_progress.fetch_add(1, std::memory_order_relaxed);
  }
}

void read_messages(const Neighbourhood& graph, RingReader& ring, Shelf& shelf, const Round& round, uint64_t seed, uint64_t& taken) {
  std::mt19937_64 random(seed);
  RecentWaits recent;
  Incoming incoming;
  for (uint64_t message = 0; round.messages == 0 || message < round.messages; ++message) {
    const auto ready = [&] { return ring.ready(); };
    graph.board().finished(message);
    if (!(graph.process() == kReaders ? await(graph, ready) : wait_for(graph, recent, ready))) return;
    ring.open(incoming);
    if (!incoming.problem.empty()) fail(incoming.problem.c_str(), message);
    uint64_t number;
    std::memcpy(&number, incoming.payload, 8);
    if (number != message) fail("a message was lost, doubled or overtaken", number, message);
    check(incoming.payload + 8, 0, message, 99);
    for (size_t at = 8; at < incoming.payload_bytes; ++at)
      if (incoming.payload[at] != pattern(message, 99, at)) fail("a byte of a payload is not what was written", message, at);
    if (random() % 10 == 0) {
      ring.discard(incoming);
    } else {
      for (size_t i = 0; i < incoming.buffers.size(); ++i) {
        const auto& buffer = incoming.buffers[i];
        check(buffer.data, buffer.bytes, message, i);
        if (buffer.block == kInline) continue;
        Lease* lease = ring.lease(buffer.block);
        if (random() % 2 == 0) {
          lease->release();
        } else {
          shelf.put({lease, buffer.data, buffer.bytes, message, i});
        }
      }
      ring.close(incoming);
    }
    ++taken;
    while (shelf.size() > round.keep) shelf.release_one(random);
  }
}

// The graph ends: readers leave what they have not taken, the pool ends, and views go meanwhile, several of a block at once. No memory stays.
void end(const std::vector<std::shared_ptr<Neighbourhood>>& graphs, Pool& pool, std::vector<std::unique_ptr<RingReader>>& readers, Shelf& shelf,
         std::mt19937_64& random) {
  graphs[0]->close_all(Closed::teardown, 0);
  std::vector<std::thread> threads;
  for (auto& reader : readers)
    threads.emplace_back([&, seed = random()] {
      std::mt19937_64 mine(seed);
      Incoming incoming;
      while (reader->ready()) {
        reader->open(incoming);
        reader->discard(incoming);
      }
      while (shelf.release_one(mine)) {}
    });
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
  pool.end();
  for (std::thread& thread : threads) thread.join();
  const Mapping& own = graphs[0]->own();
  if (pool.in_use() != 0) fail("blocks are held by nobody, and not free", pool.in_use());
  if (const uint64_t left = own.header().pool_committed.load(); left != 0) fail("memory was not given back", left);
  struct stat status{};
  if (fstat(own.fd(), &status) != 0 || static_cast<uint64_t>(status.st_blocks) * 512 > own.pool_offset()) fail("the file keeps memory of the pool", status.st_blocks * 512);
}

void run(const Round& round, uint64_t seed, uint64_t& messages, uint64_t& full) {
  std::mt19937_64 random(seed);
  Mapping* mapping = Mapping::create({{{7, round.slots, kSlotBytes, kReaders}}, 4096, round.pool_bytes, round.pool_bytes, kReaders + 1, 64, 64, 4, true},
                                     std::span<const unsigned char, 16>(kNonce));
  Shelf shelf;
  {
    std::vector<std::shared_ptr<Neighbourhood>> graphs;
    for (uint32_t process = 0; process <= kReaders; ++process) graphs.push_back(neighbour(mapping, process));
    mapping->release();
    MappingRef own = graphs[0]->own_ref();
    for (const auto& graph : graphs) graph->join(0);
    Pool pool(graphs[0], {});
    RingWriter writer(*graphs[0], 7, {1, 2, 3}, pool);
    std::vector<std::unique_ptr<RingReader>> readers;
    for (uint32_t r = 0; r < kReaders; ++r) readers.push_back(std::make_unique<RingReader>(*graphs[r + 1], 0, 7, r));
    std::atomic<bool> over{false};
    std::thread releaser([&, seed = random()] {
      std::mt19937_64 mine(seed);
      while (!over.load()) {
        if (!shelf.release_one(mine)) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::microseconds(mine() % round.pause_us));
      }
    });
    std::thread watcher([&] { watch(*graphs[0], over); });
    std::vector<std::thread> threads;
    std::vector<uint64_t> taken(kReaders, 0);
    for (uint32_t r = 0; r < kReaders; ++r)
      threads.emplace_back([&, r, seed = random()] { read_messages(*graphs[r + 1], *readers[r], shelf, round, seed, taken[r]); });
    threads.emplace_back([&, seed = random()] { write_messages(*graphs[0], writer, pool, shelf, round, seed, full); });
    if (round.messages == 0) {  // closed under way, with some of them parked
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 20'000));
      graphs[random() % graphs.size()]->close_all(Closed::teardown, 0);
    }
    for (std::thread& thread : threads) thread.join();
    for (uint64_t n : taken) {
      if (round.messages != 0 && n != round.messages) fail("a reader took too few messages", n, round.messages);
      messages += n;
    }
    over.store(true);
    releaser.join();
    watcher.join();
    if (round.messages != 0) {
      while (shelf.release_one(random)) {}
      if (pool.in_use() != 0) fail("blocks are held by nobody, and not free", pool.in_use());
    }
    if (random() % 2 != 0) end(graphs, pool, readers, shelf, random);
  }
  // What is still on the shelf keeps the mapping alive, after everything else of the graph is gone.
  while (shelf.release_one(random)) {}
}

}  // namespace

int main(int argc, char** argv) {
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const int64_t end = now_ns() + (argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 20) * 1'000'000'000ll;
  std::thread([] {
    for (uint64_t before = UINT64_MAX;;) {
      std::this_thread::sleep_for(std::chrono::seconds(30));
      const uint64_t now = g_progress.load();
      if (now == before) fail("nothing moved for 30 s: a wake-up was lost", now);
      before = now;
    }
  }).detach();
  std::mt19937_64 random(seed);
  uint64_t messages = 0, full = 0, rounds = 0, closed = 0;
  while (now_ns() < end) {
    Round round{};
    round.slots = 1u << (random() % 5);
    round.pool_bytes = random() % 2 ? (1u << 20) : (64u << 20);  // the small one runs full
    round.messages = random() % 3 == 0 ? 0 : 200 + random() % 400;
    round.keep = random() % 100;
    round.pause_us = random() % 2 ? 100 : 5000;
    closed += round.messages == 0;
    run(round, random(), messages, full);
    ++rounds;
    g_progress.fetch_add(1);
  }
  std::printf("seed %llu: %llu messages read in %llu graphs, %llu of them closed under way, pool full %llu times\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(messages), static_cast<unsigned long long>(rounds), static_cast<unsigned long long>(closed),
              static_cast<unsigned long long>(full));
  if (messages == 0 || full == 0) fail("the stress did not stress", messages, full);
  return 0;
}
