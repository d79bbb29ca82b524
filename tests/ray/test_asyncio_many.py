"""Many that await on one graph: each result costs one look, in whatever order they await, and whoever leaves is forgotten."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from typing import Any

import pytest

import raycomm
from raycomm.runtime.outputs import OutputQueue
from tests.ray.awaiting import armed, held, one, run, soon
from tests.ray.workers import Gate

pytestmark = pytest.mark.usefixtures("cluster")

_MANY = 1000


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The executions whose result was looked for."""
    seen: list[int] = []
    has = OutputQueue.has

    def counted(queue: OutputQueue, index: int) -> bool:
        seen.append(index)
        return has(queue, index)

    monkeypatch.setattr(OutputQueue, "has", counted)
    return seen


async def value_of(ref: Any) -> Any:
    return await ref


def test_many_who_wait_for_results(workers: list[Any], gate: Gate, rng: random.Random, looks: list[int]) -> None:
    """A look for each result, and one more that finds nothing: not one for each of those behind."""

    async def main(graph: Any) -> None:
        refs = [await graph.execute_async(number) for number in range(_MANY)]
        order = list(range(_MANY))
        rng.shuffle(order)
        tasks = {number: asyncio.ensure_future(value_of(refs[number])) for number in order}
        await soon(lambda: graph._waker.waiting == _MANY, "all wait")
        for number in rng.sample(order, _MANY // 4):
            tasks.pop(number).cancel()
        looks.clear()
        gate.open()
        assert await asyncio.gather(*tasks.values()) == list(tasks)
        assert [await ref for ref in refs] == list(range(_MANY))

    with raycomm.compile(held(workers, gate), max_inflight=_MANY, max_buffered_results=_MANY) as graph:
        run(main(graph))
        assert len(looks) < 5 * _MANY
        assert not armed(graph)


def test_many_who_wait_for_room(workers: list[Any], gate: Gate, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(graph: Any) -> None:
        tasks = [asyncio.ensure_future(one(graph, number)) for number in range(_MANY)]
        await soon(lambda: len(graph._line) == _MANY - 4, "all but those under way wait")
        gone = set(rng.sample(range(4, _MANY), _MANY // 4))
        for number in gone:
            tasks[number].cancel()
        asked.clear()
        gate.open()
        values = await asyncio.gather(*tasks, return_exceptions=True)
        for number, value in enumerate(values):
            assert isinstance(value, asyncio.CancelledError) if number in gone else value == number

    asked: list[int] = []
    kind = type(raycomm.runtime.awaiting.Line())
    is_next = kind.is_next
    monkeypatch.setattr(kind, "is_next", lambda line, place: bool(asked.append(place.number)) or is_next(line, place))
    with raycomm.compile(held(workers, gate), max_inflight=4) as graph:
        run(main(graph))
        assert len(asked) < 20 * _MANY
        assert not armed(graph)


def test_who_has_left_keeps_no_graph(workers: list[Any], gate: Gate) -> None:
    """Waits for a later result that were given up stand behind one that goes on, and then nobody comes for them."""

    async def main(graph: Any) -> None:
        first, second = await graph.execute_async(1), await graph.execute_async(2)
        waits = asyncio.ensure_future(value_of(first))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(value_of(second), 0.05)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits

    gc.collect()
    gc.disable()
    try:
        graph = raycomm.compile(held(workers, gate))
        run(main(graph))
        gate.open()
        graph.teardown()
        gone = weakref.ref(graph)
        del graph
        assert gone() is None
    finally:
        gc.enable()
