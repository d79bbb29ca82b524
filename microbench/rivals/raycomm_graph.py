"""raycomm: a compiled graph, one `ray.get(graph.execute(x))` per call, word for word what the rival's row does."""

from __future__ import annotations

from typing import Any

from microbench.rivals.base import Actors, Calls
from microbench.rows import RAYCOMM, Topology


class RaycommGraph:
    """Its actors idle once the graph is torn down, so they are kept over the rounds."""

    name = RAYCOMM

    def __init__(self, actors: Actors) -> None:
        self._pool = actors
        self._pids: list[int] = []
        self._graph: Any = None

    def open(self, topology: Topology) -> Calls:
        import ray

        import raycomm
        from raycomm import InputNode, MultiOutputNode

        actors = self._pool.kept(topology.actors)
        self._pids = self._pool.pids(actors)
        with InputNode() as value:
            node: Any = value
            if topology is Topology.BROADCAST4:
                node = MultiOutputNode([raycomm.bind(actor.echo, value) for actor in actors])
            else:
                for actor in actors:
                    node = raycomm.bind(actor.echo, node)
        self._graph = raycomm.compile(node)
        execute = self._graph.execute

        def call_one(value: Any) -> Any:
            return ray.get(execute(value))

        def call_all(value: Any) -> Any:
            return ray.get(execute(value))

        def fetch_one(ref: Any) -> Any:
            return ray.get(ref)

        def fetch_all(refs: Any) -> Any:
            return ray.get(refs)

        if topology is Topology.BROADCAST4:
            return Calls(call_all, execute, fetch_all)
        return Calls(call_one, execute, fetch_one)

    def processes(self) -> list[int]:
        return self._pids

    def close(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.teardown()
