// Tensors and arrays, reading side: their metadata, checked, and views built on the bytes that arrived.
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

#include "decode.hpp"
#include "gil.hpp"

namespace raycomm {
namespace {

constexpr size_t kReleaseGilFrom = 1u << 20;

void copy_bytes(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  if (bytes < kReleaseGilFrom) {
    std::memcpy(to, from, bytes);
  } else {
    GilRelease released;
    std::memcpy(to, from, bytes);
  }
}

// What a torch tensor's memory is managed by: freed by torch on any thread.
struct TensorOwner {
  dl::ManagedTensorVersioned managed{};
  Storage* storage = nullptr;
  int64_t dims[2 * kMaxDims];
};

void free_tensor(dl::ManagedTensorVersioned* managed) {
  TensorOwner* owner = static_cast<TensorOwner*>(managed->manager_ctx);
  owner->storage->release();
  delete owner;
}

}  // namespace

Storage* Storage::leased(Lease* lease, const unsigned char* data, size_t bytes) {
  Storage* storage = new Storage;
  storage->data_ = const_cast<unsigned char*>(data);
  storage->bytes_ = bytes;
  storage->lease_ = lease;
  storage->epoch_ = fork_epoch();
  return storage;
}

// From this size on malloc maps each value anew (malloc(3), M_MMAP_THRESHOLD). A fault for 2 MiB then, in place of one for 4 KiB.
constexpr size_t kMapped = 32 << 20, kPage = 4096;

Storage* Storage::owned(size_t bytes) {
  // One allocation: the header, then the bytes on the next line. By malloc: aligned_alloc asks for more than it keeps, so the hole that one
  // value leaves is too small for the next of its size, and every large value comes to new pages (docs/performance.md).
  static_assert(alignof(Storage) <= alignof(std::max_align_t));
  if (bytes > PTRDIFF_MAX - sizeof(Storage) - kLine) return nullptr;
  void* memory = std::malloc(sizeof(Storage) + kLine + bytes);
  if (!memory) return nullptr;
  if (bytes >= kMapped) {
    const uintptr_t begin = align_up(reinterpret_cast<uintptr_t>(memory), kPage);
    madvise(reinterpret_cast<void*>(begin), bytes - kPage, MADV_HUGEPAGE);  // a wish: where it is refused, the pages are small
  }
  Storage* storage = new (memory) Storage;
  storage->data_ = reinterpret_cast<unsigned char*>(align_up(reinterpret_cast<uintptr_t>(memory) + sizeof(Storage), kLine));
  storage->bytes_ = bytes;
  return storage;
}

void Storage::release() {
  if (lease_ && epoch_ != fork_epoch()) return;  // a forked child holds a copy of the parent's books: not its blocks to free
  if (refs_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (lease_) {
    lease_->release();
    delete this;
  } else {
    this->~Storage();
    std::free(this);
  }
}

// Storage for a view of a part: the block itself, or a copy of it (small parts always; shared blocks unless a read-only view will do).
Storage* Decoder::storage_for(const Part& part, bool read_only_will_do, bool& writable) {
  writable = !(part.lease && shared_ && read_only_will_do);
  if (part.lease && (!shared_ || read_only_will_do || share_tensors_)) {
    part.lease->add_ref();
    return Storage::leased(part.lease, part.data, part.bytes);
  }
  Storage* storage = Storage::owned(part.bytes);
  if (storage) copy_bytes(storage->data(), part.data, part.bytes);
  return storage;
}

// Checks everything a tensor or array message claims against the buffer it points to.
bool Decoder::read_metadata(const unsigned char* body, size_t n, const DtypeRow*& row, int64_t* shape, int& ndim, const Part*& part) {
  if (n < 8) return malformed("tensor metadata that is too short"), false;
  unsigned char head[4];
  std::memcpy(head, body, sizeof head);  // once: shared bytes can change between check and use
  if (head[0] == 0 || head[0] > kDtypes.size() || head[1] != 0 || head[2] != 0 || head[3] > kMaxDims) return unknown(), false;
  row = &kDtypes[head[0] - 1];
  ndim = head[3];
  uint32_t index;
  std::memcpy(&index, body + 4, 4);
  if (n != 8 + 8 * static_cast<size_t>(ndim)) return malformed("tensor metadata of the wrong length"), false;
  if (index != next_part_ || index >= parts_.size()) return malformed("a tensor without a buffer of its own"), false;
  ++next_part_;
  part = &parts_[index];
  std::memcpy(shape, body + 8, 8 * static_cast<size_t>(ndim));
  size_t bytes = row->dl.bits / 8;
  bool empty = false;
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] < 0) return malformed("a negative dimension"), false;
    empty |= shape[i] == 0;
  }
  for (int i = 0; i < ndim && !empty; ++i)
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(shape[i]), &bytes)) return malformed("a shape too large to exist"), false;
  if (empty) {
    // Framework code multiplies the other dimensions all the same: where their product overflows, the Python codec decides.
    size_t product = 16;
    for (int i = 0; i < ndim; ++i)
      if (shape[i] != 0 && __builtin_mul_overflow(product, static_cast<size_t>(shape[i]), &product)) return unknown(), false;
    if (product > static_cast<size_t>(PTRDIFF_MAX)) return unknown(), false;
  }
  if ((empty ? 0 : bytes) != part->bytes) return malformed("a tensor whose shape does not fit its buffer"), false;
  return true;
}

PyObject* Decoder::get_tensor(const unsigned char* body, size_t n) {
  const DtypeRow* row;
  const Part* part;
  int64_t shape[kMaxDims];
  int ndim;
  const Torch* torch = load_torch();
  if (!torch) return nullptr;
  if (!torch->api) return unknown();
  if (!read_metadata(body, n, row, shape, ndim, part)) return nullptr;
  bool writable;
  Storage* storage = storage_for(*part, false, writable);
  if (!storage) return PyErr_NoMemory();
  TensorOwner* owner = new TensorOwner;
  owner->storage = storage;
  std::memcpy(owner->dims, shape, sizeof(int64_t) * static_cast<size_t>(ndim));
  int64_t* strides = owner->dims + ndim;
  int64_t step = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= std::max<int64_t>(shape[i], 1);
  }
  owner->managed.version = {1, 0};
  owner->managed.manager_ctx = owner;
  owner->managed.deleter = free_tensor;
  owner->managed.tensor = {storage->data(), {dl::kCpu, 0}, ndim, row->dl, owner->dims, strides, 0};
  void* tensor = nullptr;
  if (torch->api->managed_to_object(&owner->managed, &tensor) != 0) {
    free_tensor(&owner->managed);
    return nullptr;
  }
  return remember(static_cast<PyObject*>(tensor));
}

PyObject* Decoder::get_array(const unsigned char* body, size_t n) {
  const DtypeRow* row;
  const Part* part;
  int64_t shape[kMaxDims];
  int ndim;
  const Numpy* numpy = load_numpy();
  if (!numpy) return nullptr;
  if (!read_metadata(body, n, row, shape, ndim, part)) return nullptr;
  PyObject* dtype = numpy->dtypes[static_cast<size_t>(row->code - 1)];
  if (!dtype) return malformed("a dtype that numpy does not have");
  bool writable;
  Storage* storage = storage_for(*part, true, writable);
  if (!storage) return PyErr_NoMemory();
  PyObject* buffer = make_buffer_(storage, writable);
  PyObject* dims = PyTuple_New(ndim);
  for (int i = 0; dims && i < ndim; ++i) PyTuple_SET_ITEM(dims, i, PyLong_FromLongLong(shape[i]));
  PyObject* array = buffer && dims ? PyObject_CallFunctionObjArgs(reinterpret_cast<PyObject*>(numpy->ndarray), dims, dtype, buffer, nullptr) : nullptr;
  Py_XDECREF(buffer);
  Py_XDECREF(dims);
  return array ? remember(array) : nullptr;
}

}  // namespace raycomm
