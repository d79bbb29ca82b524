#include "frameworks.hpp"

#include <cstring>

namespace raycomm {
namespace {

PyObject* loaded(const char* name) {  // borrowed, or null
  PyObject* modules = PyImport_GetModuleDict();
  return modules ? PyDict_GetItemString(modules, name) : nullptr;
}

bool fill(Torch& torch, PyObject* module) {
  PyObject* type = PyObject_GetAttrString(module, "Tensor");
  if (!type) {
    PyErr_Clear();  // torch is being imported by another thread just now
    return false;
  }
  Torch found;
  found.tensor_type = reinterpret_cast<PyTypeObject*>(type);
  for (size_t i = 0; i < kDtypes.size(); ++i) {
    found.dtypes[i] = PyObject_GetAttrString(module, kDtypes[i].torch_name);
    if (!found.dtypes[i]) PyErr_Clear();  // an older torch without unsigned types: never equal to a tensor's dtype
  }
  found.is_neg = PyObject_GetAttrString(type, "is_neg");
  PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  if (!found.is_neg || !capsule) {
    PyErr_Clear();
  } else if (const auto* api = static_cast<const dl::ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"))) {
    if (api->version.major == 1 && api->view_of_object && api->managed_to_object) found.api = api;
  } else {
    PyErr_Clear();
  }
  Py_XDECREF(capsule);
  torch = found;
  return true;
}

bool fill(Numpy& numpy, PyObject* module) {
  PyObject* type = PyObject_GetAttrString(module, "ndarray");
  PyObject* make = PyObject_GetAttrString(module, "dtype");
  if (!type || !make) {
    PyErr_Clear();
    return false;
  }
  Numpy found;
  found.ndarray = reinterpret_cast<PyTypeObject*>(type);
  for (size_t i = 0; i < kDtypes.size(); ++i) {
    if (!kDtypes[i].numpy_name) continue;
    found.dtypes[i] = PyObject_CallFunction(make, "s", kDtypes[i].numpy_name);
    if (!found.dtypes[i]) return false;
  }
  Py_DECREF(make);
  numpy = found;
  return true;
}

template <class Framework>
const Framework* find(Framework& cache, bool& known, PyObject* module) {
  if (!known && module) known = fill(cache, module);
  return known ? &cache : nullptr;
}

Torch g_torch;
Numpy g_numpy;
bool g_torch_known = false, g_numpy_known = false;

template <class Framework>
const Framework* load(Framework& cache, bool& known, const char* name) {
  if (known) return &cache;
  PyObject* module = PyImport_ImportModule(name);
  if (!module) return nullptr;
  const Framework* result = find(cache, known, module);
  Py_DECREF(module);
  if (!result && !PyErr_Occurred()) PyErr_Format(PyExc_ImportError, "%s is loaded but incomplete", name);
  return result;
}

}  // namespace

const Torch* torch_if_loaded() { return find(g_torch, g_torch_known, g_torch_known ? nullptr : loaded("torch")); }
const Numpy* numpy_if_loaded() { return find(g_numpy, g_numpy_known, g_numpy_known ? nullptr : loaded("numpy")); }
const Torch* load_torch() { return load(g_torch, g_torch_known, "torch"); }
const Numpy* load_numpy() { return load(g_numpy, g_numpy_known, "numpy"); }

PyObject* codec_function(const char* name) {
  PyObject* module = PyImport_ImportModule("raycomm.codec");
  if (!module) return nullptr;
  PyObject* function = PyObject_GetAttrString(module, name);
  Py_DECREF(module);
  return function;
}

}  // namespace raycomm
