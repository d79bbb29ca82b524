"""Collectives that fail: all ranks alike, only that execution, and the next is in step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from raycomm.codec import Failure
from raycomm.errors import CollectiveError, SerializationError
from raycomm.graph.model import CollectiveKind, ReduceOp
from raycomm.runtime import collectives
from tests.unit.exchange_world import World

ALLREDUCE, ALLGATHER, REDUCESCATTER, BROADCAST = (
    CollectiveKind.ALLREDUCE,
    CollectiveKind.ALLGATHER,
    CollectiveKind.REDUCESCATTER,
    CollectiveKind.BROADCAST,
)


@pytest.fixture(params=["2", "4", "4 in parts"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    count, _, parts = request.param.partition(" ")
    monkeypatch.setattr(collectives, "SHARE_FROM_BYTES", 1 if parts else 1 << 40)
    with World(int(count)) as world:
        yield world


def run(world: World, kind: CollectiveKind, values: list[Any]) -> list[Any]:
    op = ReduceOp.SUM if kind in (ALLREDUCE, REDUCESCATTER) else None
    return [result for (result,) in world.run(kind, op, [(value,) for value in values])]


def still_in_step(world: World, kind: CollectiveKind = ALLREDUCE) -> None:
    """The collective gives the right result twice more."""
    for number in (1.0, 2.0):
        values = [torch.full((world.size, 2), number * (rank + 1)) for rank in range(world.size)]
        results = run(world, kind, values)
        if kind is ALLREDUCE:
            total = torch.stack(values).sum(0)
            assert all(torch.equal(result, total) for result in results)
        else:
            assert all(isinstance(result, torch.Tensor) for result in results)


def refused(world: World, kind: CollectiveKind, values: list[Any], *texts: str) -> None:
    results = run(world, kind, values)
    for rank, result in enumerate(results):
        assert type(result) is Failure
        error = result.exception
        assert isinstance(error, CollectiveError)
        assert error.graph == "world"
        assert error.collective is not None
        assert error.collective.startswith(f"W{rank}.{kind}#")
        assert error.execution == world.executions - 1
        assert len(error.tensors) == world.size
        for text in (*texts, *error.tensors, "graph 'world'", error.collective):
            assert text in str(error)
    still_in_step(world, kind)


ONE = torch.ones(4, 2)


@pytest.mark.parametrize("kind", [ALLREDUCE, ALLGATHER, REDUCESCATTER])
@pytest.mark.parametrize(
    ("other", "text"),
    [
        (torch.ones(2, 4), "rank 1 (W1): torch float32 (2, 4)"),
        (torch.ones(8), "rank 1 (W1): torch float32 (8,)"),
        (torch.ones(4, 2).double(), "rank 1 (W1): torch float64 (4, 2)"),
        (np.ones((4, 2), "f4"), "rank 1 (W1): numpy float32 (4, 2)"),
        (np.ones((4, 2), ">f4"), "rank 1 (W1): numpy >f4 (4, 2)"),
    ],
    ids=str,
)
def test_tensors_that_differ(world: World, kind: CollectiveKind, other: Any, text: str) -> None:
    values = [ONE, other, *[ONE] * (world.size - 2)]
    refused(world, kind, values, "must be alike in kind, dtype and shape", "rank 0 (W0): torch float32 (4, 2)", text)


@pytest.mark.parametrize("kind", [ALLREDUCE, ALLGATHER, REDUCESCATTER, BROADCAST])
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "a value of type NoneType"),
        ([ONE], "a value of type list"),
        (1.5, "a value of type float"),
        (np.float32(1), "a value of type float32"),
        (ONE.to_sparse(), "a torch tensor of layout torch.sparse_coo"),
        (torch.ones(2, device="meta"), "a torch tensor on meta"),
        (np.array([object()]), "a numpy array of object"),
        (np.zeros(2, [("a", "i4")]), "a numpy array of [('a', '<i4')]"),
        (np.ma.masked_array([1.0], [True]), "a value of type MaskedArray"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_that_are_no_tensors(world: World, kind: CollectiveKind, value: Any, text: str) -> None:
    values = [ONE] * (world.size - 1) + [value]  # the last rank is the root of the broadcast
    refused(
        world, kind, values, "every actor must give CPU tensors of torch", f"rank {world.size - 1} (W{world.size - 1}): {text}"
    )


def test_dimension_0(world: World) -> None:
    refused(world, ALLGATHER, [torch.tensor(1.0)] * world.size, "allgather needs a dimension 0")
    refused(world, REDUCESCATTER, [torch.tensor(1.0)] * world.size, "reducescatter needs a dimension 0")
    wrong = torch.ones(world.size + 1, world.size)
    refused(world, REDUCESCATTER, [wrong] * world.size, f"dimension 0 must be divisible by the {world.size} actors")


def test_broadcast_looks_at_the_root_only(world: World) -> None:
    values: list[Any] = [None, *[torch.ones(rank) for rank in range(world.size - 2)], ONE]
    assert all(torch.equal(result, ONE) for result in run(world, BROADCAST, values))
    refused(world, BROADCAST, [*values[1:], None], "rank 0 (W0): not looked at")


@pytest.mark.parametrize("kind", [ALLREDUCE, ALLGATHER, REDUCESCATTER, BROADCAST])
def test_failure_of_some_ranks_is_that_of_all(world: World, kind: CollectiveKind) -> None:
    """The lowest rank's, where several have one; also of a rank whose tensor is not looked at."""
    first = Failure.capture(ValueError("first"), "W0.forward", 0)
    last = Failure.capture(KeyError("last"), "W1.forward", 0)
    for values in ([first, last, *[ONE] * (world.size - 2)], [ONE] * (world.size - 1) + [first]):
        results = run(world, kind, values)
        assert [result.message for result in results] == ["first"] * world.size
        assert [result.origin for result in results] == ["W0.forward"] * world.size
        assert all(isinstance(result.exception, ValueError) for result in results)
        still_in_step(world, kind)


class Unreadable:
    """A reading end whose next message is malformed."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def read(self) -> Any:
        self._reader.skip()
        raise SerializationError("malformed message: made so by a test")


def test_message_that_cannot_be_read(world: World) -> None:
    """Only its reader knows, unless the work is shared; the next execution is in step either way."""
    exchange = world.exchanges[1][ALLREDUCE, ReduceOp.SUM]
    whole = exchange._parts[0]
    exchange._parts[0] = Unreadable(whole)  # type: ignore[assignment]
    results = run(world, ALLREDUCE, [torch.ones(4)] * world.size)
    exchange._parts[0] = whole
    assert results[1].type_name.endswith("SerializationError")
    assert results[1].origin == "W1.allreduce reading from rank 0 (W0)"
    for result in (results[0], *results[2:]):
        good = isinstance(result, torch.Tensor) and torch.equal(result, torch.full((4,), float(world.size)))
        assert good != (type(result) is Failure and result.origin == results[1].origin)
    still_in_step(world)


def test_message_for_which_there_is_no_memory() -> None:
    with World(2, limit=1 << 20) as world:
        large = torch.ones(1 << 20)
        results = run(world, ALLREDUCE, [large, large])
        assert [result.type_name.rpartition(".")[2] for result in results] == ["PoolFull"] * 2
        still_in_step(world)


def test_result_for_which_there_is_no_memory(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails at one rank, which goes on publishing what the others wait for."""
    original = collectives.reduction.combine
    calls = iter(range(100))

    def combine(*args: Any) -> None:
        if next(calls) == 0:
            raise MemoryError("made so by a test")
        original(*args)

    monkeypatch.setattr(collectives.reduction, "combine", combine)
    results = run(world, ALLREDUCE, [torch.ones(4)] * world.size)
    failed = [result for result in results if type(result) is Failure]
    assert failed
    assert {result.message for result in failed} == {"made so by a test"}
    assert len(failed) == (world.size if collectives.SHARE_FROM_BYTES == 1 else 1)
    still_in_step(world)
