"""What runs inside the bench process of the lifecycle rows: one local Ray cluster, and the measuring of one row at a time.

Both systems do the same: the same actors' class, the same chain, `execute(x).get()`. A teardown runs in a thread of its own, so
that one that hangs costs its limit and its row; the actors are killed then, and with the close of the turn the process.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from microbench.footprint import Footprint
from microbench.harness import Effort, Measurement, highest_cpu_percent
from microbench.leftovers import scratch_directory
from microbench.lifecycle_rows import (
    GRAPHS,
    LIFECYCLE_ROWS,
    RAY_ACTORS,
    RAY_GRAPH,
    RAYCOMM,
    WARM_GRAPHS,
    Group,
    Kind,
    LifecycleRow,
    growth,
    in_milliseconds,
)
from microbench.rivals.base import START_LIMIT_S, Actors, Echo
from microbench.session import WrongResult

CALL_LIMIT_S = 60.0  # of one call: Ray's first one imports what its loops need
TEARDOWN_LIMIT_S = 10.0
QUIET_S = 2.0  # an idle graph is measured this long after its last message
SETTLE_S = 0.5  # until a driver that waits has stopped spinning, and threads of a graph that was torn down are gone
AT_RANDOM_S = 1.0  # a death comes up to so much later: at a fixed time it could be in step with a system's looks at its processes
HELD_S = 600.0  # a call that is to be killed would last this long


class Lifelike(Echo):
    """Gives back what it was given; or stays in its method until it is killed."""

    def echo_or_hold(self, path: str) -> str:
        """Makes the file and stays, where a path is given."""
        if path:
            Path(path).touch()
            time.sleep(HELD_S)
        return path


class Lifecycle(Protocol):
    """How a system makes a graph of a chain. Both kinds of graph have `execute` and `teardown`."""

    died: type[Exception]  # what a driver has to be told
    leaves_memory: bool  # in Ray's object store, until the cluster ends

    def prepare(self, methods: Sequence[Any]) -> Callable[[], Any]:
        """What compiles the chain of these actor methods; its nodes are made already."""


class RaycommLifecycle:
    """See `Lifecycle`."""

    leaves_memory = False

    def __init__(self) -> None:
        import raycomm

        self.died: type[Exception] = raycomm.ActorDiedError

    def prepare(self, methods: Sequence[Any]) -> Callable[[], Any]:
        import raycomm

        with raycomm.InputNode() as value:
            node: Any = value
            for method in methods:
                node = raycomm.bind(method, node)
        return lambda: raycomm.compile(node)


class RayLifecycle:
    """See `Lifecycle`. Ray 2.60 keeps the buffers of each channel, 10 MiB, after teardown and the death of all actors."""

    leaves_memory = True

    def __init__(self) -> None:
        import ray.exceptions

        self.died: type[Exception] = ray.exceptions.ActorDiedError

    def prepare(self, methods: Sequence[Any]) -> Callable[[], Any]:
        from ray.dag import InputNode

        with InputNode() as value:
            node: Any = value
            for method in methods:
                node = method.bind(node)
        compiled: Callable[[], Any] = node.experimental_compile
        return compiled


ADAPTERS: dict[str, Callable[[], Lifecycle | None]] = {
    RAYCOMM: RaycommLifecycle,
    RAY_GRAPH: RayLifecycle,
    RAY_ACTORS: lambda: None,
}


@dataclass(frozen=True)
class Cycle:
    """One graph, compiled, called once, torn down. `teardown_ns` is None where that did not return in time."""

    compile_ns: int
    ready_ns: int  # compile and the first result
    teardown_ns: int | None


class LifecycleSession:
    """One system open at a time, on actors that are new with each `open`.

    Attributes:
        body: of the actors.
    """

    body: ClassVar[type] = Lifelike

    def __init__(self) -> None:
        self._pool: Actors | None = None
        self._system: Lifecycle | None = None
        self._actors: list[Any] = []
        self._pids: list[int] = []
        self._had_graphs = False  # these actors
        self._graph: Any = None  # compiled and not yet torn down
        self._hanging: list[threading.Thread] = []
        self._cycles: dict[int, list[Cycle]] = {}  # by number of nodes

    def open(self, system: str, group: str) -> None:
        """Makes a system ready for the rows of a group."""
        if self._pool is None:
            import ray

            ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            self._pool = Actors(self.body)
        self._system = ADAPTERS[system]()
        self._cycles = {}
        self._start(Group(group).actors)

    def measure(self, name: str, effort: Effort) -> Measurement:
        """One row of the open system. Each graph's result is checked."""
        row = LIFECYCLE_ROWS[name]
        match row.kind:
            case Kind.NEW_ACTORS:
                if self._had_graphs:
                    self._restart()
                return _compiled([self._cycle(row.nodes)])
            case Kind.COMPILE:
                self._cycles[row.nodes] = self._many_cycles(row.nodes, effort)
                return _compiled(self._cycles[row.nodes])
            case Kind.TEARDOWN:
                # Those of the row before, where it was asked for.
                cycles = self._cycles.pop(row.nodes, None) or self._many_cycles(row.nodes, effort)
                return in_milliseconds(_teardowns(cycles))
            case Kind.IDLE:
                return self._idle(row, effort)
            case Kind.GROWTH:
                return self._growth(row)
            case Kind.DEATH_IDLE | Kind.DEATH_IN_CALL:
                return in_milliseconds([self._death(row) for _ in range(effort.min_calls)])

    def close(self, discard: bool) -> None:
        """Ends the graph, where a failure left one, and the actors. Raises `TimeoutError` while a teardown still hangs."""
        if self._graph is not None:
            self._teardown()
        self._kill()
        self._hanging = [thread for thread in self._hanging if thread.is_alive()]
        if self._hanging:
            raise TimeoutError("a teardown hangs")
        if self._system is not None and self._system.leaves_memory:
            self._end_cluster()

    def shutdown(self) -> None:
        """Ends the cluster."""
        self.close(discard=True)
        self._end_cluster()

    def _end_cluster(self) -> None:
        if self._pool is not None:
            import ray

            self._pool = None
            ray.shutdown()

    def _start(self, count: int) -> None:
        assert self._pool is not None
        self._actors = self._pool.fresh(count)
        self._pids = self._pool.pids(self._actors)
        self._had_graphs = False

    def _kill(self) -> None:
        actors, self._actors = self._actors, []
        if actors and self._pool is not None:
            self._pool.kill(actors, self._pids)

    def _restart(self) -> None:
        count = len(self._actors)
        self._kill()
        self._start(count)

    def _compile(self, methods: Sequence[Any]) -> int:
        """Nanoseconds that it took."""
        if self._system is None:
            raise RuntimeError("no system is open")
        compiled = self._system.prepare(methods)
        self._had_graphs = True
        start = time.perf_counter_ns()
        self._graph = compiled()
        return time.perf_counter_ns() - start

    def _call(self, value: Any) -> None:
        got = self._graph.execute(value).get(timeout=CALL_LIMIT_S)
        if got != value:
            raise WrongResult(f"a graph returned {got!r:.80} where {value!r} was sent")

    def _teardown(self) -> int | None:
        """Nanoseconds that it took; None: it hangs."""
        graph, self._graph = self._graph, None
        came: list[int | BaseException] = []

        def tear_down() -> None:
            start = time.perf_counter_ns()
            try:
                graph.teardown()
                came.append(time.perf_counter_ns() - start)
            except BaseException as error:  # raised below
                came.append(error)

        thread = threading.Thread(target=tear_down, daemon=True)
        thread.start()
        thread.join(TEARDOWN_LIMIT_S)
        if thread.is_alive():
            self._hanging.append(thread)
            return None
        if isinstance(came[0], BaseException):
            raise came[0]
        return came[0]

    def _cycle(self, nodes: int) -> Cycle:
        start = time.perf_counter_ns()
        compile_ns = self._compile([self._actors[index % len(self._actors)].echo for index in range(nodes)])
        prepared = time.perf_counter_ns() - compile_ns - start
        self._call(nodes)
        ready_ns = time.perf_counter_ns() - start - prepared
        teardown_ns = self._teardown()
        if teardown_ns is None:
            self._restart()
        return Cycle(compile_ns, ready_ns, teardown_ns)

    def _many_cycles(self, nodes: int, effort: Effort) -> list[Cycle]:
        """The first one, which warms up, is left out, unless its teardown hangs: nothing is tried again then."""
        cycles = [self._cycle(nodes)]
        end = time.perf_counter() + effort.measure_s
        while cycles[-1].teardown_ns is not None:
            timed = len(cycles) - 1
            if timed >= effort.max_calls or (timed >= effort.min_calls and time.perf_counter() > end):
                break
            cycles.append(self._cycle(nodes))
        return cycles[1:] or cycles

    def _idle(self, row: LifecycleRow, effort: Effort) -> Measurement:
        if self._system is not None:
            self._compile([actor.echo for actor in self._actors[: row.nodes]])
            self._call(1)
        time.sleep(QUIET_S)
        percent = highest_cpu_percent([os.getpid(), *self._pids], effort.idle_s)
        if self._graph is not None:
            self._call(2)
            if self._teardown() is None:
                self._restart()
        return {"cpu_percent": percent}

    def _growth(self, row: LifecycleRow) -> Measurement:
        pids = {"driver": os.getpid(), "actor": self._pids[0]}
        self._use_graphs(row.nodes, WARM_GRAPHS)
        before = {name: Footprint.of(pid) for name, pid in pids.items()}
        self._use_graphs(row.nodes, GRAPHS)
        after = {name: Footprint.of(pid) for name, pid in pids.items()}
        measurement: Measurement = {}
        for name in pids:
            measurement |= growth(name, before[name], after[name], GRAPHS)
        return measurement | {"count": GRAPHS}

    def _use_graphs(self, nodes: int, count: int) -> None:
        _teardowns([self._cycle(nodes) for _ in range(count)])
        gc.collect()
        time.sleep(SETTLE_S)

    def _death(self, row: LifecycleRow) -> int:
        """Nanoseconds from the signal to the error."""
        if self._had_graphs:
            self._restart()
        first, second = self._actors
        self._compile([first.echo_or_hold, second.echo])
        for _ in range(2):
            self._call("")
        killed_ns = self._kill_idle() if row.kind is Kind.DEATH_IDLE else self._kill_in_call()
        self._teardown()
        return killed_ns

    def _kill_idle(self) -> int:
        _settle()
        end = time.monotonic() + CALL_LIMIT_S
        start = time.perf_counter_ns()
        os.kill(self._pids[0], signal.SIGKILL)
        while time.monotonic() < end:  # a result may still come from a process that has the signal but was not told yet
            try:
                self._call("")
            except Exception as error:
                return self._heard(error, start)
        raise WrongResult("calls go on after the actor was killed")

    def _kill_in_call(self) -> int:
        signalled: list[int] = []

        def kill(entered: Path) -> None:
            end = time.monotonic() + START_LIMIT_S
            while not entered.exists() and time.monotonic() < end:
                time.sleep(0.001)
            _settle()
            signalled.append(time.perf_counter_ns())
            os.kill(self._pids[0], signal.SIGKILL)

        with scratch_directory() as directory:
            entered = Path(directory, "entered")
            killer = threading.Thread(target=kill, args=(entered,), daemon=True)
            ref = self._graph.execute(str(entered))
            killer.start()
            try:
                ref.get(timeout=START_LIMIT_S + CALL_LIMIT_S)
            except Exception as error:
                if not (signalled and entered.exists()):
                    raise
                return self._heard(error, signalled[0])
            finally:
                killer.join()
        raise WrongResult("a result came of a call whose actor was killed")

    def _heard(self, error: Exception, start: int) -> int:
        """Raises `WrongResult` for an error that does not say what happened."""
        stop = time.perf_counter_ns()
        assert self._system is not None
        if not isinstance(error, self._system.died):
            raise WrongResult(f"the driver was told {type(error).__name__}, not {self._system.died.__name__}: {error!s:.200}")
        return stop - start


def _settle() -> None:
    time.sleep(SETTLE_S + AT_RANDOM_S * random.random())


def _compiled(cycles: Sequence[Cycle]) -> Measurement:
    """Figures of the compile, and of compile and first result together."""
    ready = statistics.median(cycle.ready_ns for cycle in cycles) / 1e6
    return in_milliseconds([cycle.compile_ns for cycle in cycles]) | {"ready_p50_ms": ready}


def _teardowns(cycles: Sequence[Cycle]) -> list[int]:
    """Raises `TimeoutError` when one hung."""
    times = [cycle.teardown_ns for cycle in cycles]
    if None in times:
        raise TimeoutError(f"a teardown had not returned after {TEARDOWN_LIMIT_S:.0f} s")
    return [each for each in times if each is not None]
