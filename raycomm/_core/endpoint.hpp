// The Python-facing ends of a channel: waiting, codec and ring in one native call per write and one per read.
#pragma once

#include <Python.h>
#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "decode.hpp"
#include "encode.hpp"
#include "ring.hpp"

namespace raycomm {

// Raised to Python; runtime/channel code turns them into errors that name graph, edge and execution.
extern PyObject *g_timed_out, *g_closed, *g_pool_full, *g_misuse, *g_overfull;

// What a reader does once its own arena is closed: the driver still takes what was published, a loop leaves at once.
enum class AfterClose { drain, leave };

// Seconds to a deadline; negative: none, 0: already over, so that only one look is taken.
int64_t deadline_after(double seconds);

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
  std::timed_mutex mutex_;
  std::atomic<bool> held_{false};
  pthread_t owner_{};  // looked at only to recognise oneself
};

class Arena {
 public:
  explicit Arena(std::shared_ptr<Neighbourhood> graph) : graph(std::move(graph)) {}
  std::shared_ptr<Neighbourhood> graph;
  std::shared_ptr<Pool> pool;  // once the budget's arena is known

  // Waits on the own doorbell until every given process's loop has left or its process has died; false if the deadline passed.
  // Returns -1 with a Python error set on a signal.
  int wait_left(const std::vector<uint32_t>& processes, double seconds);
};

class Reader;

// Writes one value to one ring, or several values to several rings in one step (all of them or none).
class Writer {
 public:
  Writer(const Arena& arena, const std::vector<std::pair<uint32_t, std::vector<uint32_t>>>& channels);

  bool write(PyObject* const* values, size_t count, double seconds);           // false: Python error set, nothing published
  // The driver's write: any thread, in order. Makes the refs itself, one per queue: instances of `ref_type` with `_graph`, `_queue`, `_index` and
  // `_value` (= pending) set, after the values are published, while the first actor is already at work. No Python code runs in between, so an
  // interrupt cannot lose a ref whose execution is under way. A tuple of refs; None if `in_flight_limit` executions are under way;
  // null: Python error set, nothing published.
  PyObject* submit(PyObject* const* values, size_t count, PyTypeObject* ref_type, PyObject* graph, PyObject* queues, PyObject* pending,
                   const std::vector<const Reader*>& outputs, uint64_t in_flight_limit, double seconds);
  bool write_failure(PyObject* payload, PyObject* buffers, double seconds);    // the same failure to every ring
  uint64_t published() const { return rings_.front().published(); }
  size_t size() const { return rings_.size(); }

 private:
  bool write_now(PyObject* const* values, size_t count, int64_t deadline);
  bool wait_for_room(int64_t deadline);
  bool stage_and_publish(int64_t deadline);
  Queue queue_;
  std::shared_ptr<Neighbourhood> graph_;
  std::shared_ptr<Pool> pool_;
  std::vector<RingWriter> rings_;
  std::vector<std::unique_ptr<Encoder>> encoders_;
  std::vector<RingWriter::Staged> staged_;
  RecentWaits recent_;
  std::atomic<bool> busy_{false};
};

class Reader {
 public:
  Reader(const Arena& arena, uint32_t writer, uint32_t channel, uint32_t index, AfterClose after_close, uint32_t subject, BufferFactory make_buffer);

  PyObject* read(double seconds);                                // new reference; null: Python error set
  // The driver's read: any thread. Takes messages until execution `index` has been taken. Its value becomes attribute `_value` of `ref`;
  // earlier ones go into `results` (a dict by execution, at most `limit` of them), or are skipped if they are in the set `unwanted`.
  // Stored first, then taken, so that an interrupt loses nothing. With None for `ref`, execution `index` goes into `results` too.
  // False: Python error set.
  bool fetch(PyObject* ref, PyObject* results, PyObject* unwanted, uint64_t index, size_t limit, double seconds);
  bool skip(double seconds);                                     // takes one message without decoding it
  bool ready() const { return ring_.ready(); }
  uint64_t taken() const { return ring_.taken(); }

 private:
  bool wait_ready(int64_t deadline);
  bool fetch_one(PyObject* ref, PyObject* results, PyObject* unwanted, int64_t deadline);
  Queue queue_;
  std::shared_ptr<Neighbourhood> graph_;
  RingReader ring_;
  Decoder decoder_;
  Incoming message_;
  RecentWaits recent_;
  AfterClose after_close_;
  uint32_t subject_;  // what the process does once this read has returned: an action of its list
  std::atomic<bool> busy_{false};
};

}  // namespace raycomm
