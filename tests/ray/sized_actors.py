"""Actors whose values have the size one asks for, in MiB, to fill shared memory with."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import ray

from tests.ray.row_actors import shm_kib
from tests.ray.workers import Gate, WorkerBody

_MIB = 1 << 20
LONGER_S = 1.5  # than anything may look like a circle before it is called one


class SlowToDecode:
    """A big value whose receiver works on it for a while before it has it."""

    def __init__(self, body: bytes, seconds: float) -> None:
        self.body = body
        self.seconds = seconds

    def __reduce__(self) -> Any:
        return decode_slowly, (self.body, self.seconds)


def decode_slowly(body: bytes, seconds: float) -> SlowToDecode:
    time.sleep(seconds)
    return SlowToDecode(body, seconds)


@ray.remote(num_cpus=0)
class Sized(WorkerBody):
    """Makes values of so many MiB."""

    def ones(self, mib: int) -> Any:
        return np.ones(mib * _MIB, np.uint8)

    def ones_at_gate(self, mib: int, gate: str) -> Any:
        if gate:
            Gate(gate).pass_through()
        return self.ones(mib)

    def slow_to_decode(self, mib: int) -> Any:
        return SlowToDecode(b"x" * (mib * _MIB), LONGER_S)

    def weigh(self, *parts: Any) -> int:
        return sum(len(part.body if isinstance(part, SlowToDecode) else part) for part in parts)

    def weigh_at_gate(self, one: Any, other: Any, gate: str) -> int:
        if gate:
            Gate(gate).pass_through()
        return self.weigh(one, other)

    def weigh_and_die(self, part: Any, number: int, how: str, gate: str) -> int:
        Gate(gate).pass_through()
        self.die(number, how)
        return self.weigh(part)

    def ten_more(self, x: Any) -> Any:
        return np.full(10 * _MIB, x.size // _MIB, np.uint8)

    def slowly(self, x: Any) -> Any:
        time.sleep(0.05)
        return x

    def shm_kib(self) -> int:
        return shm_kib()
