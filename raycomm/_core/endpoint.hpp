// The Python-facing ends of a channel: waiting, codec and ring in one native call per write and one per read.
#pragma once

#include <Python.h>

#include <atomic>
#include <memory>
#include <vector>

#include "decode.hpp"
#include "encode.hpp"
#include "ring.hpp"
#include "waiting.hpp"

namespace raycomm {

// What a reader does once its own arena is closed: the driver still takes what was published, a loop leaves at once.
enum class AfterClose { drain, leave };

class Reader;

class Arena {
 public:
  explicit Arena(std::shared_ptr<Neighbourhood> graph) : graph(std::move(graph)) {}
  std::shared_ptr<Neighbourhood> graph;
  std::shared_ptr<Pool> pool;  // once the budget's arena is known

  // Waits on the own doorbell until every given process's loop has left or its process has died; 0 if the deadline passed.
  // Returns -1 with a Python error set on a signal.
  int wait_left(const std::vector<uint32_t>& processes, double seconds);
  // Waits until `wanted` of the results (reader, execution) are there or the graph has ended; 0 if the deadline passed, -1 with an error set.
  int wait_results(const std::vector<std::pair<const Reader*, uint64_t>>& results, size_t wanted, double seconds);
};

// One channel that a writer writes, with what its edge was given.
struct WriterChannel {
  uint32_t channel;
  std::vector<uint32_t> readers;
  bool allow_pickle = true;
};

// Writes one value to one ring, or several values to several rings in one step (all of them or none).
class Writer {
 public:
  Writer(const Arena& arena, const std::vector<WriterChannel>& channels);

  bool write(PyObject* const* values, size_t count, double seconds);           // false: Python error set, nothing published
  // The driver's write: any thread, in order. Makes the refs itself, one per queue: instances of `ref_type` with `_graph`, `_queue`, `_index` and
  // `_value` (= pending) set, after the values are published, while the first actor is already at work. No Python code runs in between, so an
  // interrupt cannot lose a ref whose execution is under way. A tuple of refs; None if `in_flight_limit` executions are under way;
  // null: Python error set, nothing published. Where memory is short and results can be taken aside, that error is PoolBusy.
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
  const std::vector<const Reader*>* outputs_ = nullptr;  // during submit: results that may be taken aside to free memory
  RecentWaits recent_;
  std::atomic<bool> busy_{false};
};

// A reader's place in its process.
struct ReaderRole {
  AfterClose after_close = AfterClose::leave;
  uint32_t subject = kNoCall;   // the call that begins once a read has returned, by its place in the list of actions
  bool first = false;           // its read begins an iteration
  bool claims = false;          // it reads the input: it says that an execution has begun, unless that was cancelled
  bool share_tensors = false;
  static constexpr uint32_t kNoCall = 0xffff;
};

class Reader {
 public:
  Reader(const Arena& arena, uint32_t writer, uint32_t channel, uint32_t index, ReaderRole role, BufferFactory make_buffer);

  PyObject* read(double seconds);                                // new reference; null: Python error set
  // The driver's read: any thread. Takes messages until execution `index` has been taken. Its value becomes attribute `_value` of `ref`;
  // earlier ones go into `results` (a dict by execution, at most `limit` of them), or are skipped if they are in the set `unwanted`.
  // Stored first, then taken, so that an interrupt loses nothing. With None for `ref`, execution `index` goes into `results` too.
  // False: Python error set.
  bool fetch(PyObject* ref, PyObject* results, PyObject* unwanted, uint64_t index, size_t limit, double seconds);
  bool skip(double seconds);                                     // takes one message without decoding it
  // The graph is closed: lets go of what is there, and hands out nothing more. Any thread; if another has its turn, up to the deadline and longer
  // (TimedOut), or this one is in the middle of a fetch (Misuse), it happens at the end of that turn.
  bool discard_rest(double seconds);
  bool ready() const { return ring_.ready(); }
  uint64_t taken() const { return ring_.taken(); }
  uint64_t published() const { return ring_.published(); }

 private:
  bool wait_ready(int64_t deadline, uint64_t began);
  bool fetch_one(PyObject* ref, PyObject* results, PyObject* unwanted, int64_t deadline);
  bool fetch_in_turn(PyObject* ref, PyObject* results, PyObject* unwanted, uint64_t index, size_t limit, int64_t deadline);
  void discard_one();
  void discard_in_turn();
  bool begin_execution(uint64_t execution) const;  // false: it was cancelled
  Queue queue_;
  std::shared_ptr<Neighbourhood> graph_;
  RingReader ring_;
  Decoder decoder_;
  Incoming message_;
  RecentWaits recent_;
  ReaderRole role_;
  ProcessSet writer_{};
  std::atomic<bool> busy_{false};
  std::atomic<bool> over_{false};
};

// The driver's claim on an execution that nobody has begun: true if no actor will run it.
bool cancel_execution(const Mapping& driver, uint64_t execution);

}  // namespace raycomm
