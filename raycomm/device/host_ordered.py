"""A device whose work the host orders, with one thread for all of it. For libraries whose calls may block, or may not, and that
keep things per thread. Memory of the host, or of a GPU.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from raycomm.device.base import Shape
from raycomm.device.cpu import CpuDevice, CpuStream
from raycomm.errors import CommunicatorClosedError


class Done(threading.Event):
    """The end of a call, and what it raised."""

    failure: BaseException | None = None


class CallThread:
    """Makes calls one after the other. Started with the first; idle it only waits.

    Attributes:
        first: the end of the first call; set, too, if there has been none when it is stopped.
    """

    def __init__(self, name: str, place: torch.device) -> None:
        self.first = threading.Event()
        self._name = name
        self._place = place
        self._waiting: deque[tuple[Callable[[], object], Done]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._stopped = False

    def call(self, work: Callable[[], object]) -> Done:
        """Have `work` called after what was given before; its end.

        Raises:
            CommunicatorClosedError: it was stopped.
        """
        with self._changed:
            if self._stopped:
                raise CommunicatorClosedError(f"{self._name} is closed", communicator=self._name)
            return self._add(work)

    def call_if_idle(self, work: Callable[[], object]) -> Done | None:
        """The same, if it runs, nothing is under way and nothing waits; else None, and `work` is not called."""
        with self._changed:
            if self._stopped or self._busy or self._waiting or self._thread is None:
                return None
            return self._add(work)

    def stop(self) -> None:
        """No more calls after those that wait."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self.first.set()

    def _add(self, work: Callable[[], object]) -> Done:
        done = Done()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"raycomm {self._name}", daemon=True)
            thread.start()  # if none can be started, there is none, and nothing waits for it
            self._thread = thread
        self._waiting.append((work, done))
        self._changed.notify()
        return done

    def _run(self) -> None:
        if self._place.type != "cpu":
            torch.cuda.set_device(self._place)
        while True:
            with self._changed:
                while not (self._waiting or self._stopped):
                    self._changed.wait()
                if not self._waiting:
                    return
                work, done = self._waiting.popleft()
                self._busy = True
            try:
                work()
            except BaseException as error:  # sys.exit, too: nobody else would tell who waits
                done.failure = error
            del work  # with it goes the last reference to what it kept
            with self._changed:
                self._busy = False  # before anybody is told that it has ended
            done.set()
            self.first.set()


class HostOrdered(CpuDevice):
    """Memory of the host or of a GPU, whose work is ordered by the host: all its streams are one thread, which waits for each
    piece.

    Args:
        place: where.
        calls: the thread.
    """

    def __init__(self, name: str, place: torch.device, calls: CallThread | None = None) -> None:
        super().__init__(name)
        self._place = place
        self._calls = calls or CallThread(name, place)

    def stream(self, name: str) -> HostStream:
        """The stream of that name."""
        with self._lock:
            found = self._streams.setdefault(name, HostStream(self, name, self._calls))
        assert isinstance(found, HostStream)
        return found

    def holds(self, tensor: object) -> bool:
        """Whether it is a dense tensor there."""
        return isinstance(tensor, torch.Tensor) and tensor.device == self._place and tensor.layout is torch.strided

    def allocate(self, shape: Shape, dtype: torch.dtype, stream: CpuStream) -> torch.Tensor:
        """Uninitialized memory."""
        return self.empty(shape, dtype)

    def empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized memory."""
        return torch.empty(shape, dtype=dtype, device=self._place)

    def launched(self) -> Any:
        """What this thread has launched on the GPU so far; None where there is none."""
        return None if self._place.type == "cpu" else torch.cuda.current_stream(self._place).record_event()

    def settle(self, made: Any, work: Callable[[], None], stream: Callable[[], AbstractContextManager[Any]]) -> None:
        """Wait for `made`, call `work` with the GPU's stream that `stream` sets, and wait for that."""
        if made is None:
            work()
            return
        made.synchronize()
        with stream():
            work()
            torch.cuda.current_stream(self._place).synchronize()


class HostStream(CpuStream):
    """See `HostOrdered`."""

    def __init__(self, device: HostOrdered, name: str, calls: CallThread) -> None:
        super().__init__(device, name)
        self._calls = calls

    def _start(self) -> None:
        self._calls.call(self._run)
