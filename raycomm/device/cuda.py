"""A CUDA device through torch and cupy: streams of its own, events, and memory from torch's caching allocator.

Streams are made with cupy and lent to torch, not torch's own: those come from a pool of 32 per device and are handed out in turn,
so the 33rd name would share a stream with the first, and two transfers that must not wait for each other would. They are
non-blocking: the legacy default stream, which waits for all others, does not wait for these.

The host waits by looking at an event now and then, never inside the driver: a transfer whose peer has died never ends, and only
a waiter that looks can also see that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from raycomm.device.base import Shape
from raycomm.errors import CommunicatorError, TransferTimeoutError

_SPIN_S = 50e-6
_SLEEP_S = (20e-6, 500e-6)  # between two looks: the first, doubled up to the last


class Transferring(Protocol):
    """What an event needs to know of a communicator whose transfers come before it."""

    @property
    def failure(self) -> CommunicatorError | None:
        """What is known to have gone wrong. Set before anything is aborted."""

    def check(self) -> None:
        """Raise what the library says of transfers that have failed."""

    def poll(self) -> None:
        """Look for what has gone wrong, and raise it."""


_NONE: frozenset[Transferring] = frozenset()


class CudaEvent:
    """A point in a stream. See `raycomm.device.Event`.

    Args:
        event: of torch, recorded.
        what: for messages.
        transferring: the communicators whose transfers come before it.
    """

    def __init__(self, event: Any, what: str, transferring: frozenset[Transferring]) -> None:
        self.event = event
        self.transferring = transferring
        self._what = what
        self._good = False

    @property
    def complete(self) -> bool:
        """Whether it has been reached."""
        return bool(self.event.query())

    def synchronize(self, limit_s: float | None = None) -> None:
        """Block until it is reached. See the interface."""
        begin = time.monotonic()
        pause = 0.0
        while not self._reached():
            for communicator in self.transferring:
                communicator.poll()
            waited = time.monotonic() - begin
            if limit_s is not None and waited >= limit_s:
                text = f"{self._what} did not end within {limit_s} s; see whether the other end takes part, and in the same order"
                raise TransferTimeoutError(text, limit_s=limit_s, waits_for=self._what)
            if waited > _SPIN_S:
                pause = min(max(2 * pause, _SLEEP_S[0]), _SLEEP_S[1])
                time.sleep(pause if limit_s is None else min(pause, limit_s - waited))

    def _reached(self) -> bool:
        """A communicator that is aborted ends its kernels, so that what is behind them is reached although nothing arrived. So
        first look for failures, then at the event: what had not failed by then was not aborted before it was reached."""
        if self._good:
            return True
        failures = [communicator.failure for communicator in self.transferring]
        if not self.event.query():
            return False
        for failure in failures:
            if failure is not None:
                raise failure.fresh()
        for communicator in self.transferring:
            communicator.check()
        self._good = True
        return True

    def __str__(self) -> str:
        return self._what


class CudaStream:
    """Work in the order of its launch. See `raycomm.device.Stream`.

    Attributes:
        torch: the stream as torch knows it, for ``with torch.cuda.stream(...)``.
        handle: the CUDA handle, for libraries.
    """

    def __init__(self, device: CudaDevice, name: str, stream: Any) -> None:
        self.device = device
        self.name = name
        self.torch = stream
        self.handle = int(stream.cuda_stream)
        self._transferring = _NONE

    def record(self) -> CudaEvent:
        """The end of what was launched so far."""
        return self.mark("everything")

    def mark(self, what: str, communicator: Transferring | None = None) -> CudaEvent:
        """An event at the end of `what`, a transfer of `communicator`."""
        if communicator is not None and communicator not in self._transferring:
            self._transferring |= {communicator}
        return CudaEvent(self.torch.record_event(), f"{what} on {self}", self._transferring)

    def wait(self, event: CudaEvent) -> None:
        """What is launched from now on runs after `event`."""
        self._transferring |= event.transferring
        self.torch.wait_event(event.event)

    def synchronize(self, limit_s: float | None = None) -> None:
        """Block until the stream is empty."""
        self.record().synchronize(limit_s)

    def __str__(self) -> str:
        return f"stream {self.name} of {self.device.name}"


class CudaDevice:
    """One GPU, as this process sees it. See `raycomm.device.Device`. A context manager: on the way out its idle streams are free
    to be used by others.

    Args:
        index: of the device among those that this process sees; None: torch's current one.

    Raises:
        CommunicatorError: there is no such device, or cupy is not installed.
    """

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise CommunicatorError("torch finds no CUDA device in this process; see nvidia-smi and CUDA_VISIBLE_DEVICES")
        self.index = torch.cuda.current_device() if index is None else index
        if not 0 <= self.index < torch.cuda.device_count():
            text = f"there is no cuda:{self.index}; this process sees {torch.cuda.device_count()} CUDA devices"
            raise CommunicatorError(text, device=f"cuda:{self.index}")
        self.name = f"cuda:{self.index}"
        self.torch = torch.device("cuda", self.index)
        self._lock = threading.Lock()
        self._streams: dict[str, CudaStream] = {}
        self._current: dict[int, CudaStream] = {}

    def stream(self, name: str) -> CudaStream:
        """The stream of that name."""
        with self._lock:
            if name not in self._streams:
                self._streams[name] = CudaStream(self, name, _raw_streams.take(self.index))
            return self._streams[name]

    def current_stream(self) -> CudaStream:
        """The stream on which this thread's torch code runs now: where a method's tensors are made."""
        stream = torch.cuda.current_stream(self.torch)
        known = self._current.get(stream.cuda_stream)
        if known is None:  # kept: what it has waited for counts for what is launched on it later
            known = self._current[stream.cuda_stream] = CudaStream(self, f"{stream.cuda_stream:#x} of computations", stream)
        return known

    def allocate(self, shape: Shape, dtype: torch.dtype, stream: CudaStream) -> torch.Tensor:
        """Memory of torch's allocator, for use on `stream`."""
        with torch.cuda.stream(stream.torch):
            return torch.empty(shape, dtype=dtype, device=self.torch)

    def record_stream(self, tensor: torch.Tensor, stream: CudaStream) -> None:
        """Keep the memory until what is in `stream` now has ended."""
        tensor.record_stream(stream.torch)

    def holds(self, tensor: object) -> bool:
        """Whether it is a dense tensor on this GPU."""
        return isinstance(tensor, torch.Tensor) and tensor.device == self.torch and tensor.layout is torch.strided

    def to_device(self, host: torch.Tensor, stream: CudaStream) -> torch.Tensor:
        """A copy. CUDA reads pageable memory before the call returns, and pinned memory later: that is copied first."""
        source = host.detach()
        if source.is_pinned():
            source = torch.empty_like(source, pin_memory=False).copy_(source)
        with torch.cuda.stream(stream.torch):
            return torch.empty_like(source, device=self.torch).copy_(source, non_blocking=True)

    def to_host(self, tensor: torch.Tensor, stream: CudaStream, limit_s: float | None = None) -> torch.Tensor:
        """A copy, made once `stream` is empty."""
        stream.synchronize(limit_s)
        with torch.cuda.stream(stream.torch):
            return tensor.detach().cpu()

    def synchronize(self, limit_s: float | None = None) -> None:
        """Block until all streams of this object are empty."""
        end = None if limit_s is None else time.monotonic() + limit_s
        for event in [stream.record() for stream in list(self._streams.values())]:
            event.synchronize(None if end is None else max(0.0, end - time.monotonic()))

    def run(self, stream: CudaStream, work: Callable[[], object]) -> None:
        """Have the torch code in `work` launch on `stream`."""
        with torch.cuda.stream(stream.torch):
            work()

    def use(self) -> None:
        """Make it the one that torch uses on this thread unless told otherwise."""
        torch.cuda.set_device(self.torch)

    def selected(self) -> AbstractContextManager[None]:
        """Inside, this thread's CUDA calls are about this device."""
        return torch.cuda.device(self.torch)

    def close(self) -> None:
        """Give the streams up. Does not block: one that still has work is used by nobody again."""
        with self._lock:
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            _raw_streams.give_back(self.index, stream.torch)

    def __enter__(self) -> CudaDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return self.name


class _RawStreams:
    """CUDA streams of this process. None is ever destroyed: torch's allocator records an event on every stream that a tensor was
    used on when the tensor is freed, which may be long after the device object that made the stream has gone. So they are kept
    and used again, which is all the state there is here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[int, list[Any]] = {}
        self._made: list[Any] = []  # keeps cupy from destroying them

    def take(self, index: int) -> Any:
        with self._lock:
            idle = self._idle.get(index)
            if idle:
                return idle.pop()
        try:
            import cupy
        except ImportError as error:
            major = str(torch.version.cuda).partition(".")[0]
            text = f"cupy, which streams and NCCL are used through, cannot be imported ({error}); pip install cupy-cuda{major}x"
            raise CommunicatorError(text, device=f"cuda:{index}") from error
        with cupy.cuda.Device(index):
            made = cupy.cuda.Stream(non_blocking=True)
        with self._lock:
            self._made.append(made)
        external: Any = torch.cuda.ExternalStream
        return external(made.ptr, device=torch.device("cuda", index))

    def give_back(self, index: int, stream: Any) -> None:
        if stream.query():
            with self._lock:
                self._idle.setdefault(index, []).append(stream)


_raw_streams = _RawStreams()
