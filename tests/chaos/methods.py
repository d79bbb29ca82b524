"""What the actors' methods give, as plain functions. `reference` calls these; `actors` adds what only a process can do."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from tests.chaos.values import Unsendable, digest

# Methods that hand on what they were given, inside what they return.
PASSING = frozenset({"echo", "pack", "defaults", "split", "hide", "slow", "fail", "miscount"})


def bulk(seed: int, size: int, kind: str) -> Any:
    """`size` bytes that follow from the seed."""
    raw = random.Random(seed).randbytes(size)
    if kind == "bytes":
        return raw
    array = np.frombuffer(bytearray(raw), np.uint8)
    return torch.from_numpy(array) if kind == "tensor" else array


class Methods:
    """Every method follows from its arguments alone."""

    def echo(self, x: Any) -> Any:
        return x

    def pack(self, *parts: Any, **named: Any) -> Any:
        return parts, named

    def defaults(self, x: Any, by: Any = 3, *rest: Any, label: str = "l") -> Any:
        return [x, by, *rest, label]

    def summary(self, *parts: Any) -> str:
        return f"{digest(parts):016x}"

    def grow(self, x: Any, size: int, kind: str) -> Any:
        return bulk(digest(x), size, kind)

    def lend(self, x: Any, size: int) -> Any:
        return bulk(digest(x), size, "array")

    def reuse(self, x: Any, size: int) -> Any:
        return bulk(digest(x), size, "array")

    def keep(self, x: Any) -> str:
        return f"{digest(x):016x}"

    def split(self, x: Any, count: int) -> Any:
        return (x, *(digest(x) >> index for index in range(count - 1)))

    def slow(self, x: Any, seconds: float) -> Any:
        return x

    def fail(self, x: Any, modulus: int) -> Any:
        number = digest(x)
        if number % modulus == 0:
            raise LookupError(f"no luck with {number}")
        return x

    def miscount(self, x: Any, modulus: int) -> Any:
        number = digest(x)
        return (x, number) if number % modulus else rng_of(number).choice(((x,), (x, 1, 2), 5, "ab"))

    def hide(self, x: Any, modulus: int) -> Any:
        return {"in": [x, Unsendable()]} if digest(x) % modulus == 0 else x

    def tensor(self, x: Any, rows: int, dtype: str) -> torch.Tensor:
        numbers = np.frombuffer(random.Random(digest(x)).randbytes(rows * 4), np.int16).astype(np.int64).reshape(rows, 2)
        return torch.from_numpy(numbers).to(getattr(torch, dtype))


def rng_of(seed: int) -> random.Random:
    """Choices that follow from the seed."""
    return random.Random(seed)
