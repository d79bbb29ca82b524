"""Graphs written with `ray.dag`, alone and mixed with raycomm's nodes, on real actor handles."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
from ray.dag import InputNode as RayInputNode
from ray.dag import MultiOutputNode as RayMultiOutputNode

from raycomm.errors import CompileError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.model import CallValue, Graph, Position
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.plan.lowering import lower
from raycomm.plan.text import parse_plan
from raycomm.plan.verify import verify
from raycomm.ray_dag.read import ADAPTER
from tests.ray.read_actors import Worker, call, double, refused, two_actors

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def handles(cluster: None) -> Iterator[tuple[Any, Any]]:
    with two_actors() as both:
        yield both


def pipeline(handles: tuple[Any, Any], families: str) -> Graph:
    """One graph, each node from the family that `families` names in turn."""
    w, v = handles
    names = {"r": "ray", "c": "raycomm"}
    turn = iter(names[letter] for letter in families)
    inp: Any = RayInputNode() if next(turn) == "ray" else InputNode()
    with inp:
        a = call(next(turn), w.forward, inp[0])
        left, right = call(next(turn), v.split, a)
        b = call(next(turn), w.join, left, 7, right, inp.key)
        c = call(next(turn), v.forward, b)
    outputs = [c, a, inp[0], left]
    return build(RayMultiOutputNode(outputs) if next(turn) == "ray" else MultiOutputNode(outputs), ADAPTER)


@pytest.mark.parametrize("families", ["rrrrrr", "rrrrrc", "crrrrr", "rcrcrc", "crcrcr", "ccccrc", "cccccr", "rrccrr", "rccccr"])
def test_both_families_give_one_plan(handles: tuple[Any, Any], families: str) -> None:
    own = pipeline(handles, "cccccc")
    graph = pipeline(handles, families)
    assert graph == own
    plan = lower(graph, "pipeline")
    verify(plan)
    assert plan.to_text() == lower(own, "pipeline").to_text()
    assert parse_plan(plan.to_text()) == plan
    assert [channel.value for channel in plan.channels] == [
        "input[0]",
        "input.key",
        "Worker.forward#0",
        "Other.split#1[0]",
        "Other.split#1[1]",
        "Worker.join#2",
        "Other.forward#3",
    ]
    assert {actor.key for actor in graph.actors} == {handle._actor_id.hex() for handle in handles}


def test_signatures_of_real_methods(handles: tuple[Any, Any]) -> None:
    w, _ = handles
    with pytest.raises(
        CompileError, match=r"Worker.forward\(x: 'Any'\) was given \(\): missing a required argument: 'x'; pass"
    ) as caught:
        bind(w.forward)
    assert caught.value.node == "Worker.forward"
    assert len(bind(w.forward.options(num_returns=3), InputNode())) == 3


@pytest.mark.parametrize("make", [lambda: double, lambda: Worker.forward, lambda: ray.remote(Worker).forward])
def test_bind_refuses_what_is_no_actor_method(make: Any) -> None:
    with pytest.raises(CompileError, match=r"create the actor with Cls.remote\(...\)"):
        bind(make(), InputNode())


def test_bind_refuses_an_actor_that_is_not_created() -> None:
    with pytest.raises(CompileError, match="has not been created; create the actor") as caught:
        bind(ray.remote(Worker).bind().forward, InputNode())
    assert caught.value.node == "forward"


def test_bind_order_is_shared_by_both_families(handles: tuple[Any, Any]) -> None:
    w, _ = handles
    for own_first in (True, False):
        inp = RayInputNode()
        first = call("raycomm" if own_first else "ray", w.join, inp, 1)
        second = call("ray" if own_first else "raycomm", w.join, inp, 2)
        graph = build(MultiOutputNode([second, first]), ADAPTER)
        assert graph.constants == (1, 2)
        assert graph.outputs == (CallValue(1), CallValue(0))


def test_two_handles_of_one_actor(handles: tuple[Any, Any]) -> None:
    w, _ = handles
    again = ray.get_actor("worker")
    assert again is not w
    inp = RayInputNode()
    a = w.join.bind(inp, 1)
    b = again.join.bind(inp, 2)
    c = w.join.bind(inp, 3)
    graph = build(RayMultiOutputNode([c, b, a]), ADAPTER)
    assert [actor.label for actor in graph.actors] == ["Worker"]
    # All use the input, whose list of users keeps the order that the handles' own counters do not show.
    assert graph.outputs == (CallValue(2), CallValue(1), CallValue(0))


def test_remote_function(handles: tuple[Any, Any]) -> None:
    w, _ = handles
    inp = RayInputNode()
    error = refused(w.forward.bind(double.bind(inp)), "only actor methods can be nodes", "double()")
    assert "make it a method" in str(error.remedy)


def test_actor_that_is_not_created() -> None:
    inp = RayInputNode()
    unbound = ray.remote(Worker).bind()
    error = refused(unbound.forward.bind(inp), "its actor has not been created", "Worker.forward")
    assert "Cls.remote(...)" in str(error.remedy)
    refused(unbound, "only methods of created actors", "Worker.bind()")


def test_nested_node_in_an_earlier_argument(handles: tuple[Any, Any]) -> None:
    """Ray remembers only the last argument's answer, so it lets this through."""
    w, v = handles
    for family in ("ray", "raycomm"):
        inp = RayInputNode()
        root = v.join.bind([call(family, w.forward, inp)], inp, 1)
        assert not root._args_contain_nested_dag_node
        refused(root, r"contains node Worker.forward at \[0\]", "Other.join")


def test_keyword_node(handles: tuple[Any, Any]) -> None:
    w, _ = handles
    inp = RayInputNode()
    graph = build(w.join.bind(inp[1], named=inp[1]), ADAPTER)
    assert graph.inputs == (Position(1),)
    assert graph.input_arity == 2
    assert graph.nodes[0].kwargs[0][1] == graph.nodes[0].args[0]


def test_stray_branch_is_found(handles: tuple[Any, Any]) -> None:
    w, v = handles
    inp = RayInputNode()
    x = w.forward.bind(inp)
    v.join.bind(v.forward.bind(x))  # Ray keeps what uses a node.
    refused(x, "1 call leads to no result: Other.join; add it to MultiOutputNode", "Other.join")


def test_unused_element_is_allowed(handles: tuple[Any, Any]) -> None:
    w, _ = handles
    _, second = w.split.bind(RayInputNode())
    assert build(second, ADAPTER).outputs == (CallValue(0, 1),)


def test_two_inputs_of_both_families(handles: tuple[Any, Any]) -> None:
    w, v = handles
    own, rays = InputNode(), RayInputNode()
    with pytest.raises(CompileError, match=r"2 InputNodes: .*; use one InputNode") as error:
        build(w.join.bind(v.forward.bind(rays), own), ADAPTER)
    assert error.value.node
    assert re.search(r"ray\.dag InputNode\(\w{6}\) \(used by Other\.forward\)", str(error.value))
    assert f"{own!r} (used by Worker.join)" in str(error.value)


def test_touched_parts_of_the_input_do_not_count(handles: tuple[Any, Any]) -> None:
    w, _ = handles
    inp = RayInputNode()
    assert hasattr(inp, "shape")
    assert inp[-1] is not None
    assert build(w.forward.bind(inp.x), ADAPTER).input_keys == ("x",)
    root = w.forward.bind(inp[-1])
    with pytest.raises(CompileError, match="-1 is no part of an input; use a position of at least 0"):
        build(MultiOutputNode([root, w.forward.bind(inp.x)]), ADAPTER)


def test_results_as_argument_and_empty_results(handles: tuple[Any, Any]) -> None:
    w, _ = handles
    inp = RayInputNode()
    out = RayMultiOutputNode([w.forward.bind(inp)])
    refused(w.join.bind(inp, out), "argument 1 of node Worker.join is a MultiOutputNode", "Worker.join")
    refused(RayMultiOutputNode([]), "MultiOutputNode is empty", "MultiOutputNode")


def test_results_that_are_not_compiled_join_no_graphs(handles: tuple[Any, Any]) -> None:
    w, v = handles
    x, y = w.forward.bind(RayInputNode()), v.forward.bind(RayInputNode())
    both = RayMultiOutputNode([x, y])
    assert [node.method for node in build(x, ADAPTER).nodes] == ["forward"]
    with pytest.raises(CompileError, match="2 InputNodes"):
        build(both, ADAPTER)


def test_ray_nodes_count_as_constants_without_the_adapter(handles: tuple[Any, Any]) -> None:
    w, _ = handles
    with pytest.raises(CompileError, match="compile takes a node, got a value of type ClassMethodNode"):
        build(w.forward.bind(RayInputNode()))


def random_root(handles: tuple[Any, Any], families: Callable[[], str], rng: random.Random) -> tuple[Any, list[str]]:
    """Results of a random graph in which every call is used, and the tags of the calls in the order they were bound."""
    inp: Any = RayInputNode() if families() == "ray" else InputNode()
    sources: list[Any] = [inp[0], inp[1], inp.key]
    values: list[Any] = []
    tags: list[str] = []
    for place in range(rng.randint(1, 25)):
        args = [rng.choice(values[-5:] + sources) for _ in range(rng.randint(1, 3))]
        method = rng.choice(handles).join.options(num_returns=rng.choice([1, 1, 2]))
        made = call(families(), method, *args, tag=f"call {place}")
        tags.append(f"call {place}")
        values.extend(made if isinstance(made, tuple) else (made,))
    return (RayMultiOutputNode if families() == "ray" else MultiOutputNode)(values), tags


@pytest.mark.parametrize("seed", range(25))
def test_random_graphs_of_both_families_give_one_plan(handles: tuple[Any, Any], seed: int) -> None:
    graphs = [build(random_root(handles, lambda f=family: f, random.Random(seed))[0], ADAPTER) for family in ("ray", "raycomm")]
    assert graphs[0] == graphs[1]
    assert graphs[0].constants == graphs[1].constants


@pytest.mark.parametrize("seed", range(25))
def test_random_mixed_graphs_keep_the_order_of_binding(handles: tuple[Any, Any], seed: int) -> None:
    rng = random.Random(seed)
    root, tags = random_root(handles, lambda: rng.choice(["ray", "raycomm"]), rng)
    graph = build(root, ADAPTER)
    verify(lower(graph, "mixed"))
    order = {tag: place for place, tag in enumerate(tags)}
    for actor in graph.actors:
        run = [order[graph.constants[dict(node.kwargs)["tag"].index]] for node in graph.nodes if node.actor == actor.index]
        assert run == sorted(run)


def test_call_that_returns_nothing(handles: tuple[Any, Any]) -> None:
    w, _ = handles
    refused(w.forward.options(num_returns=0).bind(RayInputNode()), "Worker.forward has num_returns=0", "Worker.forward")
