#include "endpoint.hpp"

#include <algorithm>
#include <cstring>
#include <optional>

#include "copy.hpp"

namespace raycomm {
namespace {

constexpr size_t kReleaseGilFrom = 256u << 10;  // bytes copied by one write

// Claims, by execution: see layout.hpp.
constexpr uint64_t started(uint64_t execution) { return execution * 4 + 1; }
constexpr uint64_t cancelled(uint64_t execution) { return execution * 4 + 2; }

// Nothing is claimed for an execution whose place a later one has taken: it is over.
// Which of the two comes first is what counts, not memory order: the message itself is ordered by the ring.
bool claim(std::atomic<uint64_t>& word, uint64_t mine, uint64_t theirs) {
  uint64_t seen = word.load(std::memory_order_acquire);
  for (;;) {
    if (seen == mine) return true;
    if (seen == theirs || seen >> 2 > mine >> 2) return false;
    if (word.compare_exchange_weak(seen, mine, std::memory_order_acq_rel, std::memory_order_acquire)) return true;
  }
}

}  // namespace

int Arena::wait_left(const std::vector<uint32_t>& processes, double seconds) {
  if (graph->own().made_under() != fork_epoch()) return 1;
  std::vector<MappingRef> waiting;
  for (uint32_t process : processes) waiting.push_back(graph->peer(process));
  const auto left = [&] {
    for (const MappingRef& mapping : waiting) {
      if (mapping->header().loop_state.load(std::memory_order_seq_cst) != static_cast<uint32_t>(LoopState::running)) continue;
      pollfd fd{mapping->pidfd(), POLLIN, 0};
      if (mapping->pidfd() < 0 || poll(&fd, 1, 0) == 0) return false;
    }
    return true;
  };
  RecentWaits recent;
  switch (wait_in_slices(*graph, recent, deadline_after(seconds), left)) {
    case Waited::done: return 1;
    case Waited::timed_out: return 0;
    default: return -1;
  }
}

int Arena::wait_results(const std::vector<std::pair<const Reader*, uint64_t>>& results, size_t wanted, double seconds) {
  if (!in_its_process(*graph)) return -1;
  const auto enough = [&] {
    if (graph->closed() != 0) return true;
    size_t there = 0;
    for (const auto& [reader, execution] : results) there += reader->published() > execution;
    return there >= wanted;
  };
  RecentWaits recent;
  switch (wait_in_slices(*graph, recent, deadline_after(seconds), enough)) {
    case Waited::done: return 1;
    case Waited::timed_out: return 0;
    default: return -1;
  }
}

bool cancel_execution(const Mapping& driver, uint64_t execution) {
  return driver.claim_count() != 0 && claim(driver.claim(execution), cancelled(execution), started(execution));
}

Writer::Writer(const Arena& arena, const std::vector<WriterChannel>& channels) : graph_(arena.graph), pool_(arena.pool) {
  if (!pool_) throw ArenaError("the arena has no pool yet: call join first");
  if (channels.empty()) throw ArenaError("a writer needs at least one channel");
  for (const WriterChannel& edge : channels) {
    rings_.emplace_back(*graph_, edge.channel, edge.readers, *pool_);
    encoders_.push_back(std::make_unique<Encoder>(edge.allow_pickle));
  }
  staged_.resize(rings_.size());
}

bool Writer::wait_for_room(int64_t deadline) {
  const auto room = [this] {
    for (const RingWriter& ring : rings_)
      if (!ring.has_room()) return false;
    return true;
  };
  if (const uint64_t closed = graph_->closed(); closed != 0) return raise_closed(closed), false;
  if (room()) return true;
  const uint64_t began = ticks();
  ProcessSet slow{};
  for (const RingWriter& ring : rings_) ring.add_laggards(slow);
  graph_->board().set_waiting(Activity::writing, rings_.front().channel(), slow, began);
  const Waited waited = wait_in_slices(*graph_, recent_, deadline, [&] { return room() || graph_->closed() != 0; });
  const uint64_t now = ticks();
  graph_->board().set(Activity::idle, 0, now);
  rings_.front().count_wait(now - began);
  if (waited == Waited::raised) return false;
  if (const uint64_t closed = graph_->closed(); closed != 0) return raise_closed(closed), false;
  if (waited == Waited::timed_out) return PyErr_SetNone(g_timed_out), false;
  return true;
}

bool Writer::stage_and_publish(int64_t deadline) {
  size_t bytes = 0;
  std::optional<MemoryWait> short_of_memory;
  const auto abandon = [this](size_t staged) {
    for (size_t j = 0; j < staged; ++j) rings_[j].abandon(staged_[j], *pool_);
  };
  for (size_t i = 0; i < rings_.size();) {
    try {
      rings_[i].stage(encoders_[i]->message(), *pool_, staged_[i]);
      bytes += staged_[i++].copy_bytes;
    } catch (const PoolExhausted& report) {
      // What is staged already is given back first: two writers that each hold a part of what the other needs would wait for ever.
      abandon(i);
      i = 0;
      bytes = 0;
      if (!short_of_memory) short_of_memory.emplace(*graph_, *pool_);
      const auto result_waits = [this] { return outputs_ && std::any_of(outputs_->begin(), outputs_->end(), [](auto* output) { return output->published() > output->taken(); }); };
      const bool busy = result_waits();
      if (busy || !short_of_memory->step(report, deadline, result_waits)) {
        rings_.front().count_wait(ticks() - short_of_memory->began());
        if (busy) PyErr_SetNone(g_pool_busy);
        return false;
      }
    } catch (...) {
      abandon(i);
      throw;
    }
  }
  if (short_of_memory) rings_.front().count_wait(ticks() - short_of_memory->began());
  if (short_of_memory) short_of_memory->over();
  short_of_memory.reset();
  const auto copy = [this] {
    for (const auto& staged : staged_)
      for (const auto& piece : staged.copies) bulk_copy(piece.to, piece.from, piece.bytes);
  };
  if (bytes >= kReleaseGilFrom) {
    GilRelease released;
    copy();
  } else {
    copy();
  }
  for (size_t i = 0; i < rings_.size(); ++i) rings_[i].commit(staged_[i], *pool_);
  for (RingWriter& ring : rings_) ring.notify();
  pool_->trim_if_wanted();
  if (pool_->ended()) {  // ORDER ended: published first, then this look. Another thread has ended the graph meanwhile: nobody may read this
    GilRelease released;
    pool_->end();
  }
  return true;
}

bool Writer::write_now(PyObject* const* values, size_t count, int64_t deadline) {
  if (count != rings_.size()) return PyErr_Format(g_misuse, "%zu values for %zu channels", count, rings_.size()), false;
  Board& board = graph_->board();
  const uint64_t began = ticks(), execution = published();
  board.close_call(began);
  if (!wait_for_room(deadline)) return false;
  bool ok = true;
  for (size_t i = 0; ok && i < count; ++i) {
    encoders_[i]->reset(rings_[i].inline_begin(), rings_[i].inline_bytes());
    ok = encoders_[i]->encode(values[i]);
  }
  ok = ok && stage_and_publish(deadline);
  if (ok) {
    const uint64_t now = ticks();
    board.set(Activity::idle, 0, now);  // the call is over, whatever comes next
    board.record(Activity::writing, rings_.front().channel(), execution, began, now, staged_.front().bytes);
  }
  for (auto& encoder : encoders_) encoder->reset(nullptr, 0);
  return ok;
}

bool Writer::write(PyObject* const* values, size_t count, double seconds) {
  Turn turn(busy_, graph_->own().made_under(), "a channel's writing end");
  return turn && write_now(values, count, deadline_after(seconds));
}

bool Writer::write_failure(PyObject* payload, PyObject* buffers, double seconds) {
  Turn turn(busy_, graph_->own().made_under(), "a channel's writing end");
  const int64_t deadline = deadline_after(seconds);
  if (!turn) return false;
  graph_->board().close_call(ticks());
  if (!wait_for_room(deadline)) return false;
  bool ok = true;
  for (auto& encoder : encoders_) {
    encoder->reset(nullptr, 0);
    ok = ok && encoder->adopt(payload, buffers);
    encoder->message().kind = Kind::failure;
  }
  ok = ok && stage_and_publish(deadline);
  for (auto& encoder : encoders_) encoder->reset(nullptr, 0);
  return ok;
}

Reader::Reader(const Arena& arena, uint32_t writer, uint32_t channel, uint32_t index, ReaderRole role, BufferFactory make_buffer)
    : graph_(arena.graph), ring_(*graph_, writer, channel, index), decoder_(make_buffer, role.share_tensors), role_(role) {
  add_to(writer_, writer);
  role_.claims = role.claims && graph_->driver()->claim_count() != 0;
}

bool Reader::wait_ready(int64_t deadline, uint64_t began) {
  if (role_.after_close == AfterClose::leave) {
    if (const uint64_t closed = graph_->closed(); closed != 0) return raise_closed(closed), false;
  }
  if (ring_.ready()) return true;
  graph_->board().set_waiting(Activity::reading, ring_.channel(), writer_, began);
  const Waited waited = wait_in_slices(*graph_, recent_, deadline, [this] { return ring_.ready() || graph_->closed() != 0; });
  ring_.count_wait(ticks() - began);
  if (waited == Waited::raised) return false;
  if (ring_.ready()) return true;
  if (const uint64_t closed = graph_->closed(); closed != 0) return raise_closed(closed), false;
  return PyErr_SetNone(g_timed_out), false;
}

bool Reader::begin_execution(uint64_t execution) const {
  return claim(graph_->driver()->claim(execution), started(execution), cancelled(execution));
}

PyObject* Reader::read(double seconds) {
  Turn turn(busy_, graph_->own().made_under(), "a channel's reading end");
  if (!turn) return nullptr;
  Board& board = graph_->board();
  const uint64_t began = ticks();
  board.close_call(began);
  const uint64_t execution = ring_.taken();
  if (role_.first) board.finished(execution);
  const bool was_ready = ring_.ready();
  if (!wait_ready(deadline_after(seconds), began)) return nullptr;
  if (!was_ready) board.set(Activity::idle, 0, ticks());  // it waits no longer: decoding may take its time
  ring_.open(message_);
  if (role_.claims && !begin_execution(execution)) {
    PyObject* function = codec_function("cancelled");
    PyObject* value = function ? PyObject_CallFunction(function, "K", static_cast<unsigned long long>(execution)) : nullptr;
    Py_XDECREF(function);
    if (value) ring_.discard(message_);
    return value;
  }
  PyObject* value = decoder_.decode(message_, ring_);
  if (value || PyErr_ExceptionMatches(PyExc_Exception)) {  // else interrupted: the message stays for the next read
    decoder_.settle();
    ring_.close(message_);
  }
  const uint64_t now = ticks();
  board.record(Activity::reading, ring_.channel(), execution, began, now, message_.payload_bytes);
  if (role_.subject != ReaderRole::kNoCall) board.open_call(role_.subject, now);
  return value;
}

bool Reader::discard_rest(double seconds) {
  if (!in_its_process(*graph_)) return false;
  over_.store(true, std::memory_order_seq_cst);  // ORDER over: this first, then the turn; who gives up its turn looks at this afterwards
  switch (queue_.enter(deadline_after(seconds), [] { return false; })) {
    case Queue::Entered::raised: return false;
    case Queue::Entered::timed_out: return PyErr_SetNone(g_timed_out), false;
    case Queue::Entered::yes: break;
  }
  const Queue::Turn turn(queue_);
  discard_in_turn();
  return true;
}

void Reader::discard_in_turn() {
  role_.after_close = AfterClose::leave;  // nothing that comes later is handed out: its writer may let go of it for a reader that has left
  if (decoder_.open() && ring_.ready()) discard_one();
  GilRelease released;  // giving the memory of large blocks back takes the kernel a while
  while (ring_.ready()) discard_one();
}

void Reader::discard_one() {
  ring_.open(message_);
  if (decoder_.open()) {  // by a read that was interrupted; its leases hold the blocks
    decoder_.settle();
    ring_.close(message_);
  } else {
    ring_.discard(message_);
  }
}

bool Reader::skip(double seconds) {
  Turn turn(busy_, graph_->own().made_under(), "a channel's reading end");
  if (!turn) return false;
  const bool came = wait_ready(deadline_after(seconds), ticks());
  graph_->board().set(Activity::idle, 0, ticks());
  if (!came) return false;
  discard_one();
  return true;
}

}  // namespace raycomm
