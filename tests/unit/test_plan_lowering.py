"""Graph to plan: equal meaning on random graphs, and what `verify` refuses."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allgather, allreduce, broadcast, reducescatter
from raycomm.graph.edges import after as run_after
from raycomm.graph.model import Graph
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.plan.actions import Compute, Read, Register
from raycomm.plan.lowering import lower
from raycomm.plan.placement import Transport, place
from raycomm.plan.text import parse_plan
from raycomm.plan.verify import verify
from tests.unit.interpret import evaluate, interpret
from tests.unit.sample_graphs import diamond, fan_out
from tests.unit.stub_actors import actor

COLLECTIVES: list[Callable[[list[Any]], list[Any]]] = [
    allreduce,
    allgather,
    lambda nodes: reducescatter(nodes, "max"),
    lambda nodes: broadcast(nodes, root=len(nodes) - 1),
]


def random_graph(rng: random.Random, actors: int, calls: int, whole: bool) -> Graph:
    """A graph of `calls` calls in which every call is used, with constants, keywords, several returns repeated arguments, and
    collectives."""
    workers = [actor("W", f"{index:06x}") for index in range(actors)]
    inp = InputNode()
    sources: list[Any] = [inp] if whole else [inp[0], inp[2], inp.alpha, inp["b c"]]
    values: list[Any] = list(sources)
    unused: dict[int, Any] = {}
    for _ in range(calls):
        args: list[Any] = [rng.choice(values[-6:] + sources) for _ in range(rng.randint(1, 3))]
        kwargs: dict[str, Any] = {}
        if rng.random() < 0.3:
            args.insert(rng.randrange(len(args) + 1), rng.choice([1, "text", None]))
        if rng.random() < 0.3:
            kwargs["named"] = rng.choice([*values, 2.5])
        returns = rng.choice([1, 1, 1, 2, 3])
        made = bind(rng.choice(workers).join.options(num_returns=returns), *args, **kwargs)
        for argument in (*args, *kwargs.values()):
            unused.pop(id(getattr(argument, "collective", getattr(argument, "call", argument))), None)
        elements = made if isinstance(made, tuple) else (made,)
        if rng.random() < 0.2:
            run_after(elements[-1], rng.choice([*values, inp]))
        unused[id(getattr(elements[0], "call", elements[0]))] = rng.choice(elements)
        values.extend(elements)
        if rng.random() < 0.2:
            made_here = {node.made_by.key: node for node in values if node.made_by is not None}
            members = rng.sample(list(made_here.values()), rng.randint(1, len(made_here)))
            for node in members:
                unused.pop(id(getattr(node, "collective", getattr(node, "call", node))), None)
            results = rng.choice(COLLECTIVES)(members)
            chosen = rng.choice(results)
            unused[id(chosen.collective)] = chosen
            values.append(chosen)
    outputs = list(unused.values()) + rng.sample(values, k=min(2, len(values)))
    rng.shuffle(outputs)
    return build(MultiOutputNode(outputs))


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 25), st.booleans())
def test_plan_means_what_the_graph_means(seed: int, actors: int, calls: int, whole: bool) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, actors, calls, whole)
    plan = lower(graph, f"random {seed}")
    verify(plan)
    assert parse_plan(plan.to_text()) == plan
    arity, keys = (1, ()) if whole else (graph.input_arity or 0, graph.input_keys)
    executions = [
        ([f"in{place}.{execution}" for place in range(arity)], {key: f"{key}.{execution}" for key in keys})
        for execution in range(3)
    ]
    expected = [evaluate(graph, args, kwargs) for args, kwargs in executions]
    assert interpret(plan, graph.constants, executions, rng) == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 20))
def test_every_channel_is_read_once_right_before_its_first_use(seed: int, actors: int, calls: int) -> None:
    graph = random_graph(random.Random(seed), actors, calls, True)
    plan = lower(graph, "random")
    for entry in plan.actors:
        reads = [action.channel for action in entry.actions if isinstance(action, Read)]
        assert len(reads) == len(set(reads))
        for index, action in enumerate(entry.actions):
            if isinstance(action, Read):
                user = next(later for later in entry.actions[index:] if not isinstance(later, Read))
                assert isinstance(user, Compute)  # a collective uses only what its actor has made
                arguments = (*user.args, *(argument for _, argument in user.kwargs))
                assert Register(action.register) in arguments or action.register in user.awaited


def test_registers_are_used_again() -> None:
    w, v = actor("W1"), actor("W2")
    node: Any = InputNode()
    for index in range(40):
        node = bind((w, v)[index % 2].forward, node)
    assert [entry.registers for entry in lower(build(node), "long").actors] == [2, 2]


def test_placement_says_why() -> None:
    graph = diamond()
    kinds = {(item.value, item.transport): item for item in place(graph)}
    forward = [item for item in kinds.values() if item.writer == 1 and item.value == graph.nodes[1].args[0]]
    assert [(item.transport, item.readers) for item in forward] == [
        (Transport.REFERENCE, (1,)),
        (Transport.SHARED_MEMORY, (2, 3)),
    ]
    assert [item.reason for item in forward] == ["made and used by the same actor", "different processes of one machine"]
    passed = [item for item in place(fan_out()) if item.transport is Transport.REFERENCE]
    assert [(item.writer, item.reason) for item in passed] == [(0, "made by the driver for itself")]


def test_value_used_only_by_its_actor_has_no_channel() -> None:
    w = actor("W1")
    plan = lower(build(bind(w.forward, bind(w.forward, InputNode()))), "local")
    assert [channel.value for channel in plan.channels] == ["input", "W1.forward#1"]


def test_plan_is_plain_data() -> None:
    plan = lower(diamond(), "diamond")
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert hash(plan) == hash(lower(diamond(), "diamond"))
    assert lower(diamond(), "other") != plan


def test_calls_to_compile_grow_with_the_nodes_and_no_faster() -> None:
    """Counted, not timed: calls of Python functions from the root to a verified plan."""

    def calls(nodes: int) -> int:
        workers = [actor("W", f"{index:06x}") for index in range(10)]
        inp = InputNode()
        node: Any = inp
        for index in range(nodes):
            node = bind(workers[index % 10].join, node, inp)
        made = 0

        def count(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            verify(lower(build(node), "large"))
        finally:
            sys.setprofile(None)
        return made

    calls(10)  # what is only loaded once
    assert calls(1200) < 5 * calls(300)


def test_large_graph_is_lowered() -> None:
    workers = [actor("W", f"{index:06x}") for index in range(10)]
    inp = InputNode()
    node: Any = inp
    for index in range(3000):
        node = bind(workers[index % 10].join, node, inp)
    plan = lower(build(node), "large")
    verify(plan)
    assert len(plan.channels) == 3001
    assert parse_plan(plan.to_text()) == plan
