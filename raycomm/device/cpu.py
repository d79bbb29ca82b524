"""The CPU as a device: streams are queues that a thread works off, tensors are plain CPU `torch.Tensor`s.

A stream's thread lives while the stream has work, so there is nothing to close and an idle device has no threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from raycomm.device.base import Shape
from raycomm.errors import CollectiveError, CommunicatorError, RaycommError, TensorMismatchError, TransferTimeoutError

_KNOWN_TO_BOTH = (TensorMismatchError, CollectiveError)


class CpuEvent:
    """The end of a piece of work. See `raycomm.device.Event`."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._reached = threading.Event()
        self._failure: RaycommError | None = None

    @property
    def complete(self) -> bool:
        """Whether it has been reached."""
        return self._reached.is_set()

    def synchronize(self, limit_s: float | None = None) -> None:
        """Block until it is reached. See the interface."""
        if not self._reached.wait(limit_s):
            text = f"{self._what} did not end within {limit_s} s; see whether the other end takes part, and in the same order"
            raise TransferTimeoutError(text, limit_s=limit_s, waits_for=self._what)
        if self._failure is not None:
            raise self._failure.fresh()

    def wait(self) -> None:
        """Block until it is reached, whatever came of it."""
        self._reached.wait()

    def __str__(self) -> str:
        return self._what

    def finish(self, failure: RaycommError | None) -> None:
        """Reached."""
        self._failure = failure
        self._reached.set()


class CpuStream:
    """Work in the order of its launch. Once a piece has failed, all events that are recorded later raise that failure.

    Nor is later work done then, unless the failure is one that both ends know of: a peer would take it for what failed.
    """

    def __init__(self, device: CpuDevice, name: str) -> None:
        self.device = device
        self.name = name
        self._lock = threading.Lock()
        self._work: deque[tuple[Callable[[], None], CpuEvent]] = deque()
        self._running = False
        self._failure: RaycommError | None = None

    def launch(self, what: str, work: Callable[[], None]) -> CpuEvent:
        """Have `work` called on the stream's thread; its end. `what` is for messages."""
        event = CpuEvent(f"{what} on stream {self.name} of {self.device.name}")
        with self._lock:
            if not self._running:  # before the work is there: if no thread can be started, nothing has been launched
                self._start()
                self._running = True
            self._work.append((work, event))
        return event

    def record(self) -> CpuEvent:
        """The end of what was launched so far."""
        return self.launch("everything", _nothing)

    def wait(self, event: CpuEvent) -> None:
        """What is launched from now on runs after `event`."""
        self.launch("a wait for an event", event.synchronize)

    def synchronize(self, limit_s: float | None = None) -> None:
        """Block until the stream is empty."""
        self.record().synchronize(limit_s)

    def _start(self) -> None:
        """Have `_run` called by another thread."""
        threading.Thread(target=self._run, name=f"raycomm stream {self.name}", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._work:
                    self._running = False
                    return
                work, event = self._work.popleft()
            try:
                if self._failure is None or isinstance(self._failure, _KNOWN_TO_BOTH):
                    work()
            except BaseException as error:  # whatever it is: this thread is the only one that can tell who waits
                text = f"{event} failed with {type(error).__name__}: {error}"
                own = error.fresh() if isinstance(error, RaycommError) else CommunicatorError(text, device=self.device.name)
                self._failure = self._failure or own
            del work  # With it goes the last reference to what it kept.
            event.finish(self._failure)

    def __str__(self) -> str:
        return f"stream {self.name} of {self.device.name}"


class CpuDevice:
    """CPU memory of this process. See `raycomm.device.Device`."""

    def __init__(self, name: str = "cpu") -> None:
        self.name = name
        self._lock = threading.Lock()
        self._streams: dict[str, CpuStream] = {}

    def stream(self, name: str) -> CpuStream:
        """The stream of that name."""
        with self._lock:
            return self._streams.setdefault(name, CpuStream(self, name))

    def current_stream(self) -> None:
        """None: code runs on the host."""

    def allocate(self, shape: Shape, dtype: torch.dtype, stream: CpuStream) -> torch.Tensor:
        """Uninitialized memory."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def record_stream(self, tensor: torch.Tensor, stream: CpuStream) -> None:
        """Keep `tensor` until what is in `stream` has ended."""
        stream.launch("keeping a tensor", lambda: _nothing(tensor))

    def holds(self, tensor: object) -> bool:
        """Whether it is a dense CPU tensor."""
        return isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.layout is torch.strided

    def to_device(self, host: torch.Tensor, stream: CpuStream) -> torch.Tensor:
        """A copy."""
        return host.detach().clone()

    def to_host(self, tensor: torch.Tensor, stream: CpuStream, limit_s: float | None = None) -> torch.Tensor:
        """A copy, made once `stream` is empty."""
        stream.synchronize(limit_s)
        return tensor.clone()

    def close(self) -> None:
        """Forget the streams, which know this device. What is under way goes on."""
        with self._lock:
            self._streams.clear()

    def synchronize(self, limit_s: float | None = None) -> None:
        """Block until all streams are empty."""
        for event in [stream.record() for stream in list(self._streams.values())]:
            event.synchronize(limit_s)

    def __str__(self) -> str:
        return self.name


def _nothing(*kept: Any) -> None:
    """Work that only takes its turn."""
