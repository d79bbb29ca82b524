"""The native codec against the Python one: the same bytes for every value, the same value for the same bytes."""

from __future__ import annotations

import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from raycomm import _core, codec
from tests.unit.strategies import (
    FLOAT_EDGES,
    GOLDEN,
    INT_EDGES,
    NUMPY_DTYPES,
    TORCH_DTYPES,
    arrays,
    equal,
    packed,
    tensors,
    torch_of,
    values,
)

LENGTHS = (0, 1, 14, 15, 16, 17, 31, 32, 33, 255, 256, 257, 65535, 65536)


def both_ways(value: Any, *, exact: bool = True) -> None:
    """Same bytes from both encoders, and both decoders bring the value back. Not `exact`: bytes between fields are nobody's."""
    payload, buffers = _core.encode(value)
    expected, expected_buffers = codec.encode(value)
    assert payload == expected
    assert list(map(len, buffers)) == list(map(len, expected_buffers))
    if exact:
        assert buffers == [bytes(buffer) for buffer in expected_buffers]
    assert equal(value, _core.decode(payload, buffers))
    assert equal(value, codec.decode(payload, [bytearray(buffer) for buffer in buffers]))


def holds_structures(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(holds_structures, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(holds_structures, value))
    return isinstance(value, np.ndarray) and value.dtype.fields is not None


@settings(max_examples=600, deadline=None)
@given(values())
def test_any_value(value: Any) -> None:
    both_ways(value, exact=not holds_structures(value))


@settings(max_examples=150, deadline=None)
@given(packed())
def test_packed_lists(value: Any) -> None:
    both_ways(value)


@settings(max_examples=250, deadline=None)
@given(tensors())
def test_any_tensor(value: torch.Tensor) -> None:
    both_ways(value)
    both_ways([value, {"again": (value,)}])


@settings(max_examples=250, deadline=None)
@given(arrays())
def test_any_array(value: np.ndarray[Any, Any]) -> None:
    exact = value.dtype.fields is None
    both_ways(value, exact=exact)
    both_ways((value, [value]), exact=exact)


@pytest.mark.parametrize(("value", "payload"), GOLDEN, ids=range(len(GOLDEN)))
def test_golden_bytes(value: Any, payload: str) -> None:
    encoded, buffers = _core.encode(value)
    assert encoded.hex() == payload
    assert equal(value, _core.decode(bytes.fromhex(payload), buffers))


@pytest.mark.parametrize("value", [*INT_EDGES, *FLOAT_EDGES], ids=repr)
def test_numbers(value: float) -> None:
    for form in (value, [value], (value, value), [value] * 16, (value,) * 17, {value: [value]}):
        both_ways(form)


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int) -> None:
    for value in (
        *("x" * length, "\u00e9" * length, b"x" * length, bytearray(b"x" * length), "\ud800" * length),
        *([None] * length, (None,) * length, dict.fromkeys(range(length)), ((),) * length, [[]] * length),
        *([1] * length, (2.5,) * length, [2**40] * length, [True] * length, np.zeros(length, "u1"), torch.zeros(length)),
        *([1] * length + [None], [1.0] * length + [1], (b"y" * length, "z" * length), {"k" * length: ()}),
    ):
        both_ways(value)


@pytest.mark.parametrize("depth", [1, 2, 199, 200, 201, 202, 499, 500])
def test_depths_around_where_the_native_path_ends(depth: int) -> None:
    for wrap in (lambda inner: [inner], lambda inner: (inner,), lambda inner: {"k": inner}):
        value: Any = 7
        for _ in range(depth):
            value = wrap(value)
        payload, buffers = _core.encode(value)
        assert (payload, buffers) == codec.encode(value)
        assert codec.encode(_core.decode(payload, []))[0] == payload  # comparing such values would recurse


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_torch_dtype_and_layout(dtype: torch.dtype) -> None:
    raw = bytes((37 * index + 11) % 256 for index in range(24 * dtype.itemsize))
    value = torch_of(bytes(byte & 1 for byte in raw) if dtype is torch.bool else raw, dtype, (2, 3, 4))
    views = [value, value.permute(2, 0, 1), value[:, ::2], value[1:, 1], value[0, 0, 0], value[:0], value.expand(2, 2, 3, 4)]
    views += [value[:, :1], value.reshape(1, 24, 1), value.reshape(24), torch.nn.Parameter(value, requires_grad=False)]
    views += [value.conj()] if dtype.is_complex else []
    for view in views:
        both_ways(view)
    both_ways(views)


def test_channels_last_and_lazy_signs() -> None:
    image = torch.arange(120.0).reshape(2, 3, 4, 5)
    for value in (
        *(image.contiguous(memory_format=torch.channels_last), image[:1].contiguous(memory_format=torch.channels_last)),
        *(torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag, torch._neg_view(torch.ones(3))),
        *(torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2),
    ):
        both_ways(value)


@pytest.mark.parametrize("dims", [0, 1, 63, 64, 65, 200])
def test_many_dimensions(dims: int) -> None:
    both_ways(torch.ones([1] * dims))


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=repr)
def test_every_numpy_dtype(dtype: np.dtype[Any]) -> None:
    value = np.zeros((2, 3, 4), dtype)
    for view in (
        value,
        value.T,
        value[:, ::2],
        value[::-1],
        value[0, 0],
        value[:0],
        np.broadcast_to(value, (2, 2, 3, 4)),
        value[()],
    ):
        both_ways(view, exact=dtype.fields is None)
    both_ways(value[0, 0, 0])
    assert _core.decode(*_core.encode(value)).flags.writeable


def test_many_tensors_keep_their_identity() -> None:
    """More objects than the native encoder searches one by one."""
    several = [torch.full((2,), float(number)) for number in range(100)]
    both_ways([*several, *reversed(several), {"k": tuple(several[::3])}])
    arrived = _core.decode(*_core.encode([*several, *several]))
    assert all(arrived[index] is arrived[index + 100] for index in range(100))
    assert len({id(item) for item in arrived}) == 100


def test_a_value_taken_up_by_pickle_holds_its_tensors_out_of_band() -> None:
    class Local:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    payload, buffers = _core.encode([Local(torch.arange(1000))])
    assert [len(buffer) for buffer in buffers] == [8000]
    assert equal(torch.arange(1000), _core.decode(payload, buffers)[0].tensor)


def test_what_cannot_be_sent_is_named_the_same() -> None:
    value = {"a": [1, threading.Lock()]}
    with pytest.raises(codec.values.SerializationError) as native:
        _core.encode(value)
    with pytest.raises(codec.values.SerializationError) as python:
        codec.encode(value)
    assert (str(native.value), native.value.path) == (str(python.value), "value['a'][1]")


def test_decoded_values_own_their_memory() -> None:
    payload, buffers = _core.encode([torch.arange(4), np.arange(4)])
    first = _core.decode(payload, buffers)
    second = _core.decode(payload, buffers)
    for item in first:
        item += 1
    assert second[0].tolist() == second[1].tolist() == [0, 1, 2, 3]
    assert equal([torch.arange(4), np.arange(4)], _core.decode(payload, buffers))


def test_threads_share_nothing() -> None:
    big = np.arange(1 << 18)  # large enough that copying it lets other threads run
    value = {"a": [torch.arange(10), np.arange(10), (1, {2, 3}), list(range(40))], "b": "x" * 300, "c": [big, big[::2]]}
    expected = _core.encode(value)
    start = threading.Barrier(4)

    def work(_: int) -> bool:
        start.wait()
        for _ in range(25):
            encoded = _core.encode(value)
            if encoded != expected or not equal(value, _core.decode(*encoded)):
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


def test_lists_that_change_meanwhile_do_not_crash() -> None:
    """A thread that shortens, lengthens and refills what another one encodes."""
    shared: list[Any] = [torch.arange(3)] * 50
    over = threading.Event()

    def disturb() -> None:
        while not over.is_set():
            shared.clear()
            shared.extend([torch.arange(3), "x", (1, 2), np.arange(3)] * 12)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for _ in range(2000):
            arrived = _core.decode(*_core.encode([shared, {"k": shared}]))
            assert len(arrived) == 2
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("mib", [1, 4, 16])
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_copies_come_to_pages_that_are_there(kind: str, mib: int) -> None:
    """Receiving one large value after the other, the last still held, reuses memory: new pages would cost more than the copy."""
    zeros = np.zeros(mib << 18, np.float32)
    payload, buffers = _core.encode(torch.from_numpy(zeros) if kind == "tensor" else zeros)
    held = [_core.decode(payload, buffers) for _ in range(2)]

    def receive(times: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for number in range(times):
            held[number % 2] = _core.decode(payload, buffers)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    receive(20)
    pages = (mib << 20) // resource.getpagesize()
    assert receive(10) < pages  # a tenth of what ten new ones take
