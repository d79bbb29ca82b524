"""In place of a GPU and of NCCL: streams that are threads, and a library that takes addresses as NCCL does, over gloo.

So the code of `raycomm.device.nccl`, and of streams and events in `raycomm.device.cuda`, runs as it is. As on a GPU, what fails
on a stream fails in silence: events behind it are reached all the same.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from raycomm.device.cpu import CpuDevice, CpuEvent, CpuStream
from raycomm.device.cuda import CudaDevice, CudaStream
from raycomm.device.gloo import GlooCommunicator
from raycomm.device.nccl import NcclCommunicator
from raycomm.errors import CommunicatorError
from tests.unit.communicator_programs import BIG, numbers
from tests.unit.communicator_ranks import GlooPlace


class PretendEvent:
    def __init__(self, event: CpuEvent) -> None:
        self.event = event

    def query(self) -> bool:
        return self.event.complete


class PretendStream:
    """What `CudaStream` needs of a `torch.cuda.Stream`."""

    def __init__(self, stream: CpuStream, handle: int) -> None:
        self.cpu = stream
        self.cuda_stream = handle

    def launch(self, what: str, work: Callable[[], object]) -> CpuEvent:
        def quietly() -> None:
            with suppress(Exception):
                work()

        return self.cpu.launch(what, quietly)

    def record_event(self) -> PretendEvent:
        return PretendEvent(self.launch("everything", bool))

    def wait_event(self, event: PretendEvent) -> None:
        self.launch("a wait", event.event.wait)

    def query(self) -> bool:
        return self.record_event().query()


class PretendHost(PretendStream):
    """The stream that code of a thread runs on, as with CUDA_LAUNCH_BLOCKING: what is launched has run when the call returns."""

    def launch(self, what: str, work: Callable[[], object]) -> CpuEvent:
        with suppress(Exception):
            work()
        event = CpuEvent(what)
        event.finish(None)
        return event


class PretendGpu(CudaDevice):
    """CPU memory of this process as the memory of a GPU."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.torch = torch.device("cpu")
        self._cpu = CpuDevice(name)
        self._streams = {}
        self._handles = itertools.count(1000)
        self.by_handle: dict[int, PretendStream] = {}
        self._host = CudaStream(self, "of computations", PretendHost(self._cpu.stream("of computations"), 1))

    def stream(self, name: str) -> CudaStream:
        if name not in self._streams:
            handle = next(self._handles)
            self.by_handle[handle] = PretendStream(self._cpu.stream(name), handle)
            self._streams[name] = CudaStream(self, name, self.by_handle[handle])
        return self._streams[name]

    def current_stream(self) -> CudaStream:
        return self._host

    def allocate(self, shape: Any, dtype: torch.dtype, stream: Any) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        made.view(-1).view(torch.uint8).fill_(0xAB)  # poison, for who looks too early
        return made

    def record_stream(self, tensor: torch.Tensor, stream: CudaStream) -> None:
        stream.torch.launch("keeping a tensor", lambda: tensor)

    def to_device(self, host: torch.Tensor, stream: CudaStream) -> torch.Tensor:
        made, copy = self.allocate(tuple(host.shape), host.dtype, stream), host.detach().clone()
        self.run(stream, lambda: made.copy_(copy))
        return made

    def to_host(self, tensor: torch.Tensor, stream: CudaStream, limit_s: float | None = None) -> torch.Tensor:
        stream.synchronize(limit_s)
        return tensor.clone()

    def run(self, stream: CudaStream, work: Callable[[], object]) -> None:
        stream.torch.launch("torch code", work)

    def use(self) -> None:
        pass

    def close(self) -> None:
        self._streams.clear()

    @contextmanager
    def selected(self) -> Iterator[None]:  # type: ignore[override]
        yield


class PretendNccl:
    """As `cupy.cuda.nccl`. Unique ids are bytes, or a tuple of signed numbers as before cupy 14."""

    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_INT64, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = (
        0,
        1,
        2,
        4,
        6,
        7,
        8,
        9,
    )
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)

    def __init__(self, store: Any, gpu: PretendGpu, *, tuples: bool) -> None:
        self.store = store
        self.gpu = gpu
        self._tuples = tuples
        self.group: list[tuple[int, Callable[[], object]]] | None = None

    def get_unique_id(self) -> Any:
        raw = os.urandom(128)
        return tuple(byte - 256 if byte > 127 else byte for byte in raw) if self._tuples else raw

    def NcclCommunicator(self, size: int, unique_id: Any, rank: int) -> PretendComm:
        assert isinstance(unique_id, tuple) is self._tuples
        assert len(unique_id) == 128
        return PretendComm(self, size, bytes(number & 0xFF for number in unique_id).hex(), rank)

    def groupStart(self) -> None:
        self.group = []

    def groupEnd(self) -> None:
        """In the order of pairs of ranks, within one the smaller rank's send first: nobody waits in a circle."""
        calls, self.group = self.group or [], None
        for _, call in sorted(calls, key=lambda entry: entry[0]):
            call()


class PretendComm:
    def __init__(self, library: PretendNccl, size: int, name: str, rank: int) -> None:
        self._library = library
        self._rank = rank
        self._size = size
        self._link = GlooCommunicator(library.store, name, rank, size, device=library.gpu._cpu)
        self._link.warm_up(30.0)
        self._launched: list[CpuEvent] = []

    def send(self, address: int, count: int, dtype: int, peer: int, handle: int) -> None:
        data = memory(address, count, dtype)
        self._later(
            peer, peer < self._rank, lambda: self._launched.append(self._link.send(data, peer, stream=self._stream(handle)))
        )

    def recv(self, address: int, count: int, dtype: int, peer: int, handle: int) -> None:
        data = memory(address, count, dtype)
        self._later(
            peer,
            peer > self._rank,
            lambda: self._launched.append(
                self._link.recv(tuple(data.shape), data.dtype, peer, stream=self._stream(handle), into=data).event
            ),
        )

    def allReduce(self, address: int, out: int, count: int, dtype: int, op: int, handle: int) -> None:
        data = memory(address, count, dtype)
        self._fill(memory(out, count, dtype), self._link.allreduce(data, OPS[op], stream=self._stream(handle)), handle)

    def reduceScatter(self, address: int, out: int, count: int, dtype: int, op: int, handle: int) -> None:
        data = memory(address, count * self._size, dtype)
        self._fill(memory(out, count, dtype), self._link.reducescatter(data, OPS[op], stream=self._stream(handle)), handle)

    def allGather(self, address: int, out: int, count: int, dtype: int, handle: int) -> None:
        data = memory(address, count, dtype)
        self._fill(memory(out, count * self._size, dtype), self._link.allgather(data, stream=self._stream(handle)), handle)

    def broadcast(self, address: int, out: int, count: int, dtype: int, root: int, handle: int) -> None:
        data = memory(address, count, dtype)
        self._fill(memory(out, count, dtype), self._link.broadcast(data, root, stream=self._stream(handle)), handle)

    def check_async_error(self) -> None:
        """Of what was launched: that a rank has gone away since is no error."""
        for event in [event for event in self._launched if event.complete]:
            self._launched.remove(event)
            try:
                event.synchronize()
            except CommunicatorError as error:
                raise RuntimeError(str(error)) from None

    def abort(self) -> None:
        self._link.abort(5.0)

    def _stream(self, handle: int) -> CpuStream:
        return self._library.gpu.by_handle[handle].cpu

    def _fill(self, out: torch.Tensor, came: Any, handle: int) -> None:
        self._launched.append(came.event)
        self._library.gpu.by_handle[handle].launch("copy", lambda: (came.event.synchronize(), out.copy_(came.tensor)))

    def _later(self, peer: int, second: bool, call: Callable[[], object]) -> None:
        if self._library.group is None:
            call()
        else:
            low, high = sorted((self._rank, peer))
            self._library.group.append(((low * self._size + high) * 2 + second, call))


OPS = ("sum", "product", "max", "min", "avg")
DTYPES = {
    PretendNccl.NCCL_INT8: torch.int8,
    PretendNccl.NCCL_UINT8: torch.uint8,
    PretendNccl.NCCL_INT32: torch.int32,
    PretendNccl.NCCL_INT64: torch.int64,
    PretendNccl.NCCL_FLOAT16: torch.float16,
    PretendNccl.NCCL_FLOAT32: torch.float32,
    PretendNccl.NCCL_FLOAT64: torch.float64,
    PretendNccl.NCCL_BFLOAT16: torch.bfloat16,
}


def memory(address: int, count: int, dtype: int) -> torch.Tensor:
    kind = DTYPES[dtype]
    raw = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=kind)


class NcclPlace(GlooPlace):
    """A rank in a process of its own, with a GPU that is none."""

    def __init__(self, rank: int, size: int, path: str) -> None:
        super().__init__(rank, size, path)
        self.device: Any = PretendGpu(f"gpu of rank {rank}")

    def link(self, name: str) -> NcclCommunicator:
        library = PretendNccl(self._store, self.device, tuples=name < "m")
        return NcclCommunicator(self._store, name, self.rank, self._size, device=self.device, library=library)

    def die_while_sending(self, link: Any, peer: int) -> None:
        from raycomm.device.gloo import _header, _send

        _send(link._comm._link._group, _header(numbers(self.rank, BIG)), peer)
        self.die()
