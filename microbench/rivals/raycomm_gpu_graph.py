"""raycomm: graphs whose tensors move from device to device."""

from __future__ import annotations

from typing import Any

from microbench.gpu_rows import GpuRow, Place, Wiring
from microbench.rivals.base import Calls, graph_calls
from microbench.rivals.gpu_workers import GpuActors
from microbench.rows import Topology


class RaycommGpuGraph:
    """Its actors idle once the graph is torn down, so they are kept for the next graph of as many actors."""

    def __init__(self, pool: GpuActors) -> None:
        self._pool = pool
        self._actors: list[Any] = []
        self._graph: Any = None

    def open(self, row: GpuRow) -> Calls:
        import raycomm
        from raycomm import InputNode, bind

        first, *middle, last = self._actors = self._pool.kept(row.wiring.actors)
        promises = {"_static_shape": row.static_shape, "_direct_return": row.direct_return}
        with InputNode() as request:
            node: Any = bind(first.make, request)
            for actor in middle:
                node = bind(actor.add_one, node.with_tensor_transport("nccl", **promises))
            node.with_tensor_transport("nccl", **promises)
            node = bind(last.keep if row.wiring is Wiring.CHAIN4 else last.take, node)
        options = {"device": "simulated"} if self._pool.place is Place.SIMULATED else {}
        self._graph = raycomm.compile(node, **options)
        return graph_calls(self._graph.execute, Topology.ECHO)

    def actors(self) -> list[Any]:
        return self._actors

    def close(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.teardown()
