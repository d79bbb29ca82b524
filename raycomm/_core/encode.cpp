#include "encode.hpp"

#include <bit>
#include <cstring>
#include <limits>

namespace raycomm {
namespace {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian, and so are x86-64 and arm64");

template <class T>
T big_endian(T value) {
  if constexpr (sizeof(T) == 2) return static_cast<T>(__builtin_bswap16(static_cast<uint16_t>(value)));
  if constexpr (sizeof(T) == 4) return static_cast<T>(__builtin_bswap32(static_cast<uint32_t>(value)));
  if constexpr (sizeof(T) == 8) return static_cast<T>(__builtin_bswap64(static_cast<uint64_t>(value)));
}

}  // namespace

void Encoder::reset(unsigned char* region, size_t bytes) {
  for (PyObject* object : objects_) Py_DECREF(object);
  objects_.clear();
  if (!index_of_.empty()) index_of_.clear();
  for (Py_buffer& view : views_) PyBuffer_Release(&view);
  views_.clear();
  Py_CLEAR(adopted_);
  message_.buffers.clear();
  message_.kind = Kind::value;
  message_.pickles = 0;
  if (own_.size() > (1u << 20)) std::vector<unsigned char>().swap(own_);  // a rare large payload does not pin its memory
  begin_ = cur_ = region;
  end_ = region + bytes;
}

void Encoder::grow(size_t bytes) {
  const size_t used = static_cast<size_t>(cur_ - begin_);
  const bool mine = !own_.empty() && begin_ == own_.data();
  std::vector<unsigned char> larger(std::max<size_t>({2 * used, used + bytes, 4096}));
  std::memcpy(larger.data(), begin_, used);
  if (mine || own_.size() < larger.size()) own_.swap(larger);
  else std::memcpy(own_.data(), begin_, used);
  begin_ = own_.data();
  cur_ = begin_ + used;
  end_ = begin_ + own_.size();
}

template <class T>
void Encoder::big(unsigned char tag, T value) {
  unsigned char* at = room(1 + sizeof(T));
  at[0] = tag;
  const T swapped = big_endian(value);
  std::memcpy(at + 1, &swapped, sizeof swapped);
}

void Encoder::array_header(size_t n) {
  if (n < 16) byte(static_cast<unsigned char>(0x90 | n));
  else if (n < (1u << 16)) big<uint16_t>(0xdc, static_cast<uint16_t>(n));
  else big<uint32_t>(0xdd, static_cast<uint32_t>(n));
}

void Encoder::ext_header(int8_t ext, size_t n) {
  if (n == 1 || n == 2 || n == 4 || n == 8 || n == 16) {
    byte(static_cast<unsigned char>(0xd4 + std::countr_zero(n)));
  } else if (n < 256) {
    byte(0xc7);
    byte(static_cast<unsigned char>(n));
  } else if (n < (1u << 16)) {
    big<uint16_t>(0xc8, static_cast<uint16_t>(n));
  } else {
    big<uint32_t>(0xc9, static_cast<uint32_t>(n));
  }
  byte(static_cast<unsigned char>(ext));
}

bool Encoder::encode(PyObject* value) {
  unsigned char* const region = begin_;
  unsigned char* const region_end = end_;
  byte(kFormatVersion);
  switch (put(value, 0)) {
    case Result::done:
      message_.payload = begin_;
      message_.payload_bytes = static_cast<size_t>(cur_ - begin_);
      return true;
    case Result::error: return false;
    case Result::unknown: break;
  }
  reset(region, static_cast<size_t>(region_end - region));
  PyObject* function = codec_function("encode_counted");
  if (!function) return false;
  PyObject* made = PyObject_CallFunctionObjArgs(function, value, allow_pickle_ ? Py_True : Py_False, nullptr);
  Py_DECREF(function);
  if (!made) return false;
  if (!PyTuple_Check(made) || PyTuple_GET_SIZE(made) != 3) {
    Py_DECREF(made);
    PyErr_SetString(PyExc_TypeError, "raycomm.codec.encode_counted must return (payload, buffers, pickles)");
    return false;
  }
  message_.pickles = static_cast<uint32_t>(PyLong_AsUnsignedLongMask(PyTuple_GET_ITEM(made, 2)));
  const bool ok = adopt(PyTuple_GET_ITEM(made, 0), PyTuple_GET_ITEM(made, 1));
  Py_DECREF(made);
  return ok;
}

bool Encoder::adopt(PyObject* payload, PyObject* buffers) {
  PyObject* sequence = PySequence_Fast(buffers, "buffers must be a sequence");
  if (!sequence) return false;
  Py_buffer view;
  bool ok = PyObject_GetBuffer(payload, &view, PyBUF_SIMPLE) == 0;
  if (ok) {
    views_.push_back(view);
    message_.payload = static_cast<const unsigned char*>(view.buf);
    message_.payload_bytes = static_cast<size_t>(view.len);
    for (Py_ssize_t i = 0; ok && i < PySequence_Fast_GET_SIZE(sequence); ++i) {
      ok = PyObject_GetBuffer(PySequence_Fast_GET_ITEM(sequence, i), &view, PyBUF_SIMPLE) == 0;
      if (!ok) break;
      views_.push_back(view);
      message_.buffers.push_back({view.buf, static_cast<size_t>(view.len)});
    }
  }
  adopted_ = sequence;
  return ok;
}

Encoder::Result Encoder::put(PyObject* value, int depth) {
  PyTypeObject* type = Py_TYPE(value);
  if (type == &PyLong_Type) return put_int(value);
  if (type == &PyUnicode_Type) return put_str(value);
  if (value == Py_None) return byte(0xc0), Result::done;
  if (type == &PyBool_Type) return byte(value == Py_True ? 0xc3 : 0xc2), Result::done;
  if (type == &PyFloat_Type) return big<uint64_t>(0xcb, std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(value))), Result::done;
  if (type == &PyBytes_Type) {
    const size_t n = static_cast<size_t>(PyBytes_GET_SIZE(value));
    if (n > std::numeric_limits<uint32_t>::max()) return Result::unknown;
    if (n < 256) byte(0xc4), byte(static_cast<unsigned char>(n));
    else if (n < (1u << 16)) big<uint16_t>(0xc5, static_cast<uint16_t>(n));
    else big<uint32_t>(0xc6, static_cast<uint32_t>(n));
    std::memcpy(room(n), PyBytes_AS_STRING(value), n);
    return Result::done;
  }
  if (type == &PyList_Type) return put_sequence(value, false, depth);
  if (type == &PyTuple_Type) return put_sequence(value, true, depth);
  if (type == &PyDict_Type) return put_dict(value, depth);
  // Exact types only: a subclass of Tensor or ndarray must not arrive as its base.
  if (const Torch* torch = torch_if_loaded(); torch && type == torch->tensor_type) return put_tensor(value, *torch);
  if (const Numpy* numpy = numpy_if_loaded(); numpy && type == numpy->ndarray) return put_array(value, *numpy);
  return Result::unknown;
}

Encoder::Result Encoder::put_int(PyObject* value) {
  int overflow = 0;
  const long long v = PyLong_AsLongLongAndOverflow(value, &overflow);
  if (overflow != 0) {
    if (overflow < 0) return Result::unknown;
    const unsigned long long u = PyLong_AsUnsignedLongLong(value);
    if (u == static_cast<unsigned long long>(-1) && PyErr_Occurred()) return PyErr_Clear(), Result::unknown;
    big<uint64_t>(0xcf, u);
  } else if (v >= 0) {
    if (v < 128) byte(static_cast<unsigned char>(v));
    else if (v < 256) byte(0xcc), byte(static_cast<unsigned char>(v));
    else if (v < (1 << 16)) big<uint16_t>(0xcd, static_cast<uint16_t>(v));
    else if (v < (1ll << 32)) big<uint32_t>(0xce, static_cast<uint32_t>(v));
    else big<uint64_t>(0xcf, static_cast<uint64_t>(v));
  } else {
    if (v >= -32) byte(static_cast<unsigned char>(v));
    else if (v >= -128) byte(0xd0), byte(static_cast<unsigned char>(v));
    else if (v >= -32768) big<uint16_t>(0xd1, static_cast<uint16_t>(v));
    else if (v >= -2147483648ll) big<uint32_t>(0xd2, static_cast<uint32_t>(v));
    else big<uint64_t>(0xd3, static_cast<uint64_t>(v));
  }
  return Result::done;
}

Encoder::Result Encoder::put_str(PyObject* value) {
  Py_ssize_t length;
  const char* text = PyUnicode_AsUTF8AndSize(value, &length);
  if (!text) return PyErr_Clear(), Result::unknown;  // surrogates
  const size_t n = static_cast<size_t>(length);
  if (n > std::numeric_limits<uint32_t>::max()) return Result::unknown;
  if (n < 32) byte(static_cast<unsigned char>(0xa0 | n));
  else if (n < 256) byte(0xd9), byte(static_cast<unsigned char>(n));
  else if (n < (1u << 16)) big<uint16_t>(0xda, static_cast<uint16_t>(n));
  else big<uint32_t>(0xdb, static_cast<uint32_t>(n));
  std::memcpy(room(n), text, n);
  return Result::done;
}

Encoder::Result Encoder::put_sequence(PyObject* sequence, bool tuple, int depth) {
  if (depth >= kNativeDepth) return Result::unknown;
  if (PySequence_Fast_GET_SIZE(sequence) >= kPackedFrom) {
    const Result packed = put_packed(sequence, tuple);
    if (packed != Result::unknown) return packed;
  }
  if (!tuple) return put_items(sequence, depth);
  // The length of a tuple's body is known at its end: leave room for the longest header, then close the gap.
  constexpr size_t kLongest = 6;
  const size_t mark = static_cast<size_t>(cur_ - begin_);
  room(kLongest);
  const Result result = put_items(sequence, depth);
  if (result != Result::done) return result;
  const size_t body = static_cast<size_t>(cur_ - begin_) - mark - kLongest;
  if (body > std::numeric_limits<uint32_t>::max()) return Result::unknown;
  cur_ = begin_ + mark;
  ext_header(kExtTuple, body);
  std::memmove(cur_, begin_ + mark + kLongest, body);
  cur_ += body;
  return Result::done;
}

Encoder::Result Encoder::put_items(PyObject* sequence, int depth) {
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(sequence);
  if (static_cast<size_t>(n) > std::numeric_limits<uint32_t>::max()) return Result::unknown;
  array_header(static_cast<size_t>(n));
  for (Py_ssize_t i = 0; i < n; ++i) {
    // Reading a tensor may let another thread run, and that thread may change the list.
    if (PySequence_Fast_GET_SIZE(sequence) != n) return Result::unknown;
    PyObject* item = PySequence_Fast_GET_ITEM(sequence, i);
    Py_INCREF(item);
    const Result result = put(item, depth + 1);
    Py_DECREF(item);
    if (result != Result::done) return result;
  }
  return Result::done;
}

Encoder::Result Encoder::put_packed(PyObject* sequence, bool tuple) {
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(sequence);
  PyObject** items = PySequence_Fast_ITEMS(sequence);
  const size_t count = static_cast<size_t>(n);
  if (Py_TYPE(items[0]) == &PyFloat_Type) {
    for (Py_ssize_t i = 1; i < n; ++i)
      if (Py_TYPE(items[i]) != &PyFloat_Type) return Result::unknown;
    if (count * 8 + 2 > std::numeric_limits<uint32_t>::max()) return Result::unknown;
    ext_header(kExtPacked, 2 + count * 8);
    unsigned char* at = room(2 + count * 8);
    at[0] = tuple;
    at[1] = 5;
    for (size_t i = 0; i < count; ++i) std::memcpy(at + 2 + i * 8, &reinterpret_cast<PyFloatObject*>(items[i])->ob_fval, 8);
    return Result::done;
  }
  if (Py_TYPE(items[0]) != &PyLong_Type) return Result::unknown;
  std::vector<int64_t>& values = ints_;
  values.resize(count);
  int64_t low = 0, high = 0;
  for (size_t i = 0; i < count; ++i) {
    if (Py_TYPE(items[i]) != &PyLong_Type) return Result::unknown;
    int overflow = 0;
    const int64_t v = PyLong_AsLongLongAndOverflow(items[i], &overflow);
    if (overflow != 0) return Result::unknown;
    values[i] = v;
    low = std::min(low, v);
    high = std::max(high, v);
  }
  const auto fits = [&](auto width) { return low >= std::numeric_limits<decltype(width)>::min() && high <= std::numeric_limits<decltype(width)>::max(); };
  const auto write = [&](auto width, unsigned char code) {
    using T = decltype(width);
    if (count * sizeof(T) + 2 > std::numeric_limits<uint32_t>::max()) return Result::unknown;
    ext_header(kExtPacked, 2 + count * sizeof(T));
    unsigned char* at = room(2 + count * sizeof(T));
    at[0] = tuple;
    at[1] = code;
    at += 2;
    for (size_t i = 0; i < count; ++i) {
      const T v = static_cast<T>(values[i]);
      std::memcpy(at + i * sizeof v, &v, sizeof v);
    }
    return Result::done;
  };
  if (fits(int8_t{})) return write(int8_t{}, 1);
  if (fits(int16_t{})) return write(int16_t{}, 2);
  if (fits(int32_t{})) return write(int32_t{}, 3);
  return write(int64_t{}, 4);
}

Encoder::Result Encoder::put_dict(PyObject* dict, int depth) {
  if (depth >= kNativeDepth) return Result::unknown;
  const Py_ssize_t n = PyDict_GET_SIZE(dict);
  if (n < 16) byte(static_cast<unsigned char>(0x80 | n));
  else if (n < (1 << 16)) big<uint16_t>(0xde, static_cast<uint16_t>(n));
  else big<uint32_t>(0xdf, static_cast<uint32_t>(n));
  Py_ssize_t at = 0, done = 0;
  PyObject *key, *item;
  while (PyDict_Next(dict, &at, &key, &item)) {
    Py_INCREF(key);
    Py_INCREF(item);
    Result result = put(key, depth + 1);
    if (result == Result::done) result = put(item, depth + 1);
    Py_DECREF(key);
    Py_DECREF(item);
    if (result != Result::done) return result;
    if (PyDict_GET_SIZE(dict) != n) return Result::unknown;
    ++done;
  }
  return done == n ? Result::done : Result::unknown;
}

}  // namespace raycomm
