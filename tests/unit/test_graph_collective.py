"""Collective nodes: what they become in a graph, and what is refused when they are made."""

from __future__ import annotations

import enum
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from raycomm.errors import CompileError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allgather, allreduce, broadcast, reducescatter
from raycomm.graph.model import CallValue, Collective, CollectiveKind, ReduceOp
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.graph.tensor_hint import TensorHint
from raycomm.graph.tensor_transport import TensorTransport
from raycomm.plan.lowering import lower
from raycomm.plan.verify import verify
from tests.unit.stub_actors import StubHandle, actor
from tests.unit.test_plan_own import LikeRays, Whole


def two() -> tuple[Any, Any, Any, Any]:
    """Two actors, and a value of each."""
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    return w, v, bind(w.forward, inp), bind(v.forward, inp)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_node_per_actor_in_the_order_given(order: tuple[int, int]) -> None:
    values = two()[2:]
    nodes = tuple(values[place] for place in order)
    results = allreduce(nodes)
    assert isinstance(results, list)
    assert [node.made_by.key for node in results] == [node.made_by.key for node in nodes]
    graph = build(MultiOutputNode([*results, *nodes]))
    (whole,) = graph.collectives
    assert [graph.nodes[member].args for member in whole.ranks] == [(made,) for made in graph.outputs[2:]]
    assert graph.outputs[:2] == tuple(CallValue(member) for member in whole.ranks)


def test_kinds() -> None:
    for make, kind, op, root in (
        (lambda nodes: allreduce(nodes, "AVG"), CollectiveKind.ALLREDUCE, ReduceOp.AVG, None),
        (allgather, CollectiveKind.ALLGATHER, None, None),
        (reducescatter, CollectiveKind.REDUCESCATTER, ReduceOp.SUM, None),
        (lambda nodes: broadcast(nodes, root=1), CollectiveKind.BROADCAST, None, 1),
    ):
        _, _, a, b = two()
        graph = build(MultiOutputNode(make([a, b])))
        assert graph.collectives == (Collective(kind, op, root, (2, 3)),)
        assert [node.collective for node in graph.nodes] == [None, None, 0, 0]
        assert [node.method for node in graph.nodes[2:]] == [kind, kind]


def test_list_of_lists() -> None:
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    (a, b), (c, d) = bind(w.split, inp), bind(v.split, inp)
    results = allreduce([[a, c], [b, d]])
    assert [[node.made_by.class_name for node in row] for row in results] == [["W1", "W1"], ["W2", "W2"]]
    graph = build(MultiOutputNode([results[0][1], results[1][0]]))
    assert [node.args for node in graph.nodes[2:]] == [(CallValue(0, 0), CallValue(0, 1)), (CallValue(1, 0), CallValue(1, 1))]
    assert graph.outputs == (CallValue(2, 1), CallValue(3, 0))
    assert allreduce([[a, c]])[0].made_by.class_name == "W1"  # one list in a list: nodes, as in Ray


def test_one_tensor_twice() -> None:
    _, _, a, b = two()
    graph = build(MultiOutputNode(allreduce([[a, b], [a, b]])[0]))
    assert graph.nodes[2].args == (CallValue(0), CallValue(0))
    plan = lower(graph, "twice")
    verify(plan)
    assert "r0, r2 = collective 2 allreduce sum rank 0 from r1, r1 parts" in str(plan)


@pytest.mark.parametrize("op", [*ReduceOp, "sum", "Max", enum.Enum("Foreign", ["PRODUCT"]).PRODUCT])  # type: ignore[attr-defined]
def test_operations(op: Any) -> None:
    _, _, a, b = two()
    (whole,) = build(MultiOutputNode(allreduce([a, b], op))).collectives
    assert whole.op is ReduceOp[getattr(op, "name", op).upper()]


def cpu_communicator(*actors: Any) -> Any:
    """As Ray's, which is told by its module."""
    kind = type("CPUCommunicator", (LikeRays,), {"__module__": "ray.experimental.channel.cpu_communicator"})
    return kind(*actors, transport="cpu")


@pytest.mark.parametrize(
    ("of", "transport"),
    [
        (lambda w, v: None, "auto"),
        (lambda w, v: "default", "auto"),
        (lambda w, v: "shm", "shm"),
        (lambda w, v: cpu_communicator(w, v), "shm"),
        (lambda w, v: cpu_communicator(v, w), "shm"),
        (lambda w, v: LikeRays(v, w), "own"),
        (lambda w, v: LikeRays(v, w, transport="cpu"), "own"),  # not Ray's, so it is for something
        (lambda w, v: Whole, "own"),
    ],
)
def test_communicators(of: Callable[[Any, Any], Any], transport: str) -> None:
    w, v, a, b = two()
    (whole,) = build(MultiOutputNode(allreduce([a, b], communicator=of(w, v)))).collectives
    assert (whole.transport, whole.own is not None) == (transport, transport == "own")


REFUSED: list[tuple[str, Callable[[Any, Any], Any], str, str]] = [
    ("empty", lambda a, b: allreduce([]), "nodes", "allreduce: no nodes"),
    ("empty list", lambda a, b: allreduce([[a, b], []]), "nodes", "allreduce: no nodes in list 1"),
    ("no list", lambda a, b: allgather(a), "nodes", "allgather: a value of type MethodNode instead of a list"),
    ("mixed", lambda a, b: allreduce([[a, b], a]), "nodes", "instead of a list of nodes in list 1"),
    ("no node", lambda a, b: reducescatter([a, 3]), "nodes", "place 1 holds a value of type int, which is no value"),
    (
        "input",
        lambda a, b: allreduce([a, InputNode()]),
        "nodes",
        r"place 1 holds InputNode\(\d+\), which is no value that an actor",
    ),
    ("nested gather", lambda a, b: allgather([[a, b]]), "nodes", "allgather: place 0 holds a value of type list"),
    ("node twice", lambda a, b: allreduce([a, b, a]), "nodes", "places 0 and 2 hold the same node of W1"),
    (
        "node twice in list",
        lambda a, b: allreduce([[a, b], [b, b]]),
        "nodes",
        "places 0 and 1 in list 1 hold the same node of W2",
    ),
    ("actor twice", lambda a, b: allreduce([a, allreduce([a, b])[0]]), "nodes", "places 0 and 1 hold nodes of one actor, W1#"),
    ("lengths", lambda a, b: allreduce([[a, b], [a]]), "nodes", "list 0 has 2 nodes and list 1 has 1"),
    ("order", lambda a, b: allreduce([[a, b], [b, a]]), "nodes", "list 1 has the actors in another order than list 0"),
    ("actors", lambda a, b: allreduce([[a], [b]]), "nodes", "list 1 has other actors than list 0"),
    ("op", lambda a, b: allreduce([a, b], "mean"), "op", "unknown operation 'mean'; use one of ReduceOp: SUM, PRODUCT"),
    ("op type", lambda a, b: reducescatter([a, b], 3), "op", "unknown operation 3"),
    ("root", lambda a, b: broadcast([a, b], root=2), "root", "root=2 is no rank among 2 actors; give a rank from 0 to 1"),
    ("root type", lambda a, b: broadcast([a, b], root=True), "root", "root=True is no rank"),
    ("name", lambda a, b: allreduce([a, b], communicator="mpi"), "communicator", "unknown communicator 'mpi'"),
    ("object", lambda a, b: allgather([a, b], communicator=3), "communicator", "unknown communicator of type int"),
    (
        "one end",
        lambda a, b: allreduce([a, b], communicator=Whole()),
        "communicator",
        "it is one end of a communicator, a Whole",
    ),
    ("other actors", lambda a, b: allreduce([a, b], communicator=LikeRays(actor("C"))), "communicator", "the 1 actors of its"),
    ("none", lambda a, b: allreduce([a, b], communicator=cpu_communicator()), "communicator", "the 0 actors of its"),
]


@pytest.mark.parametrize(("make", "argument", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_refused_when_made(make: Callable[[Any, Any], Any], argument: str, message: str) -> None:
    _, _, a, b = two()
    with pytest.raises(CompileError, match=message) as caught:
        make(a, b)
    assert caught.value.argument == argument
    assert caught.value.node
    assert caught.value.node in str(caught.value)
    assert caught.value.remedy
    assert str(caught.value).endswith(caught.value.remedy)


def test_one_result_brings_all_actors() -> None:
    """The others' nodes were dropped, and nothing leads to them; they take part all the same."""
    w, _, a, b = two()
    result = bind(w.forward, allreduce([a, b])[0])
    graph = build(result)
    assert [node.method for node in graph.nodes] == ["forward", "forward", "allreduce", "allreduce", "forward"]
    verify(lower(graph, "part"))


def test_collective_that_is_not_used() -> None:
    _, _, a, b = two()
    kept = allreduce([a, b])
    with pytest.raises(CompileError, match=re.escape("2 calls lead to no result: W1.allreduce, W2.allreduce;")):
        build(MultiOutputNode([a, b]))
    del kept
    with pytest.raises(CompileError, match=re.escape("W1.allreduce (its node is gone)")):
        build(MultiOutputNode([a, b]))


def test_same_collectives_in_one_order_on_all_actors() -> None:
    """The results' order does not matter; each actor has them in the order in which they were made."""
    workers = [actor(f"W{index}") for index in range(3)]
    inp = InputNode()
    a, b, c = (bind(w.forward, inp) for w in workers)
    first = allreduce([a, b, c])
    second = allgather([c, b])
    third = broadcast([bind(w.forward, x) for w, x in zip(workers, first, strict=True)])
    graph = build(MultiOutputNode([third[2], second[0], first[1], third[0]]))
    assert [whole.kind for whole in graph.collectives] == ["allreduce", "allgather", "broadcast"]
    for whole in graph.collectives:
        assert list(whole.ranks) == list(range(whole.ranks[0], whole.ranks[0] + len(whole.ranks)))
    plan = lower(graph, "ordered")
    verify(plan)


def test_two_handles_of_one_actor_are_one_rank() -> None:
    w = actor("W1", "aa")
    again = StubHandle(w._cls, "aa")
    inp = InputNode()
    with pytest.raises(CompileError, match="nodes of one actor, W1#aa"):
        allreduce([bind(w.forward, inp), bind(again.forward, inp)])


def test_results_are_values_like_any_other() -> None:
    _, v, a, b = two()
    first, second = allreduce([a, b])
    assert first.with_tensor_transport("shm") is first
    joined = bind(v.join, first, second, named=first)
    graph = build(MultiOutputNode([joined, first, first]))
    assert graph.nodes[4].args == (CallValue(2), CallValue(3))
    assert graph.outputs == (CallValue(4), CallValue(2), CallValue(2))
    second.with_tensor_transport("nccl")
    assert dict(build(joined).hints)[CallValue(3)] == TensorHint(TensorTransport.NCCL)


def test_dropping_the_last_node_frees_the_actor_handles() -> None:
    class Token:
        pass

    w, v, a, b = two()
    w.token = Token()
    alive = weakref.ref(w.token)
    gc.disable()
    try:
        results = allreduce([a, b])
        del w, v, a, b
        assert alive() is not None
        del results
        assert alive() is None
    finally:
        gc.enable()


def test_nodes_stay_in_their_process() -> None:
    _, _, a, b = two()
    data = pickle.dumps(allreduce([a, b])[0])
    with pytest.raises(
        TypeError, match=r"CollectiveOutputNode\(W1.allreduce, \d+\) is a node of a raycomm graph: it cannot leave"
    ):
        pickle.loads(data)


def test_many_collectives_take_linear_time() -> None:
    """300 of them over 10 actors; a quadratic step would take minutes."""
    workers = [actor("W", f"{index:06x}") for index in range(10)]
    inp = InputNode()
    values: list[Any] = [bind(w.forward, inp) for w in workers]
    for _ in range(300):
        values = allreduce(values)
    plan = lower(build(MultiOutputNode(values)), "many")
    verify(plan)
    assert sum(channel.value.startswith("part of") for channel in plan.channels) == 3000
