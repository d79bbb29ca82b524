"""A plain Ray actor call: what a graph has to be faster than."""

from __future__ import annotations

from typing import Any

import ray

from microbench.rivals.base import Actors, Calls
from microbench.rows import RAY_CALL, Topology


class RayActorCall:
    """`ray.get(actor.echo.remote(x))` on the first actor; the others, where a topology has them, stand idle."""

    name = RAY_CALL

    def __init__(self, actors: Actors) -> None:
        self._pool = actors
        self._actors: list[Any] = []
        self._pids: list[int] = []

    def open(self, topology: Topology) -> Calls:
        actors = self._actors = self._pool.kept(topology.actors)
        self._pids = self._pool.pids(actors)
        submit, get = actors[0].echo.remote, ray.get

        def call(value: Any) -> Any:
            return get(submit(value))

        return Calls(call, submit, get)

    def actors(self) -> list[Any]:
        return self._actors

    def processes(self) -> list[int]:
        return self._pids

    def close(self) -> None:
        """The actors stay: they are idle."""
