// The codec's fast path, reading side: a message to Python values. Large tensors and arrays are built on the block they arrived in.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

#include "frameworks.hpp"
#include "ring.hpp"

namespace raycomm {

// Bytes that a view keeps alive: a lease on a block, or memory of this process. Freed by any thread, without the GIL.
class Storage {
 public:
  static Storage* leased(Lease* lease, const unsigned char* data, size_t bytes);  // takes over one reference
  static Storage* owned(size_t bytes);                                            // 64-byte aligned, not filled; null: no memory
  void add_ref() { refs_.fetch_add(1, std::memory_order_relaxed); }
  void release();
  unsigned char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  unsigned char* data_ = nullptr;
  size_t bytes_ = 0;
  Lease* lease_ = nullptr;
  uint32_t epoch_ = 0;
  std::atomic<uint32_t> refs_{1};
};

// Makes the Python object that exports a storage by the buffer protocol. Takes over one reference; null with an error set on failure.
// Set by module.cpp, which defines the type.
using BufferFactory = PyObject* (*)(Storage* storage, bool writable);

class Decoder {
 public:
  // `share_tensors`: tensors stand on blocks that other processes read too; the user has promised that nobody writes to them.
  explicit Decoder(BufferFactory make_buffer, bool share_tensors = false) : make_buffer_(make_buffer), share_tensors_(share_tensors) {}

  // The value of an open message. `shared`: other processes read the same blocks, so nothing writable may be built on them.
  // Null with a Python error set (SerializationError for whatever cannot be decoded, or what interrupted it). Holds every block of the message
  // until settle(), which goes with closing the message; without it the next call decodes the same message again.
  PyObject* decode(const Incoming& message, const RingReader& reader);
  // The same for bytes of this process, with buffers that are copied: for tests, and for channels without blocks.
  PyObject* decode_copy(const Incoming& message);
  bool open() const { return open_; }
  void settle();

 private:
  struct Part {
    const unsigned char* data;
    size_t bytes;
    Lease* lease;  // null: small, to be copied
  };
  PyObject* run(const Incoming& message, bool shared);
  PyObject* attempt(const Incoming& message, bool shared);
  PyObject* in_python(const char* function, const Incoming& message);
  PyObject* get(int depth);
  PyObject* get_items(size_t n, int depth);
  PyObject* get_map(size_t n, int depth);
  PyObject* get_ext(size_t n, int depth);
  PyObject* get_packed(const unsigned char* body, size_t n);
  PyObject* get_tensor(const unsigned char* body, size_t n);
  PyObject* get_array(const unsigned char* body, size_t n);
  bool read_metadata(const unsigned char* body, size_t n, const DtypeRow*& row, int64_t* shape, int& ndim, const Part*& part);
  Storage* storage_for(const Part& part, bool read_only_will_do, bool& writable);
  PyObject* remember(PyObject* object) { return Py_INCREF(object), objects_.push_back(object), object; }
  void forget_objects();
  PyObject* malformed(const char* what);
  PyObject* unknown() { return unknown_ = true, nullptr; }
  template <class T>
  bool take(T& value);
  const unsigned char* take_bytes(size_t n);

  BufferFactory make_buffer_;
  bool share_tensors_;
  const unsigned char *cur_ = nullptr, *end_ = nullptr;
  std::vector<Part> parts_;
  std::vector<PyObject*> objects_;  // tensors and arrays of this message, in order; strong references while decoding
  size_t next_part_ = 0;            // each tensor or array has the next buffer for its own
  bool shared_ = false, unknown_ = false, open_ = false;
};

// raycomm.errors.SerializationError with a message; returns null.
PyObject* raise_serialization_error(const char* message);

}  // namespace raycomm
