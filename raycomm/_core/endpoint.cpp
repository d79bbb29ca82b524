#include "endpoint.hpp"

#include <chrono>
#include <cmath>
#include <cstring>

#include "copy.hpp"
#include "gil.hpp"

namespace raycomm {

PyObject *g_timed_out = nullptr, *g_closed = nullptr, *g_pool_full = nullptr, *g_misuse = nullptr, *g_overfull = nullptr;

namespace {

constexpr size_t kReleaseGilFrom = 256u << 10;  // bytes copied by one write
constexpr int64_t kPoolPatienceNs = 100'000'000;

bool on_main_thread() { return getpid() == static_cast<pid_t>(syscall(SYS_gettid)); }

void set_activity(const Neighbourhood& graph, Activity kind, uint32_t subject) {
  graph.own().header().activity.store(static_cast<uint64_t>(kind) | uint64_t{subject} << 32, std::memory_order_relaxed);
}

void raise_closed(uint64_t closed) {
  PyObject* value = Py_BuildValue("(II)", static_cast<unsigned>(closed), static_cast<unsigned>(closed >> 32));
  if (value) PyErr_SetObject(g_closed, value);
  Py_XDECREF(value);
}

void raise_pool_full(const PoolExhausted& report) {
  PyObject* holders = PyDict_New();
  for (const auto& [process, bytes] : report.holders) {
    PyObject* key = PyLong_FromUnsignedLong(process);
    PyObject* value = PyLong_FromUnsignedLongLong(bytes);
    if (key && value) PyDict_SetItem(holders, key, value);
    Py_XDECREF(key);
    Py_XDECREF(value);
  }
  PyObject* value = Py_BuildValue("(KKKiN)", report.wanted, report.free, report.limit, report.system_error, holders);
  if (value) PyErr_SetObject(g_pool_full, value);
  Py_XDECREF(value);
}

enum class Waited { done, timed_out, raised };

// Waits with the GIL released, in slices: at the end of each, dead peers are looked for and, on the main thread, signals are handled.
template <class Done>
Waited wait_in_slices(const Neighbourhood& graph, RecentWaits& recent, int64_t deadline, const Done& done) {
  const bool handles_signals = on_main_thread();
  for (;;) {
    Wake wake;
    {
      GilRelease released;
      do {
        wake = wait_until(done, graph.own().header().doorbell, graph.policy, recent, deadline);
        if (wake == Wake::slice_ended) graph.look_for_dead();
      } while (wake == Wake::slice_ended && !handles_signals);
    }
    if (wake == Wake::ready) return Waited::done;
    if (handles_signals && PyErr_CheckSignals() != 0) return Waited::raised;
    if (wake == Wake::timed_out) return done() ? Waited::done : Waited::timed_out;
  }
}

// A forked child must not touch the parent's rings.
bool in_its_process(const Neighbourhood& graph) {
  if (graph.own().made_under() == fork_epoch()) return true;
  PyErr_SetString(g_misuse, "this graph belongs to the process that compiled it, and this one was forked from it; compile a graph here, or start processes with spawn");
  return false;
}

}  // namespace

template <class Served>
Queue::Entered Queue::enter(int64_t deadline, const Served& served) {
  const pthread_t me = pthread_self();
  if (held_.load(std::memory_order_acquire) && pthread_equal(owner_, me)) {
    PyErr_SetString(g_misuse, "the graph is called from inside one of its own calls on this thread (a signal handler, a reducer or a finalizer)");
    return Entered::raised;
  }
  const auto mine = [&] {
    owner_ = me;
    held_.store(true, std::memory_order_release);
    return Entered::yes;
  };
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

int64_t deadline_after(double seconds) {
  if (seconds < 0) return kNoDeadline;
  if (seconds == 0) return 0;
  return seconds > 1e9 ? kNoDeadline : now_ns() + static_cast<int64_t>(std::ceil(seconds * 1e9));
}

Turn::Turn(std::atomic<bool>& busy, uint32_t made_under, const char* what) : busy_(busy) {
  if (made_under != fork_epoch()) {
    PyErr_Format(g_misuse, "%s is used in a forked child of the process that made it; compile the graph in this process, or start it with spawn", what);
  } else if (busy.exchange(true, std::memory_order_acquire)) {
    PyErr_Format(g_misuse, "%s is used by two threads at once", what);
  } else {
    held_ = true;
  }
}

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

Writer::Writer(const Arena& arena, const std::vector<std::pair<uint32_t, std::vector<uint32_t>>>& channels) : graph_(arena.graph), pool_(arena.pool) {
  if (!pool_) throw ArenaError("the arena has no pool yet: call open_pool first");
  if (channels.empty()) throw ArenaError("a writer needs at least one channel");
  for (const auto& [channel, readers] : channels) {
    rings_.emplace_back(*graph_, channel, readers);
    encoders_.push_back(std::make_unique<Encoder>());
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
  set_activity(*graph_, Activity::writing, rings_.front().channel());
  const Waited waited = wait_in_slices(*graph_, recent_, deadline, [&] { return room() || graph_->closed() != 0; });
  if (waited == Waited::raised) return false;
  if (const uint64_t closed = graph_->closed(); closed != 0) return raise_closed(closed), false;
  if (waited == Waited::timed_out) return PyErr_SetNone(g_timed_out), false;
  return true;
}

bool Writer::stage_and_publish(int64_t deadline) {
  size_t bytes = 0;
  int64_t patience = 0;
  for (size_t i = 0; i < rings_.size();) {
    try {
      rings_[i].stage(encoders_[i]->message(), *pool_, staged_[i]);
      bytes += staged_[i++].copy_bytes;
    } catch (const PoolExhausted& report) {
      // Not at once: a loop lets go of what it was given a moment after its result can be seen, so the next value may well come first.
      if (patience == 0) patience = std::min(now_ns() + kPoolPatienceNs, deadline);
      if (now_ns() < patience && graph_->closed() == 0) {
        GilRelease released;
        usleep(200);
        continue;
      }
      for (size_t j = 0; j < i; ++j) rings_[j].abandon(staged_[j], *pool_);
      if (const uint64_t closed = graph_->closed(); closed != 0) return raise_closed(closed), false;
      raise_pool_full(report);
      return false;
    } catch (...) {
      for (size_t j = 0; j < i; ++j) rings_[j].abandon(staged_[j], *pool_);
      throw;
    }
  }
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
  return true;
}

bool Writer::write_now(PyObject* const* values, size_t count, int64_t deadline) {
  if (count != rings_.size()) return PyErr_Format(g_misuse, "%zu values for %zu channels", count, rings_.size()), false;
  if (!wait_for_room(deadline)) return false;
  bool ok = true;
  for (size_t i = 0; ok && i < count; ++i) {
    encoders_[i]->reset(rings_[i].inline_begin(), rings_[i].inline_bytes());
    ok = encoders_[i]->encode(values[i]);
  }
  ok = ok && stage_and_publish(deadline);
  for (auto& encoder : encoders_) encoder->reset(nullptr, 0);
  return ok;
}

bool Writer::write(PyObject* const* values, size_t count, double seconds) {
  Turn turn(busy_, graph_->own().made_under(), "a channel's writing end");
  return turn && write_now(values, count, deadline_after(seconds));
}

PyObject* Writer::submit(PyObject* const* values, size_t count, PyTypeObject* ref_type, PyObject* graph, PyObject* queues, PyObject* pending,
                         const std::vector<const Reader*>& outputs, uint64_t in_flight_limit, double seconds) {
  static PyObject* const graph_name = PyUnicode_InternFromString("_graph");
  static PyObject* const queue_name = PyUnicode_InternFromString("_queue");
  static PyObject* const index_name = PyUnicode_InternFromString("_index");
  static PyObject* const value_name = PyUnicode_InternFromString("_value");
  const int64_t deadline = deadline_after(seconds);
  if (!in_its_process(*graph_)) return nullptr;
  switch (queue_.enter(deadline, [] { return false; })) {
    case Queue::Entered::raised: return nullptr;
    case Queue::Entered::timed_out: return PyErr_SetNone(g_timed_out), nullptr;
    case Queue::Entered::yes: break;
  }
  const Queue::Turn turn(queue_);
  const uint64_t index = published();
  uint64_t finished = index;
  for (const Reader* output : outputs) finished = std::min(finished, output->taken());
  if (index - finished >= in_flight_limit) Py_RETURN_NONE;
  const Py_ssize_t n = PyTuple_GET_SIZE(queues);
  PyObject* refs = PyTuple_New(n);
  PyObject* empty = PyTuple_New(0);
  PyObject* number = PyLong_FromUnsignedLongLong(index);
  bool ok = refs && empty && number;
  for (Py_ssize_t i = 0; ok && i < n; ++i) {
    PyObject* ref = ref_type->tp_new(ref_type, empty, nullptr);
    ok = ref != nullptr;
    if (ok) PyTuple_SET_ITEM(refs, i, ref);
  }
  try {
    ok = ok && write_now(values, count, deadline);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    ok = false;
  }
  for (Py_ssize_t i = 0; ok && i < n; ++i) {
    PyObject* ref = PyTuple_GET_ITEM(refs, i);
    ok = PyObject_SetAttr(ref, graph_name, graph) == 0 && PyObject_SetAttr(ref, queue_name, PyTuple_GET_ITEM(queues, i)) == 0 &&
         PyObject_SetAttr(ref, index_name, number) == 0 && PyObject_SetAttr(ref, value_name, pending) == 0;
  }
  Py_XDECREF(empty);
  Py_XDECREF(number);
  if (!ok) Py_CLEAR(refs);
  return refs;
}

bool Writer::write_failure(PyObject* payload, PyObject* buffers, double seconds) {
  Turn turn(busy_, graph_->own().made_under(), "a channel's writing end");
  const int64_t deadline = deadline_after(seconds);
  if (!turn || !wait_for_room(deadline)) return false;
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

Reader::Reader(const Arena& arena, uint32_t writer, uint32_t channel, uint32_t index, AfterClose after_close, uint32_t subject, BufferFactory make_buffer)
    : graph_(arena.graph), ring_(*graph_, writer, channel, index), decoder_(make_buffer), after_close_(after_close), subject_(subject) {}

bool Reader::wait_ready(int64_t deadline) {
  if (after_close_ == AfterClose::leave) {
    if (const uint64_t closed = graph_->closed(); closed != 0) return raise_closed(closed), false;
  }
  if (!ring_.ready()) {
    set_activity(*graph_, Activity::reading, ring_.channel());
    const Waited waited =
        wait_in_slices(*graph_, recent_, deadline, [this] { return ring_.ready() || graph_->closed() != 0; });
    if (waited == Waited::raised) return false;
    if (!ring_.ready()) {
      if (const uint64_t closed = graph_->closed(); closed != 0) return raise_closed(closed), false;
      return PyErr_SetNone(g_timed_out), false;
    }
  }
  set_activity(*graph_, Activity::computing, subject_);
  return true;
}

PyObject* Reader::read(double seconds) {
  Turn turn(busy_, graph_->own().made_under(), "a channel's reading end");
  if (!turn || !wait_ready(deadline_after(seconds))) return nullptr;
  ring_.open(message_);
  PyObject* value = decoder_.decode(message_, ring_);
  if (value || !PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
    decoder_.settle();
    ring_.close(message_);
  }
  return value;
}

bool Reader::fetch_one(PyObject* ref, PyObject* results, PyObject* unwanted, int64_t deadline) {
  static PyObject* const value_name = PyUnicode_InternFromString("_value");
  if (!wait_ready(deadline)) return false;
  ring_.open(message_);
  PyObject* key = PyLong_FromUnsignedLongLong(ring_.taken());
  if (!key) return false;
  const auto given_up = [&] { return PySet_GET_SIZE(unwanted) != 0 && PySet_Discard(unwanted, key) == 1; };
  if (!decoder_.open() && given_up()) {
    ring_.discard(message_);
    Py_DECREF(key);
    return true;
  }
  PyObject* value = decoder_.decode(message_, ring_);
  if (!value && !PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
    // Whoever asks for this execution gets the error; the ones behind it are not in its way.
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace) PyException_SetTraceback(error, trace);
    PyObject* function = codec_function("undecodable");
    value = function ? PyObject_CallFunctionObjArgs(function, error, key, nullptr) : nullptr;
    Py_XDECREF(function);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
  }
  const bool stored = value && (ref ? PyObject_SetAttr(ref, value_name, value) : PyDict_SetItem(results, key, value)) == 0;
  if (stored) {
    if (!ref && given_up()) PyDict_DelItem(results, key);  // its ref died while it was being decoded
    decoder_.settle();
    ring_.close(message_);
  }
  Py_XDECREF(value);
  Py_DECREF(key);
  return stored;
}

bool Reader::fetch(PyObject* ref, PyObject* results, PyObject* unwanted, uint64_t index, size_t limit, double seconds) {
  const int64_t deadline = deadline_after(seconds);
  while (taken() <= index) {
    if (!in_its_process(*graph_)) return false;
    const auto entered = queue_.enter(deadline, [&] { return taken() > index; });
    if (entered == Queue::Entered::raised) return false;
    if (entered == Queue::Entered::timed_out) {
      if (taken() > index) break;
      return PyErr_SetNone(g_timed_out), false;
    }
    const Queue::Turn turn(queue_);
    bool ok = true;
    if (const uint64_t next = taken(); next < index && static_cast<size_t>(PyDict_GET_SIZE(results)) >= limit) {
      PyErr_SetNone(g_overfull);
      ok = false;
    } else if (next <= index) {
      ok = fetch_one(next == index && ref != Py_None ? ref : nullptr, results, unwanted, deadline);
    }
    if (!ok) return false;
  }
  return true;
}

bool Reader::skip(double seconds) {
  Turn turn(busy_, graph_->own().made_under(), "a channel's reading end");
  if (!turn || !wait_ready(deadline_after(seconds))) return false;
  ring_.open(message_);
  if (decoder_.open()) {  // by a read that was interrupted; its leases hold the blocks
    decoder_.settle();
    ring_.close(message_);
  } else {
    ring_.discard(message_);
  }
  return true;
}

}  // namespace raycomm
