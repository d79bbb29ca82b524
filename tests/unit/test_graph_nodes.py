"""Node classes and `bind`."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref

import pytest

from raycomm.errors import CompileError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.model import CallValue, InputValue, Key, Position
from raycomm.graph.nodes import InputAttributeNode, InputNode, MethodNode, MultiOutputNode
from tests.unit.stub_actors import StubHandle, StubMethod, actor


def test_graph_and_plan_import_neither_ray_nor_torch() -> None:
    program = "import sys, raycomm.graph, raycomm.plan; print([m for m in ('ray', 'torch', 'cupy', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_input_node_takes_no_arguments() -> None:
    for make in (lambda: InputNode(1), lambda: InputNode(x=1)):
        with pytest.raises(ValueError, match=r"InputNode takes no arguments.*execute") as caught:
            make()
        assert isinstance(caught.value, CompileError)


def test_input_parts() -> None:
    with InputNode() as inp:
        assert isinstance(inp[0], InputAttributeNode)
        assert inp.key is inp["key"]
        assert inp[0] is inp[0]
        assert [part.key for part, _ in zip(inp, range(3), strict=False)] == [0, 1, 2]


@pytest.mark.parametrize(
    "name", ["_repr_html_", "_ipython_display_", "__len__", "__deepcopy__", "_x", "__array__", "__wrapped__"]
)
def test_probes_make_no_input_parts(name: str) -> None:
    inp = InputNode()
    assert not hasattr(inp, name)
    assert inp._parts == {}
    assert inp[name].key == name  # An input key of that name can still be reached.


@pytest.mark.parametrize("key", [-1, True, False, 1.0, None, (0,), slice(0, 1)])
def test_wrong_input_keys(key: object) -> None:
    with pytest.raises(CompileError, match=r"no part of an input; use a position of at least 0") as caught:
        InputNode()[key]  # type: ignore[index]
    assert caught.value.node == "InputNode"
    assert caught.value.argument == repr(key)
    assert caught.value.remedy


def test_iterating_over_the_input_ends() -> None:
    with pytest.raises(CompileError, match=r"InputNode has no length.*use inp\[0\]"):
        list(InputNode())


def test_only_bound_parts_count() -> None:
    w = actor()
    with InputNode() as inp:
        assert inp[7] is not None
        assert hasattr(inp, "shape")
        graph = build(bind(w.join, inp[0], inp.key))
    assert graph.inputs == (Position(0), Key("key"))
    assert (graph.input_arity, graph.input_keys) == (1, ("key",))


def test_nodes_pickle_to_a_refusal_and_do_not_copy() -> None:
    w = actor()
    inp = InputNode()
    for node in (inp, inp[0], bind(w.forward, inp), bind(w.split, inp)[0], MultiOutputNode([])):
        data = pickle.dumps(node)  # Ray's bind pickles its arguments.
        with pytest.raises(TypeError, match="cannot leave its process"):
            pickle.loads(data)
        with pytest.raises(TypeError, match="cannot leave its process"):
            copy.copy(node)
        with pytest.raises(TypeError, match="cannot leave its process"):
            copy.deepcopy(node)


def test_bind_gives_one_node_per_return() -> None:
    w = actor()
    inp = InputNode()
    assert isinstance(bind(w.forward, inp), MethodNode)
    first, second = bind(w.split, inp)
    assert (first.index, second.index) == (0, 1)
    assert first.call is second.call
    assert len(bind(w.forward.options(num_returns=3), inp)) == 3
    assert isinstance(bind(w.split.options(num_returns=1), inp), MethodNode)


@pytest.mark.parametrize("returns", [0, -1, "streaming", "dynamic", True, 1.0])
def test_returns_must_be_countable(returns: object) -> None:
    with pytest.raises(CompileError, match=r"W1.forward has num_returns=.*method.options\(num_returns=n\)") as caught:
        bind(actor("W1").forward.options(num_returns=returns), InputNode())
    assert (caught.value.node, caught.value.argument) == ("W1.forward", "num_returns")


def test_generator_method_is_refused() -> None:
    with pytest.raises(CompileError, match="num_returns='streaming'"):
        bind(actor().stream, InputNode())


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((), {}, "missing a required argument: 'x'"),
        ((1, 2, 3), {}, "too many positional arguments"),
        ((1,), {"nope": 2}, "unexpected keyword argument 'nope'"),
        ((1,), {"x": 2}, "multiple values for argument 'x'"),
        ((1,), {"_ray_trace_ctx": 2}, "unexpected keyword argument '_ray_trace_ctx'"),
    ],
)
def test_arguments_must_fit_the_signature(args: tuple[object, ...], kwargs: dict[str, object], problem: str) -> None:
    with pytest.raises(CompileError) as caught:
        bind(actor("W1").scale, *args, **kwargs)
    text = str(caught.value)
    assert "W1.scale(x: 'Any', factor: 'int' = 1, *, offset: 'int' = 0)" in text
    assert problem in text
    assert "pass arguments that fit scale(" in text
    assert "_ray_trace_ctx:" not in text
    assert caught.value.node == "W1.scale"


def test_arguments_that_fit_the_signature() -> None:
    w = actor()
    inp = InputNode()
    for node in (
        bind(w.scale, inp),
        bind(w.scale, inp, 2),
        bind(w.scale, inp, offset=1, factor=3),
        bind(w.scale, x=inp),
        bind(w.join, inp, 1, 2, method=3, self_=4),
    ):
        assert isinstance(node, MethodNode)


class Plain:
    def forward(self, x: object) -> object:
        return x


def _unbound() -> object:
    """Like the method of `Actor.bind()`: it has an actor, but of a class that was not created."""
    return StubMethod(Plain(), "forward", 1, [])


@pytest.mark.parametrize("method", [print, Plain.forward, Plain().forward, Plain, None, 3, "forward", _unbound()])
def test_only_methods_of_created_actors_are_bound(method: object) -> None:
    with pytest.raises(CompileError, match=r"create the actor with Cls.remote\(...\)") as caught:
        bind(method, InputNode())
    assert caught.value.node
    assert caught.value.argument == "method"
    assert caught.value.remedy in str(caught.value)


def test_two_handles_of_one_actor_are_one_actor() -> None:
    first = actor("W1", "aa")
    second = StubHandle(first._cls, "aa")
    inp = InputNode()
    a = bind(first.forward, inp)
    b = bind(second.forward, inp)  # Its handle counts from 0 again.
    c = bind(first.forward, inp)
    graph = build(MultiOutputNode([c, b, a]))
    assert [item.key for item in graph.actors] == ["aa"]
    assert [node.id for node in graph.nodes] == [0, 1, 2]
    assert graph.outputs == (CallValue(2), CallValue(1), CallValue(0))
    assert graph.handles[0] is first


def test_bind_counts_up_the_index_of_the_handle() -> None:
    w = actor()
    w._ray_dag_bind_index = 5
    node = bind(w.forward, InputNode())
    assert (node._bind_index, w._ray_dag_bind_index) == (5, 6)


def test_calls_of_an_actor_keep_the_order_of_binding() -> None:
    """The order of the results and of the arguments does not matter, nor which call is nearer to the input."""
    w, other = actor("W1"), actor("W2")
    inp = InputNode()
    slow = bind(w.forward, bind(other.forward, bind(other.forward, inp)))
    quick = bind(w.scale, inp)
    graph = build(MultiOutputNode([quick, slow]))
    assert [node.method for node in graph.nodes if node.actor_label == "W1"] == ["forward", "scale"]


def test_calls_through_two_handles_keep_the_order_of_binding() -> None:
    first, other = actor("W1", "aa"), actor("W2")
    second = StubHandle(first._cls, "aa")
    inp = InputNode()
    slow = bind(first.forward, bind(other.forward, bind(other.forward, inp)))
    quick = bind(second.scale, inp)
    graph = build(MultiOutputNode([quick, slow]))
    assert [node.method for node in graph.nodes if node.actor_label == "W1"] == ["forward", "scale"]


def test_labels_are_unique() -> None:
    inp = InputNode()
    a, b, c = actor("Worker", "1a2b3c4d"), actor("Worker", "1a2b3cff"), actor("Other", "1a2b3c4e")
    graph = build(MultiOutputNode([bind(w.forward, inp) for w in (a, b, c)]))
    assert [item.label for item in graph.actors] == ["Worker#1a2b3c4", "Worker#1a2b3cf", "Other"]
    inp = InputNode()
    odd = actor("Worker#1a2b3c4", "77")
    graph = build(MultiOutputNode([bind(w.forward, inp) for w in (odd, a, b)]))
    assert [item.label for item in graph.actors] == ["Worker#1a2b3c4", "Worker#1a2b3c4@1", "Worker#1a2b3cf"]


def test_dropping_the_last_node_frees_the_actor_handle() -> None:
    class Token:
        pass

    w = actor()
    w.token = Token()
    alive = weakref.ref(w.token)
    gc.disable()
    try:
        inp = InputNode()
        node = bind(w.forward, bind(w.split, bind(w.forward, inp))[0])
        del w
        assert alive() is not None
        del node
        assert alive() is None
    finally:
        gc.enable()


def test_constants_are_kept_by_identity() -> None:
    w = actor()
    shared, equal = [1], [1]
    graph = build(bind(w.join, InputNode(), shared, equal, again=shared))
    assert [constant is shared for constant in graph.constants] == [True, False]
    assert graph.constants[1] is equal


def test_graph_is_immutable_and_comparable() -> None:
    def make() -> object:
        w = actor("W1", "ab")
        inp = InputNode()
        return build(bind(w.scale, inp.x, factor=object()))

    first, second = make(), make()
    assert first == second
    assert hash(first) == hash(second)
    with pytest.raises(AttributeError):
        first.nodes = ()  # type: ignore[attr-defined]


def test_keyword_nodes_repeated_nodes_and_passed_input() -> None:
    w = actor()
    inp = InputNode()
    x = bind(w.join, inp, inp, again=inp)
    graph = build(MultiOutputNode((x, x, inp)))
    assert graph.outputs[0] == graph.outputs[1] == CallValue(0)
    assert isinstance(graph.outputs[2], InputValue)
    assert graph.nodes[0].args[0] == graph.nodes[0].args[1] == dict(graph.nodes[0].kwargs)["again"]
    assert not graph.single_output
    # The list of results is gone, so the same call can be compiled alone.
    assert build(x).single_output


def test_long_chain_is_built_without_recursion_and_freed() -> None:
    actors = [actor("W", f"{index:032x}") for index in range(10)]
    inp = InputNode()
    node: object = inp
    for index in range(3000):
        node = bind(actors[index % 10].join, node, inp)
    graph = build(node)
    assert [call.id for call in graph.nodes] == list(range(3000))
    assert all(call.actor == call.id % 10 for call in graph.nodes)
    del node
