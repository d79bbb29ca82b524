// The parts of DLPack 1.x that we use (https://dmlc.github.io/dlpack/latest/c_api.html), written out so that nothing of torch is
// needed to build. Layouts are fixed by the specification; an exchange table of another major version is not used.
#pragma once

#include <cstdint>

namespace raycomm::dl {

struct Version {
  uint32_t major, minor;
};
struct Device {
  int32_t type, id;
};
struct DataType {
  uint8_t code, bits;
  uint16_t lanes;
};
inline constexpr int32_t kCpu = 1;
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct ManagedTensorVersioned {
  Version version;
  void* manager_ctx;
  void (*deleter)(ManagedTensorVersioned*);
  uint64_t flags;
  Tensor tensor;
};

// The table behind `type(tensor).__dlpack_c_exchange_api__` (a capsule named "dlpack_exchange_api").
struct ExchangeApi {
  Version version;
  const void* previous;
  int (*allocate)(Tensor*, ManagedTensorVersioned**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void* object, ManagedTensorVersioned** out);
  int (*managed_to_object)(ManagedTensorVersioned* tensor, void** out_object);
  int (*view_of_object)(void* object, Tensor* out);  // no reference taken; may be null
  int (*current_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace raycomm::dl
