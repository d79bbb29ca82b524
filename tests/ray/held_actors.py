"""An actor whose method holds the interpreter, for the tests of reports on actors that do not get to run."""

from __future__ import annotations

import ctypes
from typing import Any

import ray

from tests.ray.workers import WorkerBody


class HolderBody(WorkerBody):
    """No other thread of its process runs Python while its method waits at a gate."""

    def hold_interpreter(self, x: Any, gate: str) -> Any:
        wait = f"printf . >> '{gate}.entered'; until test -e '{gate}'; do sleep 0.01; done"
        ctypes.PyDLL(None).system(wait.encode())
        return x


Holder = ray.remote(num_cpus=0)(HolderBody)
