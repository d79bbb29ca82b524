"""Chains and fans of actors for the pipeline bench, in raycomm and in Ray Compiled Graphs, word for word the same."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import ray

from microbench.pipeline_rows import Shape, Wiring
from microbench.rivals.base import Actors, Calls, calls_of_all, calls_of_one

IMPORT_LIMIT_S = 90.0  # 16 actors that import torch on two cores take 20 s, and as long again beside other work
COMPILE_LIMIT_S = 60.0
CALL_LIMIT_S = 30  # of one execution; Ray's 10 seconds may be too few where spinning loops outnumber the cores
TEARDOWN_LIMIT_S = 5.0
IDLE_WINDOW_S = 0.2
IDLE_SHARE = 0.5  # of a window: a thread that waits wants a core for a hundredth of it, one that spins for all of it


class Stage:
    """The actor of every row."""

    def echo(self, value: Any) -> Any:
        return value

    def pause(self, seconds: float) -> float:
        if seconds:
            time.sleep(seconds)
        return seconds

    def load(self, modules: Sequence[str]) -> None:
        for module in modules:
            importlib.import_module(module)

    def pid(self) -> int:
        return os.getpid()


class Pipelines(Protocol):
    """One system. It has one graph at a time, made of the actors that it has started so far and of more if it needs them."""

    def compile(self, shape: Shape) -> Calls:
        """A graph that can be called."""

    def teardown(self) -> None:
        """Ends the graph. Its actors may go into the next one."""

    def rest(self) -> None:
        """Leaves nothing behind that uses a core: it is another system's turn."""

    def discard(self) -> None:
        """Ends the actors, whatever they do: after a failure nobody knows what still runs in them."""


class RaycommPipelines:
    """Actors of a graph that was torn down are idle, and serve to the end."""

    def __init__(self) -> None:
        self._pool = Actors(Stage)
        self._graph: Any = None

    def compile(self, shape: Shape) -> Calls:
        import raycomm
        from raycomm import InputNode, MultiOutputNode, bind

        actors = self._pool.kept(shape.actors)
        _load(actors, shape.imports)
        with InputNode() as value:
            output = connect(value, actors, shape, bind, MultiOutputNode)
        self._graph = raycomm.compile(
            output, compile_timeout=COMPILE_LIMIT_S, get_timeout=CALL_LIMIT_S, submit_timeout=CALL_LIMIT_S
        )
        return calls(self._graph.execute, shape)

    def teardown(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.teardown()

    def rest(self) -> None:
        """Nothing to do: idle actors sleep."""

    def discard(self) -> None:
        self._pool.discard()


class RayPipelines:
    """Actors go from graph to graph, and stay for the next round, only where Ray has verifiably let go of them.

    While a graph is there its loops spin a full core in each actor. Its `teardown` can hang, and only a kill frees the cores
    then; but to start 16 actors anew each round takes longer than all that is measured, since each imports torch for Ray's
    channels. So a teardown that passes its limit costs the actors, and so does a thread that still spins when it is the other
    system's turn.
    """

    def __init__(self) -> None:
        self._pool = Actors(Stage)
        self._actors: list[Any] = []
        self._pids: list[int] = []
        self._dag: Any = None

    def compile(self, shape: Shape) -> Calls:
        from ray.dag import DAGContext, InputNode, MultiOutputNode

        if len(self._actors) < shape.actors:
            self._actors += self._pool.fresh(shape.actors - len(self._actors))
            self._pids = self._pool.pids(self._actors)
        actors = self._actors[: shape.actors]
        # Else it happens in the first execution, beside loops that spin, and takes several times as long.
        _load(actors, ("torch", *shape.imports))
        with InputNode() as value:
            output = connect(value, actors, shape, lambda method, node: method.bind(node), MultiOutputNode)
        context = DAGContext.get_current()
        context.get_timeout = context.submit_timeout = CALL_LIMIT_S
        self._dag = output.experimental_compile()
        return calls(self._dag.execute, shape)

    def teardown(self) -> None:
        dag, self._dag = self._dag, None
        if dag is not None and not returns_within(dag.teardown, TEARDOWN_LIMIT_S):
            self.discard()

    def rest(self) -> None:
        if not idle(self._pids, IDLE_WINDOW_S):
            self.discard()

    def discard(self) -> None:
        actors, self._actors = self._actors, []
        pids, self._pids = self._pids, []
        self._pool.kill(actors, pids)
        self._dag = None  # not before: a graph that is dropped is torn down, which may hang


def connect(value: Any, actors: Sequence[Any], shape: Shape, bind: Callable[[Any, Any], Any], outputs: Any) -> Any:
    """The last node of the graph.

    Args:
        value: the node of the graph's input.
        bind: makes a node of an actor's method and of the node whose value it is given.
        outputs: makes one node of several.
    """
    methods = [getattr(actor, shape.method) for actor in actors]
    if shape.wiring is Wiring.FAN_OUT:
        return outputs([bind(method, value) for method in methods])
    node = value
    for method in methods:
        node = bind(method, node)
    return node


def calls(execute: Any, shape: Shape) -> Calls:
    """The calls of a compiled graph."""
    return calls_of_all(execute) if shape.wiring is Wiring.FAN_OUT else calls_of_one(execute)


def returns_within(call: Callable[[], Any], limit_s: float) -> bool:
    """Whether a call that may hang came back. One that did not is left behind on its thread; what it raises counts as not."""
    returned: list[bool] = []

    def run() -> None:
        try:
            call()
        except Exception:
            return
        returned.append(True)

    thread = threading.Thread(target=run, name="raycomm-bench-returns-within", daemon=True)
    thread.start()
    thread.join(limit_s)
    return bool(returned)


def idle(pids: Sequence[int], window_s: float) -> bool:
    """Whether processes are all there, and none of their threads spins.

    Told by the time that a thread has a core or stands in line for one, so that it is the same on a machine that is full.
    """
    before, start = _wanted_ns(pids), time.perf_counter_ns()
    time.sleep(window_s)
    after, stop = _wanted_ns(pids), time.perf_counter_ns()
    if before is None or after is None:
        return False
    return all(wanted - before.get(thread, 0) < IDLE_SHARE * (stop - start) for thread, wanted in after.items())


def _wanted_ns(pids: Sequence[int]) -> dict[str, int] | None:
    """Nanoseconds that each thread has run or waited for a core; None: one of the processes is gone."""
    wanted = {}
    for pid in pids:
        try:
            threads = list(Path(f"/proc/{pid}/task").iterdir())
        except OSError:
            return None
        for thread in threads:
            try:
                ran, waited, _ = (thread / "schedstat").read_text().split()
            except OSError:
                continue  # it has just ended
            wanted[thread.name] = int(ran) + int(waited)
    return wanted


def _load(actors: Sequence[Any], modules: Sequence[str]) -> None:
    if modules:
        ray.get([actor.load.remote(modules) for actor in actors], timeout=IMPORT_LIMIT_S)
