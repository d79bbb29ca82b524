"""A broadcast as a compiled graph: one input for several actors of a Ray cluster, raycomm's graph and Ray's.

The writer is the driver; the caller's duration is that of `execute`. An actor notes when it has the value, as the readers of a
plain transport do, before its method returns; the driver fetches all results before it goes on. Tensors go in as they are, as the
users of both graphs write it.
"""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from microbench.fleet import Times, clock
from microbench.leftovers import scratch_directory
from microbench.transports.base import AHEAD
from microbench.workloads import Workload

START_LIMIT_S = 60.0


class Taker:
    """The actor. What is no message is a `(Workload, int)`: another row begins."""

    def __init__(self, directory: str, rank: int, readers: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._times = Times(Path(directory, "times"), readers).of(rank)
        self._workload: Workload | None = None
        self._messages = self._number = 0

    def take(self, value: Any) -> None:
        """Receive."""
        if isinstance(value, tuple):
            (self._workload, self._messages), self._number = value, 0
            self._workload.prepare()
            return
        workload = self._workload
        assert workload is not None
        taken = workload.take(value)
        self._times[self._number] = clock()
        workload.check(self._number, value, taken)
        self._number += 1
        if self._number == self._messages:
            workload.check_whole(self._number - 1, value)

    def ready(self) -> None:
        """It has been constructed."""


class GraphBroadcast(ABC):
    """What both have in common: a cluster of their own, the actors, and results in flight."""

    def __init__(self, readers: int) -> None:
        import ray

        self._directory = scratch_directory()
        self.times = Times(Path(self._directory.name, "times"), readers)
        self._in_flight: dict[int, Any] = {}
        self._number = 0
        self._actors: list[Any] = []
        self._graph: Any = None
        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        try:
            taker: Any = ray.remote(num_cpus=0)(Taker)
            self._actors = [taker.remote(self._directory.name, rank, readers) for rank in range(1, readers + 1)]
            ray.get([actor.ready.remote() for actor in self._actors], timeout=START_LIMIT_S)
            self._graph = self._compile(self._actors)
        except BaseException:
            self.close()  # else the cluster would run beside every system that comes after
            raise

    @abstractmethod
    def _compile(self, actors: list[Any]) -> Any:
        """The graph that gives its input to all actors."""

    @abstractmethod
    def _encoded_bytes(self, value: Any) -> int:
        """Bytes of a message as the system's own serializer makes it."""

    def begin(self, workload: Workload, messages: int) -> int:
        self._in_flight.clear()
        self._number = 0
        self.times.clear()
        for ref in self._graph.execute((workload, messages)):
            ref.get()
        return self._encoded_bytes(workload.message(0))

    def write(self, value: Any) -> None:
        self._in_flight[self._number] = self._graph.execute(value)
        self._number += 1

    def wait_for(self, number: int) -> int:
        for earlier in [each for each in self._in_flight if each <= number]:
            for ref in self._in_flight.pop(earlier):
                ref.get()
        return self.times.last(number)

    def wait_until_near(self, number: int) -> None:
        if number >= AHEAD:
            self.wait_for(number - AHEAD)

    def finish(self) -> None:
        self.wait_for(self._number)

    def close(self) -> None:
        """The cluster goes, and with it the loops, of which Ray's would take a core each."""
        import ray

        self._graph = None
        for actor in self._actors:
            ray.kill(actor)
        ray.shutdown()
        self.times.close()
        with contextlib.suppress(OSError):
            self._directory.cleanup()


class RaycommBroadcast(GraphBroadcast):
    """raycomm's graph."""

    def _compile(self, actors: list[Any]) -> Any:
        import raycomm
        from raycomm import InputNode, MultiOutputNode

        with InputNode() as value:
            node = MultiOutputNode([raycomm.bind(actor.take, value) for actor in actors])
        return raycomm.compile(node)

    def _encoded_bytes(self, value: Any) -> int:
        from raycomm import _core

        payload, buffers = _core.encode(value)
        return len(payload) + sum(memoryview(buffer).nbytes for buffer in buffers)

    def close(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.teardown()
        super().close()


class RayBroadcast(GraphBroadcast):
    """Ray's compiled graph."""

    def _compile(self, actors: list[Any]) -> Any:
        from ray.dag import InputNode, MultiOutputNode

        with InputNode() as value:
            node = MultiOutputNode([actor.take.bind(value) for actor in actors])
        return node.experimental_compile()

    def _encoded_bytes(self, value: Any) -> int:
        import ray

        # Ray's own serializer, which a user has no other way to ask.
        worker: Any = ray._private.worker.global_worker
        size: int = worker.get_serialization_context().serialize(value).total_bytes
        return size
