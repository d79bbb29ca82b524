"""Actors of the tests of `raycomm.install()`: some that compile graphs themselves, and one that raises Ray's own errors."""

from __future__ import annotations

from typing import Any

import ray
from ray.dag import InputNode, MultiOutputNode
from ray.exceptions import RayChannelTimeoutError

import raycomm
from tests.ray.workers import Worker


@ray.remote(num_cpus=0)
class Late:
    """Its method raises what raycomm raises itself when a limit passes."""

    def late(self, x: Any) -> Any:
        raise RayChannelTimeoutError(f"mine {x}")


class ReplicaBody:
    """An actor that is the driver of a graph: two workers of its own, the first one's value and the second's."""

    def __init__(self, install: bool = True) -> None:
        if install:
            raycomm.install()
        self.workers = [Worker.remote(), Worker.remote()]
        with InputNode() as inp:
            x = self.workers[0].add.bind(inp)
            y = self.workers[0].add.bind(x)
            z = self.workers[1].add.bind(x)
            node = MultiOutputNode([x, y, z])
        self.graph: Any = node.experimental_compile()

    def kind(self) -> str:
        return type(self.graph).__name__

    def call(self, value: Any) -> Any:
        return ray.get(self.graph.execute(value))

    def call_one_by_one(self, value: Any) -> Any:
        return [ray.get(ref) for ref in self.graph.execute(value)]

    def end(self) -> None:
        self.graph.teardown()


class AsyncReplicaBody:
    """The same with asyncio, as a Serve replica has it."""

    def __init__(self) -> None:
        raycomm.install()
        self.workers = [Worker.remote(), Worker.remote()]
        with InputNode() as inp:
            node = self.workers[1].add.bind(self.workers[0].add.bind(inp))
        self.graph: Any = node.experimental_compile(enable_asyncio=True, _max_inflight_executions=64)

    async def call(self, value: Any) -> Any:
        return await (await self.graph.execute_async(value))

    async def end(self) -> None:
        self.graph.teardown()


Replica = ray.remote(num_cpus=0)(ReplicaBody)
AsyncReplica = ray.remote(num_cpus=0)(AsyncReplicaBody)


@ray.remote(num_cpus=0)
class TensorWorker:
    """Makes tensors and says what came."""

    def make(self, shape: Any, dtype: Any, value: int) -> Any:
        import torch

        return torch.full(shape, value, dtype=dtype)

    def describe(self, tensor: Any) -> Any:
        return tensor[0].item(), tuple(tensor.shape), tensor.dtype
