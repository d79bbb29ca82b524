"""The wire format, version 1. Every other module of this package, and the native fast path, writes exactly these bytes.

A message is a *payload* and zero or more *buffers*. All integers of ours are little-endian; msgpack's own are big-endian.

    payload   ┌────────────┬──────────────────────────────────────────────┐
              │ u8 version │ exactly one msgpack object, nothing after it │
              └────────────┴──────────────────────────────────────────────┘

msgpack types, minimal widths: None, bool, int in [-2**63, 2**64), float (always float64), str (utf-8), bytes (bin, always in
the payload), list (array), dict (map, insertion order, any hashable key). Exact types only: a subclass goes by PICKLE.

Everything else is a msgpack ext with a minimal header. The code says what the body is:

     1 BIGINT         an int outside the range above: signed two's complement, (bit_length + 8) // 8 bytes
     2 SURROGATE_STR  a str that utf-8 refuses, by 'surrogatepass'
     3 TUPLE          one msgpack array of the items
     4 SET            one msgpack array, iteration order
     5 FROZENSET      one msgpack array, iteration order
     6 BYTEARRAY      the bytes
     7 MEMORYVIEW     one msgpack array [format str, shape array, readonly bool, contents bin], contents in logical C order
     8 PACKED         a list or tuple of at least 16 items, all exact int within int64 or all exact float:
                      ┌──────────────┬────────────┬──────────┐   container 0 list, 1 tuple; element 1 int8, 2 int16, 3 int32,
                      │ u8 container │ u8 element │ elements │   4 int64, 5 float64: the narrowest that holds min and max
                      └──────────────┴────────────┴──────────┘
     9 TENSOR         torch.Tensor or nn.Parameter; the elements are a buffer
                      ┌──────────┬──────────┬───────────┬─────────┬──────────────────┬─────────────────┬───────────────────┐
                      │ u8 dtype │ u8 flags │ u8 device │ u8 ndim │ u32 buffer index │ i64 shape[ndim] │ i64 strides[ndim] │
                      └──────────┴──────────┴───────────┴─────────┴──────────────────┴─────────────────┴───────────────────┘
                      flags 1 has strides, 2 requires grad, 4 is a Parameter; device 0 cpu, 1 cuda: the
                      elements come from a GPU, and go to the reader's where it has one; strides only if flag 1
    10 ARRAY          numpy.ndarray: the same head (flags: 1 only; device 0). Where dtype is 255, one msgpack object that
                      describes the dtype (see array.py) follows the head
    11 NPSCALAR       a numpy scalar: one msgpack array [dtype description, contents bin]
    12 PICKLE         u32 first buffer index, u32 number of buffers, pickle protocol 5
    13 REF            u32 k: the k-th TENSOR or ARRAY of this message, the same Python object again

Layout of a TENSOR or ARRAY buffer: exactly numel elements. Row-major and no strides, unless the object is a dense permutation
that is not row-major (channels-last, transposed, Fortran): then the elements lie in storage order and the strides, counted in
elements as the object reports them, are in the head. "Row-major" is torch's `is_contiguous()` and numpy's `c_contiguous`: strides
of size-1 dims and empty objects do not matter. A numpy stride that is no multiple of the itemsize (possible only in a size-1
dim) is written as 0. Every other view is compacted to row-major.

Buffers are numbered in the order in which their owners are written, without gaps. The index fields repeat that number, and the
decoder refuses any other.

Depth: a list, tuple, dict, set or frozenset is one level, packed or not. A value deeper than DEPTH_LIMIT goes whole, from
its root, by PICKLE. A decoder refuses deeper messages.

The decoder does not ask for minimal widths, nor for distinct map keys: it checks that a message is whole, not that we wrote it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from raycomm.errors import SerializationError

if TYPE_CHECKING:
    from typing_extensions import Buffer

VERSION: Final = 1
DEPTH_LIMIT: Final = 500

BIGINT: Final = 1
SURROGATE_STR: Final = 2
TUPLE: Final = 3
SET: Final = 4
FROZENSET: Final = 5
BYTEARRAY: Final = 6
MEMORYVIEW: Final = 7
PACKED: Final = 8
TENSOR: Final = 9
ARRAY: Final = 10
NPSCALAR: Final = 11
PICKLE: Final = 12
REF: Final = 13

PACKED_MINIMUM: Final = 16
PACKED_LIST: Final = 0
PACKED_TUPLE: Final = 1
# Element code to the type code of the array module.
PACKED_ELEMENTS: Final = {1: "b", 2: "h", 3: "i", 4: "q", 5: "d"}

HAS_STRIDES: Final = 1
REQUIRES_GRAD: Final = 2
IS_PARAMETER: Final = 4
DEVICE_CPU: Final = 0
DEVICE_CUDA: Final = 1

DESCRIBED: Final = 255
_INT_WIDTHS = range(1, 8)
# The names are torch's; numpy has those from float64 to complex128, bfloat16 apart.
DTYPE_NAMES: Final[dict[int, str]] = dict(
    enumerate(
        (
            *("float64", "float32", "float16", "bfloat16", "int8", "int16", "int32", "int64"),
            *("uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128", "complex32"),
            *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
            *(f"int{width}" for width in _INT_WIDTHS),
            *(f"uint{width}" for width in _INT_WIDTHS),
            *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
        ),
        start=1,
    )
)

_HEAD = struct.Struct("<BBBBI")
_PICKLE_HEAD = struct.Struct("<II")
_REF = struct.Struct("<I")
_UINT32_MAX = 2**32 - 1


class Head(NamedTuple):
    """What a TENSOR or ARRAY body starts with."""

    dtype: int
    flags: int
    device: int
    buffer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None


def malformed(reason: str) -> SerializationError:
    """The error for a message that nobody can have sent."""
    return SerializationError(f"malformed message: {reason}")


def ext_header(code: int, length: int) -> bytes:
    """The minimal msgpack ext header for a body of `length` bytes."""
    fixed = {1: 0xD4, 2: 0xD5, 4: 0xD6, 8: 0xD7, 16: 0xD8}.get(length)
    if fixed is not None:
        return bytes((fixed, code))
    if length < 2**8:
        return bytes((0xC7, length, code))
    if length < 2**16:
        return struct.pack(">BHB", 0xC8, length, code)
    if length <= _UINT32_MAX:
        return struct.pack(">BIB", 0xC9, length, code)
    raise SerializationError(
        f"{length} bytes do not fit in one msgpack object (at most 2**32 - 1); send an array or a tensor instead"
    )


def pack_head(
    dtype: int, flags: int, index: int, shape: Sequence[int], strides: Sequence[int] | None, device: int = DEVICE_CPU
) -> bytes:
    if len(shape) > 255:
        raise SerializationError(f"{len(shape)} dimensions do not fit in the message (at most 255)")
    if strides is not None:
        flags |= HAS_STRIDES
        return _HEAD.pack(dtype, flags, device, len(shape), index) + struct.pack(f"<{2 * len(shape)}q", *shape, *strides)
    return _HEAD.pack(dtype, flags, device, len(shape), index) + struct.pack(f"<{len(shape)}q", *shape)


def unpack_head(body: memoryview) -> tuple[Head, memoryview]:
    """The head and what follows it."""
    if len(body) < _HEAD.size:
        raise malformed("a tensor or array head is cut short")
    dtype, flags, device, ndim, index = _HEAD.unpack_from(body)
    if device not in (DEVICE_CPU, DEVICE_CUDA):
        raise malformed(f"device kind {device} in a tensor or array")
    count = 2 * ndim if flags & HAS_STRIDES else ndim
    end = _HEAD.size + 8 * count
    if len(body) < end:
        raise malformed("the shape of a tensor or array is cut short")
    numbers: tuple[int, ...] = struct.unpack_from(f"<{count}q", body, _HEAD.size)
    strides = numbers[ndim:] if flags & HAS_STRIDES else None
    return Head(dtype, flags, device, index, numbers[:ndim], strides), body[end:]


def check_layout(head: Head, itemsize: int, nbytes: int) -> None:
    """Raise unless shape and strides cover a buffer of `nbytes` exactly: the one check that keeps every access inside it."""
    if any(size < 0 for size in head.shape):
        raise malformed(f"shape {head.shape}")
    numel = prod(head.shape)
    if numel * itemsize != nbytes:
        raise malformed(f"shape {head.shape} of {itemsize}-byte elements on a buffer of {nbytes} bytes")
    if head.strides is not None and (numel == 0 or not is_dense(head.shape, head.strides)):
        raise malformed(f"strides {head.strides} for shape {head.shape}")


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the strides are a permutation of row-major ones: every element once, no gap, no overlap."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def pack_pickle(first: int, count: int, body: bytes) -> bytes:
    return _PICKLE_HEAD.pack(first, count) + body


def unpack_pickle(body: memoryview) -> tuple[int, int, memoryview]:
    if len(body) < _PICKLE_HEAD.size:
        raise malformed("a pickle head is cut short")
    first, count = _PICKLE_HEAD.unpack_from(body)
    return first, count, body[_PICKLE_HEAD.size :]


def pack_ref(index: int) -> bytes:
    return _REF.pack(index)


def unpack_ref(body: memoryview) -> int:
    if len(body) != _REF.size:
        raise malformed(f"a back reference of {len(body)} bytes")
    return int(_REF.unpack(body)[0])


def open_payload(payload: Buffer) -> memoryview:
    """The msgpack object of a payload, its version checked."""
    data = as_bytes(payload, "payload")
    if len(data) == 0:
        raise malformed("the payload is empty")
    if data[0] != VERSION:
        raise SerializationError(
            f"the message has format version {data[0]}, this process reads version {VERSION}: use one raycomm version everywhere"
        )
    return data[1:]


def as_bytes(buffer: Buffer, what: str) -> memoryview:
    """A flat view of unsigned bytes over `buffer`; it keeps `buffer` alive and is read-only where `buffer` is."""
    try:
        view = memoryview(buffer)
        if view.ndim == 1 and view.format == "B" and view.contiguous:
            return view
        if view.nbytes == 0:  # `cast` refuses zeros in a shape
            return memoryview(b"" if view.readonly else bytearray())
        return view.cast("B")
    except (TypeError, ValueError, BufferError) as error:
        raise malformed(f"a {what} is not contiguous bytes ({error})") from error
