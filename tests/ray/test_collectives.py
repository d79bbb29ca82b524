"""Collectives between real actors: every kind, both families of nodes, failures of one execution, several on the same actors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.dag import InputNode as RayInputNode
from ray.dag import MultiOutputNode as RayMultiOutputNode
from ray.experimental.channel.cpu_communicator import CPUCommunicator
from ray.experimental.collective import allgather as ray_allgather
from ray.experimental.collective import allreduce as ray_allreduce
from ray.experimental.collective import reducescatter as ray_reducescatter
from ray.experimental.util.types import ReduceOp as RayReduceOp

import raycomm
from raycomm import CollectiveError, InputNode, MultiOutputNode, ReduceOp, bind, with_channel_options
from tests.ray.collective_actors import LARGE, Rank
from tests.ray.workers import PATIENCE_S

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def ranks(cluster: None) -> list[Any]:
    actors = [Rank.remote(rank) for rank in range(4)]
    ray.get([actor.pid.remote() for actor in actors])
    return actors


def get(refs: Any) -> Any:
    return [ref.get(timeout=PATIENCE_S) for ref in refs]


def test_every_kind_and_operation(ranks: list[Any]) -> None:
    for world in (1, 2, 4):
        some = ranks[:world]
        with InputNode() as x:
            values = [bind(rank.tensor, x) for rank in some]
            arrays = [bind(rank.array, x) for rank in some]
            results = [
                *raycomm.allreduce(values, ReduceOp.AVG),
                *raycomm.allreduce(values, "product"),
                *raycomm.allreduce(arrays, RayReduceOp.MIN),
                *raycomm.allreduce(arrays, ReduceOp.BXOR),
                *raycomm.allgather(arrays),
                *raycomm.reducescatter(values, ReduceOp.MAX),
                *raycomm.broadcast(values, root=world - 1),
            ]
        with raycomm.compile(MultiOutputNode(results)) as graph:
            for x_value in range(3):
                given = [torch.full((4, 2), float(x_value + rank)) for rank in range(world)]
                ints = [np.full((4, 2), x_value + rank, "i4") for rank in range(world)]
                got = get(graph.execute(x_value))
                rows = [got[start : start + world] for start in range(0, len(got), world)]
                for row, expected in (
                    (rows[0], torch.stack(given).mean(0)),
                    (rows[1], torch.stack(given).prod(0)),
                    (rows[2], ints[0]),
                    (rows[3], np.bitwise_xor.reduce(ints)),
                    (rows[4], np.concatenate(ints)),
                    (rows[6], given[-1]),
                ):
                    for value in row:
                        assert type(value) is type(expected)
                        assert value.dtype == expected.dtype
                        assert value.shape == expected.shape
                        assert bool((value == expected).all())
                part = 4 // world
                for rank, value in enumerate(rows[5]):
                    assert torch.equal(value, given[-1][rank * part : (rank + 1) * part])


@pytest.mark.parametrize("shape", [(3, 5), (LARGE,)])
def test_many_executions_in_flight(ranks: list[Any], shape: tuple[int, ...]) -> None:
    with InputNode() as x:
        totals = [
            bind(rank.total, value)
            for rank, value in zip(ranks, raycomm.allreduce([bind(rank.tensor, x, shape) for rank in ranks]), strict=True)
        ]
    elements = int(np.prod(shape))
    with raycomm.compile(MultiOutputNode(totals), max_inflight=8) as graph:
        refs = [graph.execute(number) for number in range(50)]
        for number, ref in enumerate(refs):
            assert get(ref) == [elements * (4.0 * number + 6)] * 4
        stats = graph.stats()
        assert [(call.call.partition(".")[2], call.calls) for call in stats.calls if "allreduce" in call.call] == [
            (f"allreduce#{node}", 50) for node in range(4, 8)
        ]
        parts = [edge for edge in stats.edges if edge.value.startswith(("part of", "slice of"))]
        assert [(edge.messages, edge.pickles, edge.failures) for edge in parts] == [(50, 0, 0)] * 8


@pytest.mark.parametrize("options", [{"allow_pickle": False}, {"share_tensors": True}, {"loop_thread": "actor"}], ids=str)
def test_with_options_of_the_graph(ranks: list[Any], options: dict[str, Any]) -> None:
    """No message of an exchange needs pickle, and no rank is given another one's memory."""
    with InputNode() as x:
        values = [bind(rank.tensor, x, (LARGE,), "bfloat16") for rank in ranks[:3]]
        results = [*raycomm.allreduce(values), *raycomm.broadcast(values)]
        changed = [bind(rank.change, value) for rank, value in zip([*ranks[:3], *ranks[:3]], results, strict=True)]
    with raycomm.compile(MultiOutputNode(changed), **options) as graph:
        for number in range(3):
            got = get(graph.execute(number))
            assert [(value.dtype, float(value[0]), float(value[-1])) for value in got] == [
                *[(torch.bfloat16, 3.0 * number + 103, 3.0 * number + 103)] * 3,
                *[(torch.bfloat16, number + 100.0, number + 100.0)] * 3,
            ]


def test_list_of_lists_and_parts_of_the_results(ranks: list[Any]) -> None:
    """Two tensors per actor in one exchange; only some results are used, one of them twice, one in another actor's call."""
    with InputNode() as x:
        pairs = [bind(rank.two, x) for rank in ranks]
        sums = raycomm.allreduce([[first for first, _ in pairs], [second for _, second in pairs]])
        joined = bind(ranks[1].add, sums[0][1], sums[2][1])
        out = MultiOutputNode([sums[3][0], joined, sums[3][0]])
    with raycomm.compile(out) as graph:
        for number in range(3):
            first, second, again = get(graph.execute(number))
            assert torch.equal(first, torch.full((3,), 4.0 * number + 6))
            assert first is again
            assert torch.equal(second, torch.full((2, 2), 2.0 * 10 * number))


def test_chained_and_crossing_collectives(ranks: list[Any]) -> None:
    """Results feed the next exchange, among other actors, in other orders of rank; two exchanges of the same actors in a row."""
    with InputNode() as x:
        values = [bind(rank.tensor, x) for rank in ranks]
        left = raycomm.allreduce(values[:2])
        right = raycomm.allreduce(values[:1:-1])
        across = raycomm.allgather([right[0], left[1]])  # actors 3 and 1
        everyone = raycomm.allreduce([left[0], left[1], right[1], right[0]], "max")
        outs = [*across, *everyone]
    with raycomm.compile(MultiOutputNode(outs)) as graph:
        for number in range(3):
            got = get(graph.execute(number))
            gathered = torch.cat([torch.full((4, 2), 2.0 * number + 5), torch.full((4, 2), 2.0 * number + 1)])
            assert all(torch.equal(value, gathered) for value in got[:2])
            highest = torch.full((4, 2), 2.0 * number + 5)
            assert all(torch.equal(value, highest) for value in got[2:])


def test_results_belong_to_their_actor(ranks: list[Any]) -> None:
    """Kept over executions and changed in place; nobody else sees it."""
    with InputNode() as x:
        values = [bind(rank.tensor, x, (LARGE,)) for rank in ranks]
        sums = raycomm.allreduce(values)
        kept = bind(ranks[0].keep, sums[0])
        changed = bind(ranks[1].change, sums[1])
        out = MultiOutputNode(
            [kept, bind(ranks[1].total, changed), bind(ranks[2].total, sums[2]), bind(ranks[3].total, values[3])]
        )
    with raycomm.compile(out) as graph:
        for number in range(5):
            total = LARGE * (4.0 * number + 6)
            assert get(graph.execute(number)) == [number + 1, total + 100 * LARGE, total, LARGE * (number + 3.0)]
    assert ray.get(ranks[0].sums.remote()) == [LARGE * (4.0 * number + 6) for number in range(5)]


@pytest.mark.parametrize("method", ["ragged_if_odd", "fail_if_odd", "words_if_odd"])
def test_one_execution_fails(ranks: list[Any], method: str) -> None:
    """Every actor's result of it, with the same error; the executions around it, submitted together, do not."""
    with InputNode() as x:
        values = [bind(getattr(rank, method), x) for rank in ranks]
        outs = raycomm.allreduce(values)
        outs = [bind(rank.total, value) for rank, value in zip(ranks, outs, strict=True)]
    with raycomm.compile(MultiOutputNode(outs), name="fails") as graph:
        executions = [graph.execute(number) for number in range(6)]
        for number, refs in enumerate(executions):
            if number % 2 == 0:
                assert get(refs) == [16.0] * 4
                continue
            for ref in refs:
                kind: type[Exception] = KeyError if method == "fail_if_odd" else CollectiveError
                with pytest.raises(kind) as caught:
                    ref.get(timeout=PATIENCE_S)
                text = str(caught.value)
                if method == "ragged_if_odd":
                    assert "torch float32 (4,)" in text
                    assert "torch float32 (7,)" in text
                elif method == "words_if_odd":
                    assert "a value of type str" in text
                if kind is CollectiveError:
                    assert f"graph 'fails', execution {number}" in text
                    assert all(f"rank {rank} (RankBody" in text for rank in range(4))
        assert get(graph.execute(8)) == [16.0] * 4


def test_death_of_a_rank_is_told(cluster: None) -> None:
    actors = [Rank.remote(rank) for rank in range(3)]
    with InputNode() as x:
        outs = raycomm.allreduce([bind(actor.die, x) for actor in actors])
    with raycomm.compile(MultiOutputNode(outs)) as graph:
        assert [value.tolist() for value in get(graph.execute(1))] == [[3.0] * 4] * 3
        refs = graph.execute(2)
        for ref in refs:
            with pytest.raises(ray.exceptions.ActorDiedError):
                ref.get(timeout=PATIENCE_S)
    # The others are ordinary actors again, and can meet in a new graph.
    with InputNode() as x:
        outs = raycomm.allreduce([bind(actor.die, x) for actor in (actors[0], actors[2])])
    with raycomm.compile(MultiOutputNode(outs)) as graph:
        assert [value.tolist() for value in get(graph.execute(3))] == [[2.0] * 4] * 2


def test_no_memory_for_the_exchange(ranks: list[Any]) -> None:
    with InputNode() as x:
        outs = raycomm.allreduce([bind(rank.tensor, x.value, x.shape) for rank in ranks[:2]])
        outs = [bind(rank.total, value) for rank, value in zip(ranks, outs, strict=False)]
    with raycomm.compile(MultiOutputNode(outs), shm_limit_bytes=2 << 20) as graph:
        for _ in range(2):
            for ref in graph.execute(value=1.0, shape=(1 << 20,)):
                with pytest.raises(raycomm.SharedMemoryError, match=r"part of RankBody#\w+\.allreduce#\d"):
                    ref.get(timeout=PATIENCE_S)
            assert get(graph.execute(value=1.0, shape=(2,))) == [6.0, 6.0]


def test_nodes_of_ray(ranks: list[Any]) -> None:
    """Ray's own collectives, by their default and on Ray's CPU communicator, mixed with ours and with raycomm's nodes."""
    some = ranks[:2]
    named = ray.util.list_named_actors(all_namespaces=True)
    with RayInputNode() as x:
        values = [rank.tensor.bind(x) for rank in some]
        pairs = [rank.two.bind(x) for rank in some]
        sums = ray_allreduce.bind(values)
        gathered = ray_allgather.bind(values)
        scattered = ray_reducescatter.bind(values, RayReduceOp.MAX, CPUCommunicator(2, some))
        several = ray_allreduce.bind([[first for first, _ in pairs], [second for _, second in pairs]], RayReduceOp.PRODUCT)
        means = raycomm.allreduce(sums, ReduceOp.AVG)
        last = [rank.add.bind(mean, total) for rank, mean, total in zip(some, means, sums, strict=True)]
        out = RayMultiOutputNode([*gathered, scattered[1], several[0][1], *last])
    with raycomm.compile(out) as graph:
        for number in range(3):
            got = get(graph.execute(number))
            both = torch.cat([torch.full((4, 2), float(number)), torch.full((4, 2), number + 1.0)])
            assert torch.equal(got[0], both)
            assert torch.equal(got[1], both)
            assert torch.equal(got[2], torch.full((2, 2), number + 1.0))
            assert torch.equal(got[3], torch.full((2, 2), 2.0 * number**2))
            assert all(torch.equal(value, torch.full((4, 2), 2 * (2.0 * number + 1))) for value in got[4:])
        assert ray.util.list_named_actors(all_namespaces=True) == named  # Ray's communicator makes a barrier of that kind


def test_edge_options_at_run_time(ranks: list[Any]) -> None:
    """Short rings and small slots on single edges change how values travel, not what arrives; nodes of both families."""
    with RayInputNode() as x:
        first = with_channel_options(ranks[0].tensor.bind(x, (300,)), slots=1, inline_bytes=64)
        second = bind(ranks[1].add, first, 1).with_channel_options(slots=2, inline_bytes=1 << 20)
        third = with_channel_options(ranks[2].add.bind(second, 1), slots=1)
        with_channel_options(x, slots=1)
    with raycomm.compile(third, max_inflight=8) as graph:
        assert "inline_bytes 64 slots 1" in str(graph.plan)
        assert "inline_bytes 1048576 slots 2" in str(graph.plan)
        refs = [graph.execute(number) for number in range(40)]
        for number, ref in enumerate(refs):
            assert torch.equal(ref.get(timeout=PATIENCE_S), torch.full((300,), number + 2.0))
