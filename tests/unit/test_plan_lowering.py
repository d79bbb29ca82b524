"""Graph to plan: golden texts, equal meaning on random graphs, and what `verify` refuses."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycomm.graph import (
    Graph,
    InputNode,
    MultiOutputNode,
    ReduceOp,
    allgather,
    allreduce,
    bind,
    broadcast,
    build,
    reducescatter,
)
from raycomm.graph import after as run_after
from raycomm.plan import (
    Compute,
    Read,
    Register,
    Transport,
    lower,
    parse_plan,
    place,
    verify,
)
from tests.unit.interpret import evaluate, interpret
from tests.unit.stub_actors import actor

CHAIN = """\
plan "chain"
signature whole
process 0 "driver"
process 1 "W1"
process 2 "W2"
channel 0 "input" 0 -> 1
channel 1 "W1.forward#0" 1 -> 2
channel 2 "W2.forward#1" 2 -> 0
input whole -> channel 0
output channel 2
returns one
actor 1 registers 2
  r0 = read 0
  r1 = 0:forward(r0)
  write 1 from r1
  release r0, r1
actor 2 registers 2
  r0 = read 1
  r1 = 1:forward(r0)
  write 2 from r1
  release r0, r1
"""

DIAMOND = """\
plan "diamond"
signature 1 b
process 0 "driver"
process 1 "W1"
process 2 "W2"
process 3 "W3"
channel 0 "input[0]" 0 -> 1
channel 1 "input.b" 0 -> 3
channel 2 "W1.forward#0" 1 -> 2, 3
channel 3 "W2.scale#1" 2 -> 1
channel 4 "W3.scale#2" 3 -> 1
channel 5 "W1.join#3" 1 -> 0
input position 0 -> channel 0
input key "b" -> channel 1
output channel 5
returns one
actor 1 registers 4
  r0 = read 0
  r1 = 0:forward(r0)
  write 2 from r1
  release r0
  r0 = read 3
  r2 = read 4
  r3 = 3:join(r0, r2, local=r1)
  write 5 from r3
  release r0, r1, r2, r3
actor 2 registers 2
  r0 = read 2
  r1 = 1:scale(r0, c0)
  write 3 from r1
  release r0, r1
actor 3 registers 3
  r0 = read 2
  r1 = read 1
  r2 = 2:scale(r0, offset=r1)
  write 4 from r2
  release r0, r1, r2
"""

FAN_OUT = """\
plan "fan out"
signature whole
process 0 "driver"
process 1 "W1"
process 2 "W2"
process 3 "W3"
channel 0 "input" 0 -> 1, 2, 3
channel 1 "W1.forward#0" 1 -> 0
channel 2 "W2.forward#1" 2 -> 0
channel 3 "W3.forward#2" 3 -> 0
channel 4 "W2.forward#3" 2 -> 0
input whole -> channel 0
output channel 1
output channel 2
output channel 3
output channel 4
output channel 1
output input whole
returns list
actor 1 registers 2
  r0 = read 0
  r1 = 0:forward(r0)
  write 1 from r1
  release r0, r1
actor 2 registers 2
  r0 = read 0
  r1 = 1:forward(r0)
  write 2 from r1
  release r1
  r1 = 3:forward(r0)
  write 4 from r1
  release r0, r1
actor 3 registers 2
  r0 = read 0
  r1 = 2:forward(r0)
  write 3 from r1
  release r0, r1
"""

TWO_RETURNS = """\
plan "two returns"
signature 0 "odd key"
process 0 "driver"
process 1 "W1"
process 2 "W2"
channel 0 "input[\\"odd key\\"]" 0 -> 1
channel 1 "W1.split#0[0]" 1 -> 0, 2
channel 2 "W1.split#0[1]" 1 -> 2
channel 3 "W1.split#1[0]" 1 -> 0
channel 4 "W2.join#2" 2 -> 0
input key "odd key" -> channel 0
output channel 4
output channel 1
output channel 3
returns list
actor 1 registers 3
  r0 = read 0
  r1, r2 = 0:split(r0)
  write 1, 2 from r1, r2
  release r0, r1
  r0, r1 = 1:split(r2)
  write 3 from r0
  release r0, r1, r2
actor 2 registers 3
  r0 = read 2
  r1 = read 1
  r2 = 2:join(r0, r1)
  write 4 from r2
  release r0, r1, r2
"""


COLLECTIVE = """\
plan "collectives"
signature whole
process 0 "driver"
process 1 "W1"
process 2 "W2"
process 3 "W3"
process 4 "W4"
channel 0 "input" 0 -> 1, 2, 3, 4 slots 64
channel 1 "W1.reducescatter#12" 1 -> 0 inline_bytes 4096 slots 2 share_tensors yes
channel 2 "W2.broadcast#13" 2 -> 0
channel 3 "W4.broadcast#14" 4 -> 0 allow_pickle no
channel 4 "W1.join#15" 1 -> 0
channel 5 "part of W1.allreduce#4" 1 -> 2, 3, 4
channel 6 "part of W2.allreduce#5" 2 -> 1, 3, 4
channel 7 "part of W3.allreduce#6" 3 -> 1, 2, 4
channel 8 "part of W4.allreduce#7" 4 -> 1, 2, 3
channel 9 "slice of W1.allreduce#4" 1 -> 2, 3, 4
channel 10 "slice of W2.allreduce#5" 2 -> 1, 3, 4
channel 11 "slice of W3.allreduce#6" 3 -> 1, 2, 4
channel 12 "slice of W4.allreduce#7" 4 -> 1, 2, 3
channel 13 "part of W1.allgather#8" 1 -> 2, 3, 4
channel 14 "part of W2.allgather#9" 2 -> 1, 3, 4
channel 15 "part of W3.allgather#10" 3 -> 1, 2, 4
channel 16 "part of W4.allgather#11" 4 -> 1, 2, 3
channel 17 "part of W2.broadcast#13" 2 -> 4
channel 18 "part of W4.broadcast#14" 4 -> 2
input whole -> channel 0
output channel 4
output channel 1
output channel 2
output channel 3
returns list
actor 1 registers 4
  r0 = read 0
  r1, r2 = 0:split(r0)
  release r0
  r0, r3 = collective 4 allreduce avg rank 0 from r1, r2 parts 5, 6, 7, 8 slices 9, 10, 11, 12
  release r1, r2
  r1 = collective 8 allgather rank 0 from r0 parts 13, 14, 15, 16
  r2 = collective 12 reducescatter sum rank 0 from r1
  write 1 from r2
  release r1, r2
  r1 = 15:join(r0, r3)
  write 4 from r1
  release r0, r1, r3
actor 2 registers 4
  r0 = read 0
  r1, r2 = 1:split(r0)
  release r0
  r0, r3 = collective 5 allreduce avg rank 1 from r1, r2 parts 5, 6, 7, 8 slices 9, 10, 11, 12
  release r1, r2, r3
  r1 = collective 9 allgather rank 1 from r0 parts 13, 14, 15, 16
  release r0
  r0 = collective 13 broadcast root 1 rank 0 from r1 parts 17, 18
  write 2 from r0
  release r0, r1
actor 3 registers 4
  r0 = read 0
  r1, r2 = 2:split(r0)
  release r0
  r0, r3 = collective 6 allreduce avg rank 2 from r1, r2 parts 5, 6, 7, 8 slices 9, 10, 11, 12
  release r1, r2, r3
  r1 = collective 10 allgather rank 2 from r0 parts 13, 14, 15, 16
  release r0, r1
actor 4 registers 4
  r0 = read 0
  r1, r2 = 3:split(r0)
  release r0
  r0, r3 = collective 7 allreduce avg rank 3 from r1, r2 parts 5, 6, 7, 8 slices 9, 10, 11, 12
  release r1, r2
  r1 = collective 11 allgather rank 3 from r0 parts 13, 14, 15, 16
  release r0, r1
  r0 = collective 14 broadcast root 1 rank 1 from r3 parts 17, 18
  write 3 from r0
  release r0, r3
"""


def chain() -> Graph:
    w1, w2 = actor("W1"), actor("W2")
    return build(bind(w2.forward, bind(w1.forward, InputNode())))


def diamond() -> Graph:
    w1, w2, w3 = actor("W1"), actor("W2"), actor("W3")
    inp = InputNode()
    a = bind(w1.forward, inp[0])
    b = bind(w2.scale, a, 3)
    c = bind(w3.scale, a, offset=inp.b)
    return build(bind(w1.join, b, c, local=a))


def fan_out() -> Graph:
    workers = [actor("W1"), actor("W2"), actor("W3")]
    inp = InputNode()
    outs = [bind(w.forward, inp) for w in (*workers, workers[1])]
    return build(MultiOutputNode([*outs, outs[0], inp]))


def two_returns() -> Graph:
    w1, w2 = actor("W1"), actor("W2")
    first, second = bind(w1.split, InputNode()["odd key"])
    third, _ = bind(w1.split, second)
    return build(MultiOutputNode([bind(w2.join, second, first), first, third]))


def collectives() -> Graph:
    """Several tensors per actor, slices among many actors, results used in part, a collective of one actor, channel options."""
    workers = [actor(f"W{index}") for index in range(1, 5)]
    inp = InputNode().with_channel_options(slots=64)
    pairs = [bind(w.split, inp) for w in workers]
    means = allreduce([[first for first, _ in pairs], [second for _, second in pairs]], ReduceOp.AVG)
    gathered = allgather([mean[0] for mean in means])
    alone = reducescatter(gathered[:1])[0].with_channel_options(inline_bytes=4096, slots=2, share_tensors=True)
    roots = broadcast([gathered[1], means[3][1]], root=1)
    roots[1].with_channel_options(allow_pickle=False)
    return build(MultiOutputNode([bind(workers[0].join, *means[0]), alone, *roots]))


GOLDEN = [
    ("chain", chain, CHAIN),
    ("diamond", diamond, DIAMOND),
    ("fan out", fan_out, FAN_OUT),
    ("two returns", two_returns, TWO_RETURNS),
    ("collectives", collectives, COLLECTIVE),
]


@pytest.mark.parametrize(("name", "make", "text"), GOLDEN, ids=[name for name, _, _ in GOLDEN])
def test_golden_text(name: str, make: Callable[[], Graph], text: str) -> None:
    plan = lower(make(), name)
    assert plan.to_text() == text
    assert str(plan) == text
    assert parse_plan(text) == plan
    verify(plan)


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
