"""Actors that make and use tensors."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ray
import torch

from tests.ray.workers import Gate, WorkerBody


class TensorsBody(WorkerBody):
    """Makes tensors, and says what it was given."""

    device = "cpu"

    def make(self, number: int) -> Any:
        return torch.full((1000,), number, dtype=torch.int64, device=self.device)

    def make_of(self, size: int) -> Any:
        return torch.full((size,), float(size), device=self.device)

    def nested(self, number: int) -> Any:
        weights = torch.full((300,), number, device=self.device)
        return {"x": weights, "again": [weights, (torch.zeros(0, 3, device=self.device), "text")], "number": number, "none": None}

    def buffer(self, number: int) -> Any:
        if not hasattr(self, "_buffer"):
            self._buffer = torch.empty(100_000, dtype=torch.int64, device=self.device)
        return self._buffer.fill_(number)

    def sum(self, *values: Any) -> int:
        return int(sum(value.sum() for value in values))

    def all_equal(self, value: Any) -> Any:
        return int(value[0]) if bool((value == value[0]).all()) else None

    def twice(self, value: Any) -> Any:
        return value * 2

    def check_nested(self, value: Any) -> Any:
        assert value["x"] is value["again"][0]
        return [list(value), float(value["x"].sum()), value["again"][1][1], value["number"]]

    def fail_on(self, value: Any, wrong: int) -> Any:
        if int(value[0]) == wrong:
            raise ValueError(f"wrong value {wrong}")
        return value

    def at_gate(self, value: Any, gate: str) -> Any:
        Gate(gate).pass_through()
        return value

    def die_at(self, value: Any, number: int) -> Any:
        if int(value[0]) == number:
            os._exit(3)
        return value

    def threads(self) -> list[str]:
        import threading

        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("raycomm"))

    def beside(self, number: int) -> Any:
        """A tensor, and what goes with its record: an array, a class of the user's, and tensors that stay as they are."""
        weights = torch.nn.Parameter(torch.full((4,), float(number), device=self.device))
        named = torch.zeros(2)  # in host memory, whatever the others
        named.label = "kept"  # type: ignore[attr-defined]
        return {
            "w": weights,
            "array": np.full(5_000, number),
            "grad": torch.ones(3, requires_grad=True, device=self.device),
            "named": named,
        }

    def change(self, value: Any) -> Any:
        value["array"] += 1
        kinds = [type(value[name]).__name__ for name in ("w", "grad", "named")]
        return int(value["array"][0]), kinds, value["w"].requires_grad, value["grad"].requires_grad, value["named"].label


Tensors = ray.remote(num_cpus=0)(TensorsBody)


@ray.remote(num_cpus=0)
class AsyncTensors:
    """The same from coroutines."""

    async def make(self, number: int) -> Any:
        return torch.full((1000,), number, dtype=torch.int64)

    async def sum(self, *values: Any) -> int:
        return int(sum(value.sum() for value in values))
