"""One rank of the exchange between processes: ``python -m dags.exchange_ranks``, started by `dags.exchange_driver`.

It runs its list of actions as an actor of a graph would, with memory, links and a loop of its own; but there is no cluster.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import types
from contextlib import suppress
from typing import Any, NamedTuple

from raycomm import _core
from raycomm.channel import ShmArena
from raycomm.runtime.blueprint import DRIVER, Blueprint, rings_of

COUNT = 1_000_000  # float32 per tensor
_MULTI_RANK_SINCE = 23000  # NCCL 2.30.0
WEIGHT = 3  # of the other rank's tensor in a result, so that one's own does not pass for it


class Start(NamedTuple):
    """What a rank is told: which GPU is its own, and how many ranks have that one."""

    blueprint: Blueprint
    gpu: int | None
    sharers: int


def share_gpu(rank: int) -> None:
    """Let this process be one of several ranks on one GPU. Before the first communicator: NCCL looks at this once.

    NCCL refuses two ranks on one GPU of one host. Since 2.30 it can be told to allow them; an older one believes what it is told
    of the host, and then moves data over the network, between ranks of one GPU too.
    """
    from cupy.cuda import nccl

    if nccl.get_version() >= _MULTI_RANK_SINCE:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    else:
        os.environ.setdefault("NCCL_HOSTID", f"rank{rank}")


def tensor_of(rank: int, execution: int) -> Any:
    """What a rank makes and sends; every element is an integer that float32 has, and so are the results'."""
    import torch

    return torch.arange(COUNT, dtype=torch.float32) + 1000 * rank + execution % 1000


class Rank:
    """The object whose methods the plan calls."""

    def __init__(self, rank: int, gpu: int | None) -> None:
        self._rank = rank
        self._device = "cpu" if gpu is None else f"cuda:{gpu}"

    def make(self, execution: int) -> Any:
        """This rank's tensor, on its device."""
        return tensor_of(self._rank, execution).to(self._device)

    def add(self, own: Any, other: Any) -> Any:
        """What the driver checks, in host memory."""
        return (own + WEIGHT * other).cpu()


def _without_ray() -> None:
    """Where Ray is not installed, empty modules in its place: the loop's imports name it, a rank never calls it."""
    if importlib.util.find_spec("ray") is not None:
        return
    for name in ("ray", "ray.actor", "ray.exceptions", "ray._raylet", "ray._private", "ray._private.worker"):
        module = sys.modules[name] = types.ModuleType(name)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    exceptions: Any = sys.modules["ray.exceptions"]
    for name in ("AsyncioActorExit", "TaskCancelledError"):
        setattr(exceptions, name, type(name, (Exception,), {}))


def main() -> None:
    """One rank: told the plan on its input, says its address on its output, and runs until the driver closes the graph."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # NCCL_DEBUG prints to the standard output
    start: Start = pickle.load(sys.stdin.buffer)
    _without_ray()
    from raycomm.runtime.fault_points import FaultPoints
    from raycomm.runtime.setup import Member

    blueprint = start.blueprint
    plan, process = blueprint.plan, blueprint.process
    if start.gpu is not None:
        import torch

        torch.cuda.set_device(start.gpu)
        if start.sharers > 1:
            with suppress(ImportError):  # cupy is missing: who makes the links says so
                share_gpu(process - 1)
    rings = rings_of(plan, process, blueprint.options)
    nodes = len(plan.actors[process - 1].actions)
    arena = ShmArena.create(process, rings, blueprint.options, loops=len(plan.processes), nodes=nodes)
    arena.attach(blueprint.driver)
    arena.core.set_loop_state(_core.LOOP_RUNNING, DRIVER)
    with answer:
        pickle.dump(arena.address, answer)
    Member(Rank(process - 1, start.gpu), blueprint, arena, FaultPoints(())).serve()
    sys.stderr.flush()
    os._exit(0)  # a transfer that hangs would keep the libraries from ending


if __name__ == "__main__":
    main()
