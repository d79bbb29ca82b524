"""`install()`: what `experimental_compile` accepts and refuses, in Ray's words; inputs; and installing itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.dag import DAGNode, InputNode, MultiOutputNode

import raycomm
from raycomm.ray_dag.compat_graph import CompatGraph
from tests.ray.install_fixtures import compiled, context, dag
from tests.ray.workers import Worker

pytestmark = pytest.mark.usefixtures("cluster", "installed")


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    raycomm.install()
    yield
    raycomm.uninstall()


def refused(build: Any, text: str, kind: type[BaseException] = ValueError, **options: Any) -> BaseException:
    with pytest.raises(kind, match=text) as caught:
        dag(build).experimental_compile(**options)
    return caught.value


def test_install_replaces_one_attribute_and_uninstall_restores_it() -> None:
    raycomm.uninstall()
    try:
        before = dict(vars(DAGNode))
        raycomm.uninstall()
        assert dict(vars(DAGNode)) == before
        raycomm.install()
        ours = DAGNode.experimental_compile
        raycomm.install()
        assert DAGNode.experimental_compile is ours, "installed twice is installed once"
        assert {name for name, value in vars(DAGNode).items() if before.get(name) is not value} == {"experimental_compile"}
        assert ours.__doc__ == before["experimental_compile"].__doc__
        raycomm.uninstall()
        assert dict(vars(DAGNode)) == before
    finally:
        raycomm.install()


def test_a_replacement_by_others_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any) -> str:
        return "other"

    monkeypatch.setattr(DAGNode, "experimental_compile", other)
    raycomm.uninstall()
    assert DAGNode.experimental_compile is other


def test_what_is_compiled_is_a_raycomm_graph(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].echo.bind(inp)) as graph:
        assert isinstance(graph, CompatGraph)
        assert isinstance(graph.graph, raycomm.CompiledGraph)
        assert graph.plan is graph.graph.plan
        assert re.fullmatch("[0-9a-f]{32}", graph.get_id())
        assert str(graph) == f"CompiledDAG({graph.get_id()})"
        assert not graph.is_teardown
        with pytest.raises(AttributeError):
            graph._no_such_attribute  # noqa: B018
    assert graph.is_teardown


def test_compiling_twice_is_refused(workers: list[Any]) -> None:
    for build in (lambda inp: workers[0].echo.bind(inp), lambda inp: [workers[0].echo.bind(inp)]):
        node = dag(build)
        graph = node.experimental_compile()
        for _ in range(2):
            with pytest.raises(
                ValueError, match="not allowed to call `experimental_compile` on the same DAG object multiple times"
            ):
                node.experimental_compile()
            graph.teardown()


def test_compiling_another_node_of_a_compiled_graph_is_refused(workers: list[Any]) -> None:
    with InputNode() as inp:
        branch = workers[0].echo.bind(inp)
        node = MultiOutputNode([branch, workers[1].echo.bind(inp)])
    node.experimental_compile().teardown()
    with pytest.raises(ValueError, match="The DAG was compiled more than once. The following two nodes call"):
        branch.experimental_compile()


def test_a_node_that_did_not_compile_may_be_tried_again(workers: list[Any]) -> None:
    node = dag(lambda inp: workers[0].echo.bind(inp))
    with pytest.raises(ValueError, match="max_inflight"):
        node.experimental_compile(_max_inflight_executions=0)
    graph = node.experimental_compile()
    assert ray.get(graph.execute(1)) == 1
    graph.teardown()


@ray.remote
def function(x: Any) -> Any:
    return x


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def test_rules_about_nodes(workers: list[Any]) -> None:
    a, b, _ = workers
    with pytest.raises(
        ValueError, match="No InputNode found in the DAG: when traversing upwards, no upstream node was found for"
    ):
        a.echo.bind(1).experimental_compile()
    refused(
        lambda inp: [a.echo.bind(inp), b.echo.bind(1)],
        "Compiled DAGs require each task to take a ray.dag.InputNode or at least one other DAGNode as an input",
    )
    refused(lambda inp: function.bind(inp), "Compiled DAGs currently only support actor method nodes", NotImplementedError)
    refused(lambda inp: Worker.bind().echo.bind(inp), "No InputNode found|already created|unsupported node")
    with pytest.raises(ValueError):
        MultiOutputNode(a.echo.bind(1))


def test_nodes_as_keyword_arguments_are_refused_and_values_are_not(workers: list[Any]) -> None:
    a = workers[0]
    text = "Compiled DAG currently does not support binding to other DAG nodes as kwargs"
    refused(lambda inp: a.add.bind(x=inp, by=1), text)
    refused(lambda inp: a.add.bind(x=a.echo.bind(inp), by=1), text)
    with compiled(lambda inp: a.add.bind(inp, by=3)) as graph:
        assert ray.get(graph.execute(2)) == 5


@pytest.mark.parametrize("wrap", [lambda n: [n], lambda n: (n,), lambda n: {"n": n}, lambda n: [n, n], Holder])
def test_nodes_inside_containers_are_refused(workers: list[Any], wrap: Any) -> None:
    refused(
        lambda inp: workers[0].echo.bind(wrap(inp)),
        r"(?s)Found \d+ DAGNodes from the arg .*? in .*?\.\s*Please ensure that the argument is a single DAGNode and that a "
        r"DAGNode is not allowed to be placed inside any type of container\.",
    )
    refused(lambda inp: workers[0].join.bind(wrap(inp), 5, inp), "container")


def test_calls_that_lead_nowhere_are_refused(workers: list[Any]) -> None:
    a, b, _ = workers

    def text(count: int) -> str:
        return re.escape(
            "Compiled DAG doesn't support leaf nodes, i.e., nodes that don't have downstream nodes and are not output nodes. "
            f"There are {count} leaf nodes in the DAG. Please add the outputs of"
        )

    def one_actor(inp: Any) -> Any:
        x = a.echo.bind(inp)
        a.add.bind(x)
        return [a.add.bind(x)]

    def two_actors(inp: Any) -> Any:
        a.add.bind(inp)
        x = b.add.bind(inp)
        return [a.add.bind(x), b.add.bind(x)]

    def two_leaves(inp: Any) -> Any:
        x = a.add.bind(inp)
        a.add.bind(x)
        a.add.bind(inp)
        return [a.add.bind(x)]

    refused(one_actor, text(1))
    refused(two_actors, text(1))
    refused(two_leaves, text(2))
    for element in (0, 1):
        refused(lambda inp, element=element: a.split.bind(inp)[element], text(1))


def test_parts_of_the_input_must_be_used(workers: list[Any]) -> None:
    a, b, _ = workers

    def unused(inp: Any) -> Any:
        first, second, third = inp[0], inp[1], inp[2]
        a.echo.bind(second)
        return b.join.bind(first, third)

    refused(
        unused,
        "Compiled Graph expects input to be accessed using all of attributes 0, 1, 2, but 1 is unused. Ensure all input "
        "attributes are used and contribute to the computation of the Compiled Graph output.",
    )

    def touched(inp: Any) -> Any:
        _ = inp[3], inp.name
        return b.echo.bind(inp[0])

    with compiled(touched) as graph:
        assert ray.get(graph.execute(5)) == 5


def test_whole_input_and_parts_do_not_mix(workers: list[Any]) -> None:
    a, b, _ = workers
    text = re.escape("All tasks must either use InputNode() directly, or they must index to specific args or kwargs.")
    refused(lambda inp: b.join.bind(inp, a.join.bind(inp[0], inp[1])), text)
    refused(lambda inp: b.join.bind(a.join.bind(inp[0], inp[1]), inp), text)


def test_two_inputs_are_refused(workers: list[Any]) -> None:
    with InputNode() as one, InputNode() as two:
        node = workers[0].join.bind(one, two)
    with pytest.raises(ValueError, match="2 InputNodes"):
        node.experimental_compile()


def test_signatures_are_checked_by_bind(workers: list[Any]) -> None:
    with InputNode() as inp, pytest.raises(TypeError, match="signature"):
        workers[0].echo.bind(inp, inp)


def test_options_are_checked(workers: list[Any]) -> None:
    def build(inp: Any) -> Any:
        return workers[0].echo.bind(inp)

    for size in (0, -1, 1.5):
        refused(build, "`buffer_size_bytes` must be a positive integer, found", _buffer_size_bytes=size)
    with context(buffer_size_bytes=0):
        refused(build, "`buffer_size_bytes` must be a positive integer, found 0")
    refused(build, "The only allowed string for default_communicator is 'create', got x", _default_communicator="x")
    refused(build, "The default_communicator must be None, a string, or a Communicator, got", _default_communicator=5)
    refused(build, "submit_timeout", _submit_timeout=-3)
    with compiled(build, _default_communicator=None, _buffer_size_bytes=10, _overlap_gpu_communication=True) as graph:
        array = np.arange(100_000)
        assert (ray.get(graph.execute(array)) == array).all()


def test_tensor_hints_that_stay_on_the_host(workers: list[Any]) -> None:
    a, b, _ = workers

    def build(inp: Any) -> Any:
        inp.with_tensor_transport()
        left = a.echo.bind(inp[0]).with_tensor_transport()
        right = b.echo.bind(inp[1]).with_tensor_transport(transport="shm")
        return a.join.bind(left, right).with_tensor_transport(transport="auto")

    given = [torch.arange(5), torch.ones(70_000)]
    with compiled(build) as graph:
        parts, named = ray.get(graph.execute(*given))
        assert all(torch.equal(one, other) for one, other in zip(parts, given, strict=True))
        assert named == {}
    with InputNode() as inp, pytest.raises(ValueError, match="transport"):
        a.echo.bind(inp).with_tensor_transport(transport="pigeon")
    refused(
        lambda inp: a.echo.bind(inp.with_tensor_transport("accelerator")),
        "DAG inputs cannot be transferred via accelerator because the driver cannot participate",
    )
