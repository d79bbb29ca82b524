"""Edges over gloo, over NCCL and over a communicator of the user's, between real actors: values, order, executions that fail,
promises, deaths, and what is left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch
from ray.dag import InputNode as RayInputNode

import raycomm
from raycomm import ActorDiedError, ChannelClosedError, InputNode, MultiOutputNode, bind
from raycomm.errors import TensorMismatchError
from raycomm.ray_dag.gloo import Gloo
from raycomm.testing.faults import Fault, Kill, Point, inject
from tests.ray.gpu_actors import start_on_gpu
from tests.ray.own_communicators import RaysGroup, SocketLink
from tests.ray.tensor_actors import Tensors
from tests.ray.workers import PATIENCE_S, Gate, until

pytestmark = pytest.mark.usefixtures("cluster")

_PROMPTLY_S = 20.0  # a hang guard

Over = Callable[..., Any]
New = Callable[[], Any]


@pytest.fixture(scope="module", params=["gloo", "nccl", "own"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def new(cluster: None, transport: str) -> New:
    """Starts an actor whose tensors can move over the transport."""
    return start_on_gpu if transport == "nccl" else Tensors.remote


@pytest.fixture(scope="module")
def actors(new: New) -> list[Any]:
    actors = [new() for _ in range(3)]
    ray.get([actor.pid.remote() for actor in actors])
    return actors


@pytest.fixture(scope="module")
def over(transport: str) -> Over:
    given = SocketLink if transport == "own" else transport
    return lambda node, **hints: node.with_tensor_transport(given, **hints)


def test_a_chain(actors: list[Any], over: Over, transport: str) -> None:
    with InputNode() as x:
        node = over(bind(actors[0].make, x))
        node = over(bind(actors[1].twice, node))
        node = bind(actors[2].sum, node)
    with raycomm.compile(node) as graph:
        assert f"over {transport}" in str(graph.plan)
        assert [ref.get(PATIENCE_S) for ref in [graph.execute(number) for number in range(10)]] == [2000 * n for n in range(10)]
        assert graph.execute(3).get(PATIENCE_S) == 6000


def test_nodes_of_ray(actors: list[Any], transport: str) -> None:
    of_ray = {"nccl": "nccl", "gloo": Gloo(), "own": RaysGroup(actors)}[transport]
    with RayInputNode() as x:
        node = actors[0].make.bind(x).with_tensor_transport(of_ray, _static_shape=True)
        node = actors[1].twice.bind(node).with_tensor_transport("accelerator" if transport == "nccl" else of_ray)
        node = actors[2].sum.bind(node)
    with raycomm.compile(node) as graph:
        assert str(graph.plan).count(f"over {transport}") == 2
        assert [ray.get(graph.execute(number)) for number in range(5)] == [2000 * number for number in range(5)]


def test_values_around_tensors_and_changing_shapes(actors: list[Any], over: Over) -> None:
    with InputNode() as x:
        nested = over(bind(actors[0].nested, x))
        sized = over(bind(actors[0].make_of, x))
        node = MultiOutputNode([bind(actors[1].check_nested, nested), bind(actors[1].sum, sized)])
    with raycomm.compile(node) as graph:
        for number in (1, 2, 2, 4096, 3):
            nested_got, total = (ref.get(PATIENCE_S) for ref in graph.execute(number))
            assert nested_got == [["x", "again", "number", "none"], 300.0 * number, "text", number]
            assert total == number * number


def test_several_readers_and_the_driver(actors: list[Any], over: Over) -> None:
    with InputNode() as x:
        made = over(bind(actors[0].make, x))
        node = MultiOutputNode([bind(actors[1].sum, made), bind(actors[2].sum, made, made), bind(actors[0].sum, made), made])
    with raycomm.compile(node) as graph:
        for number in range(20):
            first, second, own, tensor = (ref.get(PATIENCE_S) for ref in graph.execute(number))
            assert (first, second, own) == (1000 * number, 2000 * number, 1000 * number)
            assert (tensor == number).all()


def test_both_directions_between_two_actors(actors: list[Any], over: Over) -> None:
    with InputNode() as x:
        there = [over(bind(actors[place].make, x)) for place in (0, 1)]
        node = MultiOutputNode([bind(actors[0].sum, there[1]), bind(actors[1].sum, there[0])])
    with raycomm.compile(node) as graph:
        refs = [graph.execute(number) for number in range(8)]
        assert [[ref.get(PATIENCE_S) for ref in row] for row in refs] == [[1000 * number] * 2 for number in range(8)]


def test_a_buffer_that_its_method_uses_again(actors: list[Any], over: Over, gate: Gate) -> None:
    """The reader is held while the writer goes on, as far as it may."""
    with InputNode() as x:
        node = bind(actors[1].all_equal, bind(actors[1].at_gate, over(bind(actors[0].buffer, x)), gate.path))
    with raycomm.compile(node, max_inflight=8) as graph:
        refs = [graph.execute(number) for number in range(8)]
        gate.wait_entered()
        gate.open()
        assert [ref.get(PATIENCE_S) for ref in refs] == list(range(8))


def test_a_failing_execution_fails_alone(actors: list[Any], over: Over) -> None:
    with InputNode() as x:
        node = over(bind(actors[1].fail_on, over(bind(actors[0].make, x)), 3))
        node = bind(actors[2].sum, node)
    with raycomm.compile(node) as graph:
        refs = [graph.execute(number) for number in range(8)]
        for number, ref in enumerate(refs):
            if number == 3:
                with pytest.raises(ValueError, match="wrong value 3"):
                    ref.get(PATIENCE_S)
            else:
                assert ref.get(PATIENCE_S) == 1000 * number


@pytest.mark.parametrize("promise", ["_static_shape", "_direct_return"])
def test_a_broken_promise_fails_one_execution(actors: list[Any], over: Over, promise: str) -> None:
    with InputNode() as x:
        made = bind(actors[0].make_of if promise == "_static_shape" else actors[0].nested, x)
        node = bind(actors[1].twice if promise == "_static_shape" else actors[1].check_nested, over(made, **{promise: True}))
    with raycomm.compile(node) as graph:
        if promise == "_static_shape":
            assert graph.execute(4).get(PATIENCE_S).tolist() == [8.0] * 4
        broken = graph.plan.channels[1].value
        with pytest.raises(
            TensorMismatchError, match=rf"^graph '{graph.name}', execution \d: {broken} .*{promise}.*leave the promise out"
        ) as caught:
            graph.execute(5).get(PATIENCE_S)
        error, execution = caught.value, 1 if promise == "_static_shape" else 0
        assert (error.graph, error.channel, error.node, error.execution) == (graph.name, broken, broken, execution)
        if promise == "_static_shape":
            assert graph.execute(4).get(PATIENCE_S).tolist() == [8.0] * 4


@pytest.mark.parametrize("who", ["writer", "reader"])
def test_a_death_ends_the_graph(new: New, over: Over, who: str) -> None:
    mortal = [new() for _ in range(2)]
    with InputNode() as x:
        made = bind(mortal[0].make, x)
        if who == "writer":
            made = bind(mortal[0].die_at, made, 5)
        node = bind(mortal[1].die_at, over(made), 5 if who == "reader" else -1)
    with raycomm.compile(node) as graph:
        refs = [graph.execute(number) for number in range(8)]
        begin = time.monotonic()
        with pytest.raises(ActorDiedError, match="exit code 3|died"):
            for ref in refs:
                ref.get(PATIENCE_S)
        assert time.monotonic() - begin < _PROMPTLY_S


@pytest.mark.skipif(torch.cuda.is_available(), reason="only with the stand-in it is known when a transfer has begun")
def test_what_is_computed_from_a_transfer_that_broke_goes_nowhere(cluster: None) -> None:
    """The sender dies under way. The receiver waits on its stream, which ends, as on a GPU, without anything having arrived."""
    first, second, third = (start_on_gpu() for _ in range(3))
    with InputNode() as x:
        made = bind(first.make, x).with_tensor_transport("nccl")
        node = bind(third.sum, bind(second.twice, made).with_tensor_transport("nccl"))
    with raycomm.compile(MultiOutputNode([node, bind(second.sum, made)])) as graph:
        assert [ref.get(PATIENCE_S) for ref in graph.execute(2)] == [4000, 2000]
        ray.get(first.die_in_the_next_transfer.remote())
        begin = time.monotonic()
        refs = graph.execute(3)
        for ref in refs:
            with pytest.raises(ActorDiedError) as caught:
                ref.get(PATIENCE_S)
            assert caught.value.actor_id == first._actor_id.hex()
        assert time.monotonic() - begin < _PROMPTLY_S
    with InputNode() as x:
        node = bind(third.sum, bind(second.make, x).with_tensor_transport("nccl"))
    with raycomm.compile(node) as graph:
        assert graph.execute(4).get(PATIENCE_S) == 4000


@pytest.mark.skipif(torch.cuda.is_available(), reason="only the stand-in can be told to break a link")
@pytest.mark.parametrize("reader", ["driver", "actor"])
def test_a_link_that_breaks_while_nobody_dies(cluster: None, reader: str) -> None:
    first, second, third = (start_on_gpu() for _ in range(3))
    with InputNode() as x:
        node = bind(first.make, x).with_tensor_transport("nccl")
        if reader == "driver":
            node = bind(second.sum, node)
        else:
            node = bind(third.sum, bind(second.twice, node).with_tensor_transport("nccl"))
    with raycomm.compile(node, name="breaks") as graph:
        assert graph.execute(2).get(PATIENCE_S) == (2000 if reader == "driver" else 4000)
        ray.get(first.send_nothing.remote())
        ref = graph.execute(3)
        until(lambda: "execution 1, for" in str(graph.status()), "the second actor is in its call, with what has not arrived")
        assert ray.get(second.abort_links.remote()) == (1 if reader == "driver" else 2)
        link = rf"rank 1 of link 0 of graph 'breaks' from OnGpu#{first._actor_id.hex()[:6]} to OnGpu#.* aborted the communicator"
        with pytest.raises(ActorDiedError, match=rf"left its loop \(CommunicatorClosedError: {link}.*execution 1 will give no"):
            ref.get(PATIENCE_S)
    assert ray.get([actor.pid.remote() for actor in (first, second, third)])  # all live on


def test_teardown_while_all_wait(actors: list[Any], over: Over, gate: Gate) -> None:
    """And nothing is left in the actors: threads of links and streams end with the graph."""
    with InputNode() as x:
        node = bind(actors[2].sum, over(bind(actors[1].at_gate, over(bind(actors[0].make, x)), gate.path)))
    graph = raycomm.compile(node)
    refs = [graph.execute(number) for number in range(4)]
    gate.wait_entered()
    graph.teardown(timeout=0)
    gate.open()
    with pytest.raises(ChannelClosedError):
        refs[0].get()
    until(lambda: not any(ray.get([actor.threads.remote() for actor in actors])), "the threads of the graph are gone")
    with raycomm.compile(node) as again:
        assert again.execute(2).get(PATIENCE_S) == 2000


def test_what_is_beside_the_tensors_arrives_as_on_any_edge(actors: list[Any], over: Over) -> None:
    with InputNode() as x:
        node = bind(actors[1].change, over(bind(actors[0].beside, x)))
    with raycomm.compile(node) as graph:
        for number in (3, 4):
            kinds = ["Parameter", "Tensor", "Tensor"]
            assert graph.execute(number).get(PATIENCE_S) == (number + 1, kinds, True, True, "kept")


def test_calls_are_counted_once(actors: list[Any], over: Over) -> None:
    with InputNode() as x:
        node = bind(actors[1].sum, over(bind(actors[0].make, x)), x)
        node = bind(actors[2].sum, over(bind(actors[1].make, node)))
    with raycomm.compile(node) as graph:
        for _ in range(5):
            graph.execute(torch.tensor(1)).get(PATIENCE_S)
        assert [call.calls for call in graph.stats().calls] == [5] * 4


@pytest.mark.parametrize("thread", ["own", "actor"])
def test_loop_threads(new: New, over: Over, thread: str) -> None:
    two = [new() for _ in range(2)]
    with InputNode() as x:
        node = bind(two[1].sum, over(bind(two[0].make, x)))
    for _ in range(2):
        with raycomm.compile(node, loop_thread=thread) as graph:
            assert [graph.execute(number).get(PATIENCE_S) for number in range(3)] == [0, 1000, 2000]


def test_a_value_that_is_only_waited_for(actors: list[Any], over: Over) -> None:
    with InputNode() as x:
        made = over(bind(actors[0].make, x))
        used = bind(actors[1].sum, made)
        last = raycomm.after(bind(actors[1].make, x), made)
    with raycomm.compile(MultiOutputNode([used, last])) as graph:
        total, tensor = (ref.get(PATIENCE_S) for ref in graph.execute(4))
        assert (total, int(tensor[0])) == (4000, 4)


def test_a_collective_of_values_that_arrive(actors: list[Any], over: Over) -> None:
    with InputNode() as x:
        made = [over(bind(actors[2].make, x)), over(bind(actors[2].make, x))]
        passed = [bind(actor.twice, value) for actor, value in zip(actors[:2], made, strict=True)]
        reduced = raycomm.allreduce(passed)
    with raycomm.compile(MultiOutputNode(reduced)) as graph:
        for number in range(4):
            assert [int(ref.get(PATIENCE_S)[0]) for ref in graph.execute(number)] == [4 * number] * 2


def test_two_graphs_on_the_same_actors(actors: list[Any], over: Over) -> None:
    with InputNode() as x:
        node = bind(actors[1].sum, over(bind(actors[0].make, x)))
    with InputNode() as x:
        back = bind(actors[0].sum, over(bind(actors[1].make, x)))
    with raycomm.compile(node, name="there") as there, raycomm.compile(back, name="back") as other:
        refs = [graph.execute(number) for number in range(5) for graph in (there, other)]
        assert [ref.get(PATIENCE_S) for ref in refs] == [1000 * number for number in range(5) for _ in range(2)]


def test_a_death_while_links_are_set_up(new: New, over: Over) -> None:
    """The other end, which waits for the dead one, gives up, and can be compiled into another graph at once."""
    two = [new() for _ in range(3)]
    with InputNode() as x:
        node = bind(two[1].sum, over(bind(two[0].make, x)))
    with InputNode() as x:
        other = bind(two[1].sum, over(bind(two[2].make, x)))
    begin = time.monotonic()
    with inject(Fault(actor=two[0], point=Point.SETUP_LINKS, action=Kill())), pytest.raises(ActorDiedError):
        raycomm.compile(node)
    with raycomm.compile(other) as graph:
        assert graph.execute(2).get(PATIENCE_S) == 2000
    assert time.monotonic() - begin < _PROMPTLY_S
    until(lambda: not ray.get(two[1].threads.remote()), "the threads of the graph are gone")
