"""A driver that is an asynchronous actor."""

from __future__ import annotations

import threading
from typing import Any

import ray

import raycomm
from tests.ray.workers import chain, vitals


@ray.remote(num_cpus=0)
class Replica:
    """As a Ray Serve replica: compiles in its constructor over other actors, and awaits in many concurrent calls."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.graph = raycomm.compile(chain(workers[0].add, workers[1].echo), max_inflight=3, name="replica")
        self.late: Any = None

    async def call(self, x: Any) -> Any:
        return await (await self.graph.execute_async(x))

    async def call_late(self, x: Any) -> Any:
        """Compiles in a method, which blocks the loop, once."""
        if self.late is None:
            self.late = raycomm.compile(chain(self.workers[0].add, self.workers[1].add), name="late")
        return await (await self.late.execute_async(x))

    async def vitals(self) -> dict[str, int]:
        return {**vitals(), "python": threading.active_count()}

    async def end(self) -> None:
        self.graph.teardown()
        if self.late is not None:
            self.late.teardown()
