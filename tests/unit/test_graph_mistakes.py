"""What is said to somebody who took a node for something else, or something else for a node."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from raycomm.errors import CompileError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allreduce
from raycomm.graph.edges import after, with_channel_options
from raycomm.graph.nodes import InputNode, MultiOutputNode
from tests.unit.stub_actors import actor


def nodes() -> list[Any]:
    """One of each kind but inputs, of which any attribute is a part."""
    w, v, x = actor("W1"), actor("W2"), InputNode()
    call = bind(w.forward, x)
    return [call, bind(w.split, x)[0], MultiOutputNode([call]), *allreduce([bind(w.forward, x), bind(v.forward, x)])]


@pytest.mark.parametrize("name", ["execute", "execute_async", "experimental_compile"])
def test_a_node_that_was_not_compiled_says_so(name: str) -> None:
    for node in nodes():
        with pytest.raises(AttributeError, match=rf"{type(node).__name__} has no attribute '{name}'; .*raycomm\.compile\(node\)"):
            getattr(node, name)


def test_other_attributes_are_missing_as_usual() -> None:
    for node in nodes():
        with pytest.raises(AttributeError, match=rf"^{type(node).__name__} has no attribute 'nope'$"):
            node.nope  # noqa: B018
        assert not hasattr(node, "__array__")
    assert InputNode().execute.key == "execute", "a part of the input"


def test_a_copied_node_says_what_it_was_meant_for() -> None:
    for node in [*nodes(), InputNode(), InputNode()[0]]:
        with pytest.raises(TypeError) as caught:
            pickle.loads(pickle.dumps(node))
        for part in (repr(node), "Ray's own .bind", "raycomm.compile(node)", "ray.dag.InputNode", ".remote"):
            assert part in str(caught.value)


@pytest.mark.parametrize("kind", ["ObjectRef", "ObjectRefGenerator"])
@pytest.mark.parametrize(
    "use",
    [
        build,
        lambda ref: MultiOutputNode([ref]),
        lambda ref: after(bind(actor("W1").forward, InputNode()), ref),
        lambda ref: after(ref, InputNode()),
        lambda ref: with_channel_options(ref, slots=2),
    ],
)
def test_remote_in_place_of_bind(kind: str, use: Any) -> None:
    ref = type(kind, (), {"__module__": "ray._raylet"})()
    message = rf"a value of type {kind} \(did you call .remote instead of .bind\?\)"
    with pytest.raises(CompileError, match=message):
        build(use(ref))
    other = type(kind, (), {"__module__": "rayon"})()
    with pytest.raises(CompileError) as caught:
        build(use(other))
    assert ".remote" not in str(caught.value)


def test_results_are_looked_at_when_they_are_listed() -> None:
    """A list that holds what may be a node of another library passes: whether it is one shows when the graph is compiled."""

    class Foreign:
        def with_tensor_transport(self) -> None: ...

    node = bind(actor("W1").forward, InputNode())
    listed = MultiOutputNode([node, Foreign()])
    with pytest.raises(CompileError, match="result 1 is a value of type Foreign, not a node"):
        build(listed)
    for wrong in (1, None, "x", [node], {}, Foreign):
        with pytest.raises(CompileError, match="MultiOutputNode: result 1 is a value of type") as caught:
            MultiOutputNode((node, wrong))
        assert caught.value.argument == "1"


def test_unknown_channel_options() -> None:
    node = bind(actor("W1").forward, InputNode())
    wrong: dict[str, Any] = {"slot": 3}
    for set_options in (lambda: with_channel_options(node, **wrong), lambda: node.with_channel_options(**wrong)):
        with pytest.raises(CompileError, match="unknown channel option 'slot' of node MethodNode") as caught:
            set_options()
        assert "known options are: inline_bytes, slots, share_tensors, allow_pickle" in str(caught.value)
        assert caught.value.argument == "slot"
