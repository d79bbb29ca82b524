"""No transport: one copy of a tensor and one sum, in this process. Nothing that copies once can do better."""

from __future__ import annotations

from typing import Any

from microbench.fleet import clock
from microbench.workloads import Workload


class CopyAndSum:
    """Offers what a broadcast does. There is one reader, the writer itself."""

    def __init__(self, readers: int) -> None:
        self._workload: Workload | None = None
        self._buffer: Any = None
        self._number = 0
        self._last = 0

    def begin(self, workload: Workload, messages: int) -> int:
        self._workload = workload
        self._buffer = workload.message(0)
        self._number = 0
        return workload.nbytes

    def write(self, value: Any) -> None:
        assert self._workload is not None
        self._buffer.copy_(value)
        taken = self._workload.take(self._buffer)
        self._last = clock()
        self._workload.check(self._number, self._buffer, taken)
        self._number += 1

    def wait_for(self, number: int) -> int:
        return self._last

    def wait_until_near(self, number: int) -> None:
        """It is there."""

    def finish(self) -> None:
        """Every message was looked at."""

    def close(self) -> None:
        self._buffer = None
