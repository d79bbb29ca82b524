"""What this machine has, whether its parts fit, and how many ranks NCCL takes on one GPU."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import raycomm
from tests.gpu import ranks
from tests.gpu.ranks import Part
from tests.gpu.setting import Figures, Setting, StepFailed

_TRIAL_S = 25.0
_NOT_MEASURED = "not measured: a stand-in"


def environment(setting: Setting) -> Figures:
    """Versions, the card, and ranks per GPU."""
    figures: Figures
    (figures,) = ranks.run(setting, (Part(_versions, 0, 1),), _TRIAL_S)
    figures["gpus"] = setting.gpus
    if setting.stand_in:
        _trial(setting, 2)
        note = f"{_NOT_MEASURED}; torch {figures['torch']}"
        return {**figures, "card": _NOT_MEASURED, "ranks on one GPU": _NOT_MEASURED, "summary": note}
    figures.update(_card())
    figures["ranks on one GPU"] = {str(size): _trial(setting, size) for size in (2, 4)}
    problem = _problem(setting, figures)
    if problem:
        raise StepFailed(problem, figures)
    trials = "; ".join(f"{size} ranks on one GPU: {said}" for size, said in figures["ranks on one GPU"].items())
    figures["summary"] = f"{figures['card']}, torch {figures['torch']}, NCCL {figures['nccl of cupy']}; {trials}"
    return figures


def rank_per_device(setting: Setting) -> Figures:
    """With two GPUs: ranks 0 and 1 have one each, and exchange a million floats."""
    from tests.unit.communicator_programs import exchange_by_link

    def program(place: Any) -> Any:
        return place.device.name, exchange_by_link(place)

    (first, one), (second, other) = ranks.pair(setting, program, program, _TRIAL_S)
    if first == second or one[2] != 1.0 or other[2] != 1.0:
        raise StepFailed(f"rank 0 on {first} received {one}, rank 1 on {second} received {other}")
    return {"devices": [first, second], "summary": f"{first} and {second}"}


def _versions(place: Any) -> Figures:
    """In a process that touches CUDA, if there is one: what is loaded, and in which version."""
    figures: Figures = {
        "raycomm": raycomm.__file__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda of torch": torch.version.cuda,
    }
    if "cuda" not in place.device.name:
        return {**figures, "nccl of torch": None, "nccl of cupy": None, "cuda of cupy": None, "libnccl": []}
    import cupy
    from cupy.cuda import nccl
    from torch.cuda import nccl as nccl_of_torch

    properties = torch.cuda.get_device_properties(place.device.torch)
    nccl.get_unique_id()  # so that the library is loaded
    maps = Path("/proc/self/maps").read_text()
    return {
        **figures,
        "cupy": cupy.__version__,
        "cuda of cupy": _dotted(cupy.cuda.runtime.runtimeGetVersion(), 1000, 10),
        "nccl of torch": ".".join(map(str, nccl_of_torch.version())),
        "nccl of cupy": _dotted(nccl.get_version(), 10000, 100),
        "libnccl": sorted(set(re.findall(r"/\S*libnccl\.so\S*", maps))),
        "device": properties.name,
        "SMs": properties.multi_processor_count,
    }


def _dotted(number: int, major: int, minor: int) -> str:
    text = f"{number // major}.{number % major // minor}"
    return text if minor == 10 else f"{text}.{number % minor}"


def _card() -> Figures:
    """What nvidia-smi says of the first GPU."""
    wanted = "name,memory.total,driver_version"
    if shutil.which("nvidia-smi") is None:
        return {"card": "unknown: no nvidia-smi here"}
    command = ["nvidia-smi", f"--query-gpu={wanted}", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    parts = [part.strip() for part in said.partition("\n")[0].split(",")]
    if len(parts) != 3:
        return {"card": f"unknown: nvidia-smi said {said.strip()!r:.100}"}
    return dict(zip(("card", "memory", "driver"), parts, strict=True))


def _trial(setting: Setting, size: int) -> str:
    """Whether so many ranks work on one GPU, and by what; see `share_gpu`."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    said: list[str] = []
    for way in _WAYS:
        parts = [
            Part(_sum_of_ranks, rank, size, environment={"CUDA_VISIBLE_DEVICES": first, **way(rank)}) for rank in range(size)
        ]
        try:
            answers = ranks.run(setting, parts, _TRIAL_S / (1 + len(said)))
        except StepFailed as failed:
            said.append(f"no ({failed!s:.200})")
            continue
        if all(total == sum(range(size)) for total, _ in answers):
            return f"yes, by {answers[0][1]}"
        said.append(f"no: the sums of their numbers are {answers}")
    return "; on different hosts, so to say: ".join(said)


# As it is done everywhere here; and, for the record, as if on different hosts.
_WAYS: tuple[Callable[[int], dict[str, str]], ...] = (lambda rank: {}, lambda rank: {"NCCL_HOSTID": f"rank{rank}"})


def _sum_of_ranks(place: Any) -> tuple[float, str]:
    link = place.link("trial")
    link.warm_up(_TRIAL_S)
    stream = place.device.stream("s")
    came = link.allreduce(place.device.to_device(torch.tensor([float(place.rank)]), stream), stream=stream)
    total = float(place.device.to_host(came.tensor, stream, _TRIAL_S)[0])
    return total, "NCCL_HOSTID" if "NCCL_HOSTID" in os.environ else "NCCL_MULTI_RANK_GPU_ENABLE"


def _problem(setting: Setting, figures: Figures) -> str | None:
    majors = {str(figures[name]).partition(".")[0] for name in ("cuda of torch", "cuda of cupy")}
    if len(majors) > 1:
        return f"torch is built for CUDA {figures['cuda of torch']} and cupy for {figures['cuda of cupy']}; their majors differ"
    if len(figures["libnccl"]) != 1:
        return f"a process with torch and cupy has not one libnccl loaded but {figures['libnccl']}"
    two = figures["ranks on one GPU"]["2"]
    if setting.gpus < 2 and not two.startswith("yes"):
        return f"two ranks cannot share this machine's one GPU, and all further steps need two: {two}"
    return None
