"""The actors of the GPU rows, where they are put, and what the two systems of a bare send and receive have in common."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar, Protocol

import ray
import torch

from microbench.gpu_rows import GpuRow, Place
from microbench.leftovers import scratch_directory
from microbench.rivals.base import START_LIMIT_S, Actors, Calls

SHARED_GPU = {"env_vars": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}
SHARE = 0.2  # of a GPU, per actor, where there are fewer GPUs than actors
CALLS_LIMIT_S = 60.0


class Rank(Protocol):
    """One end of a bare send and receive, made in an actor with its rank of two, its device and the path of a store."""

    def __init__(self, rank: int, device: str, path: str) -> None: ...

    def send(self, tensor: torch.Tensor) -> None:
        """To the other rank. Returns once it is sent."""

    def receive(self, shape: tuple[int, ...]) -> torch.Tensor:
        """From the other rank, a float16: ready for the code of this thread."""


class Worker:
    """The actor of all GPU rows.

    Args:
        device: where its tensors lie, "cuda" or "cpu".
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._last = -1.0
        self._rank: Any = None
        torch.zeros(1, device=device)  # CUDA takes seconds to begin

    def pid(self) -> int:
        import os

        return os.getpid()

    def make(self, request: tuple[int, ...]) -> torch.Tensor:
        """A tensor that is full of `request[0]`, of the shape that the rest says."""
        return torch.full(request[1:], request[0], dtype=torch.float16, device=self._device)

    def take(self, tensor: torch.Tensor) -> float:
        """The last element: the host waits for the tensor to be there, and no other copy is made."""
        return float(tensor.view(-1)[-1].item())

    def add_one(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a stage in the middle of the chain computes."""
        return tensor + 1

    def keep(self, tensor: torch.Tensor) -> None:
        """The end of the chain."""
        self._last = self.take(tensor)

    def kept(self) -> float:
        """What `keep` saw last."""
        return self._last

    def join(self, rank_class: type[Rank], rank: int, path: str) -> None:
        self._rank = rank_class(rank, self._device, path)

    def send_all(self, request: tuple[int, ...], count: int) -> None:
        for _ in range(count):
            self._rank.send(self.make(request))

    def receive_all(self, request: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
        """Nanoseconds from one element to the next, and all values seen."""
        samples, values = [], set()
        begin = time.perf_counter_ns()
        for _ in range(count):
            values.add(self.take(self._rank.receive(request[1:])))
            end = time.perf_counter_ns()
            samples.append(end - begin)
            begin = end
        return samples, sorted(values)


class GpuActors(Actors):
    """Workers with a GPU each, or with a share of one where there are too few; in host memory with `Place.SIMULATED`."""

    def __init__(self, place: Place, body: type[Worker]) -> None:
        super().__init__(body)
        self.place = place

    def fresh(self, count: int) -> list[Any]:
        device, options = "cpu", {}
        if self.place is Place.GPU:
            device = "cuda"
            options = self._gpus(count)
        actors = [self._class.options(**options).remote(device) for _ in range(count)]
        self.pids(actors)
        return actors

    @staticmethod
    def _gpus(actors: int) -> dict[str, Any]:
        cluster: Any = ray
        if cluster.cluster_resources().get("GPU", 0) >= actors:
            return {"num_gpus": 1}
        return {"num_gpus": SHARE, "runtime_env": SHARED_GPU}


class GpuSystem(Protocol):
    """One system of the GPU rows. It is opened for one row at a time and may be opened again after `close`."""

    def open(self, row: GpuRow) -> Calls | Bare:
        """Gets ready for the row and all others that open the same."""

    def actors(self) -> list[Any]:
        """The actors in use, in the order of the graph."""

    def close(self) -> None:
        """Leaves nothing behind that uses a core or a GPU."""


class Bare:
    """Two fresh actors, sender and receiver, each with an end of what a subclass names."""

    rank_class: ClassVar[type[Rank]]

    def __init__(self, pool: GpuActors) -> None:
        self._pool = pool
        self._actors: list[Any] = []
        self._pids: list[int] = []
        self._store: tempfile.TemporaryDirectory[str] | None = None

    def open(self, row: GpuRow) -> Bare:
        self._actors = self._pool.fresh(row.wiring.actors)
        self._pids = self._pool.pids(self._actors)
        self._store = scratch_directory()
        path = str(Path(self._store.name, "store"))
        joined = [actor.join.remote(self.rank_class, rank, path) for rank, actor in enumerate(self._actors)]
        ray.get(joined, timeout=START_LIMIT_S)
        return self

    def run(self, request: tuple[int, ...], count: int) -> tuple[list[int], list[float]]:
        """Of `count` sends, one after the other: nanoseconds at the receiver, and all values that came."""
        sender, receiver = self._actors
        sent = sender.send_all.remote(request, count)
        came: tuple[list[int], list[float]] = ray.get(receiver.receive_all.remote(request, count), timeout=CALLS_LIMIT_S)
        ray.get(sent, timeout=CALLS_LIMIT_S)
        return came

    def actors(self) -> list[Any]:
        return self._actors

    def close(self) -> None:
        actors, self._actors = self._actors, []
        store, self._store = self._store, None
        self._pool.kill(actors, self._pids)
        if store is not None:
            store.cleanup()
