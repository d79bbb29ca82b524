"""A bare send and receive through raycomm's communicators: NCCL on GPUs, gloo in host memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from microbench.rivals.gpu_workers import Bare

LIMIT_S = 30.0


class RaycommRank:
    """One rank, on a stream of its own, as the link of a graph has it."""

    def __init__(self, rank: int, device: str, path: str) -> None:
        distributed: Any = torch.distributed  # Its type stubs leave this out.
        store = distributed.FileStore(path, -1)
        self._peer = 1 - rank
        self._device: Any
        self._link: Any
        if device == "cuda":
            from raycomm.device.cuda import CudaDevice
            from raycomm.device.nccl import NcclCommunicator

            self._device = CudaDevice()
            self._link = NcclCommunicator(store, "bare", rank, 2, device=self._device)
        else:
            from raycomm.device.cpu import CpuDevice
            from raycomm.device.gloo import GlooCommunicator

            self._device = CpuDevice()
            self._link = GlooCommunicator(store, "bare", rank, 2, device=self._device)
        self._stream = self._device.stream("bare")
        self._link.warm_up(LIMIT_S)

    def send(self, tensor: torch.Tensor) -> None:
        made_on = self._device.current_stream()
        if made_on is not None:
            self._stream.wait(made_on.record())
        event = self._link.send(tensor, self._peer, stream=self._stream)
        if made_on is None:
            event.synchronize(LIMIT_S)
        else:
            # As torch's own waits do. The event's wait looks and sleeps in turn, which would make the bare transfer look slower.
            self._stream.torch.synchronize()

    def receive(self, shape: tuple[int, ...]) -> torch.Tensor:
        came = self._link.recv(shape, torch.float16, self._peer, stream=self._stream)
        tensor: torch.Tensor = came.tensor
        used_on = self._device.current_stream()
        if used_on is None:
            came.event.synchronize(LIMIT_S)
        else:
            used_on.wait(came.event)
            self._device.record_stream(tensor, used_on)
        return tensor


class RaycommSend(Bare):
    """See `Bare`."""

    rank_class = RaycommRank
