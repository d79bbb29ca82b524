"""Options of one edge: how they are given, where they end up, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from raycomm.channel import RingLayout
from raycomm.errors import CompileError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allreduce
from raycomm.graph.edges import with_channel_options
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.options import Options
from raycomm.plan.actions import Channel, Plan
from raycomm.plan.lowering import lower
from raycomm.plan.text import parse_plan
from raycomm.plan.verify import verify
from raycomm.runtime.blueprint import DRIVER, rings_of
from tests.unit.stub_actors import actor


def plan_of(*outputs: Any) -> Plan:
    plan = lower(build(MultiOutputNode(list(outputs))), "options")
    verify(plan)
    assert parse_plan(plan.to_text()) == plan
    return plan


def channel(plan: Plan, value: str) -> Channel:
    return next(channel for channel in plan.channels if channel.value == value)


def given(entry: Channel) -> tuple[Any, ...]:
    return entry.inline_bytes, entry.slots, entry.share_tensors, entry.allow_pickle


def test_function_and_method_return_the_node() -> None:
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    x = bind(w.forward, inp)
    assert with_channel_options(x, inline_bytes=4096) is x
    assert x.with_channel_options(slots=2, allow_pickle=False) is x  # adds to what was set before
    y = bind(v.forward, x)
    plan = plan_of(y)
    assert given(channel(plan, "W1.forward#0")) == (4096, 2, None, False)
    assert given(channel(plan, "input")) == given(channel(plan, "W2.forward#1")) == (None, None, None, None)
    x.with_channel_options(slots=4)
    assert given(channel(plan_of(y), "W1.forward#0")) == (4096, 4, None, False)


def test_each_element_has_its_own() -> None:
    w = actor("W1")
    first, second = bind(w.split, InputNode())
    first.with_channel_options(share_tensors=True)
    second.with_channel_options(slots=8)
    plan = plan_of(first, second)
    assert given(channel(plan, "W1.split#0[0]")) == (None, None, True, None)
    assert given(channel(plan, "W1.split#0[1]")) == (None, 8, None, None)


def test_parts_inherit_from_the_whole_input() -> None:
    w = actor("W1")
    inp = InputNode().with_channel_options(inline_bytes=128, share_tensors=True)
    inp.a.with_channel_options(inline_bytes=256)
    plan = plan_of(bind(w.join, inp.a, inp[0]))
    assert given(channel(plan, "input.a")) == (256, None, True, None)
    assert given(channel(plan, "input[0]")) == (128, None, True, None)


def test_results_of_a_collective() -> None:
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    first, second = allreduce([bind(w.forward, inp), bind(v.forward, inp)])
    second.with_channel_options(inline_bytes=64)
    plan = plan_of(first, second)
    assert given(channel(plan, "W2.allreduce#3")) == (64, None, None, None)
    assert given(channel(plan, "W1.allreduce#2")) == given(channel(plan, "part of W2.allreduce#3")) == (None, None, None, None)


def test_no_channel_no_effect() -> None:
    w = actor("W1")
    x = bind(w.forward, InputNode()).with_channel_options(slots=2)
    plan = plan_of(bind(w.forward, x))
    assert [entry.value for entry in plan.channels] == ["input", "W1.forward#1"]


def test_rings_are_made_accordingly() -> None:
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    small, large = inp.a.with_channel_options(slots=1), inp.b.with_channel_options(slots=128)
    x = bind(w.join, small, large, inp.c).with_channel_options(slots=1, inline_bytes=8192)
    plan = plan_of(bind(v.forward, x))
    options = Options(max_inflight=10, inline_bytes=1024)

    def ring(process: int, value: str) -> RingLayout:
        number = channel(plan, value).id
        return next(ring for ring in rings_of(plan, process, options) if ring.channel == number)

    assert (ring(1, "W1.join#0").slots, ring(1, "W1.join#0").inline_bytes) == (1, 8192)
    assert (ring(2, "W2.forward#1").slots, ring(2, "W2.forward#1").inline_bytes) == (16, 1024)
    # execute must not wait for a reader, so the driver's rings are never shorter than the executions in flight
    assert [ring(DRIVER, f"input.{key}").slots for key in "abc"] == [16, 128, 16]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("inline_bytes", value) for value in (63, 0, -1, (1 << 20) + 1, 1024.0, True, "1024")),
        *(("slots", value) for value in (0, 3, -2, 1 << 16, 2.0, True, "2")),
        *(("share_tensors", value) for value in (1, "yes", 0.0)),
        *(("allow_pickle", value) for value in (0, "no", [])),
        *(("sender_keeps", value) for value in (1, "no")),
        *(("streams", value) for value in (1, (1,), (0, -1), (1, 2, 3), (True, 1), ("1", "2"), [1, 2])),
    ],
)
def test_bad_values(option: str, value: Any) -> None:
    w = actor("W1")
    node = bind(w.forward, InputNode())
    with pytest.raises(CompileError, match=f"channel option {option}=.* of node MethodNode.W1.forward") as caught:
        with_channel_options(node, **{option: value})
    assert caught.value.argument == option
    assert caught.value.node == repr(node)
    assert caught.value.remedy
    assert caught.value.remedy in str(caught.value)
    assert given(channel(plan_of(node), "W1.forward#0")) == (None, None, None, None)


@pytest.mark.parametrize("wrong", [None, 3, (), "several", "results"])
def test_only_nodes_of_values(wrong: Any) -> None:
    w = actor("W1")
    several = bind(w.split, InputNode())
    wrong = {"several": several, "results": MultiOutputNode(list(several))}.get(wrong, wrong) if isinstance(wrong, str) else wrong
    with pytest.raises(CompileError, match="has no channel; give a node that stands for a value") as caught:
        with_channel_options(wrong, slots=2)
    assert caught.value.argument == "node"
