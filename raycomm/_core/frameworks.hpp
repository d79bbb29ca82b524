// What the codec knows of torch and numpy. Neither is linked or imported here: torch is looked up when a value turns out to be a tensor
// (so it is loaded already) or when a message holds one. The cached types are facts of the process, not state of a graph.
#pragma once

#include <Python.h>

#include <array>
#include <cstdint>

#include "dlpack.hpp"

namespace raycomm {

// Dtype codes of the wire format (raycomm/codec/message.py) that torch's DLPack carries exactly; others take the Python codec.
struct DtypeRow {
  uint8_t code;
  const char* torch_name;
  const char* numpy_name;  // null: numpy has none
  dl::DataType dl;
};
inline constexpr std::array<DtypeRow, 15> kDtypes{{
    {1, "float64", "float64", {dl::kFloat, 64, 1}},
    {2, "float32", "float32", {dl::kFloat, 32, 1}},
    {3, "float16", "float16", {dl::kFloat, 16, 1}},
    {4, "bfloat16", nullptr, {dl::kBfloat, 16, 1}},
    {5, "int8", "int8", {dl::kInt, 8, 1}},
    {6, "int16", "int16", {dl::kInt, 16, 1}},
    {7, "int32", "int32", {dl::kInt, 32, 1}},
    {8, "int64", "int64", {dl::kInt, 64, 1}},
    {9, "uint8", "uint8", {dl::kUInt, 8, 1}},
    {10, "uint16", "uint16", {dl::kUInt, 16, 1}},
    {11, "uint32", "uint32", {dl::kUInt, 32, 1}},
    {12, "uint64", "uint64", {dl::kUInt, 64, 1}},
    {13, "bool", "bool", {dl::kBool, 8, 1}},
    {14, "complex64", "complex64", {dl::kComplex, 64, 1}},
    {15, "complex128", "complex128", {dl::kComplex, 128, 1}},
}};
inline constexpr size_t kMaxDims = 64;

struct Torch {
  PyTypeObject* tensor_type = nullptr;
  const dl::ExchangeApi* api = nullptr;  // null: this torch has no exchange table; tensors take the Python codec
  PyObject* is_neg = nullptr;            // torch.Tensor.is_neg
  std::array<PyObject*, kDtypes.size()> dtypes{};
};

struct Numpy {
  PyTypeObject* ndarray = nullptr;
  std::array<PyObject*, kDtypes.size()> dtypes{};  // null where numpy has none
};

// Null without an error set if the module is not loaded; null with an error set if it is, and something is missing.
const Torch* torch_if_loaded();
const Numpy* numpy_if_loaded();
// Import on demand. Null with an error set on failure.
const Torch* load_torch();
const Numpy* load_numpy();

// A function of raycomm.codec, imported on first use. Null with an error set on failure.
PyObject* codec_function(const char* name);

}  // namespace raycomm
