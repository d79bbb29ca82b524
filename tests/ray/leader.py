"""An actor that is itself the driver of a graph."""

from __future__ import annotations

from typing import Any

import ray

import raycomm
from raycomm import InputNode, bind


class LeaderBody:
    """Compiles a graph over other actors and keeps it running."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.ref: Any = None

    def begin(self, first: Any, last: Any, gate: str) -> None:
        """Start an execution that comes to the gate in `last`."""
        with InputNode() as x:
            out = bind(last.hold, bind(first.add, x), gate)
        self.graph = raycomm.compile(out)
        self.ref = self.graph.execute(1)


Leader = ray.remote(num_cpus=0)(LeaderBody)
