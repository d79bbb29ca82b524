"""Collectives on groups, over gloo and over NCCL, between real actors: beside calls and transfers, and what may go wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import ray
import torch

import raycomm
from raycomm import ActorDiedError, CollectiveError, CompileError, InputNode, MultiOutputNode, ReduceOp, bind
from tests.ray.collective_actors import Rank
from tests.ray.gpu_actors import start_rank_on_gpu
from tests.ray.workers import PATIENCE_S, Gate, until

pytestmark = pytest.mark.usefixtures("cluster")

_PROMPTLY_S = 20.0  # a hang guard


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def by(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def new(cluster: None, by: str) -> Callable[[int], Any]:
    return start_rank_on_gpu if by == "nccl" else Rank.remote


@pytest.fixture(scope="module")
def ranks(new: Callable[[int], Any]) -> list[Any]:
    actors = [new(rank) for rank in range(3)]
    ray.get([actor.pid.remote() for actor in actors])
    return actors


def get(refs: Any) -> Any:
    return [ref.get(timeout=PATIENCE_S) for ref in refs]


def test_every_kind(ranks: list[Any], by: str) -> None:
    with InputNode() as x:
        values = [bind(rank.tensor, x, (3, 2)) for rank in ranks]
        results = [
            *raycomm.allreduce(values, ReduceOp.AVG, by),
            *raycomm.allreduce(values, "max", by),
            *raycomm.allgather(values, by),
            *raycomm.reducescatter(values, ReduceOp.SUM, by),
            *raycomm.broadcast(values, 2, by),
        ]
    with raycomm.compile(MultiOutputNode(results)) as graph:
        assert f"group 0 1, 2, 3 over {by}\n" in str(graph.plan)
        refs = [graph.execute(float(number)) for number in range(6)]
        for number, row in enumerate(refs):
            given = [torch.full((3, 2), float(number + rank)) for rank in range(3)]
            whole = torch.stack(given)
            expected = [whole.mean(0), whole.amax(0), torch.cat(given), whole.sum(0), given[2]]
            got = get(row)
            for place, wanted in enumerate(expected):
                for rank, value in enumerate(got[3 * place : 3 * place + 3]):
                    part = wanted[rank : rank + 1] if place == 3 else wanted
                    assert torch.equal(value.cpu(), part), (number, place, rank)


@pytest.mark.parametrize("policy", ["link", "direction", "shared"])
@pytest.mark.parametrize("overlap", [True, False])
def test_beside_sends_receives_and_calls(ranks: list[Any], by: str, policy: str, overlap: bool) -> None:
    """Results go on over links and to calls, a chain of collectives needs no host, and all is told apart."""
    with InputNode() as x:
        first = [bind(rank.tensor, x, (1000,)) for rank in ranks]
        there = bind(ranks[0].tensor, x, (1000,)).with_tensor_transport(by)
        reduced = raycomm.allreduce(first, communicator=by)
        again = raycomm.allreduce([bind(rank.add, value, value) for rank, value in zip(ranks, reduced, strict=True)], "max", by)
        sent = raycomm.allreduce(list(again), "min", by)
        sent[0].with_tensor_transport(by)
        node = [bind(ranks[1].add, there, again[1]), bind(ranks[2].total, sent[0]), sent[0], bind(ranks[0].total, again[0])]
    with raycomm.compile(MultiOutputNode(node), stream_policy=policy, overlap=overlap, max_inflight=6) as graph:
        refs = [graph.execute(float(number)) for number in range(20)]
        for number, row in enumerate(refs):
            added, total, value, own = get(row)
            twice = 2 * (3.0 * number + 3)
            assert (float(added[0]), total, float(value[-1]), own) == (number + twice, 1000 * twice, twice, 1000 * twice)


def test_a_buffer_that_its_method_uses_again(ranks: list[Any], by: str, gate: Gate) -> None:
    """Two ranks are held, while the third goes on as far as it may, and fills its buffer anew."""
    with InputNode() as x:
        held = [bind(rank.wait, bind(rank.buffer, x), gate.path) for rank in ranks[1:]]
        reduced = raycomm.allreduce([bind(ranks[0].buffer, x), *held], communicator=by)
        totals = [bind(rank.total, value) for rank, value in zip(ranks, reduced, strict=True)]
    with raycomm.compile(MultiOutputNode(totals), max_inflight=6) as graph:
        refs = [graph.execute(float(number)) for number in range(6)]
        gate.wait_entered()
        gate.open()
        for number, row in enumerate(refs):
            assert get(row) == [50_000 * (3.0 * number + 3)] * 3


def test_a_result_that_is_sent_on_and_changed_here(ranks: list[Any], by: str, gate: Gate) -> None:
    """The reader is slow. A method of the sender writes to what it is given, which is the memory that is being sent."""
    with InputNode() as x:
        late = bind(ranks[2].wait, x, gate.path)
        reduced = raycomm.allreduce([bind(rank.tensor, x, (300_000,)) for rank in ranks[:2]], communicator=by)
        changed = bind(ranks[0].total, bind(ranks[0].change, reduced[0].with_tensor_transport(by)))
        node = MultiOutputNode([bind(ranks[2].total, reduced[0]), changed, late])
    with raycomm.compile(node, overlap=False) as graph:
        refs = [graph.execute(float(number)) for number in range(2)]
        gate.wait_entered()
        gate.open()
        for number, row in enumerate(refs):
            assert get(row)[:2] == [300_000 * (2.0 * number + 1), 300_000 * (2.0 * number + 101)]


@pytest.mark.parametrize(
    ("method", "error", "match"),
    [
        ("ragged_if_odd", CollectiveError, r"they must be alike .*rank 1 .* \(5,\)"),
        ("fail_if_odd", KeyError, "rank 1 at 1"),
        ("words_if_odd", CollectiveError, "every actor must give .*rank 0 .*: a value of type str"),
        ("array_if_odd", CollectiveError, "all of them must lie on devices that group 0 .* joins, or all in host memory"),
    ],
)
def test_one_execution_fails_at_all_ranks(ranks: list[Any], by: str, method: str, error: type[Exception], match: str) -> None:
    with InputNode() as x:
        reduced = raycomm.allreduce([bind(getattr(rank, method), x) for rank in ranks], communicator=by)
    with raycomm.compile(MultiOutputNode(reduced)) as graph:
        rows = [graph.execute(number) for number in range(4)]
        for number, row in enumerate(rows):
            for ref in row:
                if number % 2:
                    with pytest.raises(error, match=match if number == 1 else None):
                        ref.get(PATIENCE_S)
                else:
                    assert float(ref.get(PATIENCE_S)[0]) == 3.0


def test_an_operation_that_is_not_for_the_dtype(ranks: list[Any], by: str) -> None:
    with InputNode() as x:
        values = [bind(rank.tensor, x[0], (4,), x[1]) for rank in ranks]
        reduced = raycomm.allreduce(values, ReduceOp.BAND, by)
    with raycomm.compile(MultiOutputNode(reduced)) as graph:
        for dtype in ("float32", "int32", "float8_e4m3fn", "int64"):
            refs = graph.execute(4, dtype)
            if dtype.startswith("int"):
                assert [int(value[0]) for value in get(refs)] == [4 & 5 & 6] * 3
                continue
            for ref in refs:
                with pytest.raises(CollectiveError, match="BAND is not for"):
                    ref.get(PATIENCE_S)


def test_several_tensors_each(ranks: list[Any], by: str) -> None:
    with InputNode() as x:
        pairs = [bind(rank.two, x) for rank in ranks]
        sums = raycomm.allreduce([[one for one, _ in pairs], [other for _, other in pairs]], communicator=by)
    with raycomm.compile(MultiOutputNode([value for row in sums for value in row])) as graph:
        for number in range(3):
            got = get(graph.execute(float(number)))
            assert [(tuple(value.shape), float(value.sum())) for value in got] == [
                ((3,), 3 * (3.0 * number + 3)),
                ((2, 2), 4 * 6.0 * number),
            ] * 3


def test_arrays_are_combined_in_host_memory_where_nobody_asked_for_more(ranks: list[Any], by: str) -> None:
    with InputNode() as x:
        reduced = raycomm.allreduce([bind(rank.array, x) for rank in ranks], communicator=None if by == "nccl" else by)
    with raycomm.compile(MultiOutputNode(reduced)) as graph:
        if by == "nccl":
            assert 'over nccl because "all its actors have devices that nccl joins"' in str(graph.plan)
        for number in range(3):
            assert [int(value[0, 0]) for value in get(graph.execute(number))] == [3 * number + 3] * 3


def test_arrays_are_refused_where_gpus_were_asked_for(ranks: list[Any], by: str) -> None:
    if by != "nccl":
        pytest.skip("gloo is for host memory")
    with InputNode() as x:
        reduced = raycomm.allreduce([bind(rank.array, x) for rank in ranks], communicator="nccl")
    refused = pytest.raises(CollectiveError, match="they must be tensors of .*, as communicator 'nccl' asks for")
    with raycomm.compile(MultiOutputNode(reduced)) as graph, refused:
        get(graph.execute(1))


def test_a_death_ends_the_graph(new: Callable[[int], Any], by: str) -> None:
    mortal = [new(rank) for rank in range(3)]
    with InputNode() as x:
        reduced = raycomm.allreduce([bind(rank.die, x) for rank in mortal], communicator=by)
    with raycomm.compile(MultiOutputNode(reduced)) as graph:
        assert [float(value[0]) for value in get(graph.execute(1))] == [3.0] * 3
        begin = time.monotonic()
        for ref in graph.execute(2):
            with pytest.raises(ActorDiedError, match="SIGKILL|signal 9"):
                ref.get(PATIENCE_S)
        assert time.monotonic() - begin < _PROMPTLY_S
    with InputNode() as x:
        node = raycomm.allreduce([bind(rank.tensor, x) for rank in (mortal[0], mortal[2])], communicator=by)
    with raycomm.compile(MultiOutputNode(node)) as graph:
        assert [float(value[0, 0]) for value in get(graph.execute(1.0))] == [4.0] * 2


def test_nothing_is_left_in_the_actors(ranks: list[Any], by: str) -> None:
    with InputNode() as x:
        reduced = raycomm.allreduce([bind(rank.tensor, x) for rank in ranks], communicator=by)
    with raycomm.compile(MultiOutputNode(reduced)) as graph:
        get(graph.execute(1.0))
    until(lambda: not any(ray.get([rank.threads.remote() for rank in ranks])), "the threads of the graph are gone")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpus(cluster: None) -> None:
    actors = [Rank.remote(rank) for rank in range(2)]

    def reduced(communicator: str | None) -> Any:
        with InputNode() as x:
            return MultiOutputNode(raycomm.allreduce([bind(rank.tensor, x) for rank in actors], communicator=communicator))

    with pytest.raises(CompileError, match=r"communicator 'nccl' of node .*allreduce#2: actor .*it has no GPU"):
        raycomm.compile(reduced("nccl"))
    with raycomm.compile(reduced(None)) as graph:
        assert "group" not in str(graph.plan)
        assert [float(value[0, 0]) for value in get(graph.execute(1.0))] == [3.0] * 2
    with raycomm.compile(reduced("nccl"), device="simulated") as graph:
        assert "group 0 1, 2 over simulated" in str(graph.plan)
        assert [float(value[0, 0]) for value in get(graph.execute(1.0))] == [3.0] * 2
