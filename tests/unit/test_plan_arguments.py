"""Arguments of `execute`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from raycomm.errors import ArgumentError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.nodes import InputNode
from raycomm.plan.actions import Plan
from raycomm.plan.arguments import project, split_arguments
from raycomm.plan.lowering import lower
from tests.unit.stub_actors import actor


def parts_plan() -> Plan:
    inp = InputNode()
    return lower(build(bind(actor("W1").join, inp[2], inp.b, inp["a"])), "parts")


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((1, 2), {"a": 1, "b": 2}, ""),
        ((1, 2, 3, 4), {"a": 1, "b": 2}, ""),
        ((1, 2, 3), {"b": 2}, ": missing 'a'"),
        ((1, 2, 3), {}, ": missing 'a', 'b'"),
        ((1, 2, 3), {"a": 1, "x": 2}, ": missing 'b'; unknown 'x'"),
        ((1, 2, 3), {"a": 1, "b": 2, "c": 3}, ": unknown 'c'"),
        ((), {"a": 1, "x": 2}, ": missing 'b'; unknown 'x'"),
    ],
)
def test_wrong_arguments_of_a_graph_with_parts(args: Sequence[object], kwargs: dict[str, object], problem: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        split_arguments(parts_plan(), args, kwargs)
    assert caught.value.expected == "3 positional arguments (inp[2] is used) and keyword arguments 'a', 'b'"
    names = f"keyword arguments {', '.join(map(repr, sorted(kwargs)))}" if kwargs else "no keyword arguments"
    assert caught.value.given == f"{len(args)} positional arguments and {names}"
    text = f"execute of graph 'parts' takes {caught.value.expected}, was given {caught.value.given}{problem}"
    assert str(caught.value) == text
    assert isinstance(caught.value, ValueError)


def test_arguments_are_split_in_the_order_of_inputs() -> None:
    plan = parts_plan()
    values = split_arguments(plan, (10, 11, 12), {"a": "A", "b": "B"})
    assert values == [12, "B", "A"]
    assert [project(item.projection, (10, 11, 12), {"a": "A", "b": "B"}) for item in plan.inputs] == values


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2), {}), ((1,), {"x": 2}), ((), {"x": 2})])
def test_whole_input_takes_one_argument(args: Sequence[object], kwargs: dict[str, object]) -> None:
    plan = lower(build(bind(actor("W1").forward, InputNode())), "whole")
    assert split_arguments(plan, (None,), {}) == [None]
    with pytest.raises(ArgumentError, match="takes one positional argument, the whole input, was given") as caught:
        split_arguments(plan, args, kwargs)
    assert caught.value.expected == "one positional argument, the whole input"
