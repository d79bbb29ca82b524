"""Edges without a value, and graphs whose executions take no argument, on real actors and nodes of both families."""

from __future__ import annotations

import random
from typing import Any

import pytest
import ray
from ray.dag import InputNode as RayInputNode
from ray.dag import MultiOutputNode as RayMultiOutputNode

import raycomm
from raycomm import ExecutionCancelledError, InputNode, MultiOutputNode, after, bind
from tests.ray.workers import PATIENCE_S, Gate, start

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return start(2)


class Family:
    """Nodes of one library."""

    def __init__(self, name: str) -> None:
        self._rays = name == "ray"
        self.input: Any = (RayInputNode if self._rays else InputNode)()
        self.results: Any = RayMultiOutputNode if self._rays else MultiOutputNode

    def call(self, method: Any, *args: Any) -> Any:
        return method.bind(*args) if self._rays else bind(method, *args)


@pytest.fixture(params=["ray", "raycomm"])
def nodes(request: pytest.FixtureRequest) -> Family:
    return Family(request.param)


@pytest.mark.parametrize("family", ["ray", "raycomm"])
def test_executions_without_an_argument(workers: list[Any], family: str) -> None:
    w, v = workers
    if family == "ray":
        with RayInputNode() as begin:
            pid = after(w.pid.bind(), begin)
            out: Any = RayMultiOutputNode([v.echo.bind(pid), pid])
    else:
        with InputNode() as begin:
            pid = bind(w.pid).after(begin)
            out = MultiOutputNode([bind(v.echo, pid), pid])
    expected = ray.get(w.pid.remote())
    with raycomm.compile(out) as graph:
        refs = [graph.execute() for _ in range(30)]
        assert [[ref.get(timeout=PATIENCE_S) for ref in pair] for pair in refs] == [[expected, expected]] * 30
        with pytest.raises(raycomm.ArgumentError, match="takes 0 positional arguments"):
            graph.execute(1)


def test_a_call_waits_without_being_given_the_value(workers: list[Any], gate: Gate) -> None:
    w, v = workers
    with InputNode() as x:
        held = bind(w.hold, x, gate.path)
        noted = bind(v.note, x).after(held)
    ray.get(v.seen_so_far.remote())
    with raycomm.compile(MultiOutputNode([held, noted])) as graph:
        before = ray.get(v.seen_so_far.remote())
        refs = graph.execute("late")
        gate.wait_entered()
        assert ray.get(v.seen_so_far.remote()) == before
        gate.open()
        assert [ref.get(timeout=PATIENCE_S) for ref in refs] == ["late", "late"]
        assert ray.get(v.seen_so_far.remote()) == [*before, "late"]


def test_failure_of_what_is_waited_for_is_not_passed_on(workers: list[Any]) -> None:
    w, v = workers
    with InputNode() as x:
        checked = bind(w.fail_if_odd, x)
        told = bind(v.echo, x).after(checked)
    with raycomm.compile(MultiOutputNode([checked, told])) as graph:
        for number in range(4):
            first, second = graph.execute(number)
            assert second.get(timeout=PATIENCE_S) == number
            if number % 2:
                with pytest.raises(ValueError, match=f"bad {number}"):
                    first.get(timeout=PATIENCE_S)
            else:
                assert first.get(timeout=PATIENCE_S) == number


def test_waiting_may_be_told_after_others_use_the_value(workers: list[Any], nodes: Family) -> None:
    """Late, twice, for what a call is given anyway, and for a call bound later on another actor."""
    w, v = workers
    a = nodes.call(w.add, nodes.input)
    x = nodes.call(v.add, nodes.input)
    y = nodes.call(v.join, a, x)
    z = nodes.call(w.add, nodes.input, 10)
    late = nodes.call(v.add, nodes.input, 20)
    after(x, a, a)
    after(y, a)
    after(z, late)
    with raycomm.compile(nodes.results([a, x, y, z, late])) as graph:
        for number in range(5):
            one = number + 1
            got = [ref.get(timeout=PATIENCE_S) for ref in graph.execute(number)]
            assert got == [one, one, ((one, one), {}), number + 10, number + 20]


def test_a_cancelled_execution_runs_no_call_that_only_waits(gate: Gate, nodes: Family) -> None:
    """Not where it waits for the beginning, for another actor, for its own, or for a call that was itself not run."""
    first, second, third = start(3)
    held = nodes.call(first.hold, nodes.input, gate.path)
    own = after(nodes.call(first.note, "own"), held)
    other = after(nodes.call(second.note, "other"), held)
    halves = nodes.call(second.split, 5)
    after(halves[0], own)
    begun = after(nodes.call(third.note, "begun"), nodes.input)
    last = after(nodes.call(third.note, "last"), other, begun)
    with raycomm.compile(nodes.results([held, own, other, *halves, begun, last])) as graph:
        rows = [graph.execute(number) for number in range(5)]
        gate.wait_entered()
        assert rows[1][4].cancel()
        assert rows[3][6].cancel()
        gate.open()
        for number in (1, 3):
            for ref in rows[number]:
                with pytest.raises(ExecutionCancelledError, match=f"execution {number} "):
                    ref.get(timeout=PATIENCE_S)
        for number in (0, 2, 4):
            got = [ref.get(timeout=PATIENCE_S) for ref in rows[number]]
            assert got == [number, "own", "other", *ray.get(second.split.remote(5)), "begun", "last"]
    seen = ray.get([actor.seen_so_far.remote() for actor in (first, second, third)])
    assert seen == [["own"] * 3, ["other"] * 3, ["begun", "last"] * 3]


def test_a_storm_of_cancellations_among_calls_that_only_wait(workers: list[Any], rng: random.Random) -> None:
    """`cancel` says for each execution whether they ran."""
    counter = start(1)[0]
    with InputNode() as x:
        passed = bind(workers[0].echo, x)
        waits = after(bind(counter.note, "ran"), passed)
        last = after(bind(workers[1].echo, "last"), waits)
    ran = 0
    with raycomm.compile(MultiOutputNode([passed, waits, last]), max_inflight=8) as graph:
        window: list[tuple[int, list[Any], bool]] = []
        for number in range(1006):
            if number < 1000:
                refs = graph.execute(number, timeout=PATIENCE_S)
                window.append((number, refs, rng.random() < 0.5 and rng.choice(refs).cancel()))
            if number >= 6:
                execution, refs, cancelled = window.pop(0)
                if cancelled:
                    for ref in refs:
                        with pytest.raises(ExecutionCancelledError, match=f"execution {execution} "):
                            ref.get(timeout=PATIENCE_S)
                else:
                    assert [ref.get(timeout=PATIENCE_S) for ref in refs] == [execution, "ran", "last"]
                    ran += 1
    assert len(ray.get(counter.seen_so_far.remote())) == ran
    assert 100 < ran < 1000


def test_a_method_that_raises_as_if_cancelled_stops_none_that_wait(workers: list[Any]) -> None:
    """It may have asked another graph, whose execution was cancelled: that is a failure like any other."""

    class Asks:
        def ask(self, number: int) -> int:
            if number % 2:
                raise ExecutionCancelledError("an execution of another graph was cancelled")
            return number

    asks = ray.remote(num_cpus=0)(Asks).remote()
    with InputNode() as x:
        asked = bind(asks.ask, x)
        told = after(bind(workers[0].echo, "told"), asked)
    with raycomm.compile(MultiOutputNode([asked, told])) as graph:
        for number in range(4):
            first, second = graph.execute(number)
            assert second.get(timeout=PATIENCE_S) == "told"
            if number % 2:
                with pytest.raises(ExecutionCancelledError, match="of another graph"):
                    first.get(timeout=PATIENCE_S)
            else:
                assert first.get(timeout=PATIENCE_S) == number
