// The driver's ends: submit and fetch, each a whole operation in one native call, for any thread.
#include "endpoint.hpp"

namespace raycomm {

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
  outputs_ = &outputs;
  try {
    ok = ok && write_now(values, count, deadline);
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    ok = false;
  }
  outputs_ = nullptr;
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

bool Reader::fetch_one(PyObject* ref, PyObject* results, PyObject* unwanted, int64_t deadline) {
  static PyObject* const value_name = PyUnicode_InternFromString("_value");
  const uint64_t began = ticks();
  const bool was_ready = ring_.ready();
  const bool came = wait_ready(deadline, began);
  if (!was_ready) graph_->board().set(Activity::idle, 0, ticks());
  if (!came) return false;
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
  if (!value && PyErr_ExceptionMatches(PyExc_Exception)) {
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
    graph_->board().record(Activity::reading, ring_.channel(), ring_.taken(), began, ticks(), message_.payload_bytes);
    if (!ref && given_up()) PyDict_DelItem(results, key);  // its ref died while it was being decoded
    decoder_.settle();
    ring_.close(message_);
  }
  Py_XDECREF(value);
  Py_DECREF(key);
  return stored;
}

bool Reader::fetch(PyObject* ref, PyObject* results, PyObject* unwanted, uint64_t index, size_t limit, double seconds) {
  const bool ok = fetch_in_turn(ref, results, unwanted, index, limit, deadline_after(seconds));
  // ORDER over: our turn is over, then this look. Whoever has the turn by now does it after that.
  if (over_.load(std::memory_order_seq_cst) && graph_->own().made_under() == fork_epoch() && queue_.try_enter()) {
    const Queue::Turn turn(queue_);
    const KeptError error;
    discard_in_turn();
    PyDict_Clear(results);
  }
  return ok;
}

bool Reader::fetch_in_turn(PyObject* ref, PyObject* results, PyObject* unwanted, uint64_t index, size_t limit, int64_t deadline) {
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

}  // namespace raycomm
