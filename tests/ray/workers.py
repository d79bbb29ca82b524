"""The actors that the tests on a real Ray use, and a gate to hold a method until a test lets it go."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray

from raycomm import InputNode, bind

# Hang guards. Never what a test waits for: ten times what is promised, or more.
PATIENCE_S = 60.0


def until(condition: Any, what: str, limit_s: float = PATIENCE_S) -> None:
    """Returns once `condition()` is true; fails naming `what` after `limit_s`."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s: {what}"
        time.sleep(0.002)


def chain(*methods: Any) -> Any:
    """input -> each method in turn."""
    with InputNode() as x:
        value: Any = x
        for method in methods:
            value = bind(method, value)
    return value


class Gate:
    """A file. `Worker.hold` announces itself next to it and returns once the file exists."""

    def __init__(self, path: str) -> None:
        self.path = path

    def open(self) -> None:
        """Let everyone at the gate through, now and later."""
        Path(self.path).touch()

    def entered(self, count: int = 1) -> bool:
        """Whether `count` calls have come to the gate."""
        file = Path(self.path + ".entered")
        return file.exists() and len(file.read_bytes()) >= count

    def wait_entered(self, count: int = 1) -> None:
        """Returns once `count` calls have come to the gate."""
        until(lambda: self.entered(count), f"{count} calls at the gate")

    def pass_through(self) -> None:
        """In the actor: come to the gate, wait, go on."""
        with open(self.path + ".entered", "ab") as file:
            file.write(b".")
        until(lambda: Path(self.path).exists(), "the gate opens")


class NeedsArguments(Exception):
    """Pickles, but does not unpickle: its constructor wants two arguments and hands one on."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"{code} at {place}")
        self.code = code
        self.place = place


class HoldsLock(ValueError):
    """Does not pickle."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()
        self.detail = "kept"


class Opaque:
    """A value that cannot be sent."""

    def __reduce__(self) -> Any:
        raise TypeError("an Opaque stays where it is")


def raise_named(kind: str, value: Any) -> None:
    """Raise the exception that `kind` names."""
    if kind == "value":
        raise ValueError(f"bad {value}")
    if kind == "cause":
        try:
            raise KeyError("the root")
        except KeyError as error:
            raise ValueError(f"bad {value}") from error
    if kind == "arguments":
        raise NeedsArguments(7, f"value {value}")
    if kind == "lock":
        raise HoldsLock(f"held {value}")
    if kind == "stop":
        raise StopIteration(value)
    if kind == "foreign":
        import only_here  # type: ignore[import-not-found]

        raise only_here.Strange(f"strange {value}")


class WorkerBody:
    """Methods for every test; the state is a list of what was seen."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.seen: list[Any] = []
        self.kept: Any = None

    def echo(self, x: Any) -> Any:
        return x

    def add(self, x: Any, by: Any = 1) -> Any:
        return x + by

    def join(self, *parts: Any, **named: Any) -> Any:
        return parts, named

    def pair(self, a: Any, b: Any) -> Any:
        return (self.name, a, b)

    @ray.method(num_returns=2)
    def split(self, x: Any) -> Any:
        return x, x + 1

    @ray.method(num_returns=2)
    def as_two(self, x: Any) -> Any:
        return x

    def same(self, a: Any, b: Any) -> bool:
        return a is b

    def grow(self, x: Any, one: list[Any], other: list[Any]) -> Any:
        one.append(x)
        return list(one), one is other

    def note(self, x: Any) -> Any:
        self.seen.append(x)
        return x

    def seen_so_far(self) -> list[Any]:
        return self.seen

    def keep(self, x: Any) -> int:
        self.kept = [*(self.kept or []), x]
        return len(self.kept)

    def let_go(self) -> None:
        self.kept = None

    def fail(self, x: Any, kind: str = "value") -> Any:
        raise_named(kind, x)

    def fail_if_odd(self, x: int, kind: str = "value") -> int:
        if x % 2:
            raise_named(kind, x)
        return x

    def return_exception(self, x: Any) -> Any:
        return ValueError(f"only a value: {x}")

    def opaque_if_odd(self, x: int) -> Any:
        return {"inside": [x, Opaque()]} if x % 2 else x

    def hold(self, x: Any, gate: str) -> Any:
        Gate(gate).pass_through()
        return x

    def die(self, x: Any, how: str) -> Any:
        if x == "stay":
            return x
        if how == "_exit":
            os._exit(1)
        elif how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "SIGSEGV":
            ctypes.string_at(0)
        elif how == "exit_actor":
            ray.actor.exit_actor()
        elif how == "sys.exit":
            sys.exit(1)
        return x

    def zeros(self, n: int) -> Any:
        import numpy

        return numpy.zeros(n, numpy.uint8)

    def total(self, x: Any) -> int:
        return int(x.sum())

    def modules(self) -> list[str]:
        return list(sys.modules)

    def learn(self, directory: str) -> None:
        sys.path.insert(0, directory)

    def pid(self) -> int:
        return os.getpid()

    def vitals(self) -> dict[str, int]:
        """Descriptors, memfds among them, and threads of this process."""
        return vitals()

    def get_inside(self, x: Any) -> Any:
        """Uses Ray inside a node's method."""
        return ray.get(ray.put(x))


class Broken:
    """An actor that cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("cannot begin")

    def echo(self, x: Any) -> Any:
        return x


class Asynchronous:
    """An actor of asynchronous methods."""

    async def method(self, x: Any) -> Any:
        return x

    async def stream(self, x: Any) -> Any:
        yield x


def vitals() -> dict[str, int]:
    """Descriptors, raycomm's memfds among them (mappings too), and threads of this process."""
    descriptors = os.listdir("/proc/self/fd")
    maps = Path("/proc/self/maps").read_text()
    loops = [thread for thread in threading.enumerate() if thread.name.startswith("raycomm:")]
    return {
        "descriptors": len(descriptors),
        "memfds": sum("memfd:raycomm" in _target(descriptor) for descriptor in descriptors),
        "maps": maps.count("memfd:raycomm"),
        "threads": len(os.listdir("/proc/self/task")),
        "loops": len(loops),
    }


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # closed meanwhile
        return ""


Worker = ray.remote(num_cpus=0)(WorkerBody)


def start(count: int, **options: Any) -> list[Any]:
    """`count` workers named w0, w1, ..., all up."""
    workers = [Worker.options(**options).remote(f"w{index}") for index in range(count)]
    ray.get([worker.pid.remote() for worker in workers])
    return workers


def holds_nothing(vitals: dict[str, int]) -> bool:
    return not any(vitals[name] for name in ("loops", "memfds", "maps"))


def free(*workers: Any) -> None:
    """These actors answer at once, and hold nothing of any graph."""
    assert ray.get([worker.add.remote(1) for worker in workers], timeout=PATIENCE_S) == [2] * len(workers)
    for worker in workers:
        until(lambda worker=worker: holds_nothing(ray.get(worker.vitals.remote())), "the loop leaves")
