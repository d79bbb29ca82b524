"""Plain values: every boundary of the format, the exact bytes, and depth."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from raycomm.codec import DEPTH_LIMIT, decode, encode
from raycomm.codec.message import ext_header
from raycomm.codec.unpack import Decoder
from raycomm.errors import SerializationError
from tests.unit.strategies import FLOAT_EDGES, GOLDEN, INT_EDGES, equal, packed, values

LENGTHS = (0, 1, 14, 15, 16, 17, 31, 32, 33, 255, 256, 257, 65535, 65536)


def carried(value: Any) -> Any:
    payload, buffers = encode(value)
    return decode(payload, [bytearray(buffer) for buffer in buffers])


def deep(payload: bytes, buffers: list[Any]) -> Any:
    """Decoded by the careful reader alone."""
    decoder = Decoder([memoryview(bytearray(buffer)) for buffer in buffers])
    value = decoder.deep(memoryview(payload)[1:])
    decoder.finish()
    return value


def nested(depth: int, wrap: Any = lambda inner: [inner]) -> Any:
    value: Any = None
    for _ in range(depth):
        value = wrap(value)
    return value


@settings(max_examples=500, deadline=None)
@given(values())
def test_any_value_arrives_equal(value: Any) -> None:
    payload, buffers = encode(value)
    assert equal(value, decode(payload, [bytearray(buffer) for buffer in buffers]))
    assert equal(value, deep(payload, buffers))
    assert encode(value)[0] == payload


@settings(max_examples=100, deadline=None)
@given(packed())
def test_packed_lists_arrive_equal(value: Any) -> None:
    assert equal(value, carried(value))


@pytest.mark.parametrize("value", INT_EDGES)
def test_ints(value: int) -> None:
    payload, _ = encode(value)
    assert type(carried(value)) is int
    assert carried(value) == value == deep(payload, [])
    if -(2**63) <= value < 2**64:
        assert payload[1:] == msgpack.packb(value)


@pytest.mark.parametrize("value", FLOAT_EDGES)
def test_floats(value: float) -> None:
    assert equal(value, carried(value))
    assert equal([value] * 20, carried([value] * 20))
    assert equal([value, None], carried([value, None]))


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int) -> None:
    for value in (
        *("x" * length, b"x" * length, bytearray(b"x" * length), "\ud800" * length, memoryview(b"x" * length)),
        *([None] * length, (None,) * length, dict.fromkeys(range(length)), set(range(length)), frozenset(range(length))),
        *([1] * length, (2.5,) * length, [[]] * length, 2 ** (8 * length + 64)),
    ):
        payload, buffers = encode(value)
        assert equal(value, decode(payload, buffers))
        assert equal(value, deep(payload, buffers))


@pytest.mark.parametrize("length", [*range(18), 255, 256, 65535, 65536])
def test_ext_headers_are_msgpacks(length: int) -> None:
    assert ext_header(5, length) + bytes(length) == msgpack.packb(msgpack.ExtType(5, bytes(length)))


@pytest.mark.parametrize(
    ("low", "high", "code", "width"),
    [
        (-128, 127, 1, 1),
        (-129, 0, 2, 2),
        (0, 128, 2, 2),
        (-32768, 32767, 2, 2),
        (-32769, 0, 3, 4),
        (0, 32768, 3, 4),
        (-(2**31), 2**31 - 1, 3, 4),
        (0, 2**31, 4, 8),
        (-(2**31) - 1, 0, 4, 8),
        (-(2**63), 2**63 - 1, 4, 8),
    ],
)
def test_packed_width_is_the_narrowest(low: int, high: int, code: int, width: int) -> None:
    value = [low, high] * 8
    payload, _ = encode(value)
    body = bytes((0, code)) + b"".join(item.to_bytes(width, "little", signed=True) for item in value)
    assert payload == b"\x01" + ext_header(8, len(body)) + body
    assert carried(value) == value
    assert type(carried(tuple(value))) is tuple


@pytest.mark.parametrize(
    "value",
    [
        [1] * 15,
        [True] * 16,
        [*[1] * 15, True],
        [*[1] * 15, 1.0],
        [2**63, *[1] * 15],
        [*[1] * 15, 2**70],
        ["a"] * 16,
        (None,) * 16,
        {*range(20)},
    ],
    ids=str,
)
def test_not_packed(value: Any) -> None:
    payload, _ = encode(value)
    assert payload[1] not in (0xC7, 0xC8, 0xC9) or payload[3] != 8
    assert equal(value, carried(value))


@pytest.mark.parametrize(("value", "payload"), GOLDEN, ids=range(len(GOLDEN)))
def test_golden_bytes(value: Any, payload: str) -> None:
    assert encode(value)[0].hex() == payload
    buffers = [bytearray(buffer) for buffer in encode(value)[1]]
    assert equal(value, decode(bytes.fromhex(payload), buffers))


WRAPS: dict[str, tuple[Any, int]] = {  # with the levels that each adds
    "list": (lambda inner: [inner], 1),
    "tuple": (lambda inner: (inner,), 1),
    "dict": (lambda inner: {"k": inner}, 1),
    "mixed": (lambda inner: [(inner, 7)], 2),
}


@pytest.mark.parametrize("name", WRAPS)
@pytest.mark.parametrize("depth", [2, 4, 6, 8, 10, 248, 250, 498, 500])
def test_depth_up_to_the_limit(depth: int, name: str) -> None:
    wrap, levels = WRAPS[name]
    value = nested(depth // levels, wrap)
    payload, buffers = encode(value)
    assert not buffers
    assert b"\x80\x05" not in payload  # no pickle
    assert payload == encode(decode(payload))[0] == encode(deep(payload, []))[0]  # comparing such values would recurse
    assert depth_of(decode(payload)) == depth


def depth_of(value: Any) -> int:
    depth = 0
    while isinstance(value, (list, tuple, dict)):
        value, depth = next(iter(value.values() if isinstance(value, dict) else value), None), depth + 1
    return depth


@pytest.mark.parametrize("leaf", [[], (), {}, set(), frozenset(), [1] * 20, (1.5,) * 16, {(): 1}], ids=str)
def test_every_container_is_a_level(leaf: Any, high_recursion_limit: None) -> None:
    levels = 2 if leaf == {(): 1} else 1
    value = leaf
    for _ in range(DEPTH_LIMIT - levels):
        value = [value]
    payload, _ = encode(value)
    assert payload[1] == 0x91
    assert depth_of(decode(payload)) >= DEPTH_LIMIT - 1
    payload, _ = encode([value])
    assert is_pickle(payload)
    assert depth_of(decode(payload)) >= DEPTH_LIMIT


def is_pickle(payload: bytes) -> bool:
    return payload[1] in (0xC7, 0xC8, 0xC9) and payload[{0xC7: 3, 0xC8: 4, 0xC9: 6}[payload[1]]] == 12


@pytest.fixture
def high_recursion_limit() -> Iterator[None]:
    """pickle needs about two of Python's levels for each of ours, so the default limit of 1000 stops it where we stop."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(5000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.parametrize("depth", [501, 1000])
def test_deeper_goes_whole_by_pickle_with_its_tensors(depth: int, high_recursion_limit: None) -> None:
    shared = torch.arange(6).to(torch.uint16)
    value: Any = [shared, shared]
    for _ in range(depth - 1):
        value = [value]
    payload, buffers = encode(value)
    assert is_pickle(payload)
    assert len(buffers) == 1
    arrived = decode(payload, [bytearray(buffers[0])])
    for _ in range(depth - 1):
        (arrived,) = arrived
    assert arrived[0] is arrived[1]
    assert equal(shared, arrived[0])


@pytest.mark.parametrize("depth", [1000, 5000, 100_000])
@pytest.mark.parametrize("name", ["list", "tuple", "dict"])
def test_too_deep_for_pickle_is_an_error(depth: int, name: str) -> None:
    with pytest.raises(SerializationError, match="500 levels") as caught:
        encode(nested(depth, WRAPS[name][0]))
    assert caught.value.path == "value"


def test_self_reference_keeps_its_shape() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    arrived = carried(loop)
    assert arrived[0] == 1
    assert arrived[1] is arrived
    knot: dict[str, Any] = {}
    knot["a"] = [knot, (knot,)]
    arrived = carried(knot)
    assert arrived["a"][0] is arrived
    assert arrived["a"][1][0] is arrived


def stack_depth() -> int:
    depth, frame = 0, sys._getframe()
    while frame is not None:
        depth, frame = depth + 1, frame.f_back  # type: ignore[assignment]
    return depth


def test_deep_in_the_callers_stack() -> None:
    def at(levels: int, call: Any) -> Any:
        return at(levels - 1, call) if levels else call()

    value = [nested(400), {"a": (1, 2, {"b": {3}, "c": torch.ones(2)})}, Reentrant(1)]
    payload, buffers = encode(value)

    def near_the_limit() -> bool:
        room = sys.getrecursionlimit() - stack_depth()
        right = bool(at(room - 60, lambda: equal(value[1], carried(value[:2])[1])))
        # In the last three levels no error can be built, ours or anyone's.
        for left in range(12, 70):
            for call in (lambda: encode(value), lambda: decode(payload, [bytearray(buffer) for buffer in buffers])):
                try:
                    at(room - left, call)
                except SerializationError:
                    continue
        return right

    with ThreadPoolExecutor(1) as thread:  # whose stack holds nothing of the test runner's
        assert thread.submit(near_the_limit).result()


def test_order_of_dicts_and_odd_keys() -> None:
    value = {
        "b": 1,
        "a": 2,
        (1, (2, "x")): 3,
        None: 4,
        2.5: 5,
        frozenset({1}): 6,
        np.int16(9): 7,
        2**80: 8,
        b"k": 9,
        "\udfff": 10,
    }
    assert equal(value, carried(value))


def test_memoryviews() -> None:
    base = bytearray(range(64))
    for view in (
        *(memoryview(base), memoryview(bytes(base)), memoryview(base)[3:40:3], memoryview(base)[::-1], memoryview(base)[:0]),
        *(memoryview(base).cast(form) for form in "bBchHiIlLqQnNfd?"),
        *(memoryview(base).cast("@i"), memoryview(base).cast("i", [4, 4]), memoryview(base).cast("B", [2, 4, 8])),
        *(memoryview(base[:8]).cast("d", []), memoryview(np.arange(12).reshape(3, 4)), memoryview(np.arange(12).reshape(3, 4).T)),
    ):
        arrived = carried(view)
        assert equal(view, arrived)
    held = carried(memoryview(base))
    held[0] = 99
    assert base[0] == 0


@pytest.mark.parametrize("view", [memoryview(np.zeros(3, ">i4")), memoryview(np.zeros((0, 2))), memoryview(np.zeros(2, "f2"))])
def test_memoryviews_that_cannot_be_rebuilt(view: memoryview) -> None:
    with pytest.raises(SerializationError) as caught:
        encode({"m": [view]})
    assert caught.value.path == "value['m'][0]"
    assert caught.value.type_name == "memoryview"


def test_released_memoryview_is_an_error() -> None:
    view = memoryview(b"abc")
    view.release()
    with pytest.raises(SerializationError):
        encode([view])


def test_buffers_may_be_anything_contiguous() -> None:
    payload, buffers = encode([torch.arange(4), np.arange(4)])
    (raw,) = {bytes(buffer) for buffer in buffers}
    for made in (
        bytearray(raw),
        memoryview(bytearray(raw)),
        np.frombuffer(bytearray(raw), "f4"),
        memoryview(bytearray(raw)).cast("q"),
    ):
        assert decode(memoryview(payload), [made, made])[1].tolist() == [0, 1, 2, 3]
    with pytest.raises(SerializationError):
        decode(payload, [bytearray(2 * len(raw)), memoryview(bytearray(2 * len(raw)))[::2]])
    with pytest.raises(SerializationError):
        decode(payload, [1, 2])  # type: ignore[list-item]


def test_threads_share_nothing() -> None:
    value = {"a": [torch.arange(10), np.arange(10), (1, {2, 3}), list(range(40))], "b": "x" * 300}
    start = threading.Barrier(4)

    def work(_: int) -> bool:
        start.wait()
        return all(equal(value, carried(value)) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_a_reducer_may_encode() -> None:
    arrived = carried([Reentrant(5), Reentrant(6)])
    assert [item.number for item in arrived] == [5, 6]


class Reentrant:
    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return reenter, (encode([self.number, torch.ones(2)])[0],)


def reenter(payload: bytes) -> Reentrant:
    return Reentrant(decode(payload, [bytearray(8)])[0])


def test_importing_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, raycomm.codec as c; v = [1, (2, {3: 'x'}), {4}, 2**90, list(range(99)), memoryview(b'a')];"
        "assert c.decode(*c.encode(v)) == v; assert not {'torch', 'numpy', 'ray', 'cloudpickle'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
