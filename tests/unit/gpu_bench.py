"""The bench process of the GPU rows with one GPU that is none: a number to Ray, and the stand-in of `pretend_nccl` to raycomm."""

from __future__ import annotations

import os
from typing import Any

import ray

from microbench.gpu_session import OnGpus
from microbench.rivals.gpu_workers import Worker
from tests.ray.gpu_actors import pretend
from tests.unit.pretend_nccl import PretendStream


class OnPretended(Worker):
    """An actor whose tensors lie in host memory, as those of the stand-in do."""

    def __init__(self, device: str) -> None:
        assert device == "cuda"
        pretend()
        PretendStream.synchronize = lambda stream: stream.launch("all", bool).wait()  # type: ignore[attr-defined]
        super().__init__("cpu")

    def join(self, rank_class: Any, rank: int, path: str) -> None:
        self._rank = rank_class(rank, "cuda", path)

    def environment(self) -> str | None:
        return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE")


class OnPretendedGpu(OnGpus):
    """What `--device gpu` runs, on that."""

    cluster = {"num_gpus": 1}
    body = OnPretended

    def environments(self) -> list[str | None]:
        """What the open actors were told of sharing a GPU."""
        assert self._open is not None
        told: list[str | None] = ray.get([actor.environment.remote() for actor in self._open.actors()])
        return told
