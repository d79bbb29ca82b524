"""The actors of the tests of collectives."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import numpy as np
import ray
import torch

from tests.ray.workers import Gate

LARGE = 100_000  # elements; an allreduce of so many is shared among four actors


class RankBody:
    """An actor that makes tensors that depend on its rank."""

    device = "cpu"

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.kept: list[Any] = []

    def tensor(self, x: float, shape: tuple[int, ...] = (4, 2), dtype: str = "float32") -> torch.Tensor:
        return torch.full(shape, x + self.rank, dtype=getattr(torch, dtype), device=self.device)

    def array(self, x: int) -> Any:
        return np.full((4, 2), x + self.rank, "i4")

    @ray.method(num_returns=2)
    def two(self, x: float) -> Any:
        return torch.full((3,), x + self.rank, device=self.device), torch.full((2, 2), x * (self.rank + 1), device=self.device)

    def ragged_if_odd(self, x: int) -> torch.Tensor:
        return torch.ones(4 + (self.rank if x % 2 else 0), device=self.device)

    def fail_if_odd(self, x: int) -> torch.Tensor:
        if x % 2 and self.rank == 1:
            raise KeyError(f"rank 1 at {x}")
        return torch.ones(4, device=self.device)

    def words_if_odd(self, x: int) -> Any:
        return "no tensor" if x % 2 and self.rank == 0 else torch.ones(4, device=self.device)

    def array_if_odd(self, x: int) -> Any:
        return np.ones(4, "f4") if x % 2 and self.rank == 0 else torch.ones(4, device=self.device)

    def buffer(self, x: float) -> torch.Tensor:
        if not hasattr(self, "_buffer"):
            self._buffer = torch.empty(50_000, device=self.device)
        return self._buffer.fill_(x + self.rank)

    def wait(self, x: Any, gate: str) -> Any:
        Gate(gate).pass_through()
        return x

    def add(self, x: Any, y: Any) -> Any:
        return x + y

    def change(self, x: Any) -> Any:
        x += 100
        return x

    def total(self, x: Any) -> float:
        return float(x.sum())

    def keep(self, x: Any) -> int:
        self.kept.append(x)
        return len(self.kept)

    def sums(self) -> list[float]:
        return [float(x.sum()) for x in self.kept]

    def die(self, x: float) -> torch.Tensor:
        if x > 1 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4, device=self.device)

    def pid(self) -> int:
        return os.getpid()

    def threads(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("raycomm"))


Rank = ray.remote(num_cpus=0)(RankBody)
