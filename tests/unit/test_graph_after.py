"""Edges without a value: `after`."""

from __future__ import annotations

import random
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycomm.codec import Failure, cancelled, decode_failure, encode_failure
from raycomm.errors import CompileError, DeadlockError, ExecutionCancelledError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allreduce
from raycomm.graph.edges import after
from raycomm.graph.model import CallNode, CallValue, Graph, InputValue, Nothing
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.plan.actions import Compute, Plan
from raycomm.plan.arguments import check_arguments, split_arguments
from raycomm.plan.lowering import lower
from raycomm.plan.text import parse_plan
from raycomm.plan.verify import verify
from tests.unit.interpret import evaluate, interpret
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
  r1 = 0:join() after r0
  write 1 from r1
  release r0, r1
actor 2 registers 2
  r0 = read 1
  r1 = 1:join(c0) after r0
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
    assert "let no call run after one that needs its value" in str(caught.value.remedy)
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
    with pytest.raises(DeadlockError, match="calls wait for each other.*or that is bound later on the same actor"):
        build(MultiOutputNode([first, second]))


def test_what_is_only_waited_for_leads_to_no_result() -> None:
    """Else its error would be lost."""
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    lost = bind(w.forward, inp)
    with pytest.raises(CompileError, match=r"1 call leads to no result: W1.forward; add it"):
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
    with pytest.raises(CompileError, match="raycomm.after: .* is no call; give a node that bind made") as caught:
        after(target, inp)
    assert caught.value.argument == "node"


def test_call_without_any_node_is_still_refused() -> None:
    w, v = actor("W1"), actor("W2")
    root = bind(v.join, InputNode(), bind(w.join, 1))
    with pytest.raises(CompileError, match=r"W1.join has no node among its arguments; .* run with raycomm.after\(node, inp\)"):
        build(root)


def test_waiting_is_told_after_another_call_uses_the_value() -> None:
    """`a` learns of its users in the order y, x, although x was bound first and y needs it."""
    w1, w2, w3 = actor("W1"), actor("W2"), actor("W3")
    inp = InputNode()
    a = bind(w1.forward, inp)
    x = bind(w2.forward, inp)
    y = bind(w3.join, a, x)
    after(x, a)
    graph = build(MultiOutputNode([x, y]))
    assert [node.actor_label for node in graph.nodes] == ["W1", "W2", "W3"]
    planned(graph, "told late")


def test_waiting_is_told_late_on_one_actor() -> None:
    w1, w2 = actor("W1"), actor("W2")
    inp = InputNode()
    a = bind(w1.forward, inp)
    x = bind(w2.forward, inp)
    y = bind(w2.forward, a)
    after(x, a)
    graph = build(MultiOutputNode([x, y]))
    assert [node.after for node in graph.nodes] == [(), (CallValue(0),), ()]
    planned(graph, "told late")


def test_waiting_for_what_a_call_is_given_anyway() -> None:
    w1, w2, w3 = actor("W1"), actor("W2"), actor("W3")
    inp = InputNode()
    a = bind(w1.forward, inp)
    y = bind(w2.forward, a)
    x = bind(w3.join, a, y)
    after(y, a, a)
    plan = planned(build(MultiOutputNode([x])), "given anyway")
    assert not any(action.awaited for entry in plan.actors for action in entry.actions if isinstance(action, Compute))


def test_waiting_for_a_call_that_was_bound_later() -> None:
    """Both use the input, which knows its users in order of binding; that is no reason to run them in it."""
    w1, w2 = actor("W1"), actor("W2")
    inp = InputNode()
    x, y = bind(w1.forward, inp), bind(w2.forward, inp)
    x.after(y)
    graph = build(MultiOutputNode([x, y]))
    assert [node.actor_label for node in graph.nodes] == ["W2", "W1"]
    planned(graph, "turned round")


def random_calls(rng: random.Random, actors: int, count: int) -> tuple[InputNode, list[Any], list[Any]]:
    """The input, values, and for each call in order of creation a node to say something of; collectives have none."""
    workers = [actor("W", f"{index:06x}") for index in range(actors)]
    inp = InputNode()
    values: list[Any] = [inp]
    calls: list[Any] = []
    for _ in range(count):
        args = [rng.choice([*values[-5:], inp, 7]) for _ in range(rng.randint(0, 3))]
        made = bind(rng.choice(workers).join.options(num_returns=rng.choice([1, 1, 2])), *args, named=rng.choice([*values, 1]))
        elements = made if isinstance(made, tuple) else (made,)
        values.extend(elements)
        calls.append(elements[-1])
        if not any(value in values for value in args):
            after(calls[-1], inp)
        if rng.random() < 0.15:
            members = list({node.made_by.key: node for node in values if node.made_by is not None}.values())
            values.extend(allreduce(rng.sample(members, rng.randint(1, len(members)))))
    return inp, values, calls


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 14), st.integers(1, 12))
def test_waiting_for_what_was_bound_before_is_never_refused(seed: int, actors: int, count: int, edges: int) -> None:
    """Whatever the order in which it is said, and however often."""
    rng = random.Random(seed)
    inp, values, calls = random_calls(rng, actors, count)
    for _ in range(edges):
        call = rng.choice(calls)
        after(call, *rng.choices([value for value in values if value._created < getattr(call, "call", call)._created], k=2))
    graph = build(MultiOutputNode(values[1:]))
    for node in graph.nodes:
        assert all(value.node < node.id for value in node.after if isinstance(value, CallValue))
    plan = planned(graph, "random")
    whole = graph.input_arity is None
    executions = [((f"in{execution}",) if whole else (), {}) for execution in range(2)]
    expected = [evaluate(graph, args, kwargs) for args, kwargs in executions]
    assert interpret(plan, graph.constants, executions, rng) == expected
    assert awaited_by(plan) == {node.id: waits_only_for(node) for node in graph.nodes if waits_only_for(node)}
    assert inp is values[0]


def awaited_by(plan: Plan) -> dict[int, int]:
    """How many values each call waits for without being given them."""
    computes = (action for entry in plan.actors for action in entry.actions if isinstance(action, Compute))
    return {action.node: len(action.awaited) for action in computes if action.awaited}


def waits_only_for(node: CallNode) -> int:
    return len({*node.after} - {*node.args, *(operand for _, operand in node.kwargs)})


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(2, 8), st.integers(1, 5))
def test_waiting_is_refused_exactly_where_it_closes_a_cycle(seed: int, actors: int, count: int, edges: int) -> None:
    """In any direction: what needs a value comes after it, an actor's calls in order of binding, and nothing else counts."""
    rng = random.Random(seed)
    inp, values, calls = random_calls(rng, actors, count)
    before: dict[Any, set[Any]] = defaultdict(set)

    def unit(node: Any) -> Any:
        """A call, or the collective whose calls are one."""
        return getattr(node, "collective", getattr(node, "call", node))

    run_of: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    for node in {unit(value): None for value in values[1:]}:
        before[node] = set()
        for call in getattr(node, "calls", (node,)):
            before[node] |= {unit(value) for value in (*call.args, *getattr(call, "kwargs", {}).values()) if value in values[1:]}
            run_of[call.actor.key].append((call._created, node))
    for run in run_of.values():
        for (_, first), (_, then) in pairwise(sorted(run, key=lambda entry: entry[0])):
            before[then].add(first)
    for _ in range(edges):
        call, awaited = rng.choice(calls), rng.choice(values)
        if unit(call) is not unit(awaited):
            after(call, awaited)
            before[unit(call)] |= {unit(awaited)} - {inp}
    try:
        TopologicalSorter(before).prepare()
        closed = False
    except CycleError:
        closed = True
    root = MultiOutputNode(values[1:])
    if not closed:
        planned(build(root), "any direction")
        return
    with pytest.raises(DeadlockError, match="calls wait for each other: W") as caught:
        build(root)
    assert len(caught.value.cycle) >= 2
    assert " -> ".join((*caught.value.cycle, caught.value.cycle[0])) in str(caught.value)


def test_a_cancelled_execution_is_told_from_a_method_that_raises_the_same() -> None:
    def sent(failure: Failure) -> Failure:
        return decode_failure(*encode_failure(failure))

    failure = cancelled(3)
    assert failure.is_cancellation
    assert sent(failure).is_cancellation
    assert sent(sent(failure)).is_cancellation
    cut = Failure(None, failure.type_name, failure.message, "", failure.origin, failure.execution)
    assert sent(cut).is_cancellation
    assert not sent(Failure.capture(ExecutionCancelledError("of another graph"), "W.f", 3)).is_cancellation
    assert not sent(Failure.capture(ValueError("x"), "ref.cancel()", 3)).is_cancellation
