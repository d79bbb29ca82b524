"""An asynchronous actor for the tests of coroutine methods."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AsyncioActorExit

from tests.ray.workers import PATIENCE_S, vitals

_NUMBER: contextvars.ContextVar[int] = contextvars.ContextVar("number")


class AsyncBody:
    """What a service would do in its methods: share a lock and an event of asyncio between plain calls and a graph."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.event = asyncio.Event()
        self.cancelled = 0
        self.began = 0

    async def add(self, x: Any, by: Any = 1) -> Any:
        async with self.lock:
            await asyncio.sleep(0)
            return x + by

    def plain(self, x: Any) -> Any:
        return x * 10, threading.current_thread().name

    async def where(self, x: Any) -> Any:
        return id(asyncio.get_running_loop()), threading.current_thread().name

    @ray.method(concurrency_group="side")
    async def aside(self, x: Any) -> Any:
        return id(asyncio.get_running_loop()), threading.current_thread().name

    @ray.method(num_returns=2)
    async def both(self, x: Any) -> Any:
        await asyncio.sleep(0)
        return x, -x

    async def fail(self, x: Any) -> Any:
        await asyncio.sleep(0)
        if x == "value":
            raise ValueError("bad value")
        if x == "cancelled":
            raise asyncio.CancelledError
        if x == "closed":
            raise GeneratorExit
        if x == "cancels itself":
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(PATIENCE_S)
        return x

    async def leave(self, x: Any) -> Any:
        await asyncio.sleep(0)
        if x == "exit_actor":
            ray.actor.exit_actor()
        if x == "sys.exit":
            sys.exit(1)
        return x

    def leave_plainly(self, x: Any) -> Any:
        if x == "exit_actor":
            ray.actor.exit_actor()
        return x

    async def raise_exit(self, x: Any) -> Any:
        """Only raises what `exit_actor` raises. Ray ends the actor of a plain call for that, too."""
        if x == "exit_actor":
            raise AsyncioActorExit
        return x

    async def until_set(self, x: Any) -> Any:
        self.began += 1
        try:
            await self.event.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return x

    async def stubborn(self, x: Any, gate: str) -> Any:
        self.began += 1
        while not Path(gate).exists():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                self.cancelled += 1
        return x

    async def set(self) -> None:
        self.event.set()

    async def counts(self) -> tuple[int, int]:
        return self.began, self.cancelled

    async def vitals(self) -> dict[str, int]:
        return vitals()

    def returns_coroutine(self, x: Any) -> Any:
        return self.add(x) if x % 2 else x

    async def stream(self, x: Any) -> Any:
        yield x

    async def sum_of(self, x: Any, tasks: int) -> Any:
        return sum(await asyncio.gather(*[self.add(x, number) for number in range(tasks)]))

    async def ask(self, other: Any, x: Any) -> Any:
        """Awaits a plain call of another actor."""
        return await other.add.remote(x)

    async def number(self, x: Any) -> Any:
        before = _NUMBER.get(None)
        _NUMBER.set(x)
        await asyncio.sleep(0)
        return before, _NUMBER.get()

    async def size(self, x: Any) -> int:
        await asyncio.sleep(0)
        return int(x.sum())


Async = ray.remote(num_cpus=0, concurrency_groups={"side": 1})(AsyncBody)
