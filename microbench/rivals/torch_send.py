"""A bare send and receive through `torch.distributed`, as in Ray's own microbenchmark: NCCL on GPUs, gloo in host memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from microbench.rivals.gpu_workers import Bare

distributed: Any = torch.distributed  # Its type stubs leave out what is used here.


class TorchRank:
    """One rank of the default process group."""

    def __init__(self, rank: int, device: str, path: str) -> None:
        self._device = device
        self._peer = 1 - rank
        backend = "nccl" if device == "cuda" else "gloo"
        distributed.init_process_group(backend, store=distributed.FileStore(path, 2), rank=rank, world_size=2)

    def send(self, tensor: torch.Tensor) -> None:
        distributed.send(tensor, self._peer)
        self._finish()

    def receive(self, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=torch.float16, device=self._device)
        distributed.recv(tensor, self._peer)
        self._finish()
        return tensor

    def _finish(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


class TorchSend(Bare):
    """See `Bare`."""

    rank_class = TorchRank
