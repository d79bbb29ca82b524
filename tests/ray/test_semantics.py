"""What a graph computes: shapes of graphs, ways to write them, ways to fetch results."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.dag import InputNode as RayInputNode
from ray.dag import MultiOutputNode as RayMultiOutputNode

import raycomm
from raycomm import ArgumentError, InputNode, MultiOutputNode, bind
from tests.ray.workers import PATIENCE_S, Gate, start

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return start(4)


def node(family: str, method: Any, *args: Any, **kwargs: Any) -> Any:
    """A node by `bind` of the family: Ray's is a method of the actor's method, raycomm's a function."""
    return method.bind(*args, **kwargs) if family == "ray" else bind(method, *args, **kwargs)


INPUTS = {"ray": RayInputNode, "raycomm": InputNode}
OUTPUTS = {"ray": RayMultiOutputNode, "raycomm": MultiOutputNode}
both_families = pytest.mark.parametrize("family", ["ray", "raycomm"])


@both_families
@pytest.mark.parametrize("inputs", ["ray", "raycomm"])
def test_first_example(workers: list[Any], family: str, inputs: str) -> None:
    with INPUTS[inputs]() as batch:
        x = node(family, workers[0].add, batch)
        x = node(family, workers[1].add, x, 10)
    graph = raycomm.compile(x)
    ref = graph.execute(0)
    assert ref.get(timeout=PATIENCE_S) == 11
    assert ray.get(graph.execute(1)) == 12
    assert ray.get([graph.execute(2), graph.execute(3)]) == [13, 14]
    assert ray.get(graph.execute(4), timeout=PATIENCE_S) == 15
    graph.teardown()
    # The actors are ordinary actors before, during and after.
    assert ray.get(workers[0].add.remote(1)) == 2


@both_families
def test_await(workers: list[Any], family: str) -> None:
    with INPUTS[family]() as x:
        out = node(family, workers[1].add, node(family, workers[0].add, x))

    async def fetch(graph: Any) -> list[int]:
        refs = [graph.execute(value) for value in range(8)]
        first = await refs[5]
        return [first, *await asyncio.gather(*(wait_for(ref) for ref in refs))]

    async def wait_for(ref: Any) -> int:
        return int(await ref)

    with raycomm.compile(out) as graph:
        assert asyncio.run(fetch(graph)) == [7, *range(2, 10)]


def test_await_leaves_the_event_loop_free_and_can_be_cancelled(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        out = bind(workers[0].hold, x, gate.path)

    async def fetch(graph: Any) -> int:
        ref = graph.execute(3)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.ensure_future(wait_for(ref)), timeout=0.05)
        waiting = asyncio.ensure_future(wait_for(ref))
        await asyncio.sleep(0)
        assert not waiting.done()
        gate.open()
        return await waiting

    async def wait_for(ref: Any) -> int:
        return int(await ref)

    with raycomm.compile(out) as graph:
        assert asyncio.run(fetch(graph)) == 3


def test_out_of_order_and_repeated_gets(workers: list[Any]) -> None:
    with InputNode() as x:
        out = bind(workers[1].add, bind(workers[0].add, x))
    with raycomm.compile(out) as graph:
        refs = [graph.execute(value) for value in range(10)]
        order = list(range(10))
        random.Random(1).shuffle(order)
        assert [refs[index].get() for index in order] == [index + 2 for index in order]
        assert [ref.get() for ref in refs] == list(range(2, 12))
        assert ray.get(refs) == ray.get(refs)


def test_a_value_fetched_twice_is_one_object(workers: list[Any]) -> None:
    with InputNode() as x:
        out = bind(workers[0].echo, x)
    with raycomm.compile(out) as graph:
        ref = graph.execute([1, 2])
        assert ref.get() == [1, 2]
        assert ref.get() is ref.get()


@both_families
def test_fan_out_and_fan_in(workers: list[Any], family: str) -> None:
    with INPUTS[family]() as x:
        a = node(family, workers[0].add, x, 1)
        b = node(family, workers[1].add, a, 10)
        c = node(family, workers[2].add, a, 100)
        out = node(family, workers[3].join, b, c, whole=x, first=a)
    with raycomm.compile(out) as graph:
        refs = [graph.execute(value) for value in range(5)]
        assert [ref.get() for ref in refs] == [((i + 11, i + 101), {"whole": i, "first": i + 1}) for i in range(5)]


@both_families
def test_several_outputs(workers: list[Any], family: str) -> None:
    with INPUTS[family]() as x:
        a = node(family, workers[0].add, x, 1)
        b = node(family, workers[1].add, a, 10)
    with raycomm.compile(OUTPUTS[family]([b, a, b])) as graph:
        many = [graph.execute(value) for value in range(5)]
        assert all(isinstance(refs, list) for refs in many)
        # One channel is fetched to the end before the other.
        assert [refs[1].get() for refs in many] == [1, 2, 3, 4, 5]
        assert ray.get(many[4]) == [15, 5, 15]
        assert [ray.get(refs) for refs in many] == [[i + 11, i + 1, i + 11] for i in range(5)]


def test_one_output_in_a_list_stays_a_list(workers: list[Any]) -> None:
    with InputNode() as x:
        out = bind(workers[0].add, x)
    with raycomm.compile(MultiOutputNode([out])) as graph:
        refs = graph.execute(1)
        assert isinstance(refs, list)
        assert [ref.get() for ref in refs] == [2]


@both_families
def test_parts_of_the_input(workers: list[Any], family: str) -> None:
    with INPUTS[family]() as inp:
        a = node(family, workers[0].pair, inp[0], inp.key)
        b = node(family, workers[1].pair, inp[1], inp["key"])
        out = node(family, workers[2].join, a, right=b)
    with raycomm.compile(out) as graph:
        assert graph.execute(1, 2, key="k").get() == ((("w0", 1, "k"),), {"right": ("w1", 2, "k")})
        with pytest.raises(ArgumentError, match="missing 'key'"):
            graph.execute(1, 2)
        with pytest.raises(ArgumentError, match="was given 1 positional argument ") as caught:
            graph.execute(1, key=3)
        assert "'key'" in str(caught.value.expected)
        with pytest.raises(ArgumentError, match="unknown 'other'"):
            graph.execute(1, 2, key=3, other=4)
        assert graph.execute(3, 4, key=5).get() == ((("w0", 3, 5),), {"right": ("w1", 4, 5)})


@both_families
def test_keyword_and_constant_arguments(workers: list[Any], family: str) -> None:
    table = {"k": [1, 2, (3,)]}
    with INPUTS[family]() as x:
        a = node(family, workers[0].join, x, 5, table, named=x, other="text")
        out = node(family, workers[1].join, a, last=None)
    with raycomm.compile(out) as graph:
        inner = ((9, 5, table), {"named": 9, "other": "text"})
        assert graph.execute(9).get() == ((inner,), {"last": None})


def test_a_constant_is_one_object_in_every_execution(workers: list[Any]) -> None:
    shared: list[int] = []
    with InputNode() as x:
        out = bind(workers[0].grow, x, shared, shared)
    with raycomm.compile(out) as graph:
        assert [graph.execute(value).get() for value in range(3)] == [([0], True), ([0, 1], True), ([0, 1, 2], True)]
    assert shared == []  # the actor's copy grew


@both_families
def test_an_actor_used_several_times(workers: list[Any], family: str) -> None:
    a, b = workers[:2]
    with INPUTS[family]() as x:
        value = x
        for worker in (a, b, a, a, b, a):
            value = node(family, worker.add, value)
    with raycomm.compile(value) as graph:
        assert [ref.get() for ref in [graph.execute(i) for i in range(10)]] == [i + 6 for i in range(10)]


def test_an_edge_inside_one_actor_hands_over_the_object(workers: list[Any]) -> None:
    with InputNode() as x:
        a = bind(workers[0].join, x)
        out = bind(workers[0].same, a, a)
        left = bind(workers[0].echo, a)
        both = bind(workers[0].same, left, a)
    with raycomm.compile(MultiOutputNode([out, both])) as graph:
        assert ray.get(graph.execute(1)) == [True, True]


def test_readers_of_all_kinds(workers: list[Any]) -> None:
    """One value for the driver, another actor and its own actor, and an input for two actors and the driver."""
    with InputNode() as x:
        a = bind(workers[0].add, x)
        own = bind(workers[0].add, a, 10)
        other = bind(workers[1].join, a, own, x)
    with raycomm.compile(MultiOutputNode([a, own, other, x, a])) as graph:
        for value in range(5):
            assert ray.get(graph.execute(value)) == [
                value + 1,
                value + 11,
                ((value + 1, value + 11, value), {}),
                value,
                value + 1,
            ]


@both_families
def test_several_returns(workers: list[Any], family: str) -> None:
    with INPUTS[family]() as x:
        low, high = node(family, workers[0].split, x)
        a = node(family, workers[1].add, high, 10)
    with raycomm.compile(OUTPUTS[family]([a, low, high])) as graph:
        assert [ray.get(graph.execute(i)) for i in range(3)] == [[i + 11, i, i + 1] for i in range(3)]


def test_several_returns_by_option_and_one_dropped(workers: list[Any]) -> None:
    with InputNode() as x:
        first, _, third = bind(workers[0].echo.options(num_returns=3), x)
        out = bind(workers[1].pair, first, third)
    with raycomm.compile(out) as graph:
        assert graph.execute((1, 2, 3)).get() == ("w1", 1, 3)
        assert graph.execute(["a", "b", "c"]).get() == ("w1", "a", "c")


def test_the_input_as_an_output_waits_for_nobody(workers: list[Any], gate: Gate) -> None:
    with InputNode() as inp:
        held = bind(workers[0].hold, inp[0], gate.path)
    with raycomm.compile(MultiOutputNode([inp[1], held])) as graph:
        direct, slow = graph.execute(1, "direct")
        assert direct.get(timeout=0) == "direct"
        with pytest.raises(raycomm.ChannelTimeoutError):
            slow.get(timeout=0)
        gate.open()
        assert slow.get(timeout=PATIENCE_S) == 1
        local = object()  # neither copied nor encoded
        assert graph.execute(1, local)[0].get() is local


def test_values_keep_their_types(workers: list[Any]) -> None:
    with InputNode() as x:
        out = bind(workers[1].echo, bind(workers[0].echo, x))
    values: list[Any] = [
        None,
        True,
        -(1 << 70),
        1.5,
        "text \N{SNOWMAN}",
        b"bytes",
        bytearray(b"array"),
        1 + 2j,
        range(3),
        slice(1, 2),
    ]
    values += [(1, [2, {3: (4,)}], {5, 6}), {"a": {"b": [None]}}, np.float32(2.5)]
    with raycomm.compile(out) as graph:
        for value in values:
            got = graph.execute(value).get()
            assert got == value
            assert type(got) is type(value)


@pytest.mark.parametrize("bytes_per_item", [0, 10, 1000, 100_000, 1 << 22])
def test_arrays_and_tensors(workers: list[Any], bytes_per_item: int) -> None:
    with InputNode() as x:
        out = bind(workers[1].echo, bind(workers[0].echo, x))
    rng = np.random.default_rng(bytes_per_item)
    with raycomm.compile(out) as graph:
        array = rng.integers(0, 255, bytes_per_item, np.uint8)
        got = graph.execute(array).get()
        assert got.dtype == array.dtype
        assert np.array_equal(got, array)
        tensor = torch.from_numpy(array.copy()).view(torch.bool) if bytes_per_item == 10 else torch.from_numpy(array.copy())
        mixed = {"t": tensor, "list": [array, tensor], "n": 1}
        back = graph.execute(mixed).get()
        assert torch.equal(back["t"].view(torch.uint8), tensor.view(torch.uint8))
        assert np.array_equal(back["list"][0], array)
        assert back["t"].dtype == tensor.dtype
        assert back["n"] == 1


def test_the_input_is_copied_before_execute_returns(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        out = bind(workers[0].hold, x, gate.path)
    tensor, array = torch.zeros(300_000), np.zeros(10)
    with raycomm.compile(out) as graph:
        ref = graph.execute([tensor, array])
        tensor.fill_(1)
        array.fill(1)
        gate.open()
        got = ref.get(timeout=PATIENCE_S)
        assert float(got[0].sum()) == 0
        assert float(got[1].sum()) == 0


def test_views_outlive_the_graph(workers: list[Any]) -> None:
    with InputNode() as x:
        out = bind(workers[0].echo, x)
    with raycomm.compile(out) as graph:
        views = [graph.execute(torch.full((100_000,), float(index))).get() for index in range(5)]
    del graph
    assert [float(view.sum()) for view in views] == [100_000.0 * index for index in range(5)]
    views[0].fill_(7)  # a received tensor belongs to its receiver
    assert [float(view[0]) for view in views] == [7, 1, 2, 3, 4]


def test_state_and_order_of_executions(workers: list[Any]) -> None:
    worker = start(1)[0]
    with InputNode() as x:
        out = bind(workers[0].echo, bind(worker.note, x))
    with raycomm.compile(out) as graph:
        refs = [graph.execute(value) for value in range(50)]
        assert ray.get(refs) == list(range(50))
    assert ray.get(worker.seen_so_far.remote()) == list(range(50))


def test_plain_calls_beside_the_loop(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        out = bind(workers[0].hold, x, gate.path)
    with raycomm.compile(out) as graph:
        ref = graph.execute(1)
        gate.wait_entered()
        # The loop is in a method; the actor answers all the same.
        assert ray.get([workers[0].add.remote(i) for i in range(20)], timeout=PATIENCE_S) == list(range(1, 21))
        gate.open()
        assert ref.get(timeout=PATIENCE_S) == 1


def test_methods_may_use_ray(workers: list[Any]) -> None:
    with InputNode() as x:
        out = bind(workers[0].get_inside, x)
    with raycomm.compile(out) as graph:
        assert graph.execute([1, 2]).get() == [1, 2]


def test_an_actor_without_tensors_never_imports_torch(cluster: None) -> None:
    a, b = start(2)
    with InputNode() as x:
        out = bind(b.join, bind(a.echo, x), {"constant": 1})
    with raycomm.compile(out) as graph:
        for value in (1, {"a": [b"x"]}, np.arange(5), np.arange(100_000)):
            graph.execute(value).get()
        for worker in (a, b):
            loaded = set(ray.get(worker.modules.remote()))
            assert "raycomm.runtime.loop" in loaded  # the right process
            assert loaded.isdisjoint({"torch", "cupy"})


def test_names_plan_and_repr(workers: list[Any]) -> None:
    with InputNode() as x:
        out = bind(workers[0].echo, x)
    with raycomm.compile(out, name="named") as graph:
        assert graph.name == "named"
        assert ":echo(" in str(graph.plan)
        ref = graph.execute(1)
        assert "'named'" in repr(graph)
        assert "running" in repr(graph)
        assert "execution 0, pending>" in repr(ref) or "execution 0, done, not fetched>" in repr(ref)
        ref.get()
        assert "fetched" in repr(ref)
        assert "execution 0" in repr(ref)
    assert "torn down" in repr(graph)


def test_refs_and_graphs_do_not_leave_their_process(workers: list[Any]) -> None:
    with InputNode() as x:
        out = bind(workers[0].echo, x)
    with raycomm.compile(out) as graph:
        ref = graph.execute(1)
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy, ray.put):
            with pytest.raises((ValueError, TypeError), match=r"(?i)ref"):
                attempt(ref)
        with pytest.raises(TypeError, match="belongs to the process that compiled it"):
            pickle.dumps(graph)
        assert ref.get() == 1
