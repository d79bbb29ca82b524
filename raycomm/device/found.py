"""What a process has for moving tensors: it looks for itself. Imports torch and cupy when it does, not before."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Has NCCL 2.30 and newer take several ranks on one GPU (its "Environment Variables" page).
_SHARES_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"


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


def look_for_gpu(_instance: object = None) -> Found:
    """What this process has, if it can have a GPU at all; else nothing is looked at and nothing imported."""
    return look_around() if _has_driver() else Found(gloo=False, pid=os.getpid())


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
        "driver": _has_driver(),
        "pid": os.getpid(),
        "shares_gpu": os.environ.get(_SHARES_GPU) == "1",
    }
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        # Two pieces of one GPU that is partitioned have different ones, as NCCL wants it.
        facts |= {"device": f"cuda:{index}", "hardware": str(torch.cuda.get_device_properties(index).uuid)}
        if facts["cuda"] is not None:  # a cupy for CUDA finds no library to load next to a torch for other GPUs
            facts |= _of_cupy()
    return Found(**facts)


def _has_driver() -> bool:
    """Of NVIDIA. The second is the device of containers that show no /proc/driver, the third that of WSL."""
    return any(os.path.exists(path) for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg"))


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
