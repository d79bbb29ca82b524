"""Random values of every kind, a digest that sees every bit of them, and an equality."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import fractions
import hashlib
import math
import pathlib
import random
import struct
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import torch

from tests.unit import strategies
from tests.unit.strategies import FLOAT_EDGES, INT_EDGES, NUMPY_DTYPES, TORCH_DTYPES, bits_of, torch_of

LARGEST = 4 << 20
EDGES = (0, 1, 64, 1024, 4096, 32 << 10, 64 << 10, 1 << 20, LARGEST)

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Record:
    """Needs pickle; its bytes go out of band."""

    name: str
    data: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and digest(other) == digest(self)  # pickle keeps no layouts

    __hash__ = None  # type: ignore[assignment]


class Unsendable:
    """Cannot be sent."""

    def __reduce__(self) -> Any:
        raise TypeError("an Unsendable stays where it is")

    def __repr__(self) -> str:
        return "Unsendable()"


def draw_size(rng: random.Random, largest: int) -> int:
    """A number of bytes: next to a threshold, or anything, small ones more often."""
    if rng.random() < 0.5:
        return min(largest, max(0, rng.choice(EDGES) + rng.choice((-17, -1, 0, 1, 9))))
    return int(math.exp(rng.random() * math.log(largest + 1))) - 1


def draw(rng: random.Random, largest: int = LARGEST) -> Any:
    """A value whose bulk is at most about `largest` bytes. The same state of `rng` makes the same value, bit for bit."""
    kinds: tuple[Callable[[random.Random, int], Any], ...] = (_scalar, _bytes, _array, _tensor, _container, _object, _text)
    kind = rng.choices(kinds, (4, 2, 4, 4, 4, 2, 1))[0]
    return kind(rng, draw_size(rng, largest))


def draw_constant(rng: random.Random, largest: int) -> Any:
    """A value that a node may be bound to. Constants travel with the set-up, by Ray's own pickling: not all of torch can."""
    value = draw(rng, largest)
    try:
        return value if same(value, cloudpickle.loads(cloudpickle.dumps(value))) else None
    except Exception:
        return None


def draw_unsendable(rng: random.Random) -> Any:
    """A value that cannot be sent, somewhere inside."""
    bad = rng.choice((Unsendable, threading.Lock))()
    return rng.choice((bad, [1, {"deep": (bad,)}], {"a": [draw(rng, 64), bad]}))


def _scalar(rng: random.Random, size: int) -> Any:
    wide = rng.getrandbits(rng.choice((1, 7, 31, 63, 64, 65, 200, 2000)))
    number = rng.choice((1, -1)) * wide
    scalars = (None, True, False, number, number, rng.choice(INT_EDGES), rng.choice(FLOAT_EDGES), rng.gauss(0, 1e9))
    return rng.choice((*scalars, np.float32(rng.random()), np.int64(wide % 2**63), np.datetime64(wide % 10**9, "s")))


def _bytes(rng: random.Random, size: int) -> Any:
    raw = rng.randbytes(size)
    return rng.choice((bytes, bytes, bytearray, memoryview))(raw)


def _text(rng: random.Random, size: int) -> str:
    size = min(size, 1 << 18)
    alphabet = rng.choice(("ab", "\u00e4\u20ac", "\U0001f600x", "\ud800z"))
    return "".join(rng.choices(alphabet, k=min(size, 64))) * max(1, size // 64)


def _shape(rng: random.Random, count: int) -> tuple[int, ...]:
    if count == 0:
        return rng.choice(((0,), (0, 3), (2, 0)))
    if count == 1 and rng.random() < 0.5:
        return ()
    for part in rng.sample((2, 3, 4, 7), 4):
        if count % part == 0 and rng.random() < 0.5:
            return rng.choice(((part, count // part), (count // part, part), (1, count // part, part)))
    return (count,)


def _tensor(rng: random.Random, size: int) -> torch.Tensor:
    dtype = rng.choice(TORCH_DTYPES)
    count = size // dtype.itemsize
    raw = rng.randbytes(count * dtype.itemsize)
    if dtype is torch.bool:
        raw = (np.frombuffer(raw, np.uint8) & 1).tobytes()
    value = torch_of(raw, dtype, _shape(rng, count))
    layout = rng.choice(("plain", "plain", "plain", "permuted", "sliced", "expanded", "tail", "grad", "parameter"))
    if layout == "permuted":
        value = value.permute(rng.sample(range(value.dim()), value.dim()))
    elif layout == "sliced" and value.dim():
        value = value[..., ::2]
    elif layout == "expanded" and size < 1 << 20:
        value = value.expand(2, *value.shape)
    elif layout == "tail" and value.dim() and value.shape[0]:
        value = value[1:]
    elif layout in ("grad", "parameter") and (dtype.is_floating_point or dtype.is_complex):
        value = torch.nn.Parameter(value) if layout == "parameter" else value.requires_grad_()
    return value


def _array(rng: random.Random, size: int) -> np.ndarray[Any, Any]:
    dtype = rng.choice(NUMPY_DTYPES)
    count = size // max(1, dtype.itemsize)
    if dtype.itemsize == 0:
        count = min(count, 64)
    plain = dtype.kind not in "bUSV" and dtype.fields is None
    raw = rng.randbytes(count * dtype.itemsize) if plain else bytes(count * dtype.itemsize)
    value = np.ndarray(_shape(rng, count), dtype, buffer=bytearray(raw))
    layout = rng.choice(("plain", "plain", "plain", "permuted", "sliced", "negative", "broadcast", "fortran"))
    if layout == "permuted":
        return value.transpose(rng.sample(range(value.ndim), value.ndim))
    if layout == "sliced" and value.ndim:
        return value[..., ::2]
    if layout == "negative" and value.ndim:
        return value[::-1]
    if layout == "broadcast" and size < 1 << 20:
        return np.broadcast_to(value, (2, *value.shape))
    return np.asfortranarray(value) if layout == "fortran" and value.ndim else value


def _container(rng: random.Random, size: int) -> Any:
    form = rng.randrange(6)
    if form == 0:
        count = min(size // 8, 20_000)
        numbers = [rng.getrandbits(40) for _ in range(min(count, 50))] * max(1, count // 50)
        return rng.choice((list, tuple))(numbers)
    if form == 1:
        return rng.choice((set, frozenset))((rng.getrandbits(16), "x", b"y", (1, None), 2.5))
    if form == 2:
        deep: Any = rng.random()
        for level in range(rng.choice((3, 40, 300, 440))):
            deep = [deep] if level % 3 else (deep,)
        return deep
    parts = [draw(rng, size // 4) if rng.random() < 0.5 else _scalar(rng, 0) for _ in range(rng.randrange(5))]
    if form == 3:
        return {rng.choice((index, str(index), (index, "k"))): part for index, part in enumerate(parts)}
    if form == 4 and parts:
        return [parts[0], (parts[0],), *parts]  # the same object twice
    return rng.choice((list, tuple))(parts)


def _object(rng: random.Random, size: int) -> Any:
    array = _array(rng, size)
    if array.dtype.byteorder == ">":  # numpy's own pickling turns the bytes of such datetimes around
        array = np.zeros(size // 8)
    return rng.choice(
        (
            Record(f"r{rng.getrandbits(8)}", array),
            Record("bytes", rng.randbytes(size)),
            Pair(rng.random(), rng.randbytes(min(size, 4096))),
            decimal.Decimal(rng.getrandbits(100)),
            fractions.Fraction(rng.getrandbits(60), 7),
            datetime.datetime(2020, 1, 1) + datetime.timedelta(seconds=rng.getrandbits(30)),
            pathlib.PurePosixPath(f"/a/{rng.getrandbits(20)}"),
            complex(rng.random(), rng.random()),
            range(rng.getrandbits(10)),
            collections.OrderedDict(a=rng.random(), b=None),
            collections.deque([1, rng.random()], 5),
            {"inside": [Record("r", rng.getrandbits(70)), torch.arange(rng.randrange(50))]},
            ValueError("only a value", rng.getrandbits(9)),
        )
    )


def scribble(value: Any) -> None:
    """Overwrite what the sender may overwrite once `execute` has returned."""
    if isinstance(value, bytearray):
        value[:] = b"\xee" * len(value)
    elif isinstance(value, np.ndarray) and value.flags.writeable and value.dtype.fields is None and value.dtype.kind in "iuf":
        value[...] = 77
    elif type(value) is torch.Tensor and value.dtype in (torch.float32, torch.int64, torch.uint8) and not value.requires_grad:
        if 0 not in value.stride():
            value.fill_(77)
    elif isinstance(value, list):
        for item in value:
            scribble(item)
        value.append("scribbled")
    elif isinstance(value, dict):
        for item in value.values():
            scribble(item)


def holds_unsendable(value: Any) -> bool:
    """Whether an `Unsendable` is inside."""
    if isinstance(value, (list, tuple)):
        return any(map(holds_unsendable, value))
    if isinstance(value, dict):
        return any(map(holds_unsendable, value.values()))
    return isinstance(value, Unsendable)


def digest(value: Any) -> int:
    """64 bits of everything that must arrive: types, dtypes, shapes, every bit. Not of memory layouts."""
    state = hashlib.blake2b(digest_size=8)
    _feed(state, value)
    return int.from_bytes(state.digest(), "big")


def _feed(state: Any, value: Any) -> None:
    state.update(f"{type(value).__name__}|".encode())
    if isinstance(value, torch.Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}{value.requires_grad}".encode())
        state.update(bits_of(value))
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        state.update(f"{array.dtype!r}{array.shape}".encode())
        _feed_array(state, array)
    elif isinstance(value, memoryview):
        state.update(f"{value.format}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, (bytes, bytearray)):
        state.update(value)
    elif isinstance(value, (list, tuple)):
        state.update(str(len(value)).encode())
        for item in value:
            _feed(state, item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _feed(state, key)
            _feed(state, item)
    elif isinstance(value, (set, frozenset)):
        state.update(str(sorted(map(digest, value))).encode())
    elif isinstance(value, float):
        state.update(struct.pack("<d", value))
    elif isinstance(value, Record):
        _feed(state, value.name)
        _feed(state, value.data)
    else:
        state.update(ascii(value).encode())


def _feed_array(state: Any, array: np.ndarray[Any, Any]) -> None:
    if array.dtype.fields is None:
        state.update(array.tobytes())
    else:  # the bytes between fields are nobody's
        for name in array.dtype.names or ():
            _feed_array(state, array[name])


def same(expected: Any, arrived: Any) -> bool:
    """Type, value, dtype, shape, layout, every bit. Which parts are one object is not compared: values are put together in
    actors from parts that came separately."""
    if type(expected) is not type(arrived):
        return False
    if isinstance(expected, (list, tuple)):
        return len(expected) == len(arrived) and all(map(same, expected, arrived))
    if isinstance(expected, dict):
        pairs = zip(expected.items(), arrived.items(), strict=False)
        return len(expected) == len(arrived) and all(same(k, j) and same(v, w) for (k, v), (j, w) in pairs)
    if isinstance(expected, BaseException):
        return expected.args == arrived.args
    return strategies.equal(expected, arrived)
