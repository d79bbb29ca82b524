#include "decode.hpp"

#include <bit>
#include <cstdio>
#include <cstring>
#include <utility>

#include "encode.hpp"

namespace raycomm {
PyObject* raise_serialization_error(const char* message) {
  PyObject* module = PyImport_ImportModule("raycomm.errors");
  if (!module) return nullptr;
  PyObject* type = PyObject_GetAttrString(module, "SerializationError");
  Py_DECREF(module);
  if (!type) return nullptr;
  PyErr_SetString(type, message);
  Py_DECREF(type);
  return nullptr;
}

PyObject* Decoder::malformed(const char* what) {
  if (!PyErr_Occurred()) {
    char text[200];
    std::snprintf(text, sizeof text, "malformed message: %s", what);
    raise_serialization_error(text);
  }
  return nullptr;
}

template <class T>
bool Decoder::take(T& value) {
  if (static_cast<size_t>(end_ - cur_) < sizeof(T)) return false;
  std::memcpy(&value, cur_, sizeof(T));
  if constexpr (sizeof(T) == 2) value = static_cast<T>(__builtin_bswap16(value));
  if constexpr (sizeof(T) == 4) value = static_cast<T>(__builtin_bswap32(value));
  if constexpr (sizeof(T) == 8) value = static_cast<T>(__builtin_bswap64(value));
  cur_ += sizeof(T);
  return true;
}

const unsigned char* Decoder::take_bytes(size_t n) {
  if (static_cast<size_t>(end_ - cur_) < n) return nullptr;
  const unsigned char* at = cur_;
  cur_ += n;
  return at;
}

PyObject* Decoder::decode(const Incoming& message, const RingReader& reader) {
  if (!open_) {
    parts_.clear();
    for (const auto& buffer : message.buffers)
      parts_.push_back({buffer.data, buffer.bytes, buffer.block == kInline ? nullptr : reader.lease(buffer.block)});
    open_ = true;
  }
  return message.problem.empty() ? run(message, reader.shared()) : malformed(message.problem.c_str());
}

void Decoder::settle() {
  for (const Part& part : parts_)
    if (part.lease) part.lease->release();
  parts_.clear();
  open_ = false;
}

PyObject* Decoder::decode_copy(const Incoming& message) {
  parts_.clear();
  for (const auto& buffer : message.buffers) parts_.push_back({buffer.data, buffer.bytes, nullptr});
  return run(message, false);
}

void Decoder::forget_objects() {
  for (PyObject* object : objects_) Py_DECREF(object);
  objects_.clear();
}

PyObject* Decoder::run(const Incoming& message, bool shared) {
  PyObject* value = attempt(message, shared);
  if (value || !PyErr_ExceptionMatches(PyExc_Exception)) return value;
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  PyObject* name = PyObject_GetAttrString(type, "__name__");
  if (name && PyUnicode_CompareWithASCIIString(name, "SerializationError") != 0) {
    // torch that cannot be imported here, no memory for a copy: whatever it is, this message cannot be decoded, and the next one may.
    PyObject* text = PyUnicode_FromFormat("cannot decode the value: %U: %S", name, error);
    if (text) raise_serialization_error(PyUnicode_AsUTF8(text));
    Py_XDECREF(text);
    PyObject *type2, *error2, *trace2;
    PyErr_Fetch(&type2, &error2, &trace2);
    PyErr_NormalizeException(&type2, &error2, &trace2);
    if (error2) PyException_SetCause(error2, Py_NewRef(error));
    PyErr_Restore(type2, error2, trace2);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
  } else {
    PyErr_Restore(type, error, trace);
  }
  Py_XDECREF(name);
  return nullptr;
}

PyObject* Decoder::attempt(const Incoming& message, bool shared) {
  shared_ = shared;
  unknown_ = false;
  next_part_ = 0;
  if (message.kind == Kind::failure) return in_python("decode_failure", message);
  cur_ = message.payload;
  end_ = cur_ + message.payload_bytes;
  if (cur_ == end_) return malformed("it is empty");
  if (*cur_ != kFormatVersion) return in_python("decode", message);  // says which versions met
  ++cur_;
  PyObject* value = get(0);
  forget_objects();
  if (value && (cur_ != end_ || next_part_ != parts_.size())) {
    Py_DECREF(value);
    return malformed(cur_ != end_ ? "bytes are left over behind the value" : "buffers are left over");
  }
  if (!value && unknown_ && !PyErr_Occurred()) return in_python("decode", message);
  if (!value && !PyErr_Occurred()) return malformed("truncated");
  return value;
}

PyObject* Decoder::in_python(const char* name, const Incoming& message) {
  PyObject* function = codec_function(name);
  if (!function) return nullptr;
  PyObject* payload = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(message.payload), static_cast<Py_ssize_t>(message.payload_bytes));
  PyObject* buffers = PyList_New(static_cast<Py_ssize_t>(parts_.size()));
  PyObject* value = nullptr;
  bool ok = payload && buffers;
  for (size_t i = 0; ok && i < parts_.size(); ++i) {
    bool writable = true;
    Storage* storage = storage_for(parts_[i], true, writable);
    PyObject* buffer = storage ? make_buffer_(storage, writable) : PyErr_NoMemory();
    ok = buffer != nullptr;
    if (ok) PyList_SET_ITEM(buffers, static_cast<Py_ssize_t>(i), buffer);
  }
  if (ok) value = PyObject_CallFunctionObjArgs(function, payload, buffers, nullptr);
  Py_XDECREF(payload);
  Py_XDECREF(buffers);
  Py_DECREF(function);
  return value;
}

PyObject* Decoder::get(int depth) {
  if (depth > kNativeDepth) return unknown();
  unsigned char tag;
  if (!take(tag)) return nullptr;
  if (tag < 0x80) return PyLong_FromLong(tag);
  if (tag >= 0xe0) return PyLong_FromLong(static_cast<int8_t>(tag));
  if (tag < 0x90) return get_map(tag & 15, depth);
  if (tag < 0xa0) return get_items(tag & 15, depth);
  const auto text = [&](size_t n) -> PyObject* {
    const unsigned char* at = take_bytes(n);
    if (!at) return nullptr;
    PyObject* value = PyUnicode_DecodeUTF8(reinterpret_cast<const char*>(at), static_cast<Py_ssize_t>(n), nullptr);
    if (value) return value;
    PyErr_Clear();
    return malformed("text that is not utf-8");
  };
  const auto bytes = [&](size_t n) -> PyObject* {
    const unsigned char* at = take_bytes(n);
    return at ? PyBytes_FromStringAndSize(reinterpret_cast<const char*>(at), static_cast<Py_ssize_t>(n)) : nullptr;
  };
  if (tag < 0xc0) return text(tag & 31);
  uint8_t n8;
  uint16_t n16;
  uint32_t n32;
  uint64_t n64;
  switch (tag) {
    case 0xc0: Py_RETURN_NONE;
    case 0xc2: Py_RETURN_FALSE;
    case 0xc3: Py_RETURN_TRUE;
    case 0xc4: return take(n8) ? bytes(n8) : nullptr;
    case 0xc5: return take(n16) ? bytes(n16) : nullptr;
    case 0xc6: return take(n32) ? bytes(n32) : nullptr;
    case 0xc7: return take(n8) ? get_ext(n8, depth) : nullptr;
    case 0xc8: return take(n16) ? get_ext(n16, depth) : nullptr;
    case 0xc9: return take(n32) ? get_ext(n32, depth) : nullptr;
    case 0xca: return unknown();  // float32: msgpack has it, we never write it
    case 0xcb: return take(n64) ? PyFloat_FromDouble(std::bit_cast<double>(n64)) : nullptr;
    case 0xcc: return take(n8) ? PyLong_FromLong(n8) : nullptr;
    case 0xcd: return take(n16) ? PyLong_FromLong(n16) : nullptr;
    case 0xce: return take(n32) ? PyLong_FromUnsignedLong(n32) : nullptr;
    case 0xcf: return take(n64) ? PyLong_FromUnsignedLongLong(n64) : nullptr;
    case 0xd0: return take(n8) ? PyLong_FromLong(static_cast<int8_t>(n8)) : nullptr;
    case 0xd1: return take(n16) ? PyLong_FromLong(static_cast<int16_t>(n16)) : nullptr;
    case 0xd2: return take(n32) ? PyLong_FromLong(static_cast<int32_t>(n32)) : nullptr;
    case 0xd3: return take(n64) ? PyLong_FromLongLong(static_cast<int64_t>(n64)) : nullptr;
    case 0xd4: return get_ext(1, depth);
    case 0xd5: return get_ext(2, depth);
    case 0xd6: return get_ext(4, depth);
    case 0xd7: return get_ext(8, depth);
    case 0xd8: return get_ext(16, depth);
    case 0xd9: return take(n8) ? text(n8) : nullptr;
    case 0xda: return take(n16) ? text(n16) : nullptr;
    case 0xdb: return take(n32) ? text(n32) : nullptr;
    case 0xdc: return take(n16) ? get_items(n16, depth) : nullptr;
    case 0xdd: return take(n32) ? get_items(n32, depth) : nullptr;
    case 0xde: return take(n16) ? get_map(n16, depth) : nullptr;
    case 0xdf: return take(n32) ? get_map(n32, depth) : nullptr;
    default: return malformed("a byte that starts nothing we write");
  }
}

PyObject* Decoder::get_items(size_t n, int depth) {
  if (n > static_cast<size_t>(end_ - cur_)) return nullptr;  // each item takes a byte at least
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(n));
  if (!list) return nullptr;
  for (size_t i = 0; i < n; ++i) {
    PyObject* item = get(depth + 1);
    if (!item) return Py_DECREF(list), nullptr;
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), item);
  }
  return list;
}

PyObject* Decoder::get_map(size_t n, int depth) {
  if (n > static_cast<size_t>(end_ - cur_) / 2) return nullptr;
  PyObject* dict = PyDict_New();
  if (!dict) return nullptr;
  for (size_t i = 0; i < n; ++i) {
    PyObject* key = get(depth + 1);
    PyObject* item = key ? get(depth + 1) : nullptr;
    const bool ok = item && PyDict_SetItem(dict, key, item) == 0;
    Py_XDECREF(key);
    Py_XDECREF(item);
    if (!ok) {
      Py_DECREF(dict);
      if (item) {
        PyErr_Clear();
        return malformed("a key that cannot be hashed");
      }
      return nullptr;
    }
  }
  return dict;
}

PyObject* Decoder::get_ext(size_t n, int depth) {
  unsigned char code;
  if (!take(code)) return nullptr;
  const unsigned char* body = take_bytes(n);
  if (!body) return nullptr;
  switch (code) {
    case kExtTuple: {
      const unsigned char* const after = std::exchange(cur_, body);
      const unsigned char* const end = std::exchange(end_, body + n);
      unsigned char tag = 0;
      PyObject* list = nullptr;
      if (n != 0 && take(tag)) {
        uint16_t n16;
        uint32_t n32;
        if (tag >= 0x90 && tag < 0xa0) list = get_items(tag & 15, depth);
        else if (tag == 0xdc) list = take(n16) ? get_items(n16, depth) : nullptr;
        else if (tag == 0xdd) list = take(n32) ? get_items(n32, depth) : nullptr;
      }
      const bool exact = cur_ == end_;
      cur_ = after;
      end_ = end;
      if (!list) return nullptr;
      PyObject* tuple = exact ? PyList_AsTuple(list) : malformed("a tuple that does not end where it says");
      Py_DECREF(list);
      return tuple;
    }
    case kExtPacked: return get_packed(body, n);
    case kExtTensor: return get_tensor(body, n);
    case kExtArray: return get_array(body, n);
    case kExtRef: {
      uint32_t k;
      if (n != sizeof k) return malformed("a reference of the wrong length");
      std::memcpy(&k, body, sizeof k);
      if (k >= objects_.size()) return malformed("a reference to a tensor that has not come yet");
      return Py_INCREF(objects_[k]), objects_[k];
    }
    default: return unknown();
  }
}

PyObject* Decoder::get_packed(const unsigned char* body, size_t n) {
  if (n < 2) return malformed("a packed list of an unknown kind");
  const unsigned char container = body[0], code = body[1];
  if (container > 1 || code < 1 || code > 5) return malformed("a packed list of an unknown kind");
  const bool tuple = container == 1;
  const size_t width = code == 5 ? 8 : size_t{1} << (code - 1);
  if ((n - 2) % width != 0) return malformed("a packed list that ends inside an item");
  const size_t count = (n - 2) / width;
  body += 2;
  PyObject* sequence = tuple ? PyTuple_New(static_cast<Py_ssize_t>(count)) : PyList_New(static_cast<Py_ssize_t>(count));
  if (!sequence) return nullptr;
  PyObject** items = PySequence_Fast_ITEMS(sequence);
  const auto fill = [&](auto example, auto make) {
    for (size_t i = 0; i < count; ++i) {
      auto v = example;
      std::memcpy(&v, body + i * sizeof v, sizeof v);
      if (!(items[i] = make(v))) return false;
    }
    return true;
  };
  bool ok = false;
  switch (code) {
    case 1: ok = fill(int8_t{}, [](int8_t v) { return PyLong_FromLong(v); }); break;
    case 2: ok = fill(int16_t{}, [](int16_t v) { return PyLong_FromLong(v); }); break;
    case 3: ok = fill(int32_t{}, [](int32_t v) { return PyLong_FromLong(v); }); break;
    case 4: ok = fill(int64_t{}, [](int64_t v) { return PyLong_FromLongLong(v); }); break;
    default: ok = fill(double{}, [](double v) { return PyFloat_FromDouble(v); }); break;
  }
  if (!ok) return Py_DECREF(sequence), nullptr;
  return sequence;
}

}  // namespace raycomm
