"""The actors: the methods of `methods`, plus state, time, and what a process holds."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import ray

import raycomm
from tests.chaos.methods import Methods, bulk
from tests.chaos.values import digest
from tests.chaos.watching import belongings

KEPT = 6


class ChaosBody(Methods):
    """A plain actor.

    Args:
        stacks: a file that SIGUSR2 writes this process's stacks to.
    """

    def __init__(self, stacks: str) -> None:
        self._kept: deque[tuple[Any, int]] = deque(maxlen=KEPT)
        self._local = threading.local()  # buffers by size, of each loop
        self._stacks = open(stacks, "w")  # noqa: SIM115 (faulthandler writes to it for as long as the process lives)
        faulthandler.register(signal.SIGUSR2, self._stacks)

    def pid(self) -> int:
        return os.getpid()

    def reuse(self, x: Any, size: int) -> Any:
        """Returns the same memory every time, filled anew."""
        buffers = vars(self._local)
        buffer = buffers.setdefault(size, np.empty(size, np.uint8))
        buffer[...] = bulk(digest(x), size, "array")
        return buffer

    def lend(self, x: Any, size: int) -> Any:
        """In shared memory from the start."""
        result = raycomm.empty(size, np.uint8)
        result[...] = bulk(digest(x), size, "array")
        return result

    def keep(self, x: Any) -> str:
        """Keeps the last few values, which must not change meanwhile."""
        for index, (value, number) in enumerate(list(self._kept)):  # loops of several graphs may run here
            if digest(value) != number:
                raise AssertionError(f"a kept value has changed, {len(self._kept) - index} executions later: {value!r:.200}")
        number = digest(x)
        self._kept.append((x, number))
        return f"{number:016x}"

    def slow(self, x: Any, seconds: float) -> Any:
        time.sleep(seconds)
        return x

    def let_go(self) -> None:
        self._kept.clear()

    def belongings(self) -> dict[str, float]:
        return belongings()


class AsyncChaosBody(ChaosBody):
    """An asyncio actor: some of its methods are coroutines."""

    async def echo(self, x: Any) -> Any:
        return x

    async def slow(self, x: Any, seconds: float) -> Any:
        await asyncio.sleep(seconds)
        return x

    async def pid(self) -> int:  # type: ignore[override]
        return os.getpid()


Chaos = ray.remote(num_cpus=0)(ChaosBody)
AsyncChaos = ray.remote(num_cpus=0)(AsyncChaosBody)


_SPARES = 2


class Crew:
    """The actors of one run; who has died is replaced by a spare, which has had time to import what it needs."""

    def __init__(self, size: int, directory: Path) -> None:
        self._directory = directory
        self._made = 0
        self._spares: dict[bool, deque[Any]] = {kind: deque(self._start(kind) for _ in range(_SPARES)) for kind in (False, True)}
        self.handles: list[Any] = [self._start(self.asynchronous(place)) for place in range(size)]
        self.pids: list[int] = [0] * size
        self._learn(range(size))

    def _start(self, asynchronous: bool) -> Any:
        kind: Any = AsyncChaos if asynchronous else Chaos
        self._made += 1
        return kind.remote(str(self.stacks(self._made)))

    def _learn(self, places: Any) -> None:
        found = ray.get([self.handles[place].pid.remote() for place in places], timeout=120)
        for place, pid in zip(places, found, strict=True):
            self.pids[place] = pid

    def asynchronous(self, place: int) -> bool:
        """Every fourth actor is."""
        return place % 4 == 3

    def stacks(self, number: int) -> Path:
        """Where an actor writes its stacks."""
        return self._directory / f"stacks-{number}"

    def replace(self, places: list[int]) -> None:
        """New actors in these places; the old ones end."""
        for place in places:
            ray.kill(self.handles[place])
            spares = self._spares[self.asynchronous(place)]
            self.handles[place] = spares.popleft()
            spares.append(self._start(self.asynchronous(place)))
        self._learn(places)

    def all_stacks(self) -> str:
        """What the actors' threads do now."""
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGUSR2)
            except ProcessLookupError:
                continue
        time.sleep(1.0)
        files = sorted(self._directory.glob("stacks-*"))
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in files if file.stat().st_size)
