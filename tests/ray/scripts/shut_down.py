"""Compiles graphs, shuts Ray down, starts it again, and checks what the graphs and the old handles say. Prints "well" at the end.

    python tests/ray/scripts/shut_down.py [with | without] DIRECTORY

"without": as if Ray had no table of graphs any more; then a graph finds out as soon as an actor is seen dead.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import ray

sys.path.insert(0, str(Path(__file__).parents[3]))
import raycomm
from tests.ray.workers import PATIENCE_S, Gate, chain, start, until

HOOK, DIRECTORY = sys.argv[1:]
SAID = "graph 'g' has ended: Ray was shut down in this process, and actors that belong to it are gone. Call ray.init()"


def init() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)


def raised(call: Any) -> BaseException:
    """What a call raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def check_ended(graph: Any, *refs: Any) -> None:
    """All that may be asked of a graph says that Ray was shut down."""
    for use in (lambda: graph.execute(3), *(ref.get for ref in refs)):
        error: Any = raised(use)
        assert isinstance(error, raycomm.ChannelClosedError), error
        assert str(error).startswith(SAID), error
        assert (error.graph, error.reason) == ("g", "shutdown")
    assert all(ref.done() and not ref.cancel() for ref in refs)
    assert "Ray was shut down in this process" in graph.status().state
    assert "Ray was shut down in this process" in repr(graph)


def main() -> None:
    if HOOK == "without":
        adapter, ref_type, _ = raycomm._ray_dag()
        raycomm._ray_dag = lambda: (adapter, ref_type, None)
    init()
    gate = Gate(str(Path(DIRECTORY) / "gate"))
    idle, holder = start(2)
    graph = raycomm.compile(chain(idle.echo), name="g")
    with raycomm.InputNode() as x:
        busy = raycomm.compile(raycomm.bind(holder.hold, x, gate.path), name="g")
    ended_before = raycomm.compile(chain(idle.echo), name="before")
    ended_before.teardown()
    fetched, unfetched, stuck = graph.execute(1), graph.execute(2), busy.execute(3)
    assert fetched.get() == 1
    gate.wait_entered()
    errors: list[BaseException] = []
    thread = threading.Thread(target=lambda: errors.append(raised(stuck.get)))
    thread.start()
    ray.shutdown()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert str(errors[0]).startswith(SAID), errors
    if HOOK == "with":
        refs = [unfetched]
    else:  # after a death what had come can still be had
        refs = []
        until(lambda: graph.ended or graph._arena.core.look_for_dead(), "the death is seen")
    for _ in range(2):
        check_ended(graph, *refs)
        check_ended(busy, stuck)
        assert fetched.get() == 1
        if not ray.is_initialized():
            init()
    before: Any = raised(lambda: ended_before.execute(1))
    assert (before.reason, ended_before.state) == ("teardown", "torn down")
    error: Any = raised(lambda: raycomm.compile(chain(idle.echo), name="old"))
    assert isinstance(error, raycomm.CompileError), error
    for part in ("graph 'old' cannot be set up", "WorkerBody", idle._actor_id.hex(), "make the actor again after ray.init()"):
        assert part in str(error), error
    with raycomm.compile(chain(start(1)[0].echo)) as again:
        assert again.execute(4).get(timeout=PATIENCE_S) == 4
    for old in (graph, busy):
        old.teardown()
    gate.open()
    print("well")


main()
