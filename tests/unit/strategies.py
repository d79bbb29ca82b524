"""Strategies for every value in the codec's table, an equality that misses nothing, and the exact bytes of some values.

`values()` makes a value, `equal(a, b)` compares what was sent with what arrived: type, dtype, shape, layout, every bit, the order
of dicts, and which tensors and arrays are one object. Neither uses the codec, so any implementation can be held against them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

_DTYPE_NAMES = (
    *(
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
    ),
    *(
        "complex64",
        "complex128",
        "complex32",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ),
    *("float4_e2m1fn_x2", *(f"int{width}" for width in range(1, 8)), *(f"uint{width}" for width in range(1, 8))),
    *("bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"),
)
TORCH_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name))
NUMPY_DTYPES: tuple[np.dtype[Any], ...] = (
    *map(
        np.dtype,
        (
            *("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "g", "G", "q", "Q"),
            *(">i2", ">i4", ">i8", ">u8", ">f4", ">f8", ">c16", "M8[ns]", "M8[D]", "M8[25s]", "m8[us]", ">M8[ms]", "m8"),
            *("S5", "U3", ">U3", "V7", "S1", "V0", []),
            [("a", "i4"), ("b", ">f8")],
            [("a", "i1"), ("b", [("c", "f8", (2, 3)), ("d", "S3")])],
            {"names": ["x", "y"], "formats": ["i2", "f8"], "offsets": [6, 16], "itemsize": 40},
            {"names": ["x", "y"], "formats": ["f4", "i4"], "offsets": [0, 0], "titles": ["first", "second"]},
        ),
    ),
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
)

_POWERS = (0, 5, 7, 8, 15, 16, 31, 32, 62, 63, 64, 65, 127)
INT_EDGES: tuple[int, ...] = tuple(
    sorted({sign * 2**power + step for power in _POWERS for step in (-1, 0, 1) for sign in (1, -1)})
)
FLOAT_EDGES: tuple[float, ...] = (
    *(0.0, -0.0, 1.5, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308),
    *(struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8000000000123, 0xFFF8000000000000)),
)

_SHARED = torch.arange(3, dtype=torch.uint8)
_ARRAY = np.arange(2, dtype=np.uint8)
# The format as it was decided; a change here is a change of VERSION.
GOLDEN: list[tuple[Any, str]] = [
    (None, "01c0"),
    (True, "01c3"),
    (False, "01c2"),
    (0, "0100"),
    (-1, "01ff"),
    (127, "017f"),
    (128, "01cc80"),
    (-33, "01d0df"),
    (2**63, "01cf8000000000000000"),
    (2**64, "01c70901000000000000000001"),
    (-(2**63) - 1, "01c70901ffffffffffffff7fff"),
    (1.5, "01cb3ff8000000000000"),
    (math.nan, "01cb7ff8000000000000"),
    ("h\u00e9", "01a368c3a9"),
    ("\ud800", "01c70302eda080"),
    (b"ab", "01c4026162"),
    (bytearray(b"ab"), "01d5066162"),
    (memoryview(b"abcd"), "01c70c0794a1429104c3c40461626364"),
    (memoryview(bytearray(range(8))).cast("h", [2, 2]), "01c7110794a168920202c2c4080001020304050607"),
    ([], "0190"),
    ((), "01d40390"),
    ([1, "a", None], "019301a161c0"),
    ((1, (2,), [3]), "01d7039301d50391029103"),
    ({"a": 1, (1, 2): {3}}, "0182a16101c70303920102d5049103"),
    ({7}, "01d5049107"),
    (frozenset({"x"}), "01c7030591a178"),
    (list(range(16)), "01c712080001000102030405060708090a0b0c0d0e0f"),
    (tuple(range(-200, -180)), "01c72a08010238ff39ff3aff3bff3cff3dff3eff3fff40ff41ff42ff43ff44ff45ff46ff47ff48ff49ff4aff4bff"),
    (
        [2**40] * 16,
        "01c7820800040000000000010000000000000001000000000000000100000000000000010000000000000001000000000000000100000000000000010000000000000001000000000000000100000000000000010000000000000001000000000000000100000000000000010000000000000001000000000000000100000000000000010000",
    ),
    (
        [0.5] * 16,
        "01c782080005000000000000e03f000000000000e03f000000000000e03f000000000000e03f000000000000e03f000000000000e03f000000000000e03f000000000000e03f000000000000e03f000000000000e03f000000000000e03f000000000000e03f000000000000e03f000000000000e03f000000000000e03f000000000000e03f",
    ),
    ([True] * 16, "01dc0010c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3"),
    ([2**64] * 2, "0192c70901000000000000000001c70901000000000000000001"),
    (torch.arange(6, dtype=torch.float32).reshape(2, 3), "01c71809020000020000000002000000000000000300000000000000"),
    (
        torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
        "01c7280906010002000000000300000000000000020000000000000001000000000000000300000000000000",
    ),
    (
        torch.zeros(1, 2, 2, 2, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last),
        "01c74809040100040000000001000000000000000200000000000000020000000000000002000000000000000800000000000000010000000000000004000000000000000200000000000000",
    ),
    (torch.tensor(7), "01d7090800000000000000"),
    (torch.ones(2, requires_grad=True), "01d80902020001000000000200000000000000"),
    (torch.nn.Parameter(torch.ones(2, dtype=torch.float16), requires_grad=False), "01d80903040001000000000200000000000000"),
    (torch.zeros(0, 3, dtype=torch.uint8), "01c71809090000020000000000000000000000000300000000000000"),
    (torch.arange(10)[::3], "01d80908000001000000000400000000000000"),
    (np.arange(6, dtype=np.int32).reshape(2, 3), "01c7180a070000020000000002000000000000000300000000000000"),
    (
        np.arange(6, dtype=np.float64).reshape(2, 3).T,
        "01c7280a01010002000000000300000000000000020000000000000001000000000000000300000000000000",
    ),
    (np.array([1, 2], dtype=">i2"), "01c7140aff000001000000000200000000000000a33e6932"),
    (
        np.zeros(2, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        "01c7270aff000001000000000200000000000000940110c39294a161c0a37c69310094a162c0a33c663808",
    ),
    (np.zeros(1, dtype=[("a", "i4", (2,))]), "01c7220aff000001000000000100000000000000940108c29194a161c09300a33c6934910200"),
    (np.float32(1.5), "01c70b0b92a33c6634c4040000c03f"),
    (np.longlong(3), "01c70d0b92a171c4080300000000000000"),
    (np.str_("a\0"), "01c70f0b92a33c5532c4086100000000000000"),
    (np.datetime64(5, "s"), "01c7120b92a63c4d385b735dc4080500000000000000"),
    ([_SHARED, _SHARED], "0192d80909000001000000000300000000000000d60d00000000"),
    (
        [_ARRAY, (_SHARED, _ARRAY, _SHARED)],
        "0192d80a09000001000000000200000000000000c71f0393d80909000001010000000300000000000000d60d00000000d60d01000000",
    ),
    (np.array([0], dtype="M8[ns]"), "01c7180aff000001000000000100000000000000a73c4d385b6e735d"),
]


def torch_of(raw: bytes, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None) -> torch.Tensor:
    """A tensor over a copy of `raw`, of any dtype."""
    storage = torch.frombuffer(bytearray(raw) or bytearray(16), dtype=torch.uint8).untyped_storage()
    value = torch.frombuffer(bytearray(dtype.itemsize), dtype=dtype)
    return value.set_(storage, 0, tuple(shape)) if strides is None else value.set_(storage, 0, tuple(shape), tuple(strides))


def bits_of(value: torch.Tensor) -> bytes:
    """The elements in row-major order, of any dtype."""
    value = value.detach()
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    if value.numel() == 0:
        return b""
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[value.dtype.itemsize]
    twin = torch.frombuffer(bytearray(16), dtype=carrier)
    twin.set_(value.untyped_storage(), value.storage_offset(), tuple(value.shape), value.stride())
    return twin.contiguous().reshape(-1).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    value = torch_of(raw, dtype, shape)
    layout = draw(st.sampled_from(("plain", "permuted", "sliced", "expanded", "tail")))
    if layout == "permuted":
        value = value.permute(draw(st.permutations(range(len(shape)))))
    elif layout == "sliced" and shape:
        value = value[..., ::2]
    elif layout == "expanded":
        value = value.expand(2, *shape)
    elif layout == "tail" and shape:
        value = value[min(1, shape[0]) :]
    floating = dtype.is_floating_point or dtype.is_complex
    kind = draw(st.sampled_from(("tensor", "tensor", "parameter", "grad")))
    if kind == "parameter":
        return torch.nn.Parameter(value, requires_grad=floating and draw(st.booleans()))
    return value.requires_grad_() if kind == "grad" and floating and value.is_leaf else value


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = draw(st.sampled_from(NUMPY_DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    size = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=size, max_size=size))
    if dtype.kind in "bU" or dtype.fields is not None:
        raw = bytes(byte & 1 for byte in raw) if dtype.kind == "b" else bytes(size)
    value = np.ndarray(shape, dtype, buffer=bytearray(raw))
    layout = draw(st.sampled_from(("plain", "permuted", "sliced", "negative", "broadcast", "fortran")))
    if layout == "permuted":
        return value.transpose(draw(st.permutations(range(len(shape)))))
    if layout == "sliced" and shape:
        return value[..., ::2]
    if layout == "negative" and shape:
        return value[::-1]
    if layout == "broadcast":
        return np.broadcast_to(value, (2, *shape))
    return np.asfortranarray(value) if layout == "fortran" and shape else value


def numpy_scalars() -> st.SearchStrategy[Any]:
    fixed = [dtype for dtype in NUMPY_DTYPES if dtype.fields is None and dtype.itemsize and dtype.kind not in "USV"]
    made = st.tuples(st.sampled_from(fixed), st.binary(min_size=32, max_size=32)).map(
        lambda pair: np.ndarray((), pair[0], buffer=bytearray(pair[1] if pair[0].kind != "b" else b"\1" * 32))[()]
    )
    structured = st.just(np.zeros((), NUMPY_DTYPES[-1])[()])
    texts_and_bytes = st.one_of(st.text(max_size=4).map(np.str_), st.binary(max_size=4).map(np.bytes_))
    return st.one_of(made, structured, texts_and_bytes, st.just(np.void(b"ab")))


def ints() -> st.SearchStrategy[int]:
    return st.one_of(st.integers(), st.sampled_from(INT_EDGES))


def floats() -> st.SearchStrategy[float]:
    return st.one_of(st.floats(), st.sampled_from(FLOAT_EDGES))


def texts() -> st.SearchStrategy[str]:
    surrogates = st.characters(min_codepoint=0xD7F0, max_codepoint=0xE010, exclude_categories=())
    return st.one_of(st.text(), st.text(surrogates, max_size=4))


def hashables() -> st.SearchStrategy[Any]:
    leaf = st.one_of(st.none(), st.booleans(), ints(), floats(), texts(), st.binary(max_size=8))

    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3))

    return st.recursive(leaf, nest, max_leaves=4)


def memoryviews() -> st.SearchStrategy[memoryview]:
    raw = st.one_of(st.binary(max_size=16), st.binary(max_size=16).map(bytearray))
    grid = st.sampled_from("bBhHiIlLqQfd").map(lambda form: memoryview(bytearray(range(48))).cast(form))
    return st.one_of(raw.map(memoryview), raw.map(lambda data: memoryview(data)[::-2]), grid, grid.map(lambda view: view[1::2]))


def packed() -> st.SearchStrategy[Any]:
    """Lists and tuples around the length where the packed form begins."""
    width = st.sampled_from((8, 16, 32, 64, 66))
    items = width.map(lambda bits: st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1))
    numbers = items.flatmap(lambda numbers: st.lists(numbers, min_size=14, max_size=20))
    lists = st.one_of(numbers, st.lists(floats(), min_size=14, max_size=20), st.lists(st.booleans(), min_size=14, max_size=18))
    return st.one_of(lists, lists.map(tuple))


def leaves() -> st.SearchStrategy[Any]:
    plain = st.one_of(st.none(), st.booleans(), ints(), floats(), texts(), st.binary(max_size=40))
    return st.one_of(
        plain, plain, st.binary(max_size=9).map(bytearray), memoryviews(), packed(), tensors(), arrays(), numpy_scalars()
    )


def values() -> st.SearchStrategy[Any]:
    """Any value of the table, nested; some of them hold one object twice."""

    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(hashables(), inner, max_size=4),
            st.sets(hashables(), max_size=4),
            st.frozensets(hashables(), max_size=4),
            inner.map(lambda value: [value, (value,)]),
        )

    return st.recursive(leaves(), nest, max_leaves=8)


def equal(sent: Any, arrived: Any) -> bool:
    """Whether `arrived` is what `sent` was, in every way the codec promises."""
    return _equal(sent, arrived, {}, {})


def _equal(a: Any, b: Any, there: dict[int, int], back: dict[int, int]) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, (torch.Tensor, np.ndarray)):
        if there.setdefault(id(a), id(b)) != id(b) or back.setdefault(id(b), id(a)) != id(a):
            return False
        return _equal_tensors(a, b) if isinstance(a, torch.Tensor) else _equal_arrays(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y, there, back) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            _equal(k, j, there, back) and _equal(v, w, there, back) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (set, frozenset)):
        return sorted(map(_fingerprint, a)) == sorted(map(_fingerprint, b))
    if isinstance(a, memoryview):
        return (a.format, a.shape, a.readonly, a.tobytes()) == (b.format, b.shape, b.readonly, b.tobytes())
    if isinstance(a, np.generic):
        return _equal_dtypes(a.dtype, b.dtype) and (
            (isinstance(a, np.void) and a.dtype.fields is not None) or _scalar_bits(a) == _scalar_bits(b)
        )
    if type(a) is float:
        return struct.pack("<d", a) == struct.pack("<d", b)
    return bool(a == b)


def _scalar_bits(value: Any) -> bytes:
    return value.encode("utf-32", "surrogatepass") if isinstance(value, np.str_) else value.tobytes()


def _fingerprint(value: Any) -> str:
    if isinstance(value, (tuple, frozenset)):
        parts = [_fingerprint(item) for item in value]
        return f"{type(value).__name__}({sorted(parts) if isinstance(value, frozenset) else parts})"
    return f"{type(value).__name__}:{struct.pack('<d', value).hex() if type(value) is float else ascii(value)}"


def _row_major(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _expected_strides(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """(axis, stride) of every axis whose stride says something: those sent if they are dense, else row-major."""
    telling = [axis for axis, size in enumerate(shape) if size != 1]
    if math.prod(shape) == 0:
        return []
    reach = 1
    for stride, size in sorted((strides[axis], shape[axis]) for axis in telling):
        if stride != reach:
            strides = _row_major(shape)
            break
        reach *= size
    return [(axis, strides[axis]) for axis in telling]


def _equal_layouts(shape: Sequence[int], sent: Sequence[int], arrived: Sequence[int]) -> bool:
    return all(arrived[axis] == stride for axis, stride in _expected_strides(shape, sent))


def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.dtype is b.dtype and a.shape == b.shape and a.device == b.device and a.requires_grad is b.requires_grad
    same = same and a.layout is b.layout and a.__dict__.keys() == b.__dict__.keys()
    return same and b.is_leaf and _equal_layouts(a.shape, a.stride(), b.stride()) and bits_of(a) == bits_of(b)


def _equal_dtypes(a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    if (a, a.num, a.type, a.itemsize, a.isalignedstruct, a.names) != (b, b.num, b.type, b.itemsize, b.isalignedstruct, b.names):
        return False
    if a.fields is None or b.fields is None:
        return a.fields is b.fields
    return all(a.fields[n][1:] == b.fields[n][1:] and _equal_dtypes(a.fields[n][0], b.fields[n][0]) for n in a.names or ())


def _equal_arrays(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if not _equal_dtypes(a.dtype, b.dtype) or a.shape != b.shape:
        return False
    if a.dtype.hasobject:
        return bool((a == b).all())
    size = a.dtype.itemsize
    if size and a.size:
        whole = all(step % size == 0 for step, length in zip(a.strides, a.shape, strict=True) if length != 1)
        strides = [step // size for step in a.strides] if whole else _row_major(a.shape)
        if not _equal_layouts(a.shape, strides, [step // size for step in b.strides]):
            return False
    if a.dtype.fields is not None:  # the bytes between fields are nobody's
        return all(_equal_contents(a[name], b[name]) for name in a.dtype.names or ())
    return _equal_contents(a, b)


def _equal_contents(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype.fields is not None:
        return all(_equal_contents(a[name], b[name]) for name in a.dtype.names or ())
    return a.tobytes() == b.tobytes()
