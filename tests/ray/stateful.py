"""An actor whose constructor sets everything that belongs to a thread, and a method that tells what it finds."""

from __future__ import annotations

import contextvars
import decimal
import os
import sys
import threading
from typing import Any

import ray

from tests.ray.workers import Gate, vitals

_TENANT: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")
_LOCAL = threading.local()

TORCH_DEFAULTS = {
    "grad": True,
    "inference": False,
    "device": "cpu",
    "autocast": (False, "torch.bfloat16"),
    "autocast cuda": (False, "torch.float16"),
    "cache": True,
}


class Stateful:
    """`kind` names what the constructor sets."""

    def __init__(self, kind: str) -> None:
        _TENANT.set(kind)
        _LOCAL.kind = kind
        decimal.getcontext().prec = 7
        if kind == "numpy":
            import numpy

            numpy.seterr(divide="raise")
        if kind in ("no grad", "inference", "device", "autocast", "autocast off", "torch"):
            import torch

            if kind == "no grad":
                torch.set_grad_enabled(False)
            if kind == "inference":
                self.mode = torch.inference_mode()  # held: the mode ends with the object
                self.mode.__enter__()
            if kind == "device":
                torch.set_default_device("meta")
            if kind == "autocast":
                torch.autocast("cpu", torch.float16, cache_enabled=False).__enter__()
            if kind == "autocast off":
                torch.set_autocast_dtype("cuda", torch.bfloat16)

    def state(self, _: Any = None) -> dict[str, Any]:
        """What this thread's state is."""
        found: dict[str, Any] = {"tenant": _TENANT.get(), "precision": decimal.getcontext().prec}
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            found["divide"] = numpy.geterr()["divide"]
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            found |= {
                "grad": torch.is_grad_enabled(),
                "inference": torch.is_inference_mode_enabled(),
                "device": str(torch.get_default_device()),
                "autocast": (torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))),
                "autocast cuda": (torch.is_autocast_enabled("cuda"), str(torch.get_autocast_dtype("cuda"))),
                "cache": torch.is_autocast_cache_enabled(),
                "factory": str(torch.ones(1).device),
                "inference tensor": torch.ones(1).is_inference(),
                "grad of a product": (torch.ones(1, requires_grad=True) * 2).requires_grad,
                "product": str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype),
            }
        return found

    def change(self, _: Any = None) -> None:
        """Change this thread's state; other threads must not see it."""
        _TENANT.set("changed")
        decimal.getcontext().prec = 3
        if "torch" in sys.modules:
            import torch

            torch.set_grad_enabled(not torch.is_grad_enabled())
            torch.set_autocast_enabled("cpu", not torch.is_autocast_enabled("cpu"))

    def local(self, _: Any = None) -> Any:
        """A thread-local that the constructor set; None on a thread that did not set it."""
        return getattr(_LOCAL, "kind", None)

    def thread(self, _: Any = None) -> str:
        """Which thread runs this."""
        return threading.current_thread().name

    def add(self, x: Any) -> Any:
        return x + 1

    def hold(self, x: Any, gate: str) -> Any:
        Gate(gate).pass_through()
        return x

    def leave(self, x: Any, how: str) -> Any:
        if x == "stay":
            return x
        if how == "exit_actor":
            ray.actor.exit_actor()
        sys.exit(1)

    def modules(self) -> list[str]:
        return list(sys.modules)

    def pid(self) -> int:
        return os.getpid()

    def vitals(self) -> dict[str, int]:
        return vitals()

    def warm(self) -> list[str]:
        """Names of the process's threads."""
        return [thread.name for thread in threading.enumerate()]


def make(kind: str, **options: Any) -> Any:
    """A running actor."""
    actor = ray.remote(num_cpus=0, **options)(Stateful).remote(kind)
    ray.get(actor.pid.remote())
    return actor
