"""Damaged and hostile messages: they decode, or raise SerializationError; nothing else, and nothing reads out of bounds."""

from __future__ import annotations

import struct
from itertools import chain
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raycomm.codec import decode, encode
from raycomm.codec.message import ext_header
from raycomm.codec.unpack import Decoder
from raycomm.errors import SerializationError
from tests.unit.strategies import bits_of

SHARED = torch.arange(3)
MESSAGES: list[Any] = [
    None,
    [1, -1, 2**40, 2.5, "text", b"bin", None, True, {"k": [1, {"n": 2}], 7: ()}],
    (1, (2, ("x",)), frozenset({1, (2,)}), {3}),
    [2**90, "\ud800", bytearray(b"ab"), memoryview(bytearray(range(8))).cast("h", [2, 2])],
    [list(range(16)), tuple(range(-200, -180)), [0.5] * 16],
    [
        torch.arange(6.0).reshape(2, 3).t(),
        SHARED,
        (SHARED,),
        torch.tensor(1),
        torch.zeros(0, 2),
        torch.ones(2, requires_grad=True),
    ],
    [torch.nn.Parameter(torch.ones(1, 2, 2, 2).contiguous(memory_format=torch.channels_last)), torch.tensor([1 + 2j])],
    [np.arange(6).reshape(2, 3).T, np.zeros(2, ">i4"), np.zeros(2, np.dtype([("a", "i1"), ("b", "f8", (2,))], align=True))],
    [np.float32(1), np.str_("ab"), np.datetime64(5, "ns"), np.zeros((), [("a", "i4")])[()]],
]


def survives(payload: bytes, buffers: list[Any]) -> bool:
    """Whether it decodes; every read of what it decodes to is inside the buffers, or this crashes."""
    try:
        value = decode(payload, buffers)
    except SerializationError:
        return False
    touch(value)
    encode(value)
    return True


def touch(value: Any) -> None:
    """Read every element of every tensor and array."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            bits_of(item)
        elif isinstance(item, np.ndarray):
            item.tobytes()
        elif isinstance(item, dict):
            stack += chain.from_iterable(item.items())
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack += item


def message_of(value: Any) -> tuple[bytes, list[Any]]:
    payload, buffers = encode(value)
    return payload, [bytearray(buffer) for buffer in buffers]


@pytest.mark.parametrize("value", MESSAGES, ids=range(len(MESSAGES)))
def test_every_truncation_is_an_error(value: Any) -> None:
    payload, buffers = message_of(value)
    for end in range(len(payload)):
        assert not survives(payload[:end], buffers)
        with pytest.raises(SerializationError):
            deep(payload[:end], buffers)
    assert not survives(payload + b"\x00", buffers)


def deep(payload: bytes, buffers: list[Any]) -> Any:
    decoder = Decoder([memoryview(buffer) for buffer in buffers])
    if not payload:
        raise SerializationError("empty")
    return decoder.deep(memoryview(payload)[1:])


@pytest.mark.parametrize("value", MESSAGES, ids=range(len(MESSAGES)))
def test_every_bit_flip_decodes_or_is_an_error(value: Any) -> None:
    payload, buffers = message_of(value)
    for position in range(8 * len(payload)):
        changed = bytearray(payload)
        changed[position // 8] ^= 1 << position % 8
        survives(bytes(changed), buffers)


@pytest.mark.parametrize("value", MESSAGES, ids=range(len(MESSAGES)))
def test_wrong_buffers_are_an_error(value: Any) -> None:
    payload, buffers = message_of(value)
    assert survives(payload, buffers)
    assert not survives(payload, [*buffers, bytearray(8)])
    for index, buffer in enumerate(buffers):
        assert not survives(payload, buffers[:index] + buffers[index + 1 :])
        assert not survives(payload, [*buffers[:index], buffer + b"\0", *buffers[index + 1 :]])
        if buffer:
            assert not survives(payload, [*buffers[:index], buffer[:-1], *buffers[index + 1 :]])


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_splices_decode_or_are_an_error(data: st.DataObject) -> None:
    first, first_buffers = message_of(data.draw(st.sampled_from(MESSAGES)))
    second, second_buffers = message_of(data.draw(st.sampled_from(MESSAGES)))
    here = data.draw(st.integers(0, len(first)))
    there = data.draw(st.integers(0, len(second)))
    for buffers in (first_buffers, second_buffers, first_buffers + second_buffers):
        survives(first[:here] + second[there:], buffers)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=80).filter(lambda noise: b"\x0c" not in noise))
def test_noise_decodes_or_is_an_error(noise: bytes) -> None:
    survives(noise, [])
    survives(b"\x01" + noise, [bytearray(8)])
    try:
        careful: Any = Decoder([]).deep(memoryview(noise))
    except Exception:
        careful = SerializationError
    try:
        quick: Any = decode(b"\x01" + noise)
    except SerializationError:
        quick = SerializationError
    assert repr(careful) == repr(quick)


def ext(code: int, body: bytes) -> bytes:
    return ext_header(code, len(body)) + body


def head(dtype: int, flags: int, device: int, ndim: int, index: int, *numbers: int) -> bytes:
    return struct.pack(f"<BBBBI{len(numbers)}q", dtype, flags, device, ndim, index, *numbers)


TENSOR_HEADS = {
    "negative dim": head(2, 0, 0, 2, 0, -1, -4),
    "huge dim": head(2, 0, 0, 1, 0, 2**62),
    "product overflows to 4": head(9, 0, 0, 2, 0, 2**62 + 1, 4),
    "product overflows to 0": head(2, 0, 0, 2, 0, 2**32, 2**32),
    "too many elements": head(2, 0, 0, 1, 0, 5),
    "too few elements": head(2, 0, 0, 1, 0, 3),
    "index out of range": head(2, 0, 0, 1, 1, 4),
    "huge index": head(2, 0, 0, 1, 2**32 - 1, 4),
    "stride past the end": head(2, 1, 0, 2, 0, 2, 2, 3, 1),
    "negative stride": head(2, 1, 0, 2, 0, 2, 2, -2, 1),
    "zero stride": head(2, 1, 0, 1, 0, 4, 0),
    "overlap": head(2, 1, 0, 2, 0, 2, 2, 1, 1),
    "huge stride": head(2, 1, 0, 2, 0, 2, 2, 2**62, 1),
    "device": head(2, 0, 2, 1, 0, 4),
    "unknown flag": head(2, 8, 0, 1, 0, 4),
    "unknown dtype": head(42, 0, 0, 1, 0, 4),
    "dtype zero": head(0, 0, 0, 1, 0, 4),
    "shape cut short": head(2, 0, 0, 2, 0, 4),
    "surplus": head(2, 0, 0, 1, 0, 4) + b"\0",
    "ndim 255": head(2, 0, 0, 255, 0, *([1] * 254)),
}


@pytest.mark.parametrize("code", [9, 10])
@pytest.mark.parametrize("body", TENSOR_HEADS.values(), ids=TENSOR_HEADS.keys())
def test_hostile_heads(body: bytes, code: int) -> None:
    assert not survives(b"\x01" + ext(code, body), [bytearray(16)])


def test_hostile_tensors() -> None:
    # requires_grad on an integer dtype; strides of size-1 dims that torch refuses or that overflow numpy's bytes
    assert not survives(b"\x01" + ext(9, head(8, 2, 0, 1, 0, 2)), [bytearray(16)])
    assert not survives(b"\x01" + ext(9, head(2, 1, 0, 2, 0, 1, 4, -5, 1)), [bytearray(16)])
    assert not survives(b"\x01" + ext(10, head(2, 1, 0, 2, 0, 1, 4, 2**62, 1)), [bytearray(16)])
    survives(b"\x01" + ext(9, head(2, 1, 0, 2, 0, 1, 4, 2**62, 1)), [bytearray(16)])
    survives(b"\x01" + ext(9, head(2, 0, 0, 3, 0, 2**62, 0, 2**62)), [bytearray()])
    assert not survives(b"\x01" + ext(10, head(2, 0, 0, 3, 0, 2**62, 0, 2**62)), [bytearray()])
    survives(b"\x01" + ext(9, head(2, 0, 0, 255, 0, *([1] * 253), 2, 2)), [bytearray(16)])
    assert not survives(b"\x01" + ext(10, head(2, 0, 0, 255, 0, *([1] * 253), 2, 2)), [bytearray(16)])
    assert not survives(b"\x01" + ext(10, head(255, 0, 0, 1, 0, 2) + msgpack.packb("O")), [bytearray(16)])
    assert not survives(b"\x01" + ext(10, head(255, 0, 0, 1, 0, 2) + msgpack.packb([0, "i4", [2]])), [bytearray(16)])


def test_back_references_go_back() -> None:
    assert not survives(b"\x01" + ext(13, struct.pack("<I", 0)), [])
    tensor = ext(9, head(2, 0, 0, 1, 0, 4))
    assert survives(b"\x01\x92" + tensor + ext(13, struct.pack("<I", 0)), [bytearray(16)])
    assert not survives(b"\x01\x92" + tensor + ext(13, struct.pack("<I", 1)), [bytearray(16)])
    assert not survives(b"\x01\x92" + tensor + ext(13, b"\0"), [bytearray(16)])
    assert not survives(b"\x01\x92" + tensor + tensor, [bytearray(16)])


@pytest.mark.parametrize("first", [0xDD, 0xDF, 0xDB, 0xC6, 0xC9], ids=hex)
def test_huge_claims(first: int) -> None:
    header = bytes((first,)) + b"\xff\xff\xff\xff\x03"
    for prefix in (b"", b"\x91", b"\x91" * 499, ext(3, b"\x91")[:-1] + b"\x91"):
        assert not survives(b"\x01" + prefix + header, [])
        assert not survives(b"\x01" + prefix + header + bytes(100), [])


@pytest.mark.parametrize("depth", [501, 502, 1024, 5000, 100_000])
def test_too_deep(depth: int) -> None:
    for opener in (b"\x91", b"\x81\x00"):
        with pytest.raises(SerializationError, match="500 levels"):
            decode(b"\x01" + opener * depth + b"\xc0")
    if depth <= 5000:
        body = b"\xc0"
        for _ in range(depth):
            body = ext(3, b"\x91" + body)
        with pytest.raises(SerializationError, match="500 levels"):
            decode(b"\x01" + body)


def test_nested_ext_bombs() -> None:
    for depth in (3, 6, 250, 499, 500):
        body = b"\xc0"
        for _ in range(depth):
            body = ext(3, b"\x91" + body)
        assert survives(b"\x01" + body, [])
        assert not survives(b"\x01" + ext(4, b"\x91" + ext(3, b"\x91\x90")), [])  # a list cannot be in a set


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x02",
        b"\xc1",
        b"\xd4\xff\x00",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xd7\xff" + bytes(8),
        b"\xc7\x0c\xff" + bytes(12),
        b"\xa1\xff",
        b"\xa2\xc3\x28",
        b"\x81\x90\x00",
        b"\x81\x80\x00",
        ext(14, b"x"),
        ext(0, b"x"),
        ext(3, b""),
        ext(3, b"\x80"),
        ext(3, b"\x90\x90"),
        ext(3, b"\xc0"),
        ext(3, ext(3, b"\x90")),
        ext(7, b"\x90"),
        ext(7, msgpack.packb(["B", [4], True, b"abc"])),
        ext(7, msgpack.packb(["h", [2**62], True, b"ab"])),
        ext(7, msgpack.packb(["Z", [1], False, b"a"])),
        ext(7, msgpack.packb(["B", [-1], True, b""])),
        ext(7, msgpack.packb(["B", ["x"], True, b"a"])),
        ext(8, b"\0"),
        ext(8, b"\2\1abc"),
        ext(8, b"\0\6abc"),
        ext(8, b"\0\2abc"),
        ext(11, b"\x90"),
        ext(11, msgpack.packb(["<f4", b"abc"])),
        ext(11, msgpack.packb(["O", bytes(8)])),
        ext(11, msgpack.packb(["<U1", b"\xff" * 4])),
        ext(12, b""),
        ext(12, bytes(8)),
        ext(12, struct.pack("<II", 1, 0) + b"N."),
        ext(12, struct.pack("<II", 0, 1) + b"N."),
        ext(12, struct.pack("<II", 0, 2**32 - 1) + b"N."),
        ext(12, bytes(8) + b"\x80\x05."),
        ext(2, b"\xff"),
        ext(9, b""),
        ext(10, b""),
    ],
    ids=lambda body: body.hex()[:24] or "empty",
)
def test_bad_bodies(body: bytes) -> None:
    if body == b"\x02":
        assert decode(b"\x01" + body) == 2
        return
    for payload in (body, b"\x91" + body, ext(3, b"\x91" + body), b"\x92" + body + bytes(1)):
        assert not survives(b"\x01" + payload, [])


def test_versions_that_met_are_named() -> None:
    with pytest.raises(SerializationError, match=r"version 2.* version 1"):
        decode(b"\x02\xc0")
    with pytest.raises(SerializationError, match="empty"):
        decode(b"")
    with pytest.raises(SerializationError):
        decode("text")  # type: ignore[arg-type]


def test_an_array_does_not_come_from_a_gpu() -> None:
    assert not survives(b"\x01" + ext(10, head(2, 0, 1, 1, 0, 4)), [bytearray(16)])
