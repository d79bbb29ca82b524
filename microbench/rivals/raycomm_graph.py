"""raycomm: a compiled graph, one `graph.execute(x).get()` per call, word for word what the rival's row does."""

from __future__ import annotations

from typing import Any

from microbench.rivals.base import Actors, Calls, graph_calls
from microbench.rows import RAYCOMM, Topology


class RaycommGraph:
    """Its actors idle once the graph is torn down, so they are kept over the rounds."""

    name = RAYCOMM

    def __init__(self, actors: Actors) -> None:
        self._pool = actors
        self._actors: list[Any] = []
        self._pids: list[int] = []
        self._graph: Any = None

    def open(self, topology: Topology) -> Calls:

        import raycomm
        from raycomm import InputNode, MultiOutputNode

        actors = self._actors = self._pool.kept(topology.actors)
        self._pids = self._pool.pids(actors)
        with InputNode() as value:
            node: Any = value
            if topology is Topology.BROADCAST4:
                node = MultiOutputNode([raycomm.bind(actor.echo, value) for actor in actors])
            else:
                for actor in actors:
                    node = raycomm.bind(actor.echo, node)
        self._graph = raycomm.compile(node)
        return graph_calls(self._graph.execute, topology)

    def actors(self) -> list[Any]:
        return self._actors

    def processes(self) -> list[int]:
        return self._pids

    def close(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.teardown()
