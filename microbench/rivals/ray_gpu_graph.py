"""Ray Compiled Graphs: the same graphs over Ray's NCCL channel; in host memory over Ray's communicator for CPU tensors.

That one sends through Ray's shared-memory channel, whatever the hint promises.
"""

from __future__ import annotations

from typing import Any

from ray.dag import DAGContext, InputNode

from microbench.gpu_rows import GpuRow, Place, Wiring
from microbench.rivals.base import START_LIMIT_S, Calls, graph_calls
from microbench.rivals.gpu_workers import GpuActors
from microbench.rows import Topology


class RayGpuGraph:
    """Starts its actors anew each time and ends them with `ray.kill`, as `RayCompiledGraph` does and for the same reasons."""

    def __init__(self, pool: GpuActors) -> None:
        self._pool = pool
        self._actors: list[Any] = []
        self._pids: list[int] = []
        self._dag: Any = None

    def open(self, row: GpuRow) -> Calls:
        first, *middle, last = self._actors = self._pool.fresh(row.wiring.actors)
        self._pids = self._pool.pids(self._actors)
        transport = self._transport()
        promises = {"_static_shape": row.static_shape, "_direct_return": row.direct_return}
        with InputNode() as request:
            node: Any = first.make.bind(request).with_tensor_transport(transport, **promises)
            for actor in middle:
                node = actor.add_one.bind(node).with_tensor_transport(transport, **promises)
            node = (last.keep if row.wiring is Wiring.CHAIN4 else last.take).bind(node)
        # The first transfer loads NCCL's kernels, for which Ray's 10 seconds may be too few. The bench has its own limit.
        DAGContext.get_current().get_timeout = round(START_LIMIT_S)
        self._dag = node.experimental_compile()
        return graph_calls(self._dag.execute, Topology.ECHO)

    def actors(self) -> list[Any]:
        return self._actors

    def close(self) -> None:
        actors, self._actors = self._actors, []
        self._pool.kill(actors, self._pids)
        self._dag = None

    def _transport(self) -> Any:
        if self._pool.place is Place.GPU:
            return "nccl"
        from ray.experimental.channel.cpu_communicator import CPUCommunicator

        return CPUCommunicator(len(self._actors), self._actors)
