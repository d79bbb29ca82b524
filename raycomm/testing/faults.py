"""Faults: what an actor is to do, at which point of its loop, in which execution.

`inject` says so to the graphs compiled inside it. The faults travel to their actors with the rest of the set-up, and the loop
puts them into its list of steps where they belong; a graph without faults has no step more for it. A fault strikes once a graph.

There are no points in the driver, for a test already holds it: a value whose `__reduce__` acts is caught in the middle of a
write, a fault that stalls an actor is caught while the driver waits.

An actor that runs out of memory is killed by the kernel or by Ray with SIGKILL: `Kill` stands for both.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Point(StrEnum):
    """Where an actor is when a fault strikes."""

    SETUP_BEGIN = "set-up begins"
    """In the set-up call, before this actor has any memory of the graph."""
    SETUP_ARENA = "arena made"
    """In the set-up call, before the driver knows the address of the actor's memory."""
    SETUP_LINKS = "before links"
    """On the loop's thread, attached to all others, before the links over which tensors go are set up, if there are any."""
    SETUP_READY = "attached"
    """On the loop's thread, attached to all others, before it says that it is ready."""
    BEFORE_READ = "before read"
    """Before it waits for a value. With several reads in the loop, before the first it comes to."""
    AFTER_READ = "after read"
    """It has taken a value, whose slot the writer may use again."""
    BEFORE_CALL = "before call"
    """Where the method's body would begin. What `Raise` raises here, the method has raised."""
    AFTER_CALL = "after call"
    """The method's body has returned. What `Raise` raises here, the method has raised."""
    BEFORE_WRITE = "before write"
    """It has a result and has not begun to write it."""
    AFTER_WRITE = "after write"
    """Readers can see the value; the actor still holds what it was made from."""
    LEAVING = "leaving"
    """The graph is closed, by teardown or otherwise, and the loop is about to say that it has left."""


_OF_CALLS = (Point.BEFORE_CALL, Point.AFTER_CALL)
_OF_EXECUTIONS = (Point.BEFORE_READ, Point.AFTER_READ, *_OF_CALLS, Point.BEFORE_WRITE, Point.AFTER_WRITE)


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL: the process ends between two instructions, and nothing of it runs any more."""


@dataclass(frozen=True, slots=True)
class Exit:
    """`os._exit(code)`: the process ends without finalizers."""

    code: int = 1


@dataclass(frozen=True, slots=True)
class ExitActor:
    """`ray.actor.exit_actor()`, as a method would call it."""


@dataclass(frozen=True, slots=True)
class Raise:
    """Raise an exception, which must pickle. At a call it fails the execution, elsewhere it is a failure of the loop itself,
    which closes the graph."""

    exception: Exception


@dataclass(frozen=True, slots=True)
class Sleep:
    """Go on after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stall:
    """Stay at the point until released.

    Args:
        path: of a file that does not exist, in a directory that does; actor and test must both see it.
        limit_s: seconds after which a `TimeoutError` is raised at the point: nobody has come to release it.
    """

    path: str
    limit_s: float = 60.0

    def reached(self) -> bool:
        """Whether an actor has come to the point."""
        return Path(f"{self.path}.reached").exists()

    def wait_reached(self, limit_s: float = 60.0) -> None:
        """Return once an actor has come to the point.

        Raises:
            TimeoutError: none came within `limit_s` seconds.
        """
        _wait_for(Path(f"{self.path}.reached"), limit_s, f"no actor came to the stall {self.path} within {limit_s} s")

    def release(self) -> None:
        """Let the actor go on, now or when it comes."""
        Path(self.path).touch()

    def stay(self) -> None:
        """In the actor: say that it is here, and wait."""
        Path(f"{self.path}.reached").touch()
        _wait_for(Path(self.path), self.limit_s, f"nobody released the stall {self.path} within {self.limit_s} s")


Action = Kill | Exit | ExitActor | Raise | Sleep | Stall


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    Args:
        actor: a handle; or a label as `print(graph.plan)` shows it; or a class name, which then only one actor of the graph has.
        point: where in its loop.
        action: what happens there.
        execution: in which; None: the first that comes to the point. Points outside an execution have none.
        method: of which call; None: of any. For points at a call.
    """

    actor: object
    point: Point
    action: Action
    execution: int | None = None
    method: str | None = None

    def __post_init__(self) -> None:
        if self.execution is not None and self.point not in _OF_EXECUTIONS:
            raise ValueError(f"point {self.point.name} belongs to no execution, and execution={self.execution} was given")
        if self.method is not None and self.point not in _OF_CALLS:
            raise ValueError(f"point {self.point.name} belongs to no call, and method={self.method!r} was given")


_injected: ContextVar[tuple[Fault, ...]] = ContextVar("raycomm.testing.faults", default=())


@contextlib.contextmanager
def inject(*faults: Fault) -> Iterator[None]:
    """Graphs compiled inside, by this thread or task, have these faults, besides those of an outer `inject`.

    A fault whose actor is not in a graph is a `CompileError` there, so that no test waits for what cannot happen.
    """
    token = _injected.set((*_injected.get(), *faults))
    try:
        yield
    finally:
        _injected.reset(token)


def injected() -> tuple[Fault, ...]:
    """The faults for a graph that is compiled now."""
    return _injected.get()


def _wait_for(file: Path, limit_s: float, otherwise: str) -> None:
    end = time.monotonic() + limit_s
    while not file.exists():
        if time.monotonic() >= end:
            raise TimeoutError(otherwise)
        time.sleep(0.002)
