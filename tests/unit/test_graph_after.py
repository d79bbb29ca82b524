"""Edges without a value: `after`."""

from __future__ import annotations

from typing import Any

import pytest

from raycomm.errors import CompileError, DeadlockError
from raycomm.graph import CallValue, Graph, InputNode, InputValue, MultiOutputNode, Nothing, after, bind, build
from raycomm.plan import Plan, check_arguments, lower, parse_plan, split_arguments, verify
from tests.unit.stub_actors import actor

BEGIN = """\
plan "begin"
signature 0
process 0 "driver"
process 1 "W1"
process 2 "W2"
channel 0 "begin" 0 -> 1
channel 1 "W1.join#0" 1 -> 0, 2
channel 2 "W2.join#1" 2 -> 0
input nothing -> channel 0
output channel 2
output channel 1
returns list
actor 1 registers 2
  r0 = read 0
  r1 = 0:join()
  write 1 from r1
  release r0, r1
actor 2 registers 2
  r0 = read 1
  r1 = 1:join(c0)
  write 2 from r1
  release r0, r1
"""


def planned(graph: Graph, name: str) -> Plan:
    plan = lower(graph, name)
    verify(plan)
    assert parse_plan(plan.to_text()) == plan
    return plan


def test_a_graph_that_takes_nothing() -> None:
    w, v = actor("W1"), actor("W2")
    with InputNode() as start:
        first = after(bind(w.join), start)
        second = bind(v.join, 7).after(first)
    graph = build(MultiOutputNode([second, first]))
    assert (graph.input_arity, graph.input_keys) == (0, ())
    assert graph.nodes[0].after == (InputValue(Nothing()),)
    assert graph.nodes[1].after == (CallValue(0),)
    plan = planned(graph, "begin")
    assert plan.to_text() == BEGIN
    assert split_arguments(plan, (), {}) == [None]
    with pytest.raises(ValueError, match="takes 0 positional arguments and no keyword arguments, was given 1"):
        check_arguments(plan, (1,), {})


def test_the_beginning_goes_with_parts_and_with_the_whole() -> None:
    for part in (False, True):
        w, v = actor("W1"), actor("W2")
        inp = InputNode()
        begun = after(bind(w.join), inp)
        given = bind(v.join, inp.x if part else inp, begun)
        graph = build(given)
        assert len(graph.inputs) == 2
        assert graph.input_arity == (0 if part else None)
        planned(graph, "both")


def test_a_part_that_is_only_waited_for_is_an_argument() -> None:
    w = actor("W1")
    inp = InputNode()
    graph = build(after(bind(w.join), inp.go, inp[1]))
    assert (graph.input_arity, graph.input_keys) == (2, ("go",))
    with pytest.raises(CompileError, match="'timeout', used by W1.join"):
        again = InputNode()
        build(after(bind(w.join), again.timeout))


def test_an_element_stands_for_its_call() -> None:
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    first, second = bind(w.split, 1)
    assert after(second, inp) is second
    graph = build(MultiOutputNode([bind(v.forward, first), after(bind(v.join), second)]))
    assert graph.nodes[0].after == (InputValue(Nothing()),)
    assert graph.nodes[2].after == (CallValue(0, 1),)
    planned(graph, "elements")


def test_order_across_actors() -> None:
    """Each call waits for the one before it, whatever the order of binding on its own actor allows."""
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    a, b = bind(w.forward, inp), bind(v.forward, inp)
    a2, b2 = bind(w.forward, a).after(b), bind(v.forward, b).after(a)
    plan = planned(build(MultiOutputNode([a2, b2])), "barrier")
    values = {channel.value: channel.readers for channel in plan.channels}
    assert values["W1.forward#0"] == (2,)
    assert values["W2.forward#1"] == (1,)


def test_calls_that_wait_for_each_other() -> None:
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    a, b = bind(w.forward, inp), bind(v.forward, inp)
    a.after(b)
    b.after(a)
    with pytest.raises(DeadlockError, match="calls wait for each other") as caught:
        build(MultiOutputNode([a, b]))
    assert sorted(caught.value.cycle) == ["W1.forward", "W2.forward"]
    c = bind(w.forward, InputNode())
    c.after(c)
    with pytest.raises(CompileError, match="node W1.forward runs after itself"):
        build(c)


def test_bound_before_what_it_waits_for_on_one_actor() -> None:
    w = actor("W1")
    inp = InputNode()
    first = bind(w.forward, inp)
    second = bind(w.forward, inp)
    first.after(second)
    with pytest.raises(DeadlockError, match="calls wait for each other"):
        build(MultiOutputNode([first, second]))


def test_what_is_only_waited_for_leads_to_no_result() -> None:
    """Else its error would be lost."""
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    lost = bind(w.forward, inp)
    with pytest.raises(CompileError, match=r"1 calls lead to no result: W1.forward; add them"):
        build(bind(v.forward, inp).after(lost))


@pytest.mark.parametrize("wrong", [3, None, "results"])
def test_only_values_can_be_waited_for(wrong: Any) -> None:
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    x = bind(v.forward, inp)
    node = bind(w.forward, inp).after(MultiOutputNode([x]) if wrong == "results" else wrong)
    with pytest.raises(
        CompileError, match="node W1.forward runs after a value of type .*, which is no node of a value"
    ) as caught:
        build(MultiOutputNode([node, x]))
    assert (caught.value.node, caught.value.argument) == ("W1.forward", "after")


@pytest.mark.parametrize("wrong", [3, None, "input", "tuple"])
def test_only_calls_wait(wrong: Any) -> None:
    inp = InputNode()
    target = {"input": inp, "tuple": bind(actor().split, inp)}.get(wrong, wrong) if isinstance(wrong, str) else wrong
    with pytest.raises(CompileError, match="is no call; give a node that bind made") as caught:
        after(target, inp)
    assert caught.value.argument == "node"


def test_call_without_any_node_is_still_refused() -> None:
    w, v = actor("W1"), actor("W2")
    root = bind(v.join, InputNode(), bind(w.join, 1))
    with pytest.raises(CompileError, match=r"W1.join has no node among its arguments; .* let it run after\(node, inp\)"):
        build(root)
