"""What the actors of a graph have for moving tensors. Each looks for itself; the driver asks where a hint makes it matter."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raycomm.graph import Graph, TensorDevice, TensorTransport
from raycomm.options import DeviceKind
from raycomm.plan.devices import NO_GPU, Missing, Place, no_cupy, no_nccl
from raycomm.plan.transfer import Backend
from raycomm.runtime.conversation import Conversation

# Several ranks on one GPU: NCCL 2.30 and newer take them with this set (nccl docs, "Environment Variables").
_SHARES_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
_SHARES_GPU_FROM = 23000


def places_of(graph: Graph, device: DeviceKind, actors: Conversation) -> dict[int, Place]:
    """By index of the process. Asks the actors, and blocks for it, if there are hints that depend on what they have.

    Raises:
        What `Conversation.ask` raises.
    """
    if device is DeviceKind.SIMULATED:
        return {actor.index + 1: Place.simulated(f"simulated device of {actor.label}") for actor in graph.actors}
    if not any(hint.transport is not TensorTransport.SHM or hint.device is TensorDevice.GPU for _, hint in graph.hints):
        return {}
    found: dict[int, Found] = actors.ask(look_around)
    return {process: place_of(here) for process, here in found.items()}


@dataclass(frozen=True, slots=True)
class Found:
    """What a process has.

    Attributes:
        torch: None if it can be imported, else why not.
        gloo: whether torch was built with it.
        cuda: the major version of CUDA that torch is built for; None: for none.
        device: the GPU that torch uses unless told otherwise, such as ``cuda:0``; None where it finds none.
        hardware: tells GPUs of the whole cluster apart.
        driver: whether the system has an NVIDIA driver, whatever torch makes of it.
        cupy: None if it can be imported, else why not.
        cupy_cuda: the major version of CUDA that it is built for.
        nccl: version of the library that cupy uses, such as 23203 for 2.32.3; 0 where it finds none.
        nccl_files: of the NCCL libraries that are loaded.
        pid: of the process.
        shares_gpu: whether NCCL is told to take several ranks on one GPU.
    """

    torch: str | None = None
    gloo: bool = True
    cuda: int | None = None
    device: str | None = None
    hardware: str = ""
    driver: bool = False
    cupy: str | None = None
    cupy_cuda: int = 0
    nccl: int = 0
    nccl_files: tuple[str, ...] = ()
    pid: int = 0
    shares_gpu: bool = False


def place_of(found: Found) -> Place:
    """What an actor can take part in, and why not in the rest."""
    if found.torch is not None:
        return Place.without(Missing(f"torch cannot be imported there ({found.torch})", "pip install torch"))
    gloo = Backend.GLOO if found.gloo else Missing("its torch is built without gloo", "use 'shm', or another build of torch")
    missing = _lacks(found)
    if missing is not None:
        return Place(found.device, found.hardware, missing, gloo)
    # A rank of its own for each process, if NCCL takes them.
    apart = found.shares_gpu and found.nccl >= _SHARES_GPU_FROM
    return Place(found.device, f"{found.hardware} in {found.pid}" if apart else found.hardware, Backend.NCCL, gloo)


def _lacks(found: Found) -> Missing | None:
    """What keeps NCCL from working there."""
    if found.device is None:
        if found.driver and found.cuda is None:
            return Missing("its torch is built without CUDA", "install torch for CUDA there, or use 'auto' or 'shm'")
        return NO_GPU
    assert found.cuda is not None
    if found.cupy is not None:
        return no_cupy(found.cuda)
    if found.cupy_cuda != found.cuda:
        text = f"its torch is built for CUDA {found.cuda} and its cupy for CUDA {found.cupy_cuda}, and they share its GPU"
        return Missing(text, f"pip install cupy-cuda{found.cuda}x")
    if not found.nccl:
        return no_nccl(found.cuda)
    if len(found.nccl_files) > 1:
        text = f"torch and cupy have loaded two NCCL libraries there, {' and '.join(found.nccl_files)}"
        return Missing(text, f"leave one of them, that of `pip install nvidia-nccl-cu{found.cuda}`")
    return None


def look_around(_instance: object = None) -> Found:
    """What this process has. Imports torch, and where there is a GPU cupy, which takes seconds the first time."""
    try:
        import torch
        import torch.distributed
    except ImportError as error:
        return Found(torch=str(error))
    distributed: Any = torch.distributed  # Its type stubs leave much out.
    facts: dict[str, Any] = {
        "gloo": distributed.is_available() and distributed.is_gloo_available(),
        "cuda": _major(torch.version.cuda),
        "driver": Path("/proc/driver/nvidia/version").exists(),
        "pid": os.getpid(),
        "shares_gpu": os.environ.get(_SHARES_GPU) == "1",
    }
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        # Two pieces of one GPU that is partitioned have different ones, as NCCL wants it.
        facts |= {"device": f"cuda:{index}", "hardware": str(torch.cuda.get_device_properties(index).uuid)}
        facts |= _of_cupy()
    return Found(**facts)


def _of_cupy() -> dict[str, Any]:
    try:
        import cupy
    except ImportError as error:
        return {"cupy": str(error)}
    version = 0
    try:
        from cupy.cuda import nccl

        version = nccl.get_version() if nccl.available else 0
    except (ImportError, AttributeError):  # built without it, or its library is not found
        pass
    cuda = cupy.cuda.runtime.runtimeGetVersion() // 1000
    return {"cupy_cuda": cuda, "nccl": version, "nccl_files": _loaded("libnccl.so")}


def _major(version: str | None) -> int | None:
    return None if version is None else int(version.partition(".")[0])


def _loaded(name: str) -> tuple[str, ...]:
    """The files of a library that are mapped into this process."""
    rows = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    found = {os.path.realpath(row.split(maxsplit=5)[-1]) for row in rows if f"/{name}" in row}
    return tuple(sorted(found))
