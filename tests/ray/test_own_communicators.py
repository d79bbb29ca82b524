"""Communicators that users bring: what works over them, and what is said where they do not fit or fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch
from ray.dag import InputNode as RayInputNode
from ray.dag import MultiOutputNode as RayMultiOutputNode
from ray.experimental import collective

import raycomm
from raycomm import ActorDiedError, ChannelTimeoutError, CompileError, InputNode, MultiOutputNode, ReduceOp, bind
from raycomm.ray_dag.gloo import Gloo
from tests.ray import own_communicators as own
from tests.ray.collective_actors import Rank
from tests.ray.tensor_actors import Tensors
from tests.ray.workers import PATIENCE_S, Gate, until

pytestmark = pytest.mark.usefixtures("cluster")

_PROMPTLY_S = 20.0  # a hang guard

Over = Callable[[list[Any]], Any]
KINDS: dict[str, Over] = {"class": lambda actors: own.SocketLink, "object": own.RaysGroup}


@pytest.fixture(params=KINDS)
def over(request: pytest.FixtureRequest) -> Over:
    """Makes a communicator of some actors."""
    return KINDS[request.param]


@pytest.fixture(scope="module")
def actors(cluster: None) -> list[Any]:
    actors = [Tensors.remote() for _ in range(3)]
    ray.get([actor.pid.remote() for actor in actors])
    return actors


@pytest.fixture(scope="module")
def ranks(cluster: None) -> list[Any]:
    ranks = [Rank.remote(rank) for rank in range(3)]
    ray.get([rank.pid.remote() for rank in ranks])
    return ranks


def get(refs: Any) -> Any:
    return [ref.get(PATIENCE_S) for ref in refs]


def two_way(actors: list[Any], communicator: Any) -> Any:
    """0 -> 1 -> 0 -> 1, and a value of each for the other."""
    first, second = actors[:2]
    with InputNode() as x:
        there = bind(first.make, x).with_tensor_transport(communicator)
        back = bind(second.twice, there).with_tensor_transport(communicator)
        again = bind(first.twice, back).with_tensor_transport(communicator)
        other = bind(second.make, x).with_tensor_transport(communicator)
    return MultiOutputNode([bind(second.sum, again), bind(first.sum, other)])


@pytest.mark.parametrize("policy", ["link", "direction", "shared"])
def test_both_directions_at_once(actors: list[Any], over: Over, policy: str) -> None:
    with raycomm.compile(two_way(actors, over(actors[:2])), stream_policy=policy) as graph:
        refs = [graph.execute(number) for number in range(8)]
        assert [get(row) for row in refs] == [[4000 * number, 1000 * number] for number in range(8)]


def test_every_kind_of_collective_beside_edges(ranks: list[Any], over: Over) -> None:
    communicator = over(ranks)
    with InputNode() as x:
        values = [bind(rank.tensor, x, (3, 2)) for rank in ranks]
        results = [
            *raycomm.allreduce(values, ReduceOp.AVG, communicator),
            *raycomm.allreduce(values, "max", communicator),
            *raycomm.allgather(values, communicator),
            *raycomm.reducescatter(values, ReduceOp.SUM, communicator),
            *raycomm.broadcast(values, 2, communicator),
        ]
        sent = raycomm.allreduce(values, "product", communicator)[0].with_tensor_transport(communicator)
        results.append(bind(ranks[1].wait, sent, "/dev/null"))
    with raycomm.compile(MultiOutputNode(results)) as graph:
        assert "group 0 1, 2, 3 over own 0" in str(graph.plan)
        refs = [graph.execute(float(number)) for number in range(6)]
        for number, row in enumerate(refs):
            given = [torch.full((3, 2), float(number + rank)) for rank in range(3)]
            whole = torch.stack(given)
            expected = [whole.mean(0), whole.amax(0), torch.cat(given), whole.sum(0), given[2]]
            *got, last = get(row)
            for place, wanted in enumerate(expected):
                for rank, value in enumerate(got[3 * place : 3 * place + 3]):
                    assert torch.equal(value, wanted[rank : rank + 1] if place == 3 else wanted), (number, place, rank)
            assert torch.equal(last, whole.prod(0))


def test_a_collective_over_one_and_an_edge_over_another(ranks: list[Any], over: Over) -> None:
    """Their ends are on devices of their own, so that the one can only wait for the other on the host."""
    communicator = over(ranks[:2])
    with InputNode() as x:
        values = [bind(rank.tensor, x, (50_000,)) for rank in ranks[:2]]
        first, second = raycomm.allreduce(values, "sum", communicator)
        results = []
        for transport in ("gloo", own.SocketLink):
            sent = raycomm.allreduce(values, "max", communicator)[0].with_tensor_transport(transport)
            results.append(bind(ranks[2].wait, sent, "/dev/null"))
        there = first.with_tensor_transport("gloo")
        results.append(bind(ranks[2].wait, there, "/dev/null"))
    with raycomm.compile(MultiOutputNode([*results, second])) as graph:
        for number in range(20):
            largest, likewise, whole, same = get(graph.execute(float(number)))
            assert (largest == number + 1).all()
            assert (likewise == number + 1).all()
            assert (whole == 2 * number + 1).all()
            assert (same == whole).all()


def test_a_value_with_several_readers(actors: list[Any], over: Over) -> None:
    with InputNode() as x:
        made = bind(actors[0].make, x).with_tensor_transport(over(actors))
        node = MultiOutputNode([bind(actors[1].sum, made), bind(actors[2].sum, made, made), made])
    with raycomm.compile(node) as graph:
        for number in range(20):
            first, second, tensor = get(graph.execute(number))
            assert (first, second) == (1000 * number, 2000 * number)
            assert (tensor == number).all()


def test_a_buffer_that_its_method_uses_again(actors: list[Any]) -> None:
    """What is sent is read later, on another thread."""
    with InputNode() as x:
        made = bind(actors[0].buffer, x).with_tensor_transport(own.SlowToSend(actors[:2]))
        node = bind(actors[1].all_equal, made)
    with raycomm.compile(node, max_inflight=8) as graph:
        assert get([graph.execute(number) for number in range(8)]) == list(range(8))


def test_ray_nodes(ranks: list[Any]) -> None:
    for communicator, over in ((own.RaysGroup(ranks), "own 0"), (Gloo(ranks), "gloo")):
        x = RayInputNode()
        values = [rank.tensor.bind(x) for rank in ranks]
        sums = collective.allreduce.bind(values, transport=communicator)
        gathered = collective.allgather.bind(values, transport=communicator)
        node = ranks[1].wait.bind(sums[0].with_tensor_transport(transport=communicator), "/dev/null")
        with raycomm.compile(RayMultiOutputNode([node, *sums, *gathered])) as graph:
            assert str(graph.plan).count(f"over {over}") == 2  # a group and a link
            got = get(graph.execute(1.0))
            assert all(torch.equal(value, torch.full((4, 2), 6.0)) for value in got[:4])
            whole = torch.cat([torch.full((4, 2), 1.0 + rank) for rank in range(3)])
            assert all(torch.equal(value, whole) for value in got[4:])


def test_ray_compiles_with_a_default_communicator(ranks: list[Any]) -> None:
    raycomm.install()
    try:
        x = RayInputNode()
        values = [rank.tensor.bind(x) for rank in ranks]
        sums = collective.allreduce.bind(values)
        last = ranks[2].wait.bind(sums[0].with_tensor_transport(transport="accelerator"), "/dev/null")
        node = RayMultiOutputNode([last, sums[1], sums[2]])
        graph = node.experimental_compile(_default_communicator=own.RaysGroup(ranks))
        assert str(graph.plan).count("over own 0") == 2
        assert all(torch.equal(value, torch.full((4, 2), 6.0)) for value in ray.get(graph.execute(1.0)))
        graph.teardown()
        edge = ranks[0].tensor.bind(RayInputNode()).with_tensor_transport(transport="accelerator")
        x = RayInputNode()
        summed = collective.allreduce.bind([rank.tensor.bind(x) for rank in ranks])
        for node in (ranks[1].wait.bind(edge, "/dev/null"), RayMultiOutputNode(summed)):
            with pytest.raises(ValueError, match="has no custom communicator specified. Please specify"):
                node.experimental_compile(_default_communicator=None)
    finally:
        raycomm.uninstall()


def chain(actors: list[Any], communicator: Any) -> Any:
    with InputNode() as x:
        return bind(actors[1].sum, bind(actors[0].make, x).with_tensor_transport(communicator))


def test_what_is_no_communicator_is_refused(actors: list[Any], ranks: list[Any]) -> None:
    pair = actors[:2]
    for given, message in (
        (own.Half, "transport of node .*make: class Half has no warm_up, allreduce, .*; give it the methods of raycomm.device"),
        (own.RaysGroup, "RaysGroup is a class of Ray's; pass an object of it"),
        (own.BadRanks(pair), r"BadRanks gives its 2 actors the ranks \[7\]; give each of them one rank, from 0"),
        (own.RaysGroup([pair[0], ranks[0]]), "actor TensorsBody#.* is none of the 2 actors of communicator RaysGroup"),
        (own.RaysGroup(actors), "RaysGroup has 3 actors and the graph 2 of them; it would wait for the rest"),
        (own.Unpicklable(pair), "communicator Unpicklable cannot be pickled .*make what it uses in initialize"),
        (own.OfNothing, r"link 0 of graph .*: OfNothing\(store, name, [01], 2\) failed with OSError: no such device"),
        (own.ForOthers, "ForOthers made 'nothing of the kind', which is not rank [01] of 2 of a communicator"),
        (
            own.RefusesToStart(pair),
            r"communicator 0 \(RefusesToStart\) of graph .*: initialize\([01]\) failed with ModuleNotFound",
        ),
        (object(), "transport of type object of node .* is none that there is; use 'auto'.* or an object of Ray's"),
    ):
        with pytest.raises(CompileError, match=message):
            raycomm.compile(chain(actors, given))
    assert ray.get([actor.pid.remote() for actor in actors])
    with InputNode() as x:
        node = bind(pair[0].make, x).with_tensor_transport(own.SocketLink, device="cpu")
    with pytest.raises(CompileError, match="transport SocketLink and device 'cpu' of node .* exclude each other; leave the"):
        raycomm.compile(bind(pair[1].sum, node))
    with InputNode() as x:
        made = raycomm.with_channel_options(bind(pair[0].make, x), streams=(1, 1)).with_tensor_transport(own.RaysGroup(pair))
    with pytest.raises(CompileError, match="streams are given for channel .*RaysGroup.* run in one order; leave them out"):
        raycomm.compile(bind(pair[1].sum, made))
    with raycomm.compile(chain(actors, own.SocketLink)) as graph:
        assert graph.execute(2).get(PATIENCE_S) == 2000


def test_collectives_that_do_not_fit_are_refused(ranks: list[Any]) -> None:
    with InputNode() as x:
        values = [bind(rank.tensor, x) for rank in ranks]
    turned = own.RaysGroup(ranks[::-1])
    with pytest.raises(CompileError, match="the ranks of communicator RaysGroup are not in the order of the nodes"):
        raycomm.allgather(values, turned)
    with pytest.raises(CompileError, match="communicator RaysGroup, an object of Ray's, has no BXOR; use one of SUM"):
        raycomm.allreduce(values, "bxor", turned)
    with pytest.raises(CompileError, match="the 2 actors of its communicator RaysGroup are not the 3 actors of its nodes"):
        raycomm.allreduce(values, communicator=own.RaysGroup(ranks[:2]))
    with raycomm.compile(MultiOutputNode(raycomm.allreduce(values, communicator=turned))) as graph:  # of which order is no matter
        assert all(torch.equal(value, torch.full((4, 2), 6.0)) for value in get(graph.execute(1.0)))


def test_a_communicator_that_never_starts_ends_at_the_limit(cluster: None) -> None:
    two = [Tensors.remote() for _ in range(2)]
    begin = time.monotonic()
    with pytest.raises(ChannelTimeoutError, match="was not ready within 4"):
        raycomm.compile(chain(two, own.NeverStarts(two)), compile_timeout=4.0)
    assert time.monotonic() - begin < _PROMPTLY_S
    with raycomm.compile(chain(two, own.SocketLink)) as graph:  # the actors are free again
        assert graph.execute(2).get(PATIENCE_S) == 2000


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (own.SendsNothing, "SendsNothing.recv returned None at rank 1 of link 0 .* not the tensor it received from rank 0"),
        (own.SendsAnother, r"receives int64 \[1000\] from rank 0, and SendsAnother.recv returned int64 \[999\]"),
        (own.FailsAt, "send to rank 1 at rank 0 of link 0 .* failed in FailsAt: RuntimeError: the cable is out"),
    ],
)
def test_a_communicator_that_fails_ends_the_graph_and_says_why(cluster: None, kind: Any, message: str) -> None:
    two = [Tensors.remote() for _ in range(2)]
    with raycomm.compile(chain(two, kind(two))) as graph:
        refs = [graph.execute(number) for number in range(8)]
        begin = time.monotonic()
        got = 0
        with pytest.raises(ActorDiedError, match=message):
            for got, ref in enumerate(refs):
                assert ref.get(PATIENCE_S) == 1000 * got
        assert got == (0 if kind is own.SendsNothing else 3)
        assert time.monotonic() - begin < _PROMPTLY_S
    assert ray.get([actor.pid.remote() for actor in two])


def test_a_death_in_the_middle_of_a_transfer(cluster: None, over: Over, gate: Gate) -> None:
    """The reader waits, in code of the user's that nothing ends, for what the dead one has announced."""
    two = [Tensors.remote() for _ in range(2)]
    with InputNode() as x:
        made = bind(two[0].die_at, bind(two[0].make, x), 5).with_tensor_transport(over(two))
        node = bind(two[1].sum, made)
    with raycomm.compile(node) as graph:
        refs = [graph.execute(number) for number in range(8)]
        begin = time.monotonic()
        with pytest.raises(ActorDiedError, match="exit code 3|died"):
            get(refs)
        assert time.monotonic() - begin < _PROMPTLY_S
    until(lambda: not ray.get(two[1].threads.remote()), "the threads of the graph are gone")


def test_without_gpus_it_is_simulated(actors: list[Any], over: Over) -> None:
    with raycomm.compile(two_way(actors, over(actors[:2])), device="simulated") as graph:
        assert "over simulated" in str(graph.plan)
        assert get(graph.execute(2)) == [8000, 2000]
