"""What the broadcast bench compares: where each system's adapter is, what it needs, and why it cannot run where it cannot."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microbench.workloads import Sort

VLLM_PYTHON = Path(__file__).resolve().parent.parent / ".venv-vllm" / "bin" / "python"
_BENCH_EXTRA = "pip install 'raycomm[bench]'"


@dataclass(frozen=True)
class System:
    """One system of the table.

    Attributes:
        adapter: "module:Class" under `microbench`.
        needs: what has to be importable in this interpreter.
        python: the interpreter its processes run in.
        sorts: what it can send.
        lone: no transport between plain processes, but something that sees to its readers itself.
    """

    name: str
    adapter: str
    needs: tuple[str, ...] = ()
    python: str = sys.executable
    sorts: tuple[Sort, ...] = (Sort.LIST, Sort.TENSOR)
    lone: bool = False

    def lacks(self, readers: int) -> str | None:
        """Why it cannot be measured here, with the remedy; None if it can."""
        missing = [module for module in self.needs if importlib.util.find_spec(module) is None]
        if missing:
            return f"not installed: {', '.join(missing)}; {_BENCH_EXTRA}"
        if self.name == "vllm" and not Path(self.python).parents[1].joinpath("installed").exists():
            return "no environment for it; make bench-vllm"
        if self.name == "nccl":
            import torch

            found = torch.cuda.device_count()
            if found <= readers:
                return f"takes a GPU per process, {readers + 1}; found {found}"
        return None

    def load(self) -> Callable[[Any], Any]:
        """The adapter's class: made with a `Place`; if it is lone, with the number of readers."""
        module, _, name = self.adapter.partition(":")
        found: Callable[[Any], Any] = getattr(importlib.import_module(f"microbench.{module}"), name)
        return found


_ALL = (
    System("raycomm:msgpack", "transports.raycomm_ring:RaycommRing"),
    System("raycomm:pickle", "transports.raycomm_ring:RaycommRingPickle"),
    System("vllm", "transports.vllm_queue:VllmQueue", python=str(VLLM_PYTHON)),
    System("iceoryx2", "transports.iceoryx2_pubsub:Iceoryx2PubSub", needs=("iceoryx2",)),
    System("zmq:pubsub", "transports.zmq_pubsub:ZmqPubSub", needs=("zmq",)),
    System("zmq:pubsub:msgpack", "transports.zmq_pubsub:ZmqPubSubMsgpack", needs=("zmq",)),
    System("zmq:pubsub:tcp", "transports.zmq_pubsub:ZmqPubSubTcp", needs=("zmq",)),
    System("zmq:pubsub:tcp:msgpack", "transports.zmq_pubsub:ZmqPubSubTcpMsgpack", needs=("zmq",)),
    System("gloo", "transports.torch_gloo:TorchGloo"),
    System("gloo:aligned", "transports.torch_gloo:TorchGlooAligned"),
    System("nccl", "transports.torch_gloo:TorchNccl"),
    System("raycomm:graph", "graph_broadcast:RaycommBroadcast", lone=True),
    System("ray:compiled_graph", "graph_broadcast:RayBroadcast", lone=True),
    System("copy", "copy_and_sum:CopyAndSum", sorts=(Sort.TENSOR,), lone=True),
)
SYSTEMS = {system.name: system for system in _ALL}
