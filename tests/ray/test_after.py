"""Edges without a value, and graphs whose executions take no argument, on real actors and nodes of both families."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from ray.dag import InputNode as RayInputNode
from ray.dag import MultiOutputNode as RayMultiOutputNode

import raycomm
from raycomm import InputNode, MultiOutputNode, after, bind
from tests.ray.workers import PATIENCE_S, Gate, start

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return start(2)


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
