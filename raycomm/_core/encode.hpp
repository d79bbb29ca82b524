// The codec's fast path, writing side: Python values to msgpack, straight into memory that may be a ring slot.
// The format is drawn in raycomm/codec/message.py; a test encodes every value here and there and compares the bytes.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "frameworks.hpp"
#include "ring.hpp"

namespace raycomm {

inline constexpr unsigned char kFormatVersion = 1;
inline constexpr int kNativeDepth = 200;  // deeper values take the Python codec, whose limit is the format's

enum Ext : int8_t { kExtTuple = 3, kExtPacked = 8, kExtTensor = 9, kExtArray = 10, kExtRef = 13 };
inline constexpr Py_ssize_t kPackedFrom = 16;  // shortest list that is packed
enum TensorFlags : unsigned char { kHasStrides = 1, kRequiresGrad = 2, kParameter = 4 };

class Encoder {
 public:
  explicit Encoder(bool allow_pickle = true) : allow_pickle_(allow_pickle) {}
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;
  ~Encoder() { reset(nullptr, 0); }

  // Starts a message that is written to `region` as long as it fits, to memory of its own beyond.
  void reset(unsigned char* region, size_t bytes);
  // False with a Python error set: the value cannot be sent. Holds whatever the buffers alias until the next reset().
  bool encode(PyObject* value);
  // A payload made elsewhere: bytes and a sequence of objects that export their bytes.
  bool adopt(PyObject* payload, PyObject* buffers);
  Outgoing& message() { return message_; }

 private:
  enum class Result { done, unknown, error };  // unknown: not a common value, for the Python codec
  Result put(PyObject* value, int depth);
  Result put_items(PyObject* sequence, int depth);
  Result put_sequence(PyObject* sequence, bool tuple, int depth);
  Result put_packed(PyObject* sequence, bool tuple);
  Result put_dict(PyObject* dict, int depth);
  Result put_int(PyObject* value);
  Result put_str(PyObject* value);
  Result put_tensor(PyObject* value, const Torch& torch);
  Result put_array(PyObject* value, const Numpy& numpy);
  bool seen_before(PyObject* value);
  void put_metadata(int8_t ext, uint8_t dtype, const int64_t* shape, int ndim);

  void grow(size_t bytes);
  unsigned char* room(size_t bytes) {
    if (static_cast<size_t>(end_ - cur_) < bytes) grow(bytes);
    unsigned char* at = cur_;
    cur_ += bytes;
    return at;
  }
  void byte(unsigned char b) { *room(1) = b; }
  template <class T>
  void big(unsigned char tag, T value);
  void array_header(size_t n);
  void ext_header(int8_t ext, size_t n);

  bool allow_pickle_;
  unsigned char *begin_ = nullptr, *cur_ = nullptr, *end_ = nullptr;
  std::vector<unsigned char> own_;
  Outgoing message_;
  std::vector<PyObject*> objects_;                    // tensors and arrays of this message, in order; strong references
  std::unordered_map<PyObject*, uint32_t> index_of_;  // only once there are many
  std::vector<Py_buffer> views_;
  std::vector<int64_t> ints_;
  PyObject* adopted_ = nullptr;
};

}  // namespace raycomm
