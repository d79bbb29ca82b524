"""What GPUs this machine has for the GPU rows, or what it lacks for them.

A process of its own looks: whoever asks CUDA keeps memory on the GPU until it ends.
"""

from __future__ import annotations

from microbench.gpu_rows import Gpus
from microbench.process import BenchProcess, ProcessLost, RequestFailed

LOOK_LIMIT_S = 60.0


class Looker:
    """Runs in the bench process."""

    def look(self) -> Gpus | str:
        """What there is, or why the GPU rows cannot run. Imports torch and cupy where there is an NVIDIA driver."""
        from raycomm.device.found import look_for_gpu
        from raycomm.plan.places import Missing
        from raycomm.runtime.places import place_of

        found = look_for_gpu()
        lacks = place_of(found).accelerator
        if isinstance(lacks, Missing):
            # The other remedies are for who writes a graph.
            remedy = (
                lacks.remedy if lacks.remedy.startswith("pip") else "docs/gpu.md says what it needs; or use --device simulated"
            )
            return f"this machine cannot run the GPU rows: {lacks.what}; {remedy}"
        import cupy
        import torch

        return Gpus(torch.cuda.device_count(), torch.cuda.get_device_name(), torch.__version__, cupy.__version__, found.nccl)

    def shutdown(self) -> None:
        """Nothing to end."""


def look_for_gpus() -> Gpus | str:
    """What there is, or why the GPU rows cannot run here. Blocks for seconds."""
    try:
        with BenchProcess("microbench.gpu_found:Looker") as process:
            found: Gpus | str = process.ask("look", limit_s=LOOK_LIMIT_S)
    except (RequestFailed, ProcessLost) as error:
        return f"looking for a GPU failed: {error}"
    return found
