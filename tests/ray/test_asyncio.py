"""Awaiting on any graph: values, order, cancellation, limits, failures."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
import ray

import raycomm
from raycomm import ChannelTimeoutError, InputNode, bind
from tests.ray.awaiting import armed, forked, held, one, run, soon
from tests.ray.replica import chain
from tests.ray.workers import PATIENCE_S, Gate, Opaque, start, until

pytestmark = pytest.mark.usefixtures("cluster")

_DEATH_S = 20.0  # ten times the promise


def test_both_kinds_of_call_on_one_graph(workers: list[Any]) -> None:
    async def main(graph: Any) -> None:
        early = graph.execute(1)
        late = await graph.execute_async(2)
        assert (await late, await early, early.get(), late.get()) == (2, 1, 1, 2)
        assert graph.execute(3).get() == 3
        assert await one(graph, 4) == 4

    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        run(main(graph))
        run(main(graph))  # in a second event loop
        assert graph.execute(5).get() == 5
        assert not armed(graph)


def test_a_ref_is_awaited_often_and_at_once(workers: list[Any], gate: Gate) -> None:
    async def main(graph: Any) -> None:
        ref = await graph.execute_async(np.arange(1 << 16))
        tasks = [asyncio.ensure_future(ref_value(ref)) for _ in range(20)]
        await soon(lambda: graph._waker.waiting == 20, "twenty tasks wait")
        gate.open()
        values = await asyncio.gather(*tasks)
        assert all(value is values[0] for value in values)
        assert await ref is values[0]
        assert await ref is ref.get()

    async def ref_value(ref: Any) -> Any:
        return await ref

    with raycomm.compile(held(workers, gate)) as graph:
        run(main(graph))


def test_gather_over_executions_and_outputs(workers: list[Any]) -> None:
    async def main(graph: Any) -> None:
        rows = [await graph.execute_async(value) for value in range(10)]
        flat = await asyncio.gather(*[ref for row in reversed(rows) for ref in row])
        assert flat == [number for value in reversed(range(10)) for number in (value, value + 1, value)]
        first, second, third = await graph.execute_async(7)
        assert await asyncio.gather(third, second, first) == [7, 8, 7]

    with raycomm.compile(forked(workers)) as graph:
        run(main(graph))


def test_many_tasks_keep_their_order(workers: list[Any]) -> None:
    """Calls get their turn in the order they came; the time shows that none of them is left to a timer."""
    order: dict[int, int] = {}

    async def task(graph: Any, value: int) -> Any:
        ref = await graph.execute_async(value)
        order[value] = ref._index
        return await ref

    async def main(graph: Any) -> None:
        begin = time.monotonic()
        assert await asyncio.gather(*[task(graph, value) for value in range(200)]) == list(range(200))
        assert time.monotonic() - begin < 10

    counter = start(1)[0]
    with raycomm.compile(chain(counter.note, workers[1].echo), max_inflight=2) as graph:
        run(main(graph))
        assert order == {value: value for value in range(200)}
        assert ray.get(counter.seen_so_far.remote()) == list(range(200))
        assert not armed(graph)


def test_the_next_in_line_does_not_wait_for_the_one_before_to_run(workers: list[Any], gate: Gate) -> None:
    """Room for four at once: all four get it in one look; nothing that happens later, no timer and no result, is needed."""
    second = Gate(gate.path + ".second")

    async def main(graph: Any) -> None:
        refs = [await graph.execute_async(value, gate.path) for value in range(4)]
        tasks = [asyncio.ensure_future(graph.execute_async(value, second.path)) for value in range(4, 8)]
        await soon(lambda: len(graph._line) == 4, "four in line")
        for timer in graph._waker._watching.values():
            timer.cancel()
        gate.open()
        until(lambda: graph.status().finished == 4, "the four before are finished")
        refs += await asyncio.gather(*tasks)
        assert graph.status().finished == 4
        second.open()
        assert await asyncio.gather(*refs) == list(range(8))

    with InputNode() as x:
        node = bind(workers[0].hold, x[0], x[1])
    with raycomm.compile(node, max_inflight=4) as graph:
        run(main(graph))


def test_cancelling_a_task_loses_nothing(workers: list[Any], gate: Gate) -> None:
    async def main(graph: Any) -> None:
        refs = [await graph.execute_async(value) for value in range(3)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(refs[1], 0.02)
        tasks = [asyncio.ensure_future(value_of(ref)) for ref in (refs[0], refs[0], refs[1], refs[2])]
        await soon(lambda: graph._waker.waiting == 4, "four tasks wait")
        tasks[0].cancel()
        tasks[2].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        gate.open()
        assert [await tasks[1], await tasks[3]] == [0, 2]
        assert [await ref for ref in refs] == [0, 1, 2]

    async def value_of(ref: Any) -> Any:
        return await ref

    with raycomm.compile(held(workers, gate)) as graph:
        run(main(graph))
        assert not armed(graph)


def test_cancelling_while_waiting_for_room(workers: list[Any], gate: Gate) -> None:
    """Whoever leaves the line, at its head or in it, takes no place, and the ones behind move up."""

    async def main(graph: Any) -> None:
        refs = [await graph.execute_async(value) for value in range(2)]
        tasks = [asyncio.ensure_future(graph.execute_async(value)) for value in range(2, 7)]
        await soon(lambda: len(graph._line) == 5, "five in line")
        tasks[0].cancel()
        tasks[2].cancel()
        await soon(lambda: len(graph._line) == 3, "three in line")
        with pytest.raises(ChannelTimeoutError, match=r"found no room within 0\.02 s, with at most 2 executions under way"):
            await graph.execute_async(99, timeout=0.02)
        with pytest.raises(ChannelTimeoutError, match="no room within 0 s"):
            await graph.execute_async(99, timeout=0)
        gate.open()
        refs += [await tasks[index] for index in (1, 3, 4)]
        assert [await ref for ref in refs] == [0, 1, 3, 5, 6]
        assert [ref._index for ref in refs] == list(range(5))
        assert graph.status().submitted == 5

    with raycomm.compile(held(workers, gate), max_inflight=2) as graph:
        run(main(graph))
        assert not armed(graph)


def test_limits(workers: list[Any], gate: Gate) -> None:
    async def main(graph: Any) -> None:
        ref = await graph.execute_async(5)
        gate.wait_entered()
        for _ in range(2):
            with pytest.raises(ChannelTimeoutError) as caught:
                await ref
        text = str(caught.value)
        labels = [process.label for process in graph.plan.processes[1:]]
        for part in ("execution 0 of graph 'g'", "within 0.03 s", f"{labels[1]} (pid", "waits to read", f"{labels[0]} (pid"):
            assert part in text
        assert f"computes {labels[0]}.hold#0, execution 0" in text
        assert (caught.value.limit_s, caught.value.execution, caught.value.graph) == (0.03, 0, "g")
        with pytest.raises(ChannelTimeoutError, match=r"no room within 0\.02 s") as caught:
            await graph.execute_async(6)
        assert caught.value.waits_for in str(caught.value)
        for bad in (-2, float("nan"), "5", True):
            with pytest.raises(ValueError, match="is not a time limit"):
                await graph.execute_async(7, timeout=bad)
        gate.open()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    assert await ref == 5
                    return
                except ChannelTimeoutError:
                    pass

    with raycomm.compile(held(workers, gate), get_timeout=0.03, submit_timeout=0.02, max_inflight=1, name="g") as graph:
        run(main(graph))


def test_what_is_no_limit_is_refused_with_room_too(workers: list[Any]) -> None:
    async def main(graph: Any) -> None:
        with pytest.raises(ValueError, match="is not a time limit"):
            await graph.execute_async(7, timeout=-2)
        for limit in (None, -1, 0, 60, float("inf")):
            assert await one(graph, 1, timeout=limit) == 1
        assert graph.status().submitted == 5

    with raycomm.compile(chain(workers[0].echo)) as graph:
        run(main(graph))


def test_failures_reach_who_awaits(workers: list[Any]) -> None:
    async def main(graph: Any) -> None:
        with pytest.raises(TypeError, match="Opaque"):
            await graph.execute_async(Opaque())
        with pytest.raises(ValueError, match="positional"):
            await graph.execute_async(1, 2)
        refs = [await graph.execute_async(value) for value in range(6)]
        results = await asyncio.gather(*refs, return_exceptions=True)
        for value, result in enumerate(results):
            if value % 2:
                assert isinstance(result, ValueError)
                assert isinstance(result, ray.exceptions.RayTaskError)
                assert f"bad {value}" in str(result)
            else:
                assert result == value
        for _ in range(2):  # as often as it is awaited
            with pytest.raises(ValueError, match="bad 1"):
                await refs[1]

    with raycomm.compile(chain(workers[0].fail_if_odd, workers[1].echo)) as graph:
        run(main(graph))


def test_a_stop_iteration_comes_as_a_cause(workers: list[Any]) -> None:
    """A coroutine cannot raise one: Python makes a RuntimeError of it."""
    with InputNode() as x:
        node = bind(workers[0].fail, x, "stop")
    with raycomm.compile(node) as graph:
        with pytest.raises(StopIteration):
            graph.execute(1).get()
        with pytest.raises(RuntimeError, match="StopIteration") as caught:
            run(one(graph, 1))
        assert isinstance(caught.value.__cause__, StopIteration)


def test_too_many_unfetched_results(workers: list[Any]) -> None:
    async def main(graph: Any) -> None:
        refs = []
        with pytest.raises(raycomm.CapacityExceededError, match="max_buffered_results"):
            for value in range(100):
                refs.append(await graph.execute_async(value))
        assert 3 <= len(refs) <= 5
        assert await asyncio.gather(*refs) == list(range(len(refs)))
        assert await one(graph, 7) == 7

    with raycomm.compile(chain(workers[0].echo), max_inflight=2, max_buffered_results=3) as graph:
        run(main(graph))
