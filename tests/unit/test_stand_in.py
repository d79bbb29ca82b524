"""Stand-ins for actors: bound like handles, planned, never run."""

from __future__ import annotations

from typing import Any

import pytest

from raycomm.errors import CompileError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allreduce
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.plan.lowering import lower
from raycomm.plan.verify import verify
from raycomm.testing import stand_in


class Base:
    def __init__(self) -> None:
        raise AssertionError("made")

    def inherited(self, x: Any) -> Any:
        raise AssertionError("called")


class Worker(Base):
    def forward(self, x: Any, *, scale: int = 1) -> Any:
        raise AssertionError("called")

    def split(self, x: Any) -> Any:
        raise AssertionError("called")

    async def later(self, x: Any) -> Any:
        raise AssertionError("called")

    @staticmethod
    def alone(x: Any) -> Any:
        raise AssertionError("called")

    @classmethod
    def of_class(cls, x: Any) -> Any:
        raise AssertionError("called")

    split.__ray_num_returns__ = 2  # type: ignore[attr-defined]


def test_methods_are_bound_and_planned() -> None:
    one, two = stand_in(Worker, "One"), stand_in(Worker, "Two")
    inp = InputNode()
    left, right = one.split.bind(inp)
    values = [bind(two.forward, left, scale=2), two.alone.bind(right), two.of_class.bind(right), two.later.bind(right)]
    parts = bind(one.forward.options(num_returns=3, concurrency_group="io"), inp)
    sums = allreduce([bind(one.inherited, parts[0]), bind(two.inherited, parts[1])])
    plan = lower(build(MultiOutputNode([*values, *sums, parts[2]])), "stand-ins")
    verify(plan)
    assert [process.label for process in plan.processes] == ["driver", "One", "Two"]


def test_names_tell_actors_apart() -> None:
    inp = InputNode()
    workers = [stand_in(Worker), stand_in(Worker)]
    labels = [actor.label for actor in build(MultiOutputNode([bind(worker.forward, inp) for worker in workers])).actors]
    assert len(set(labels)) == 2
    assert all(label.startswith("Worker#") for label in labels)
    (only,) = build(bind(stand_in(Worker).forward, InputNode())).actors
    assert only.label == "Worker"


def test_signatures_are_checked() -> None:
    worker = stand_in(Worker, "W")
    inp = InputNode()
    for method, arguments in ((worker.forward, (inp, inp)), (worker.alone, ()), (worker.of_class, (inp, inp))):
        with pytest.raises(CompileError, match=r"bind: W\."):
            method.bind(*arguments)
    with pytest.raises(AttributeError, match="nothing"):
        _ = worker.nothing


def test_only_classes() -> None:
    with pytest.raises(CompileError, match="a value of type Worker is no class; pass the class"):
        stand_in(object.__new__(Worker))  # type: ignore[arg-type]


def test_a_class_that_ray_has_decorated() -> None:
    """By its marks, for this needs no Ray."""

    class Decorated:
        class __ray_metadata__:
            modified_class = Worker
            class_name = "pipeline.Worker"

    (actor,) = build(bind(stand_in(Decorated).forward, InputNode())).actors
    assert actor.label == "Worker"
    with pytest.raises(TypeError, match=r"StandIn\(Named\) stands in for an actor"):
        _ = stand_in(Worker, "Named").__ray_call__
