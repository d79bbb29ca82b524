"""Actors and values of the tests that go through the behaviours row by row."""

from __future__ import annotations

import copyreg
import os
import threading
import time
from typing import Any

import ray

import raycomm
from tests.ray.workers import Gate


class OddBody:
    """Methods with signatures of every kind, and some that misbehave."""

    def __init__(self) -> None:
        self.trail: list[str] = []
        self.buffers: dict[tuple[str, int], Any] = {}

    def step(self, x: Any, name: str) -> Any:
        self.trail.append(name)
        return x

    def trail_so_far(self) -> list[str]:
        return self.trail

    def free(self, *parts: Any, scale: int = 1, **named: Any) -> Any:
        return parts, scale, named

    def strict(self, x: Any, /, y: Any, *, z: Any = None) -> Any:
        return x, y, z

    def nothing(self, x: Any) -> None:
        return None

    def two(self, x: Any) -> Any:
        return x, None

    def is_one(self, *values: Any) -> list[bool]:
        return [value is values[0] for value in values]

    def total(self, *values: Any) -> int:
        return sum(values)

    def interrupt(self, x: Any) -> Any:
        if x == "go":
            raise KeyboardInterrupt
        return x

    def long_text(self, x: int) -> Any:
        raise ValueError("long " + "x" * x)

    def unpickles_only_at_the_driver(self, x: Any) -> Any:
        return Homesick(x) if x == "homesick" else x

    def counted(self, x: Any, directory: str) -> Any:
        return Decoded(x, directory)

    def reuse(self, x: int, kind: str, size: int) -> Any:
        """The same buffer each time, filled anew."""
        import numpy
        import torch

        buffer = self.buffers.get((kind, size))
        if buffer is None:
            buffer = numpy.zeros(size, numpy.int64) if kind == "numpy" else torch.zeros(size, dtype=torch.int64)
            self.buffers[kind, size] = buffer
        buffer[:] = x
        return buffer

    def same_bytes(self, x: Any) -> bool:
        return bool((x == x[0]).all())

    def write_to(self, x: Any, value: int) -> Any:
        """In place, then the sum: what this reader sees."""
        x += value
        return int(x.sum())

    def sum_of(self, x: Any) -> int:
        return int(x.sum())

    def sized(self, n: int) -> bytes:
        return bytes([n % 251]) * n

    def describe(self, x: Any) -> Any:
        return type(x).__name__, getattr(x, "shape", None), str(getattr(x, "dtype", None))

    def slow(self, x: Any, seconds: float) -> Any:
        time.sleep(seconds)
        return x

    def spin_then(self, x: Any, gate: str) -> Any:
        """Pure Python until the gate opens: holds the interpreter lock as far as Python code can."""
        with open(gate + ".entered", "ab") as file:
            file.write(b".")
        count = 0
        while not os.path.exists(gate):
            count += 1
        return x

    def hold(self, x: Any, gate: str) -> Any:
        Gate(gate).pass_through()
        return x

    def pid(self) -> int:
        return os.getpid()

    def cpu_s(self) -> float:
        return time.process_time()

    def shm_kib(self) -> int:
        """Resident shared memory of raycomm's in this process, in KiB."""
        return shm_kib()


class Homesick:
    """Fails to unpickle in an actor."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __reduce__(self) -> Any:
        return _at_home, (self.x, os.getpid())


def _at_home(x: Any, pid: int) -> Any:
    if os.getpid() != pid:
        raise RuntimeError(f"homesick: not made in {os.getpid()}")
    return Homesick(x)


class Decoded:
    """Leaves a file for each time it is unpickled."""

    def __init__(self, x: Any, directory: str) -> None:
        self.x = x
        self.directory = directory

    def __reduce__(self) -> Any:
        return _decode, (self.x, self.directory)


def _decode(x: Any, directory: str) -> Any:
    with open(os.path.join(directory, f"{x}"), "ab") as file:
        file.write(b".")
    return Decoded(x, directory)


class DriverBody:
    """An actor that compiles and drives graphs of its own."""

    def __init__(self) -> None:
        self.graph: Any = None
        self.lock = threading.Lock()

    def compile(self, workers: list[Any], **options: Any) -> str:
        with raycomm.InputNode() as x:
            value: Any = x
            for worker in workers:
                value = raycomm.bind(worker.add, value)
        self.graph = raycomm.compile(value, **options)
        return str(self.graph.name)

    def run(self, value: Any, count: int = 1) -> list[Any]:
        refs = [self.graph.execute(value + number) for number in range(count)]
        return [ref.get(timeout=60) for ref in refs]

    def add(self, x: Any, by: Any = 1) -> Any:
        return x + by

    def teardown(self) -> None:
        self.graph.teardown()
        self.graph = None


def shm_kib() -> int:
    """Resident KiB of raycomm's arenas that this process maps."""
    total = 0
    inside = False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
                inside = "memfd:raycomm" in line
            elif inside and line.startswith("Rss:"):
                total += int(line.split()[1])
    return total


def reducers(_: Any = None) -> set[str]:
    """The types for which this process has been given a way to pickle them, besides their own."""
    import torch  # brings some of its own

    assert torch
    tables: list[Any] = [copyreg.dispatch_table, ray.cloudpickle.CloudPickler.dispatch]
    return {f"{kind.__module__}.{kind.__qualname__}" for table in tables for kind in table}


Odd = ray.remote(num_cpus=0)(OddBody)
Driver = ray.remote(num_cpus=0)(DriverBody)
