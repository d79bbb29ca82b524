"""Actors that fill memory which raycomm gives them, and look at what they receive."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import ray
import torch

import raycomm

BIG = 1 << 16  # elements: well above what is copied out


class FillerBody:
    """Fills memory that raycomm gives it, and looks at and writes to what it receives."""

    def __init__(self) -> None:
        self.kept: Any = None

    def up(self) -> None:
        pass

    def filled(self, value: int) -> Any:
        array = raycomm.empty((16, BIG // 16), np.int32)
        array[:] = value
        return array

    def filled_tensor(self, value: int) -> Any:
        tensor = raycomm.empty(BIG, torch.float32)
        tensor.fill_(value)
        return tensor

    def filled_part(self, value: int) -> Any:
        return self.filled(value)[3:7]

    def filled_twice(self, value: int) -> Any:
        if self.kept is None:
            self.kept = raycomm.empty(BIG, np.int64)
        self.kept[:] = value
        return self.kept

    def exact(self, size: int) -> Any:
        array = raycomm.empty(size, np.uint8)
        array[:] = 7
        return array

    def describe(self, x: Any) -> Any:
        return type(x).__name__, str(x.dtype), tuple(x.shape), float(x.reshape(-1)[0]), float(x.reshape(-1)[-1])

    def object_dtype(self, _: Any) -> Any:
        return raycomm.empty(3, object)

    def write(self, x: Any, value: int) -> Any:
        """Breaks the promise of share_tensors, to show whose memory it is."""
        before = float(x[0])
        x[0] = value
        return before

    def first(self, x: Any, _: Any) -> float:
        return float(x[0])

    def writable(self, x: Any) -> bool:
        return bool(x.flags.writeable)

    def plain_call(self) -> Any:
        return raycomm.empty(3, np.uint8)

    def wrap(self, x: Any) -> Any:
        return Fraction(x, 3)


Filler = ray.remote(num_cpus=0)(FillerBody)
