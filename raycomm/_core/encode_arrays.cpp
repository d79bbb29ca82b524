// Tensors and arrays, writing side: which of them are common enough for the native path, and their metadata.
#include <cstring>

#include "encode.hpp"

namespace raycomm {
namespace {

// Row-major in torch's sense: strides of dimensions of size 1, and of empty tensors, do not matter.
bool row_major(const int64_t* shape, const int64_t* strides, int ndim) {
  int64_t expected = 1;
  for (int i = 0; i < ndim; ++i)
    if (shape[i] == 0) return true;
  for (int i = ndim - 1; i >= 0; --i) {
    if (shape[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

// The dtype code of a buffer-protocol format, native byte order only; 0 for anything else.
uint8_t code_of_format(const char* format, Py_ssize_t item_bytes) {
  if (!format || format[0] == 0) return 0;
  const bool complex = format[0] == 'Z';
  const char kind = format[complex ? 1 : 0];
  if (format[complex ? 2 : 1] != 0) return 0;
  if (complex) return kind == 'f' ? 14 : kind == 'd' ? 15 : 0;
  switch (kind) {
    case '?': return 13;
    case 'e': return 3;
    case 'f': return 2;
    case 'd': return 1;
    // Not 'q' and 'Q': numpy keeps long long apart from long, and so does the format (array.py describes it by name).
    case 'b': case 'h': case 'i': case 'l':
      return item_bytes == 1 ? 5 : item_bytes == 2 ? 6 : item_bytes == 4 ? 7 : item_bytes == 8 ? 8 : 0;
    case 'B': case 'H': case 'I': case 'L':
      return item_bytes == 1 ? 9 : item_bytes == 2 ? 10 : item_bytes == 4 ? 11 : item_bytes == 8 ? 12 : 0;
    default: return 0;
  }
}

}  // namespace

bool Encoder::seen_before(PyObject* value) {
  constexpr size_t kMany = 32;
  const size_t n = objects_.size();
  size_t found = n;
  if (n < kMany) {
    for (size_t i = 0; i < n && found == n; ++i)
      if (objects_[i] == value) found = i;
  } else {
    for (size_t i = index_of_.size(); i < n; ++i) index_of_.emplace(objects_[i], static_cast<uint32_t>(i));
    if (const auto it = index_of_.find(value); it != index_of_.end()) found = it->second;
  }
  if (found < n) {
    const uint32_t k = static_cast<uint32_t>(found);
    ext_header(kExtRef, sizeof k);
    std::memcpy(room(sizeof k), &k, sizeof k);
    return true;
  }
  return false;
}

void Encoder::put_metadata(int8_t ext, uint8_t dtype, const int64_t* shape, int ndim) {
  const size_t body = 8 + 8 * static_cast<size_t>(ndim);
  ext_header(ext, body);
  unsigned char* at = room(body);
  const uint32_t index = static_cast<uint32_t>(message_.buffers.size());
  const unsigned char head[4] = {dtype, 0, 0, static_cast<unsigned char>(ndim)};
  std::memcpy(at, head, 4);
  std::memcpy(at + 4, &index, 4);
  if (ndim != 0) std::memcpy(at + 8, shape, 8 * static_cast<size_t>(ndim));
}

Encoder::Result Encoder::put_tensor(PyObject* value, const Torch& torch) {
  static PyObject* const dtype_name = PyUnicode_InternFromString("dtype");
  static PyObject* const grad_name = PyUnicode_InternFromString("requires_grad");
  if (!torch.api) return Result::unknown;
  if (seen_before(value)) return Result::done;
  // Attributes a user hung on the tensor travel with it, by pickle.
  if (PyObject** attributes = _PyObject_GetDictPtr(value); attributes && *attributes && PyDict_GET_SIZE(*attributes) != 0) return Result::unknown;
  PyObject* grad = PyObject_GetAttr(value, grad_name);
  if (!grad) return PyErr_Clear(), Result::unknown;
  const bool plain = grad == Py_False;
  Py_DECREF(grad);
  if (!plain) return Result::unknown;
  // The dtype is taken from torch, not from DLPack, which shows int4 and its like as int8.
  PyObject* dtype = PyObject_GetAttr(value, dtype_name);
  if (!dtype) return PyErr_Clear(), Result::unknown;
  Py_DECREF(dtype);  // dtypes are singletons that torch keeps
  const DtypeRow* row = nullptr;
  for (size_t i = 0; i < kDtypes.size() && !row; ++i)
    if (torch.dtypes[i] == dtype) row = &kDtypes[i];
  if (!row) return Result::unknown;
  dl::Tensor view;
  if (torch.api->view_of_object(value, &view) != 0) return PyErr_Clear(), Result::unknown;  // sparse, meta, mkldnn, ...
  if (view.device.type != dl::kCpu || view.dtype.code != row->dl.code || view.dtype.bits != row->dl.bits || view.dtype.lanes != 1 ||
      view.ndim > static_cast<int>(kMaxDims) || !row_major(view.shape, view.strides, view.ndim))
    return Result::unknown;
  if (row->code != 13) {  // a lazily negated or conjugated view holds other bytes than its values
    PyObject* negative = PyObject_CallOneArg(torch.is_neg, value);
    if (!negative) return PyErr_Clear(), Result::unknown;
    const bool straight = negative == Py_False;
    Py_DECREF(negative);
    if (!straight) return Result::unknown;
    if (row->dl.code == dl::kComplex) {
      PyObject* conjugate = PyObject_CallMethod(value, "is_conj", nullptr);
      if (!conjugate) return PyErr_Clear(), Result::unknown;
      const bool resolved = conjugate == Py_False;
      Py_DECREF(conjugate);
      if (!resolved) return Result::unknown;
    }
    // That call may have let another thread resize the tensor: look again, nothing runs between here and the copy of the shape.
    if (torch.api->view_of_object(value, &view) != 0 || view.ndim > static_cast<int>(kMaxDims) || !row_major(view.shape, view.strides, view.ndim))
      return PyErr_Clear(), Result::unknown;
  }
  size_t bytes = row->dl.bits / 8;
  for (int i = 0; i < view.ndim; ++i) bytes *= static_cast<size_t>(view.shape[i]);
  put_metadata(kExtTensor, row->code, view.shape, view.ndim);
  message_.buffers.push_back({static_cast<unsigned char*>(view.data) + view.byte_offset, bytes});
  Py_INCREF(value);
  objects_.push_back(value);
  return Result::done;
}

Encoder::Result Encoder::put_array(PyObject* value, const Numpy&) {
  if (seen_before(value)) return Result::done;
  Py_buffer view;
  if (PyObject_GetBuffer(value, &view, PyBUF_FULL_RO) != 0) return PyErr_Clear(), Result::unknown;  // datetime64
  const uint8_t code = code_of_format(view.format, view.itemsize);
  if (code == 0 || view.ndim > static_cast<int>(kMaxDims) || !PyBuffer_IsContiguous(&view, 'C')) return PyBuffer_Release(&view), Result::unknown;
  static_assert(sizeof(Py_ssize_t) == sizeof(int64_t));
  put_metadata(kExtArray, code, reinterpret_cast<const int64_t*>(view.shape), view.ndim);
  message_.buffers.push_back({view.buf, static_cast<size_t>(view.len)});
  views_.push_back(view);
  Py_INCREF(value);
  objects_.push_back(value);
  return Result::done;
}

}  // namespace raycomm
