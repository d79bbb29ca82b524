"""`raycomm.wait`, `ref.done()` and `ref.cancel()`."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
import ray

import raycomm
from raycomm import ActorDiedError, ChannelClosedError, ExecutionCancelledError, InputNode, MultiOutputNode, bind
from tests.ray.workers import PATIENCE_S, Gate, chain, start, until

pytestmark = pytest.mark.usefixtures("cluster")

_DEATH_S = 20.0  # ten times the promise


def held(first: Any, second: Any, gate: Gate) -> Any:
    """input -> first notes, then holds at the gate -> second passes on."""
    with InputNode() as x:
        return bind(second.echo, bind(first.hold, bind(first.note, x), gate.path))


def late(first: Any, second: Any, gate: Gate) -> Any:
    """Two outputs: the first at once, the second once the gate is open."""
    with InputNode() as x:
        return MultiOutputNode([bind(first.echo, x), bind(second.hold, x, gate.path)])


def test_done(workers: list[Any], gate: Gate) -> None:
    with raycomm.compile(late(workers[0], workers[1], gate)) as graph:
        early, other = graph.execute(1)
        until(early.done, "the first output is there")
        assert not other.done()
        gate.open()
        until(other.done, "the second output is there")
        assert (early.get(timeout=0), other.get(timeout=0)) == (1, 1)
        assert early.done()
        assert other.done()
        last = graph.execute(2)[0]
    assert last.done()  # get would raise at once
    with pytest.raises(ChannelClosedError):
        last.get()


def test_wait_returns_who_is_done(workers: list[Any], gate: Gate) -> None:
    with raycomm.compile(late(workers[0], workers[1], gate)) as graph:
        rows = [graph.execute(value) for value in range(4)]
        refs = [ref for row in reversed(rows) for ref in reversed(row)]
        early = [row[0] for row in reversed(rows)]
        assert raycomm.wait(refs, num_returns=4, timeout=PATIENCE_S) == (early, [ref for ref in refs if ref not in early])
        # No more than asked for, the first of the list; the others stay pending although they are done.
        assert raycomm.wait(refs, num_returns=2) == (early[:2], [ref for ref in refs if ref not in early[:2]])
        for limit in (0, 0.02):
            done, pending = raycomm.wait(refs, num_returns=5, timeout=limit)
            assert (done, len(pending)) == (early, 4)
        begin = time.monotonic()
        threading.Timer(0.1, gate.open).start()
        assert raycomm.wait(refs, num_returns=8, timeout=PATIENCE_S) == (refs, [])
        assert time.monotonic() - begin >= 0.1
        assert all(ref._value is raycomm.runtime.refs.PENDING for ref in refs)  # nothing was fetched
        assert [ref.get() for ref in refs] == [3, 3, 2, 2, 1, 1, 0, 0]
        assert raycomm.wait(refs, num_returns=8, timeout=0) == (refs, [])


def test_wait_for_failures_and_inputs(workers: list[Any]) -> None:
    with InputNode() as x:
        node = MultiOutputNode([bind(workers[0].fail, x), x])
    with raycomm.compile(node) as graph:
        refs = graph.execute(1)
        assert raycomm.wait(refs, num_returns=2, timeout=PATIENCE_S) == (refs, [])
        with pytest.raises(ValueError, match="bad 1"):
            refs[0].get(timeout=0)
        assert refs[1].get(timeout=0) == 1


def test_wait_over_several_graphs(workers: list[Any], gate: Gate) -> None:
    with (
        raycomm.compile(held(workers[0], workers[1], gate)) as slow,
        raycomm.compile(chain(workers[1].echo)) as quick,
        raycomm.compile(chain(workers[2].add)) as other,
    ):
        refs = [slow.execute(0), quick.execute(1), other.execute(2)]
        assert raycomm.wait(refs, num_returns=2, timeout=PATIENCE_S) == (refs[1:], refs[:1])
        assert raycomm.wait(refs, num_returns=3, timeout=0.03) == (refs[1:], refs[:1])
        assert raycomm.wait(refs, num_returns=3, timeout=0) == (refs[1:], refs[:1])
        threading.Timer(0.05, gate.open).start()
        assert raycomm.wait(refs, num_returns=3, timeout=-1) == (refs, [])
        assert ray.get(refs) == [0, 1, 3]


@pytest.mark.parametrize("graphs", [1, 2])
def test_wait_ends_when_an_actor_dies(workers: list[Any], gate: Gate, graphs: int) -> None:
    victim = start(1)[0]
    pid = ray.get(victim.pid.remote())
    with raycomm.compile(held(victim, workers[1], gate)) as doomed, raycomm.compile(held(workers[0], workers[1], gate)) as well:
        lost = [doomed.execute(value) for value in range(2)]
        fine = [well.execute(value) for value in range(2)]
        gate.wait_entered(2)
        os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        assert raycomm.wait(lost + fine * (graphs - 1), num_returns=2, timeout=PATIENCE_S)[0] == lost
        assert time.monotonic() - begin < _DEATH_S
        for ref in lost:
            with pytest.raises(ActorDiedError):
                ref.get()
        gate.open()
        assert raycomm.wait(fine, num_returns=2, timeout=PATIENCE_S) == (fine, [])
        assert ray.get(fine) == [0, 1]
    assert raycomm.wait(lost, num_returns=2) == (lost, [])


def test_wait_ends_with_a_teardown(workers: list[Any], gate: Gate) -> None:
    graph = raycomm.compile(held(workers[0], workers[1], gate))
    ref = graph.execute(1)
    threading.Timer(0.05, graph.teardown, (0.1,)).start()
    assert raycomm.wait([ref], timeout=PATIENCE_S) == ([ref], [])
    with pytest.raises(ChannelClosedError):
        ref.get()
    gate.open()
    graph.teardown()


def test_what_wait_refuses(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo)) as graph:
        ref = graph.execute(1)
        # It would be done and pending at once. Also where a node stands twice among the outputs, which then have one ref.
        with pytest.raises(ValueError, match="takes each ref once, and one is given twice"):
            raycomm.wait([ref, graph.execute(2), ref], num_returns=2)
        for number in (0, -1, 2):
            with pytest.raises(ValueError, match=f"num_returns={number} must lie between 1 and the number of refs, 1"):
                raycomm.wait([ref], num_returns=number)
        with pytest.raises(ValueError, match="num_returns=1 must lie between 1 and the number of refs, 0"):
            raycomm.wait([])
        plain = workers[0].pid.remote()
        for wrong in ([ref, plain], [1]):
            with pytest.raises(TypeError, match=r"takes refs of compiled graphs, got \w+; use ray\.wait"):
                raycomm.wait(wrong)
        with pytest.raises(TypeError, match=r"takes a list of refs, got a single \w*Ref; write raycomm\.wait\(\[ref\]\)"):
            raycomm.wait(ref)  # type: ignore[arg-type]
        for limit in (-2, float("nan"), "5"):
            with pytest.raises(ValueError, match="is not a time limit"):
                raycomm.wait([ref], timeout=limit)  # type: ignore[arg-type]
        assert ref.get() == 1


def test_an_execution_behind_a_running_one_is_cancelled(workers: list[Any], gate: Gate) -> None:
    counter = start(1)[0]
    with raycomm.compile(held(counter, workers[1], gate), name="g") as graph:
        refs = [graph.execute(value) for value in range(4)]
        gate.wait_entered()
        assert refs[2].cancel() is True
        assert refs[2].cancel() is True  # as often as it is asked
        assert refs[0].cancel() is False
        assert not refs[2].done()  # its turn has not come
        gate.open()
        assert [refs[index].get() for index in (0, 1, 3)] == [0, 1, 3]
        for _ in range(2):
            with pytest.raises(ExecutionCancelledError, match="execution 2 .*cancelled before it began") as caught:
                refs[2].get()
        assert caught.value.execution == 2
        assert refs[2].cancel() is False  # there is nothing left to cancel
        assert refs[2].done()
        assert graph.execute(4).get() == 4
    assert ray.get(counter.seen_so_far.remote()) == [0, 1, 3, 4]


def test_all_outputs_of_a_cancelled_execution_say_so(workers: list[Any], gate: Gate) -> None:
    """Two actors read the input, and one of them two parts of it: they agree."""
    counters = start(2)
    with InputNode() as x:
        a = bind(counters[0].hold, bind(counters[0].note, x[0]), gate.path)
        b = bind(counters[1].hold, bind(counters[1].note, x[1]), gate.path)
        c = bind(workers[0].join, a, b)
        node = MultiOutputNode([a, b, c, bind(counters[0].echo, x[1])])
    with raycomm.compile(node) as graph:
        rows = [graph.execute(value, -value) for value in range(3)]
        gate.wait_entered(2)
        assert not any(ref.cancel() for ref in rows[0])
        assert rows[1][2].cancel()
        gate.open()
        for ref in rows[1]:
            with pytest.raises(ExecutionCancelledError, match="execution 1"):
                ref.get(PATIENCE_S)
        for value in (0, 2):
            assert ray.get(rows[value]) == [value, -value, ((value, -value), {}), -value]
    assert ray.get([counter.seen_so_far.remote() for counter in counters]) == [[0, 2], [0, -2]]


def test_what_runs_or_is_finished_is_not_cancelled(workers: list[Any]) -> None:
    """Not even where so many came after it that nothing of it is remembered."""
    counter = start(1)[0]
    with raycomm.compile(chain(counter.note), max_inflight=1) as graph:
        refs = [graph.execute(value) for value in range(20)]
        until(refs[-1].done, "all are finished")
        assert not any(ref.cancel() for ref in refs)
        assert [ref.get() for ref in refs] == list(range(20))
        assert not any(ref.cancel() for ref in refs)
    assert ray.get(counter.seen_so_far.remote()) == list(range(20))


def test_a_cancelled_execution_gives_its_memory_back(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        node = bind(workers[0].hold, x, gate.path)
    with raycomm.compile(node, shm_limit_bytes=16 << 20) as graph:
        first = graph.execute(np.zeros(3 << 20, np.uint8))
        gate.wait_entered()
        others = [graph.execute(np.zeros(3 << 20, np.uint8)) for _ in range(2)]
        assert graph.stats().pools[0].held_by == {graph.plan.processes[1].label: 9 << 20}
        assert all(ref.cancel() for ref in others)
        gate.open()
        for ref in others:
            with pytest.raises(ExecutionCancelledError):
                ref.get(PATIENCE_S)
        until(lambda: not graph.stats().pools[0].held_by, "the actor holds nothing any more")
        assert first.get().nbytes == 3 << 20


def test_cancel_after_the_end(workers: list[Any], gate: Gate) -> None:
    victim = start(1)[0]
    graph = raycomm.compile(held(workers[0], workers[1], gate))
    refs = [graph.execute(value) for value in range(2)]
    gate.wait_entered()
    graph.teardown(0)
    assert [ref.cancel() for ref in refs] == [False, False]
    gate.open()
    graph.teardown()
    with raycomm.compile(chain(victim.echo, workers[1].echo)) as graph:
        assert graph.execute(1).get() == 1
        os.kill(ray.get(victim.pid.remote()), signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            while True:
                ref = graph.execute(2)
                ref.get()
        assert ref.cancel() is False


def test_a_storm_of_cancellations_shifts_nothing(workers: list[Any], rng: random.Random) -> None:
    """True means that no method saw it, False that it ran; the values are those of their executions."""
    counter = start(1)[0]
    ran: list[int] = []
    with InputNode() as x:
        node = MultiOutputNode([bind(counter.note, x), bind(workers[0].add, x)])
    with raycomm.compile(node, max_inflight=8) as graph:
        window: list[tuple[int, Any, Any, bool]] = []
        for value in range(1500):
            first, second = graph.execute(value, timeout=PATIENCE_S)
            said = False
            if rng.random() < 0.5:
                said = rng.choice([first, second]).cancel()
            window.append((value, first, second, said))
            if rng.random() < 0.2:
                victim = rng.randrange(len(window))
                number, a, b, before = window[victim]
                window[victim] = (number, a, b, a.cancel() or before)
            while len(window) > 6:
                number, a, b, cancelled = window.pop(rng.randrange(len(window)))
                if cancelled:
                    for ref in (a, b):
                        with pytest.raises(ExecutionCancelledError, match=f"execution {number} "):
                            ref.get(PATIENCE_S)
                else:
                    assert (b.get(PATIENCE_S), a.get(PATIENCE_S)) == (number + 1, number)
                    ran.append(number)
        left = [number for number, _, _, cancelled in window if not cancelled]
        assert [b.get(PATIENCE_S) for _, _, b, cancelled in window if not cancelled] == [number + 1 for number in left]
        until(lambda: graph.status().finished == 1500, "all are finished")
    assert ray.get(counter.seen_so_far.remote()) == sorted(ran + left)
    assert len(ran) > 100
