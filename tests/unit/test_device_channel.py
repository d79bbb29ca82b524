"""The channel between devices over gloo: both ends in this process, records through the codec."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

from raycomm.channel.device import SAME, Arriving, DeviceReader, DeviceWriter
from raycomm.channel.tensors import take_apart
from raycomm.codec import Failure, decode, decode_failure, encode, encode_failure
from raycomm.device.cpu import CpuDevice
from raycomm.device.gloo import GlooCommunicator
from raycomm.errors import CommunicatorError, SerializationError, TensorMismatchError

_LIMIT_S = 30.0


class Records:
    """Both ends of the ordinary channel: what is written is encoded, and decoded when it is read."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self._messages: deque[Any] = deque()

    def write(self, value: Any, timeout: float = -1.0) -> None:
        payload, buffers = encode(value)
        self._messages.append((decode, payload, [bytes(buffer) for buffer in buffers]))
        self.written.append(value)

    def write_failure(self, payload: Any, buffers: Any, timeout: float = -1.0) -> None:
        self._messages.append((decode_failure, payload, [bytes(buffer) for buffer in buffers]))

    def read(self, timeout: float = -1.0) -> Any:
        read, payload, buffers = self._messages.popleft()
        return read(payload, buffers)

    def skip(self, timeout: float = -1.0) -> None:
        self._messages.popleft()


def connected(name: str, size: int = 2) -> tuple[GlooCommunicator, ...]:
    store = torch.distributed.HashStore()
    ends = tuple(GlooCommunicator(store, name, rank, size, device=CpuDevice(f"cpu {rank}")) for rank in range(size))
    threads = [threading.Thread(target=end.warm_up, args=(_LIMIT_S,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[GlooCommunicator, ...]]:
    pair = connected("link")
    yield pair
    for end in pair:
        end.abort(_LIMIT_S)


class Channel:
    def __init__(self, ends: tuple[GlooCommunicator, ...], **promises: Any) -> None:
        self.records = Records()
        out, into = ends
        self.writer = DeviceWriter(self.records, out, 1, out.device.stream("out"), name="W1.forward#0", **promises)
        self.reader = DeviceReader(self.records, into, 0, into.device.stream("in"), name="W1.forward#0")

    def take(self) -> Any:
        value = self.reader.read()
        if not isinstance(value, Arriving):
            return value
        for event in value.events:
            event.synchronize(_LIMIT_S)
        return value.value()

    def carried(self, value: Any) -> Any:
        self.writer.write(value)
        return self.take()


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(240, dtype=torch.float32)
    return {
        "plain": base,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": base.view(12, 20).t(),
        "channels last": base.view(2, 3, 5, 8).contiguous(memory_format=torch.channels_last),
        "every other": base[::2],
        "a column": base.view(12, 20)[:, 3],
        "expanded": base[:12].view(12, 1).expand(12, 7),
        "offset": base[17:],
        "conjugate": torch.complex(base, -base).conj(),
        "negative": torch.complex(base, base).conj().imag,
        "a parameter": torch.nn.Parameter(base.clone()),
    }


@pytest.mark.parametrize("name", views())
def test_layouts(ends: Any, name: str) -> None:
    tensor = views()[name]
    channel = Channel(ends)
    got = channel.carried(tensor)
    assert torch.equal(got, tensor)
    assert got.dtype is tensor.dtype
    assert type(got) is type(tensor)
    assert got.requires_grad is tensor.requires_grad
    assert channel.writer.lent == []  # what is sent over gloo are copies, and of an empty tensor nothing
    if name not in ("every other", "a column", "expanded", "offset", "negative"):
        assert got.stride() == tensor.stride()


_DTYPES = (
    "float32 float64 float16 bfloat16 float8_e4m3fn uint8 int8 int16 int32 int64 uint16 uint32 uint64 bool complex64 complex128"
)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in _DTYPES.split()])
def test_dtypes(ends: Any, dtype: torch.dtype) -> None:
    tensor = torch.arange(37, dtype=torch.uint8).view(37).to(dtype)
    got = Channel(ends).carried([tensor])[0]
    assert got.dtype is dtype
    assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


def test_values_around_tensors(ends: Any) -> None:
    channel = Channel(ends)
    weights = torch.ones(3)
    array = np.arange(20_000)
    value = {"x": weights, "again": [weights, (torch.zeros(2), "text")], 3: array, "none": None}
    got = channel.carried(value)
    assert list(got) == list(value)
    assert got["x"] is got["again"][0]
    assert torch.equal(got["x"], weights)
    assert got["again"][1][1] == "text"
    assert (got[3] == array).all()
    for other in (5, "text", None, [1, {"a": (2,)}], [], array[:0]):
        back = channel.carried(other)
        assert type(back) is type(other)
        assert np.array_equal(back, other) if isinstance(other, np.ndarray) else back == other


def test_metadata_is_sent_when_it_changes(ends: Any) -> None:
    channel = Channel(ends)
    for shape, known in (((3,), False), ((3,), True), ((4,), False), ((4,), True), ((3,), False)):
        got = channel.carried({"x": torch.full(shape, float(shape[0]))})
        assert got["x"].tolist() == [shape[0]] * shape[0]
        assert (channel.records.written[-1] == SAME) is known
    for number in range(3):  # the rest of a value is sent each time, and the metadata with it
        assert channel.carried([torch.ones(2), number])[1] == number
        assert channel.records.written[-1] != SAME
    assert channel.carried({"x": torch.ones(3)})["x"].tolist() == [1.0] * 3


def test_a_failure_launches_nothing(ends: Any) -> None:
    channel = Channel(ends)
    failure = Failure.capture(ValueError("no"), "W1.forward", 3)
    for number in range(3):
        channel.writer.write(torch.full((5,), number))
        channel.writer.write_failure(*encode_failure(failure))
    for number in range(3):
        assert channel.take().tolist() == [number] * 5
        assert channel.take().execution == 3


def test_what_cannot_be_sent_launches_nothing(ends: Any) -> None:
    channel = Channel(ends, allow_pickle=False)
    with pytest.raises(SerializationError):
        channel.writer.write([torch.ones(4), object()])
    assert channel.records.written == []
    assert channel.carried(torch.ones(4)).tolist() == [1.0] * 4


class CannotBeRead:
    def __reduce__(self) -> Any:
        return fails, ()


def fails() -> Any:
    raise ValueError("cannot be read")


def test_what_cannot_be_read_fails_alone(ends: Any) -> None:
    """Its tensors are received all the same, or the next value would get them."""
    channel = Channel(ends)
    channel.writer.write([torch.zeros(6), CannotBeRead()])
    channel.writer.write([torch.ones(6)])
    with pytest.raises(Exception, match="cannot be read"):
        channel.take()
    assert channel.take()[0].tolist() == [1.0] * 6


_BROKEN = {
    "shape": (torch.ones(3, 2), "float32 [3, 2]", "return one shape each time"),
    "dtype": (torch.ones(2, 3).half(), "float16 [2, 3]", "convert it, with .to(torch.float32)"),
    "dtype and shape": (torch.ones(3).half(), "float16 [3]", "convert it, with .to(torch.float32), return one shape each time"),
    "order in memory": (
        torch.ones(3, 2).t(),
        "float32 [2, 3] with dimensions in the order [1, 0] in memory",
        "return it with .contiguous() each time",
    ),
    "requires_grad": (
        torch.ones(2, 3, requires_grad=True),
        "float32 [2, 3] with requires_grad",
        "return it with .detach() each time",
    ),
    "number of tensors": ([torch.ones(2, 3), torch.ones(1)], "float32 [2, 3], float32 [1]", "return as many each time"),
}


@pytest.mark.parametrize("what", _BROKEN)
def test_a_promise_of_shape_that_is_broken(ends: Any, what: str) -> None:
    channel = Channel(ends, static_shape=True)
    assert channel.carried(torch.ones(2, 3)).shape == (2, 3)
    wrong, given, remedy = _BROKEN[what]
    with pytest.raises(TensorMismatchError) as caught:
        channel.writer.write(wrong)
    assert str(caught.value) == (
        f"W1.forward#0 is promised to keep its {what} (_static_shape): it was float32 [2, 3] and now is {given}; "
        f"{remedy}, or leave the promise out"
    )
    assert (caught.value.node, caught.value.expected, caught.value.given) == ("W1.forward#0", "float32 [2, 3]", given)
    assert channel.carried(torch.zeros(2, 3)).sum() == 0


def test_a_promise_of_a_layout_other_than_that_of_the_shape(ends: Any) -> None:
    channel = Channel(ends, static_shape=True)
    assert channel.carried(torch.ones(3, 2).t()).shape == (2, 3)
    with pytest.raises(TensorMismatchError, match=r"keep its order in memory \(_static_shape\).*with \.contiguous\(\) each time"):
        channel.writer.write(torch.ones(2, 3))
    with pytest.raises(TensorMismatchError, match=r"to keep its shape \(.*float32 \[2, 3\] with dim.* now is float32 \[3, 2\];"):
        channel.writer.write(torch.ones(3, 2))


def test_a_promise_of_one_tensor_that_is_broken(ends: Any) -> None:
    channel = Channel(ends, direct_return=True)
    for wrong in ([torch.ones(2)], 5, None, {"x": torch.ones(2)}):
        with pytest.raises(TensorMismatchError, match="promised to be one tensor"):
            channel.writer.write(wrong)
    assert channel.carried(torch.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_memory_that_is_written_to_again(ends: Any, layout: str) -> None:
    """The receives come late; each gets what was there when its value was written."""
    channel = Channel(ends)
    buffer = torch.zeros(100, 100)
    value = buffer if layout == "contiguous" else buffer.t()
    for number in range(20):
        buffer.fill_(number)
        channel.writer.write(value)
    buffer.fill_(-1)
    for number in range(20):
        assert (channel.take() == number).all()


def test_an_error_after_the_record_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure written in its place would be read as the next value."""
    out, into = connected("a link that breaks")
    channel = Channel((out, into))
    with monkeypatch.context() as patch:
        patch.setattr(out, "send", fails_late)
        with pytest.raises(CommunicatorError, match=r"sending W1\.forward#0 to rank 1 .*TensorMismatchError: late") as caught:
            channel.writer.write(torch.ones(2))
    assert not isinstance(caught.value, ValueError)
    assert len(channel.records.written) == 1
    with pytest.raises(CommunicatorError, match="abort"):
        channel.writer.write(torch.ones(2))
    assert len(channel.records.written) == 1  # nothing is published over a link of no use
    into.abort(_LIMIT_S)


def fails_late(*_: Any, **__: Any) -> Any:
    raise TensorMismatchError("late", expected="one", given="other")


def test_no_thread_for_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = CpuDevice().stream("s")
    done: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            stream.launch("first", lambda: done.append(1))
    stream.launch("second", lambda: done.append(2)).synchronize(_LIMIT_S)
    assert done == [2]


def no_thread(_: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_nothing_is_left_to_a_garbage_collection() -> None:
    gc.collect()
    gc.disable()
    try:
        value = {"x": [torch.ones(2)]}
        gone = weakref.ref(value["x"][0])
        take_apart(value, torch.is_tensor)
        device = CpuDevice()
        stream = device.stream("s")
        kept = Kept()
        event = stream.launch("work", kept.fail)
        with pytest.raises(Exception, match="no work"):
            event.synchronize(_LIMIT_S)
        refs = [gone, weakref.ref(kept), weakref.ref(device), weakref.ref(stream)]
        device.close()
        del value, kept, device, stream
        until = time.monotonic() + _LIMIT_S
        while any(ref() is not None for ref in refs) and time.monotonic() < until:
            time.sleep(0.001)  # the stream's thread may be on its way out
        assert [ref() for ref in refs] == [None] * 4
        with pytest.raises(Exception, match="no work"):
            event.synchronize(_LIMIT_S)
    finally:
        gc.enable()


class Kept:
    def fail(self) -> None:
        raise ValueError("no work")


def test_arrays_beside_tensors_may_be_written_to(ends: Any) -> None:
    got = Channel(ends).carried([torch.ones(2), np.zeros(20_000)])
    got[1][0] = 1.0
    assert got[1][0] == 1.0


class ForAll:
    """The writing end of an ordinary channel with several readers."""

    def __init__(self, records: list[Records]) -> None:
        self._records = records

    def write(self, value: Any, timeout: float = -1.0) -> None:
        for records in self._records:
            records.write(value)

    def write_failure(self, payload: Any, buffers: Any, timeout: float = -1.0) -> None:
        for records in self._records:
            records.write_failure(payload, buffers)


def test_several_readers_of_one_link() -> None:
    """Each value is broadcast; every reader gets all of it, in memory of its own."""
    ends = connected("spread", 4)
    try:
        records = [Records() for _ in range(3)]
        writer = DeviceWriter(ForAll(records), ends[0], 1, ends[0].device.stream("out"), name="W1.forward#0")
        readers = [
            DeviceReader(record, end, 0, end.device.stream("in"), name="W1.forward#0")
            for record, end in zip(records, ends[1:], strict=True)
        ]
        for tensor in views().values():
            writer.write({"t": tensor, "again": [tensor], "n": 3})
            came = [reader.read() for reader in readers]
            for value in came:
                assert isinstance(value, Arriving)
                for event in value.events:
                    event.synchronize(_LIMIT_S)
            values = [value.value() for value in came]
            for value in values:
                assert value["again"][0] is value["t"]
                assert value["n"] == 3
                assert (value["t"].shape, value["t"].dtype) == (tensor.shape, tensor.dtype)
                assert torch.equal(value["t"], tensor)
            assert len({value["t"].data_ptr() for value in values if tensor.numel()}) in (0, 3)
    finally:
        for end in ends:
            end.abort(_LIMIT_S)
