"""Actors with a GPU each: with a piece of a real one where there is one, else with the stand-in of `tests.unit.pretend_nccl`."""

from __future__ import annotations

import os
import signal
from typing import Any

import ray
import torch

from tests.ray.collective_actors import RankBody
from tests.ray.tensor_actors import TensorsBody

_ends: list[Any] = []  # communicators of this process, with the stand-in
_MANY_RANKS = {"env_vars": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}


class OnGpu(TensorsBody):
    """The same on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        if torch.cuda.is_available():
            self.device = "cuda"
        else:
            pretend()

    def die_in_the_next_transfer(self) -> None:
        """Once the other end knows that something comes. Only with the stand-in."""
        from raycomm.device.gloo import _header, _send
        from tests.unit.pretend_nccl import PretendComm, memory

        def send(comm: Any, address: int, count: int, dtype: int, peer: int, handle: int) -> None:
            _send(comm._link._group, _header(memory(address, count, dtype)), peer)
            os.kill(os.getpid(), signal.SIGKILL)

        PretendComm.send = send  # type: ignore[method-assign]

    def send_nothing(self) -> None:
        """From now on the other end waits for ever. Only with the stand-in."""
        from tests.unit.pretend_nccl import PretendComm

        PretendComm.send = lambda *_: None  # type: ignore[method-assign,assignment]

    def abort_links(self) -> int:
        """Ends all that this actor receives or sends now; how many links that were."""
        for end in _ends:
            end.abort(1.0)
        return len(_ends)


GpuTensors = ray.remote(num_cpus=0)(OnGpu)


class RankOnGpu(RankBody):
    """The actors of collectives on a GPU."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        if torch.cuda.is_available():
            self.device = "cuda"
        else:
            pretend()


GpuRank = ray.remote(num_cpus=0)(RankOnGpu)


def start_on_gpu() -> Any:
    """A new actor."""
    return _with_gpu(GpuTensors).remote()


def start_rank_on_gpu(rank: int) -> Any:
    """A new actor of collectives."""
    return _with_gpu(GpuRank).remote(rank)


def _with_gpu(actor_class: Any) -> Any:
    return actor_class.options(num_gpus=0.1, runtime_env=_MANY_RANKS) if torch.cuda.is_available() else actor_class


def pretend() -> None:
    """From now on this process has a GPU and NCCL, as far as raycomm can see."""
    from raycomm.device import cuda, found, nccl
    from tests.unit.pretend_nccl import PretendGpu, PretendNccl

    real = nccl.NcclCommunicator

    def device(index: int | None = None) -> Any:
        assert index in (0, None)
        return PretendGpu("cuda:0")

    def communicator(store: Any, name: str, rank: int, size: int, *, device: Any, **others: Any) -> Any:
        library = PretendNccl(store, device, tuples=False)
        _ends.append(real(store, name, rank, size, device=device, library=library, **others))
        return _ends[-1]

    def look_around(_instance: object = None) -> found.Found:
        pid = os.getpid()
        return found.Found(cuda=12, device="cuda:0", hardware=f"GPU-{pid}", driver=True, cupy_cuda=12, nccl=23203, pid=pid)

    cuda.CudaDevice = device  # type: ignore[assignment,misc]
    nccl.NcclCommunicator = communicator  # type: ignore[assignment,misc]
    found.look_around = found.look_for_gpu = look_around
