"""Ray Compiled Graphs: one `dag.execute(x).get()` per call, on `dag.experimental_compile()`."""

from __future__ import annotations

from typing import Any

from ray.dag import InputNode, MultiOutputNode

from microbench.rivals.base import Actors, Calls, graph_calls
from microbench.rows import RAY_GRAPH, Topology


class RayCompiledGraph:
    """Starts its actors anew each time and ends them with `ray.kill`.

    Its loops spin a full core per actor while they wait, and its `teardown()` can hang; only a kill frees the cores.
    """

    name = RAY_GRAPH

    def __init__(self, actors: Actors) -> None:
        self._pool = actors
        self._actors: list[Any] = []
        self._pids: list[int] = []
        self._dag: Any = None

    def open(self, topology: Topology) -> Calls:
        self._actors = self._pool.fresh(topology.actors)
        self._pids = self._pool.pids(self._actors)
        with InputNode() as value:
            node: Any = value
            if topology is Topology.BROADCAST4:
                node = MultiOutputNode([actor.echo.bind(value) for actor in self._actors])
            else:
                for actor in self._actors:
                    node = actor.echo.bind(node)
        self._dag = node.experimental_compile()
        return graph_calls(self._dag.execute, topology)

    def actors(self) -> list[Any]:
        return self._actors

    def processes(self) -> list[int]:
        return self._pids

    def close(self) -> None:
        actors, self._actors = self._actors, []
        self._pool.kill(actors, self._pids)
        self._dag = None
