"""Building a graph, on real actors: nodes, bind order, arguments, forms of the input, hints, and what compiling costs."""

from __future__ import annotations

import os
import random
import re
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.dag import InputNode as RayInputNode
from ray.dag import MultiOutputNode as RayMultiOutputNode

import raycomm
from raycomm import ArgumentError, CompileError, InputNode, MultiOutputNode, SerializationError, bind
from tests.ray.row_actors import Odd, reducers
from tests.ray.workers import PATIENCE_S, Worker, WorkerBody, start

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def odd(cluster: None) -> Any:
    return Odd.remote()


def test_rays_own_input_form_is_read(workers: list[Any]) -> None:
    with pytest.raises(ValueError):
        RayInputNode(1)
    with RayInputNode(input_type=int) as x:
        out = workers[0].add.bind(x)
    with raycomm.compile(out) as graph:
        assert graph.execute(1).get() == 2


@pytest.mark.parametrize(
    ("arguments", "keywords"), [((), {}), ((1, 2, 3, 4), {}), ((1,), {"w": 1}), ((1,), {}), ((1, 2), {"y": 2})]
)
def test_rays_bind_checks_the_signature(odd: Any, arguments: Any, keywords: Any) -> None:
    with RayInputNode() as x, pytest.raises(TypeError, match="strict|argument"):
        odd.strict.bind(*[x for _ in arguments], **keywords)
    with InputNode() as y, pytest.raises(CompileError, match=r"OddBody\.strict"):
        bind(odd.strict, *[y for _ in arguments], **keywords)


def test_defaults_and_star_arguments(odd: Any) -> None:
    with InputNode() as inp:
        a = bind(odd.free, inp[0], 2, *[inp[1]] * 3, scale=inp.scale, extra=inp.extra, constant=5)
        b = bind(odd.free, scale=inp[0])
        c = bind(odd.free, other=inp[0])
        d = bind(odd.strict, inp[0], inp[1])
        e = bind(odd.strict, 1, y=inp[1], z=inp.scale)
    with raycomm.compile(MultiOutputNode([a, b, c, d, e])) as graph:
        for first in (1, None, "text", [1]):
            got = ray.get(graph.execute(first, "s", scale=7, extra={"k": 1}))
            assert got == [
                ((first, 2, "s", "s", "s"), 7, {"extra": {"k": 1}, "constant": 5}),
                ((), first, {}),
                ((), 1, {"other": first}),
                (first, "s", None),
                (1, "s", 7),
            ]


def test_one_return_that_is_a_tuple_stays_one_value(workers: list[Any], odd: Any) -> None:
    with InputNode() as x:
        out = bind(odd.two, x)
        twice = bind(workers[0].join, out, bind(odd.nothing, x))
    with raycomm.compile(MultiOutputNode([out, twice])) as graph:
        assert ray.get(graph.execute(5)) == [(5, None), (((5, None), None), {})]


def test_a_none_among_several_returns(workers: list[Any], odd: Any) -> None:
    with RayInputNode() as x:
        left, right = odd.two.options(num_returns=2).bind(x)
        out = RayMultiOutputNode([workers[0].echo.bind(right), workers[1].echo.bind(left), right])
    with raycomm.compile(out) as graph:
        assert [ray.get(graph.execute(value)) for value in (1, None)] == [[None, 1, None], [None, None, None]]


@pytest.mark.parametrize("seed", range(3))
def test_calls_of_an_actor_run_in_the_order_of_binding(seed: int) -> None:
    """Not in the order in which they are listed, nor in which their inputs come."""
    actors = [Odd.remote() for _ in range(2)]
    rng = random.Random(seed)
    with RayInputNode() as x:
        values: list[Any] = [x]
        bound: list[list[str]] = [[], []]
        for number in range(12):
            which = rng.randrange(2)
            name = f"n{number}"
            bound[which].append(name)
            value = rng.choice(values)
            step = actors[which].step
            values.append(step.bind(value, name) if rng.random() < 0.5 else bind(step, value, name))
    outputs = values[1:]
    rng.shuffle(outputs)
    with raycomm.compile(MultiOutputNode(outputs)) as graph:
        for _ in range(2):
            assert ray.get(graph.execute(1)) == [1] * 12
    assert ray.get([actor.trail_so_far.remote() for actor in actors]) == [names * 2 for names in bound]


def test_calls_through_two_handles_run_in_the_order_of_binding(cluster: None) -> None:
    actor = Odd.options(name="twofold").remote()
    other = ray.get_actor("twofold")
    with InputNode() as x:
        a = bind(actor.step, x, "a")
        b = bind(other.step, x, "b")
        c = bind(other.step, x, "c")
        d = bind(actor.step, x, "d")
    with raycomm.compile(MultiOutputNode([d, c, b, a])) as graph:
        assert len(graph.plan.actors) == 1
        assert ray.get(graph.execute(1)) == [1] * 4
    assert ray.get(actor.trail_so_far.remote()) == ["a", "b", "c", "d"]


def test_one_value_twice_in_a_call_is_one_object(workers: list[Any], odd: Any) -> None:
    """Also from another actor and from the driver: read once and shared."""
    with InputNode() as x:
        far = bind(workers[0].echo, x)
        first = bind(odd.is_one, far, far, far)
        second = bind(odd.is_one, x, x)
        later = bind(odd.is_one, far, bind(odd.step, far, "n"))
    with raycomm.compile(MultiOutputNode([first, second, later])) as graph:
        for value in ([1], np.zeros(100_000), {"k": torch.zeros(3)}):
            assert ray.get(graph.execute(value)) == [[True] * 3, [True] * 2, [True] * 2]


def test_what_cannot_be_bound_or_compiled(workers: list[Any]) -> None:
    @ray.remote
    def task(x: Any) -> Any:
        return x

    with RayInputNode() as x:
        plain = task.bind(x)
        for root in (plain, workers[0].echo.bind(plain)):
            with pytest.raises(CompileError, match="task"):
                raycomm.compile(root)
        lazy = ray.remote(WorkerBody).bind("w")
        with pytest.raises(CompileError, match=r"Cls\.remote"):
            raycomm.compile(lazy.echo.bind(x))


def test_another_node_of_a_graph_is_compiled_too(workers: list[Any]) -> None:
    """At once with the first: the same node again, or the same calls under another root."""
    with InputNode() as x:
        a = bind(workers[0].add, x)
        b = bind(workers[1].add, a)
    with raycomm.compile(b) as one, raycomm.compile(b) as same, raycomm.compile(MultiOutputNode([a, b])) as other:
        refs = [one.execute(1), same.execute(2), *other.execute(3)]
        assert ray.get(refs) == [3, 4, 4, 5]
    with pytest.raises(CompileError, match=r"WorkerBody.*\.add.*MultiOutputNode"):
        raycomm.compile(a)


# The input.


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2), {}), ((), {"x": 1}), ((1,), {"x": 1})])
@pytest.mark.parametrize("inputs", [InputNode, RayInputNode])
def test_a_whole_input_is_one_positional_argument(workers: list[Any], inputs: Any, args: Any, kwargs: Any) -> None:
    with inputs() as x:
        out = bind(workers[0].echo, x)
    with raycomm.compile(out) as graph:
        with pytest.raises(ArgumentError) as caught:
            graph.execute(*args, **kwargs)
        assert isinstance(caught.value, ValueError)
        assert caught.value.expected is not None
        assert caught.value.given is not None
        assert graph.execute((1, 2)).get() == (1, 2)  # a tuple is one argument


def test_the_highest_position_counts(workers: list[Any]) -> None:
    """Only inp[0] and inp[3] are bound: four arguments are needed, and those between are not sent."""
    with InputNode() as inp:
        out = bind(workers[0].pair, inp[0], inp[3])
    with raycomm.compile(out) as graph:
        unsendable = object()
        assert graph.execute(1, unsendable, unsendable, 4).get() == ("w0", 1, 4)
        for count in (0, 1, 2, 3, 5):
            with pytest.raises(ArgumentError, match=rf"takes 4 positional arguments \(inp\[3\] is used\) .*, was given {count} "):
                graph.execute(*range(count))
        with pytest.raises(ArgumentError, match="was given 1 positional argument "):
            graph.execute((1, 2, 3, 4))


def test_input_keys_that_are_odd(workers: list[Any]) -> None:
    keys = ["args", "kwargs", "class", "with space", "_x", "", "get", "1", "with_tensor_transport", "\N{SNOWMAN}"]
    with InputNode() as inp:
        out = bind(workers[0].join, *[inp[key] for key in keys])
    with raycomm.compile(out) as graph:
        assert graph.execute(**{key: place for place, key in enumerate(keys)}).get() == (tuple(range(len(keys))), {})


def test_an_input_key_named_self(workers: list[Any]) -> None:
    with InputNode() as inp:
        out = bind(workers[0].echo, inp["self"])
    with raycomm.compile(out) as graph:
        assert graph.execute(self=1).get() == 1


def test_only_bound_parts_of_the_input_count(workers: list[Any]) -> None:
    with RayInputNode() as inp:
        hasattr(inp, "looked_at")
        _ = inp[7]
        outs = [worker.echo.bind(part) for part, worker in zip(inp, workers[:2], strict=False)]
    with raycomm.compile(RayMultiOutputNode(outs)) as graph:
        assert ray.get(graph.execute(1, 2)) == [1, 2]
        with pytest.raises(ArgumentError, match="unknown 'looked_at'"):
            graph.execute(1, 2, looked_at=3)


def test_parts_of_the_input_in_many_places(workers: list[Any]) -> None:
    with InputNode() as inp:
        a = bind(workers[0].join, inp[0], inp.k, again=inp[0])
        b = bind(workers[0].join, inp.k, a)
        c = bind(workers[1].join, inp[0], b, inp.k)
    with raycomm.compile(MultiOutputNode([c, inp.k, inp[0], inp.k])) as graph:
        for first, key in ((1, 2), (np.float32(1), "k"), (None, ())):
            a_out = ((first, key), {"again": first})
            assert ray.get(graph.execute(first, k=key)) == [((first, ((key, a_out), {}), key), {}), key, first, key]
        # Each part was read once an execution by each actor, however many of its calls take it.
        parts = [edge for edge in graph.stats().edges if edge.value.startswith("input")]
        assert [[reader.messages for reader in edge.readers] for edge in parts] == [[3, 3], [3, 3]]


# Hints. Without GPUs "auto" and "shm" are shared memory.


@pytest.mark.parametrize("inputs", [InputNode, RayInputNode])
@pytest.mark.parametrize("transport", ["auto", "shm"])
@pytest.mark.parametrize("device", ["default", "cpu"])
@pytest.mark.parametrize("promise", [{}, {"_static_shape": True, "_direct_return": True}])
def test_hints_without_a_gpu(workers: list[Any], inputs: Any, transport: str, device: str, promise: Any) -> None:
    with inputs() as x:
        a = workers[0].echo.bind(x) if inputs is RayInputNode else bind(workers[0].echo, x)
        hinted = a.with_tensor_transport(transport=transport, device=device, **promise)
        assert hinted is a
        out = bind(workers[1].echo, hinted)
    with InputNode() as x:
        plain = bind(workers[1].echo, bind(workers[0].echo, x))
    with raycomm.compile(plain, name="one") as graph:
        unhinted = str(graph.plan)
    with raycomm.compile(out, max_inflight=4, name="one") as graph:
        without, hints = re.subn(" hint .*", "", str(graph.plan))
        assert (without, hints) == (unhinted, 1)
        assert ("because" in str(graph.plan)) == (transport == "auto")
        values = [torch.arange(5), {"t": torch.ones(3, 3), "n": 1}, torch.zeros(50_000, dtype=torch.bfloat16), 7]
        refs = [graph.execute(value) for value in values]  # as many at once as without a hint
        got = [ref.get() for ref in refs]
        assert torch.equal(got[0], values[0])
        assert torch.equal(got[1]["t"], values[1]["t"])
        assert torch.equal(got[2], values[2])
        assert got[2].dtype == torch.bfloat16
        assert got[3] == 7


@pytest.mark.parametrize("inputs", [InputNode, RayInputNode])
def test_hints_on_the_input(workers: list[Any], inputs: Any) -> None:
    with inputs() as x:
        out = bind(workers[0].pair, x[0].with_tensor_transport(), x.k)
    with raycomm.compile(out) as graph:
        name, first, key = graph.execute(torch.arange(3), k=torch.zeros(())).get()
        assert (name, first.tolist(), key.shape) == ("w0", [0, 1, 2], ())
    with inputs() as x:
        out = bind(workers[0].echo, x.with_tensor_transport("nccl"))
    with pytest.raises(CompileError, match="'(nccl|accelerator)'|nccl|accelerator"):
        raycomm.compile(out)


@pytest.mark.parametrize(("hint", "names"), [({"transport": "carrier pigeon"}, "carrier pigeon"), ({"device": "tpu9"}, "tpu9")])
def test_wrong_hints(workers: list[Any], hint: Any, names: str) -> None:
    with InputNode() as x:
        a = bind(workers[0].echo, x)
        with pytest.raises(ValueError, match=names) as caught:
            raycomm.compile(bind(workers[1].echo, a.with_tensor_transport(**hint)))
        assert "WorkerBody" in str(caught.value)
    with RayInputNode() as x, pytest.raises(ValueError):
        workers[0].echo.bind(x).with_tensor_transport(**hint)


def test_no_reducer_is_registered(cluster: None) -> None:
    """Ray's own edges of tensors register one for all tensors of the process; it stays, and of two the last one wins."""
    pair = start(2)

    def now() -> list[set[str]]:
        return [reducers(), *ray.get([actor.__ray_call__.remote(reducers) for actor in pair])]

    before = now()
    with RayInputNode() as x:
        hinted = pair[0].echo.bind(x).with_tensor_transport("shm", device="cpu")
        out = pair[1].echo.bind(hinted)
    with raycomm.compile(out) as graph:
        assert graph.execute({"t": torch.ones(3)}).get()["t"].sum() == 3
        assert now() == before
        assert not any("Tensor" in name for names in before for name in names)
    assert now() == before


# What compiling costs, and how large it may be.


def test_compile_makes_two_calls_per_actor(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with InputNode() as x:
        value: Any = x
        for number in range(30):
            value = bind(workers[number % 3].add, value)
    calls: list[str] = []
    method_type = type(workers[0].echo)
    real = method_type._remote

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(self._method_name)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(method_type, "_remote", count)
    with raycomm.compile(value) as graph:
        assert len(calls) == 6  # is it there, and the set-up
        assert graph.execute(0).get() == 30
    assert len(calls) == 6  # none for executions, none for teardown


def test_three_hundred_nodes_over_ten_actors(cluster: None, rng: random.Random) -> None:
    actors = [Worker.remote(f"a{number}") for number in range(10)]
    with InputNode() as x:
        values: list[Any] = [x]
        sums: list[Any] = [lambda v: v]
        for _ in range(300):
            place = rng.randrange(max(0, len(values) - 20), len(values))
            values.append(bind(rng.choice(actors).add, values[place]))
            sums.append(lambda v, before=sums[place]: before(v) + 1)
    with raycomm.compile(MultiOutputNode(values[1:])) as graph:
        rows = [graph.execute(value) for value in range(12)]
        for value, refs in enumerate(rows):
            assert ray.get(refs) == [of(value) for of in sums[1:]]


@pytest.mark.parametrize("there", ["0", "1"])
def test_options_come_from_the_driver_whatever_the_actors_environment_says(cluster: None, there: str) -> None:
    environment = {"RAYCOMM_ALLOW_PICKLE": there, "RAYCOMM_INLINE_BYTES": "no number", "RAYCOMM_LOOP_THREAD": "actor"}
    actor = Worker.options(runtime_env={"env_vars": environment}).remote()
    assert ray.get(actor.__ray_call__.remote(lambda _: os.environ["RAYCOMM_ALLOW_PICKLE"])) == there
    with InputNode() as x:
        out = bind(actor.return_exception, x)  # what it returns needs pickle
    with raycomm.compile(out) as graph:
        assert isinstance(graph.execute(1).get(), ValueError)
        assert ray.get(actor.add.remote(1), timeout=PATIENCE_S) == 2  # the loop has a thread of its own
    with raycomm.compile(out, allow_pickle=False) as graph, pytest.raises(SerializationError, match="allow_pickle"):
        graph.execute(1).get()


@pytest.mark.parametrize("name", ["enable_asyncio", "_overlap_gpu_communication", "_default_communicator"])
def test_rays_other_compile_options_are_accepted(workers: list[Any], name: str) -> None:
    value = {"enable_asyncio": True, "_overlap_gpu_communication": False, "_default_communicator": "create"}[name]
    with InputNode() as x:
        out = bind(workers[0].echo, x)
    with raycomm.compile(out, **{name: value}) as graph:
        assert graph.execute(1).get() == 1
