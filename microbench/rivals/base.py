"""What a system has to offer to be measured, and the actors that all of them run on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import ray

from microbench.leftovers import scratch_directory
from microbench.rows import Topology

START_LIMIT_S = 60.0
KILL_LIMIT_S = 5.0


@dataclass(frozen=True)
class Calls:
    """The calls of an open system. Plain functions, since a method lookup more would show in the fastest rows."""

    call: Callable[[Any], Any]  # one execution: the value it returns, all outputs fetched
    submit: Callable[[Any], Any]  # starts one execution: a ticket
    fetch: Callable[[Any], Any]  # the value of a ticket


class System(Protocol):
    """One way to call actors. It is opened on one topology at a time and may be opened again after `close`."""

    name: str

    def open(self, topology: Topology) -> Calls:
        """Builds the topology and returns once it can be called."""

    def actors(self) -> list[Any]:
        """The actors in use."""

    def processes(self) -> list[int]:
        """The pids of the actors in use."""

    def close(self) -> None:
        """Leaves nothing behind that uses a core."""


class Echo:
    """The actor of every row: gives back what it was given."""

    def __init__(self) -> None:
        # Imported before any graph waits: beside three spinning loops it takes several times as long.
        import torch  # noqa: F401

    def echo(self, value: Any) -> Any:
        return value

    def pid(self) -> int:
        return os.getpid()

    def compute(self, begun: str, over: str) -> None:
        """Holds the interpreter as a CPU-bound plain call does: makes the file `begun`, ends when there is a file `over`."""
        Path(begun).touch()
        while not os.path.exists(over):  # which lets go of the interpreter lock, so it is asked every 10 ms or so
            for _ in range(1000):
                sum(range(1000))


class Actors:
    """Starts and ends actors; idle ones are kept, since starting one costs a second of CPU time.

    Only a system that leaves its actors idle may take from `kept`. Ray's compiled graph spins a full core in each actor
    until it is killed, so that one takes `fresh` actors and kills them.
    """

    def __init__(self, body: type = Echo) -> None:
        # num_cpus=0: the machine may have fewer cores than the graph has actors.
        self._class: Any = ray.remote(num_cpus=0)(body)
        self._kept: list[Any] = []

    def fresh(self, count: int) -> list[Any]:
        """New actors, constructed."""
        actors = [self._class.remote() for _ in range(count)]
        self.pids(actors)
        return actors

    def kept(self, count: int) -> list[Any]:
        """Idle actors, from earlier rounds where there are enough."""
        self._kept += self.fresh(count - len(self._kept)) if len(self._kept) < count else []
        return self._kept[:count]

    def pids(self, actors: list[Any]) -> list[int]:
        pids: list[int] = ray.get([actor.pid.remote() for actor in actors], timeout=START_LIMIT_S)
        return pids

    def kill(self, actors: list[Any], pids: list[int]) -> None:
        """Kills actors and returns once their processes are gone, so that the next turn has the cores to itself."""
        for actor in actors:
            ray.kill(actor)
        processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        _, alive = psutil.wait_procs(processes, timeout=KILL_LIMIT_S)
        if alive:
            raise TimeoutError(f"actors still there {KILL_LIMIT_S:.0f} s after ray.kill: {[process.pid for process in alive]}")

    def discard(self) -> None:
        """Kills the kept actors: after a failure nobody knows what still runs in them."""
        kept, self._kept = self._kept, []
        for actor in kept:
            ray.kill(actor)


@contextmanager
def busy_call(actor: Any) -> Iterator[None]:
    """A plain call of `actor` computes meanwhile."""
    with scratch_directory() as directory:
        begun, over = Path(directory, "begun"), Path(directory, "over")
        call = actor.compute.remote(str(begun), str(over))
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while not begun.exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the busy call did not begin within {START_LIMIT_S:.0f} s")
                time.sleep(0.001)
            yield
        finally:
            over.touch()
            ray.get(call, timeout=START_LIMIT_S)


def graph_calls(execute: Any, topology: Topology) -> Calls:
    """The calls of a compiled graph, the same for raycomm's and Ray's: `execute(x).get()`, each ref by its own `get`."""
    return calls_of_all(execute) if topology is Topology.BROADCAST4 else calls_of_one(execute)


def calls_of_one(execute: Any) -> Calls:
    """Of a graph with one output."""

    def call(value: Any) -> Any:
        return execute(value).get()

    def fetch(ref: Any) -> Any:
        return ref.get()

    return Calls(call, execute, fetch)


def calls_of_all(execute: Any) -> Calls:
    """Of a graph with several outputs, all of them fetched."""

    def call(value: Any) -> Any:
        return [ref.get() for ref in execute(value)]

    def fetch(refs: Any) -> Any:
        return [ref.get() for ref in refs]

    return Calls(call, execute, fetch)
