#include "waiting.hpp"

#include <cmath>

namespace raycomm {

PyObject *g_timed_out = nullptr, *g_closed = nullptr, *g_pool_full = nullptr, *g_pool_busy = nullptr, *g_misuse = nullptr, *g_overfull = nullptr;

void raise_closed(uint64_t closed) {
  PyObject* value = Py_BuildValue("(II)", static_cast<unsigned>(closed), static_cast<unsigned>(closed >> 32));
  if (value) PyErr_SetObject(g_closed, value);
  Py_XDECREF(value);
}

void raise_pool_full(const PoolExhausted& report, Shortage shortage) {
  PyObject* holders = PyDict_New();
  for (const auto& [process, bytes] : report.holders) {
    PyObject* key = PyLong_FromUnsignedLong(process);
    PyObject* value = PyLong_FromUnsignedLongLong(bytes);
    if (key && value) PyDict_SetItem(holders, key, value);
    Py_XDECREF(key);
    Py_XDECREF(value);
  }
  PyObject* value = Py_BuildValue("(KKKiNIK)", report.wanted, report.free, report.limit, report.system_error, holders, static_cast<unsigned>(shortage), report.others);
  if (value) PyErr_SetObject(g_pool_full, value);
  Py_XDECREF(value);
}

bool in_its_process(const Neighbourhood& graph) {
  if (graph.own().made_under() == fork_epoch()) return true;
  PyErr_SetString(g_misuse, "this graph belongs to the process that compiled it, and this one was forked from it; compile a graph here, or start processes with spawn");
  return false;
}

int64_t deadline_after(double seconds) {
  if (seconds < 0) return kNoDeadline;
  if (seconds == 0) return 0;
  return seconds > 1e9 ? kNoDeadline : now_ns() + static_cast<int64_t>(std::ceil(seconds * 1e9));
}

MemoryWait::~MemoryWait() {
  // Nobody sees a wait that is over. The driver's goes on in Python, which looks at the row to say what it waits for.
  if (over_ || graph_.process() != kDriver) graph_.board().resume(ticks());
}

bool MemoryWait::judge(const PoolExhausted& report, int64_t deadline) {
  const Shortage shortage = pool_.shortage(report.wanted, began_, deadline != 0);
  if (const uint64_t closed = graph_.closed(); closed != 0) return raise_closed(closed), false;
  if (shortage != Shortage::passing) return over_ = true, raise_pool_full(report, shortage), false;
  if (now_ns() >= deadline) return PyErr_SetNone(g_timed_out), false;
  return true;
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

}  // namespace raycomm
