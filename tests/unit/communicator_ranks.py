"""A process that runs the programs of `communicator_programs`, one forked process per rank: as
``python -m tests.unit.communicator_ranks``. Reads what to run from its input."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

import torch

from dags.exchange_ranks import share_gpu
from raycomm.device import Communicator
from tests.unit.communicator_programs import BIG, PROGRAMS, Place, numbers


class GlooPlace:
    """A rank in a process of its own. The store is a file."""

    patience = 1.0
    hours = 30.0

    def __init__(self, rank: int, size: int, path: str) -> None:
        from raycomm.device.cpu import CpuDevice

        self.rank = rank
        self.device: Any = CpuDevice(f"cpu of rank {rank}")
        self._size = size
        self._store = torch.distributed.FileStore(path, -1)

    def link(self, name: str) -> Communicator:
        from raycomm.device.gloo import GlooCommunicator

        return GlooCommunicator(self._store, name, self.rank, self._size, device=self.device)

    def pause(self) -> None:
        time.sleep(0.02)

    def elsewhere(self) -> Any:
        from raycomm.device.cpu import CpuDevice

        return CpuDevice("elsewhere").stream("s")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_while_sending(self, link: Any, peer: int) -> None:
        from raycomm.device.gloo import _header, _send

        _send(link._group, _header(numbers(self.rank, BIG)), peer)  # The receiver has come, and now waits for the rest.
        self.die()


class CudaPlace(GlooPlace):
    """A rank with a GPU; several share one where there are too few, which NCCL has to be told."""

    def __init__(self, rank: int, size: int, path: str) -> None:
        from raycomm.device.cuda import CudaDevice

        super().__init__(rank, size, path)
        gpus = torch.cuda.device_count()
        if size > gpus:
            share_gpu(rank)
        self.device = CudaDevice(rank % gpus)

    def link(self, name: str) -> Communicator:
        from raycomm.device.nccl import NcclCommunicator

        return NcclCommunicator(self._store, name, self.rank, self._size, device=self.device)

    def elsewhere(self) -> Any:
        from raycomm.device.cuda import CudaDevice

        return CudaDevice(self.device.index).stream("s")

    def die_while_sending(self, link: Any, peer: int) -> None:
        out = self.device.stream("out")
        link.send(self.device.to_device(numbers(self.rank, BIG), out), peer, stream=out)
        self.die()


class RaysPlace(GlooPlace):
    """A rank of an object of Ray's interface, which some user wrote. Each link is one of its own."""

    def __init__(self, rank: int, size: int, path: str) -> None:
        from raycomm.device.host_ordered import CallThread, HostOrdered, HostStream

        class Apart(HostOrdered):
            """One device for all links of a program, with a thread per stream: each link is an object, which has its own."""

            def stream(self, name: str) -> HostStream:
                if name not in self._streams:
                    self._streams[name] = HostStream(self, name, CallThread(name, torch.device("cpu")))
                return super().stream(name)

        super().__init__(rank, size, path)
        self.device = Apart(f"cpu of rank {rank}", torch.device("cpu"))
        self._path = path

    def link(self, name: str) -> Communicator:
        from raycomm.runtime.ray_communicator import RayCommunicator
        from tests.ray.own_communicators import RaysGroup

        whole = RayCommunicator(RaysGroup([None] * self._size, path=f"{self._path} {name}"), self.rank, name)
        whole.initialize()
        whole.device = self.device
        return whole.part(name, range(self._size))


def place_of(kind: str, rank: int, size: int, path: str) -> Place:
    """Where a rank runs: "gloo", "nccl", in whose place something stands, "cuda", which is NCCL on GPUs, or "rays"."""
    if kind == "gloo":
        return GlooPlace(rank, size, path)
    if kind == "rays":
        return RaysPlace(rank, size, path)
    if kind == "cuda":
        return CudaPlace(rank, size, path)
    from tests.unit.pretend_nccl import NcclPlace

    return NcclPlace(rank, size, path)


def run_ranks(kind: str, name: str, size: int, path: str, limit_s: float) -> list[Any]:
    """Fork a process per rank and run a program; what each returned, or that it died. All have ended when this returns."""
    ranks: list[tuple[int, int]] = []
    for rank in range(size):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                result = {"returned": PROGRAMS[name](place_of(kind, rank, size, path))}
            except BaseException as error:
                result = {"raised": repr(error)}
            os.write(writing, json.dumps(result).encode() + b"\n")
            signal.alarm(round(limit_s))  # ends it, if nobody is there any more who would
            signal.pause()  # until all have said theirs: who leaves while another still receives is a dead peer
        os.close(writing)
        ranks.append((pid, reading))
    end = time.monotonic() + limit_s
    results: list[Any] = []
    for _, reading in ranks:
        said = b""
        while (
            not said.endswith(b"\n")
            and select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]
            and (more := os.read(reading, 1 << 16))
        ):
            said += more
        os.close(reading)
        results.append(json.loads(said) if said.endswith(b"\n") else {"raised": "nothing was said"})
    for pid, _ in ranks:
        os.kill(pid, signal.SIGKILL)  # It is ours and not yet waited for, so the number is not another's.
        os.waitpid(pid, 0)
    return results


def main() -> None:
    """Run what is asked for, one line each: kind of place, program, ranks, path of the store."""
    torch.set_num_threads(1)
    print("ready", flush=True)
    for line in sys.stdin:
        kind, name, size, path = line.split()
        print(json.dumps(run_ranks(kind, name, int(size), path, limit_s=40.0)), flush=True)


if __name__ == "__main__":
    main()
