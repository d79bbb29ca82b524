"""numpy arrays and scalars: any dtype without objects, bit exact, zero-copy on the way in.

A dtype outside the shared table travels as a description, one msgpack object:

    str                                              a simple dtype, as `numpy.dtype(str)` reads it: ">i4", "<U5", "<M8[ns]", "q"
    [0, description, [shape]]                        a subarray
    [1, itemsize, aligned, [[name, title or nil, description, offset], ...]]      a structure

numpy's own `dtype_to_descr` writes gaps as unnamed void fields and loses the align flag; this one is exact, and is checked to be:
a dtype that does not come back identical goes by pickle.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgpack
import numpy as np

from raycomm.codec.message import (
    DESCRIBED,
    DEVICE_CPU,
    DTYPE_NAMES,
    HAS_STRIDES,
    check_layout,
    is_dense,
    malformed,
    pack_head,
    unpack_head,
)
from raycomm.errors import SerializationError

_NAMES: Final = frozenset(
    {
        *("float64", "float32", "float16", "complex64", "complex128", "bool"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    }
)
_DTYPES: Final[dict[int, np.dtype[Any]]] = {code: np.dtype(name) for code, name in DTYPE_NAMES.items() if name in _NAMES}
# By type number, not by equality: on one platform or another two C types are equal and yet distinct scalar types.
_CODES: Final[dict[int, int]] = {dtype.num: code for code, dtype in _DTYPES.items()}
# numpy.dtype(str) understands far more: lists of fields, old aliases that warn, objects.
_SIMPLE: Final = re.compile(r"[<>=|]?(?:[?bBhHiIlLqQpPnNefdgFDGcuSUV][0-9]*|[mM]8?(?:\[\w+(?:/[0-9]+)?\])?)", re.ASCII)
_SUBARRAY: Final = 0
_STRUCTURE: Final = 1
_NESTING_LIMIT: Final = 32


def describe(dtype: np.dtype[Any]) -> Any | None:
    """The description, or None where none is exact."""
    try:
        description = _describe(dtype, 0)
        return description if description is not None and _identical(rebuild(description), dtype) else None
    except (TypeError, ValueError, SerializationError):
        return None


def rebuild(description: Any) -> np.dtype[Any]:
    """The dtype a description stands for."""
    try:
        dtype = _rebuild(description, 0)
    except Exception as error:
        raise malformed(f"dtype description ({type(error).__name__})") from error
    if dtype.hasobject:
        raise malformed("a dtype with objects")
    return dtype


def encode(value: np.ndarray[Any, Any], index: int) -> tuple[bytes, memoryview] | None:
    """The ARRAY body and the buffer, which aliases the array where its elements lie dense; None if pickle must take it."""
    dtype = value.dtype
    code = _table_code(dtype)
    tail = b""
    if code is None:
        description = describe(dtype)
        # A zero-width dtype may be widened when an array is made of it.
        if description is None or np.ndarray((0,), dtype).dtype != dtype:
            return None
        code, tail = DESCRIBED, _pack(description)
    strides = None
    if not value.flags.c_contiguous and value.nbytes:
        size = dtype.itemsize
        counted = tuple(step // size if step % size == 0 else 0 for step in value.strides)
        exact = all(step % size == 0 for step, length in zip(value.strides, value.shape, strict=True) if length != 1)
        if exact and is_dense(value.shape, counted):
            strides = counted
            order = sorted(range(value.ndim), key=lambda axis: (value.shape[axis] == 1, -counted[axis]))
            flat = value.transpose(order).reshape(-1)
        else:
            # Into zeros: a copy leaves the gaps of a structured dtype as the heap had them, and they would travel.
            dense = np.zeros(value.shape, dtype)
            dense[...] = value
            flat = dense.reshape(-1)
    else:
        flat = value.reshape(-1)
    raw = flat.view(np.uint8).data if value.nbytes else memoryview(b"")
    return pack_head(code, 0, index, value.shape, strides) + tail, raw


def decode(body: memoryview, buffer: memoryview, index: int) -> np.ndarray[Any, Any]:
    """The array, on top of `buffer`, read-only if that is."""
    head, rest = unpack_head(body)
    if head.flags & ~HAS_STRIDES or head.buffer != index or head.device != DEVICE_CPU:
        raise malformed("flags, device or buffer index of an array")
    if head.dtype == DESCRIBED:
        dtype = rebuild(_unpack(rest))
    elif head.dtype in _DTYPES and not len(rest):
        dtype = _DTYPES[head.dtype]
    else:
        raise malformed(f"array dtype code {head.dtype}")
    check_layout(head, dtype.itemsize, len(buffer))
    if dtype.subdtype is not None:  # numpy would turn it into more dimensions
        raise malformed("a subarray dtype as the dtype of an array")
    strides = None if head.strides is None else tuple(step * dtype.itemsize for step in head.strides)
    return np.ndarray(head.shape, dtype, buffer=buffer, strides=strides)


def encode_scalar(value: np.generic) -> bytes | None:
    """The NPSCALAR body, or None if pickle must take it."""
    description = describe(value.dtype) if value.dtype.type is type(value) else None
    if description is None:
        return None
    # An array element loses trailing zeros of these two, so their contents never pass through an array.
    if isinstance(value, np.str_):
        contents = value.encode("utf-32-le", "surrogatepass")  # str(value) would drop trailing NULs
    elif isinstance(value, np.bytes_):
        contents = bytes(value)
    else:
        contents = value.tobytes()
    return _pack([description, contents])


def decode_scalar(body: memoryview) -> np.generic:
    message = _unpack(body)
    if type(message) is not list or len(message) != 2 or type(message[1]) is not bytes:
        raise malformed("a numpy scalar")
    dtype, contents = rebuild(message[0]), message[1]
    if dtype.subdtype is not None or dtype.itemsize != len(contents):
        raise malformed(f"a numpy scalar of {dtype.itemsize} bytes in {len(contents)}")
    if dtype.type is np.str_:
        return np.str_(contents.decode("utf-32-le", "surrogatepass"))
    if dtype.type is np.bytes_:
        return np.bytes_(contents)
    # A structured scalar is a view of its array, which must therefore be writable and its own.
    scalar: Any = np.ndarray((), dtype, buffer=bytearray(contents))[()]
    return scalar  # type: ignore[no-any-return]


def _table_code(dtype: np.dtype[Any]) -> int | None:
    return _CODES.get(dtype.num) if dtype.isnative and dtype.metadata is None else None


def _describe(dtype: np.dtype[Any], depth: int) -> Any | None:
    if dtype.hasobject or dtype.metadata is not None or depth > _NESTING_LIMIT:
        return None
    if dtype.subdtype is not None:
        base = _describe(dtype.subdtype[0], depth + 1)
        return None if base is None else [_SUBARRAY, base, list(dtype.subdtype[1])]
    if dtype.fields is None:
        simple = np.dtype(dtype.str)
        return dtype.str if simple.num == dtype.num else (dtype.char if dtype.isnative else dtype.byteorder + dtype.char)
    fields = []
    for name in dtype.names or ():
        field = dtype.fields[name]
        description = _describe(field[0], depth + 1)
        title = field[2] if len(field) == 3 else None
        if description is None or not (title is None or type(title) is str):
            return None
        fields.append([name, title, description, field[1]])
    return [_STRUCTURE, dtype.itemsize, dtype.isalignedstruct, fields]


def _rebuild(description: Any, depth: int) -> np.dtype[Any]:
    if depth > _NESTING_LIMIT:
        raise ValueError("nesting")
    if type(description) is str:
        if _SIMPLE.fullmatch(description) is None:
            raise ValueError(description)
        simple: np.dtype[Any] = np.dtype(description)
        return simple
    if type(description) is not list or not description:
        raise TypeError("description")
    if description[0] == _SUBARRAY:
        _, base, shape = description
        if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
            raise TypeError("shape")
        return np.dtype((_rebuild(base, depth + 1), tuple(shape)))
    kind, itemsize, aligned, fields = description
    if kind != _STRUCTURE or type(itemsize) is not int or type(aligned) is not bool:
        raise TypeError("structure")
    names, titles, formats, offsets = [], [], [], []
    for name, title, field, offset in fields:
        if type(name) is not str or not (title is None or type(title) is str) or type(offset) is not int:
            raise TypeError("field")
        names.append(name)
        titles.append(title)
        formats.append(_rebuild(field, depth + 1))
        offsets.append(offset)
    layout: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
    if any(title is not None for title in titles):
        layout["titles"] = titles
    structure: np.dtype[Any] = np.dtype(layout, align=aligned)
    return structure


def _identical(a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    """Equality is too weak: it ignores metadata, the align flag, and which of two equal C types or scalar types it is."""
    if a != b or a.num != b.num or a.type is not b.type or a.itemsize != b.itemsize or a.isalignedstruct != b.isalignedstruct:
        return False
    if a.subdtype is not None and b.subdtype is not None:
        return a.subdtype[1] == b.subdtype[1] and _identical(a.subdtype[0], b.subdtype[0])
    if a.fields is None or b.fields is None:
        return a.fields is b.fields
    names = a.names or ()
    return a.names == b.names and all(
        a.fields[name][1:] == b.fields[name][1:] and _identical(a.fields[name][0], b.fields[name][0]) for name in names
    )


def _pack(description: Any) -> bytes:
    packed: bytes = msgpack.packb(description, use_bin_type=True)
    return packed


def _unpack(body: memoryview) -> Any:
    try:
        return msgpack.unpackb(body, raw=False, strict_map_key=False)
    except Exception as error:
        raise malformed(f"dtype description ({type(error).__name__})") from error
