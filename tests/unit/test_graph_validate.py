"""Rules of a graph: each violation names the node and a remedy."""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raycomm.errors import CompileError, DeadlockError
from raycomm.graph.actor import read_actor
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.containers import MAX_OBJECTS, nested_nodes
from raycomm.graph.model import CallValue, InputValue, Key
from raycomm.graph.nodes import InputNode, MultiOutputNode, is_own
from raycomm.graph.tensor_hint import TensorHint
from raycomm.graph.tensor_transport import TensorDevice, TensorTransport
from raycomm.graph.views import CallView, InputView, View
from tests.unit.stub_actors import actor


def refused(root: object, message: str, *, node: str | None, remedy: str) -> CompileError:
    """`build(root)` is refused with `message` (a pattern), for `node`, with `remedy` also in the text."""
    with pytest.raises(CompileError, match=message) as caught:
        build(root)
    error = caught.value
    assert error.node == node
    assert error.remedy is not None
    assert remedy in error.remedy
    assert str(error).endswith(error.remedy)
    if node is not None:
        assert node in str(error)
    return error


@dataclass
class Box:
    content: object


@dataclass
class SlottedBox:
    __slots__ = ("content",)
    content: object


class Plain:
    """Answers every attribute it lacks, as Ray's input node does."""

    def __init__(self, content: object) -> None:
        self.content = content

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"asked for {name}")

    def method(self) -> None:
        return None


class Slotted:
    __slots__ = ("content", "unset")

    def __init__(self, content: object) -> None:
        self.content = content


@pytest.mark.parametrize("root", [None, 3, "x", (), object()])
def test_root_must_be_a_node(root: object) -> None:
    refused(root, "compile takes a node", node=None, remedy="MultiOutputNode")


def test_root_may_not_be_the_tuple_that_bind_returns() -> None:
    refused(bind(actor().split, InputNode()), "value of type tuple", node=None, remedy="MultiOutputNode")


def test_no_input() -> None:
    w = actor("W1")
    root = bind(w.forward, bind(w.scale, 1))
    refused(root, "no InputNode leads to node W1.forward", node="W1.forward", remedy="bind the first calls to an InputNode")


def test_call_without_node_argument() -> None:
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    lonely = bind(w.scale, 1, offset=2)
    refused(
        bind(v.join, inp, lonely), "W1.scale has no node among its arguments", node="W1.scale", remedy="InputNode or another node"
    )


def test_graph_without_calls() -> None:
    inp = InputNode()
    refused(inp, "calls no actor", node=repr(inp), remedy="bind the input")
    refused(MultiOutputNode([inp[0]]), "calls no actor", node="MultiOutputNode", remedy="bind the input")


def test_two_inputs_are_both_named() -> None:
    w, v = actor("W1"), actor("W2")
    one, two = InputNode(), InputNode()
    error = refused(bind(v.join, bind(w.forward, one), two.x), "2 InputNodes", node=repr(two), remedy="use one InputNode")
    assert f"{one!r} (used by W1.forward)" in str(error)
    assert f"{two!r} (used by W2.join)" in str(error)


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda node: [node], "[0]"),
        (lambda node: (1, node), "[1]"),
        (lambda node: {"k": node}, "['k']"),
        (lambda node: {node: 1}, "key"),
        (lambda node: {node}, "{...}"),
        (lambda node: frozenset([node]), "{...}"),
        (lambda node: deque([node]), "[0]"),
        (lambda node: Box(node), ".content"),
        (lambda node: SlottedBox(node), ".content"),
        (lambda node: [{"a": (0, Box([node]))}], "[0]['a'][1].content[0]"),
        (lambda node: Plain(node), ".content"),
        (lambda node: Slotted(node), ".content"),
        (lambda node: SimpleNamespace(a=[node]), ".a[0]"),
        (lambda node: functools.partial(print, node), ".args[0]"),
        (lambda node: functools.partial(print, end=node), ".keywords['end']"),
        (lambda node: lambda: node, "variable node"),
        (lambda node: Plain(node).method, ".__self__.content"),
        (lambda node: np.array([[1, node]], object), "[0][1]"),
    ],
)
@pytest.mark.parametrize("keyword", [False, True])
def test_node_inside_a_container(wrap: Callable[[object], object], path: str, keyword: bool) -> None:
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    x = bind(w.forward, inp)
    # A later plain argument must not hide the nested node.
    root = bind(v.join, inp, box=wrap(x), z=1) if keyword else bind(v.join, inp, wrap(x), 1)
    error = refused(root, "contains node W1.forward", node="W2.join", remedy="not inside any container")
    assert error.argument == ("box" if keyword else "1")
    assert f"at {path}" in str(error)


def test_stray_call_with_a_nested_node_is_found() -> None:
    w = actor("W1")
    x = bind(w.forward, InputNode())
    stray = bind(w.join, [x])
    refused(x, "contains node W1.forward", node="W1.join", remedy="container")
    assert stray is not None


def test_walk_into_constants_ends() -> None:
    loop: list[object] = []
    loop.append(loop)
    graph = build(bind(actor().join, InputNode(), loop, list(range(100_000))))
    assert graph.constants[0] is loop


def test_walk_into_a_huge_constant_is_bounded() -> None:
    node = InputNode()
    filler = [object() for _ in range(MAX_OBJECTS)]
    assert [found for found, _ in nested_nodes([*filler[:-1], node], is_own)] == [node]
    assert [found for found, _ in nested_nodes([*filler, node], is_own)] == []


def test_unused_calls_are_counted_and_named() -> None:
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    x = bind(w.forward, inp)
    strays = [bind(v.scale, x), bind(v.join, bind(w.scale, inp))]
    error = refused(x, "2 calls lead to no result: ", node="W2.scale", remedy="add them to MultiOutputNode")
    assert "W2.join" in str(error)
    assert len(strays) == 2


def test_call_that_was_bound_and_dropped_is_unused() -> None:
    w, v = actor("W1"), actor("W2")
    x = bind(w.forward, InputNode())
    bind(v.join, x, x)
    gone = "W2.join (its node is gone)"
    refused(x, re.escape(f"1 call leads to no result: {gone}; add it"), node=gone, remedy="MultiOutputNode")


def test_one_element_of_two_is_enough() -> None:
    w = actor("W1")
    first, second = bind(w.split, InputNode())
    assert build(second).nodes[0].num_returns == 2
    del first
    assert build(second).nodes[0].num_returns == 2


def test_several_returns_are_used_by_element() -> None:
    w = actor("W1")
    first, _ = bind(w.split, InputNode())
    refused(bind(w.forward, first.call), "W1.split as one value, but it returns 2", node="W1.split", remedy="use its elements")


def test_whole_and_parts_do_not_mix() -> None:
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    refused(
        bind(v.join, bind(w.forward, inp), inp[0]),
        r"used whole by W1.forward and in parts \(inp\[0\]\) by W2.join",
        node="W2.join",
        remedy="parts everywhere",
    )
    inp = InputNode()
    refused(
        MultiOutputNode([bind(w.forward, inp.x), inp]),
        "used whole by the results",
        node="W1.forward",
        remedy="whole input everywhere",
    )


def test_reserved_input_key() -> None:
    w = actor("W1")
    inp = InputNode()
    node = bind(w.forward, inp.timeout)
    error = refused(node, "'timeout', used by W1.forward", node="W1.forward", remedy="another name")
    assert error.argument == "timeout"
    assert build(node, reserved_keys=frozenset()).input_keys == ("timeout",)


def test_results() -> None:
    w = actor("W1")
    x = bind(w.forward, InputNode())
    refused(MultiOutputNode([]), "MultiOutputNode is empty", node="MultiOutputNode", remedy="at least one node")
    several = bind(w.split, x)
    for wrong, place, kind in (([x, 3], 1, "int"), ((None, x), 0, "NoneType"), ([several], 0, "tuple"), ([w], 0, "Handle")):
        message = f"result {place} is a value of type .*{kind}, not a node; list nodes only, and unpack what bind returns"
        with pytest.raises(CompileError, match=message) as caught:
            MultiOutputNode(wrong)
        assert caught.value.argument == str(place)


def test_results_must_be_a_list() -> None:
    x = bind(actor("W1").forward, InputNode())
    for wrong in (x, {x}, "ab", None, iter([x])):
        with pytest.raises(CompileError, match=r"takes a list or tuple of nodes.*write MultiOutputNode\(\[a, b\]\)") as caught:
            MultiOutputNode(wrong)  # type: ignore[arg-type]
        assert caught.value.node == "MultiOutputNode"
    for right in ([x], (x,)):
        assert len(build(MultiOutputNode(right)).outputs) == 1


def test_results_do_not_nest() -> None:
    x = bind(actor("W1").forward, InputNode())
    inner = MultiOutputNode([x])
    refused(MultiOutputNode([inner, x]), "result 0 is itself a MultiOutputNode", node="MultiOutputNode", remedy="outer one")


def test_results_are_no_argument() -> None:
    w = actor("W1")
    inp = InputNode()
    out = MultiOutputNode([bind(w.forward, inp)])
    refused(bind(w.join, inp, out), "argument 1 of node W1.join is a MultiOutputNode", node="W1.join", remedy="one by one")


def test_results_that_are_not_compiled_do_not_count() -> None:
    w = actor("W1")
    inp = InputNode()
    x, y = bind(w.forward, inp), bind(w.scale, inp)
    other = MultiOutputNode([x, y])
    refused(x, "1 call leads to no result: W1.scale", node="W1.scale", remedy="MultiOutputNode")
    refused(MultiOutputNode([x]), "1 call leads to no result: W1.scale", node="W1.scale", remedy="MultiOutputNode")
    assert len(build(other).outputs) == 2


@pytest.mark.parametrize("transport", ["tcp", "NCCL", None, object(), b"nccl"])
@pytest.mark.parametrize("place", ["call", "element", "input", "part"])
def test_unknown_transports(transport: object, place: str) -> None:
    w, v = actor("W1"), actor("W2")
    inp = InputNode()
    first, _ = bind(w.split, inp if place == "input" else inp.x)
    root = bind(v.forward, first)
    target, name = {
        "call": (root, "W2.forward"),
        "element": (first, "W1.split[0]"),
        "input": (inp, repr(inp)),
        "part": (inp.x, f"{inp!r}['x']"),
    }[place]
    assert target.with_tensor_transport("shm") is target
    assert build(root)
    assert target.with_tensor_transport(transport, _static_shape=True) is target
    shown = repr(transport) if isinstance(transport, str) else f"of type {type(transport).__name__}"
    text = f"transport {shown} of node {name} is none that there is"
    error = refused(root, re.escape(text), node=name, remedy="use 'auto', 'shm', 'nccl' (or 'accelerator'), 'gloo', a class")
    assert error.argument == "transport"


def test_unknown_devices() -> None:
    node = bind(actor("W1").forward, InputNode())
    for device in ("default", "cpu", "gpu", "cuda"):
        assert build(node.with_tensor_transport(device=device))
    for device in ("cuda:0", "tpu", None):
        node.with_tensor_transport(device=device)  # type: ignore[arg-type]
        error = refused(node, f"device {device!r} of node W1.forward", node="W1.forward", remedy="'default', 'cpu' or 'gpu'")
        assert error.argument == "device"


@pytest.mark.parametrize(
    ("transport", "device", "remedy"),
    [("nccl", "cpu", "'shm'"), ("accelerator", "cpu", "'shm'"), ("gloo", "gpu", "'nccl'"), ("gloo", "cuda", "'nccl'")],
)
def test_transports_and_devices_that_exclude_each_other(transport: str, device: str, remedy: str) -> None:
    node = bind(actor("W1").forward, InputNode()).with_tensor_transport(transport, device)
    refused(node, "of node W1.forward exclude each other", node="W1.forward", remedy=remedy)


def test_a_repeated_method_is_named_with_its_number() -> None:
    w = actor("W1")
    x = bind(w.forward, InputNode())
    y = bind(w.forward, x).with_tensor_transport("tcp")
    refused(bind(w.forward, y), "node W1.forward#1 is none", node="W1.forward#1", remedy="shm")


def test_hints_are_of_values() -> None:
    """As the user gave them, the words for one thing made one; the parts of an input have what the whole has."""
    w, v = actor("W1"), actor("W2")
    inp = InputNode().with_tensor_transport("auto", "cuda")
    inp.own.with_tensor_transport("shm")
    first, second = bind(w.split, inp.x)
    first.with_tensor_transport("accelerator", _static_shape=True)
    second.with_tensor_transport("gloo", "cpu", _direct_return=True)
    graph = build(MultiOutputNode([bind(v.join, first, second, inp.own), bind(w.forward, inp.own)]))
    assert dict(graph.hints) == {
        InputValue(Key("x")): TensorHint(TensorTransport.AUTO, TensorDevice.GPU),
        InputValue(Key("own")): TensorHint(TensorTransport.SHM),
        CallValue(0, 0): TensorHint(TensorTransport.NCCL, static_shape=True),
        CallValue(0, 1): TensorHint(TensorTransport.GLOO, TensorDevice.CPU, direct_return=True),
    }
    assert build(bind(w.forward, InputNode())).hints == ()


class CyclicAdapter:
    """Calls that use each other, which neither library's nodes can express."""

    def __init__(self) -> None:
        self.worker = actor("W1")
        self.links: dict[str, list[str]] = {"a": ["in", "c"], "b": ["a"], "c": ["b"], "d": ["c"]}
        self.names = {name: name for name in (*self.links, "in")}

    def recognises(self, value: object) -> bool:
        return isinstance(value, str) and value in self.names

    def describe(self, node: Any) -> View:
        if node == "in":
            return InputView(node=self.names["in"], label="in")
        identity = read_actor(self.worker)
        assert identity is not None
        args = tuple(self.names[name] for name in self.links[node])
        return CallView(node=self.names[node], label=node, actor=identity, method=node, args=args, kwargs=(), num_returns=1)


def test_cycle_is_named() -> None:
    adapter = CyclicAdapter()
    with pytest.raises(DeadlockError, match="calls wait for each other") as caught:
        build(adapter.names["d"], adapter)
    assert sorted(caught.value.cycle) == ["a", "b", "c"]
    cycle = caught.value.cycle
    for step, name in enumerate(cycle):
        assert cycle[step - 1] in adapter.links[name]  # Each one uses the one before it.
    assert caught.value.remedy


def test_the_same_graph_without_its_cycle_is_built() -> None:
    adapter = CyclicAdapter()
    adapter.links["a"] = ["in"]
    assert [node.method for node in build(adapter.names["d"], adapter).nodes] == ["a", "b", "c", "d"]
