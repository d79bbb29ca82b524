"""Awaiting, seen from outside: many event loops and threads, deaths, loops that stop, what is left over, actors as drivers."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import signal
import threading
import time
from typing import Any

import pytest
import ray

import raycomm
from raycomm import ActorDiedError, ChannelClosedError, InputNode, bind
from tests.ray.awaiting import armed, forked, held, one, run, soon
from tests.ray.replica import Replica, chain
from tests.ray.workers import PATIENCE_S, Gate, start, until, vitals

pytestmark = pytest.mark.usefixtures("cluster")

_DEATH_S = 20.0  # ten times the promise


@pytest.mark.parametrize("how", ["SIGKILL", "_exit", "exit_actor"])
def test_an_actor_dies_while_tasks_wait(workers: list[Any], gate: Gate, how: str) -> None:
    victim = start(1)[0]
    pid = ray.get(victim.pid.remote())

    async def main(graph: Any) -> float:
        async def one_more() -> Any:
            return await (await graph.execute_async("stay"))

        refs = [await graph.execute_async("stay") for _ in range(2)]
        assert await refs[0] == "stay"
        await graph.execute_async("go")
        tasks = [asyncio.ensure_future(one_more()) for _ in range(2)]  # submitted or not: it may have died already
        tasks += [asyncio.ensure_future(graph.execute_async("stay")) for _ in range(3)]
        begin = time.monotonic()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, ActorDiedError) for result in results), results
        assert all(isinstance(result, ray.exceptions.RayActorError) for result in results)
        assert results[0].pid == pid
        assert await refs[1] == "stay"  # it had come
        with pytest.raises(ActorDiedError):
            await graph.execute_async("stay")
        return time.monotonic() - begin

    with InputNode() as x:
        node = bind(victim.die, bind(workers[0].echo, x), how)
    with raycomm.compile(node, max_inflight=2) as graph:
        assert run(main(graph)) < _DEATH_S
        assert not armed(graph)
    with raycomm.compile(chain(workers[0].echo)) as graph:
        assert asyncio.run(one(graph, 1)) == 1


@pytest.mark.parametrize("where", ["same thread", "another thread", "a task"])
def test_teardown_while_tasks_wait(workers: list[Any], gate: Gate, where: str) -> None:
    async def main(graph: Any) -> float:
        refs = [await graph.execute_async(value) for value in range(2)]
        tasks = [asyncio.ensure_future(value_of(ref)) for ref in refs]
        tasks += [asyncio.ensure_future(graph.execute_async(value)) for value in range(3)]
        await soon(lambda: graph._waker.waiting == 5, "five tasks wait")
        begin = time.monotonic()
        if where == "another thread":
            await asyncio.to_thread(graph.teardown, 0.1)
        elif where == "same thread":
            graph.teardown(0.1)
        else:
            asyncio.get_running_loop().call_soon(graph.teardown, 0.1)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        took = time.monotonic() - begin
        assert all(isinstance(result, ChannelClosedError) for result in results), results
        assert "was torn down" in str(results[0])
        for call in (value_of(refs[0]), graph.execute_async(1)):
            with pytest.raises(ChannelClosedError):
                await call
        return took

    async def value_of(ref: Any) -> Any:
        return await ref

    graph = raycomm.compile(held(workers, gate), max_inflight=2)
    assert run(main(graph)) < _DEATH_S
    assert not armed(graph)
    gate.open()
    graph.teardown()


def test_loops_in_threads_and_plain_threads_on_one_graph(workers: list[Any]) -> None:
    """Four event loops that await and four threads that get, all executing on one graph: each has its own values."""
    wrong: list[Any] = []

    async def task(graph: Any, base: int) -> None:
        for value in range(base, base + 10):
            row = await graph.execute_async(value)
            got = await asyncio.gather(*row)
            if got != [value, value + 1, value]:
                wrong.append((value, got))

    async def loop(graph: Any, base: int) -> None:
        await asyncio.gather(*[task(graph, base + 100 * number) for number in range(8)])

    def plain(graph: Any, base: int) -> None:
        for value in range(base, base + 60):
            got = [ref.get(PATIENCE_S) for ref in graph.execute(value, timeout=PATIENCE_S)]
            if got != [value, value + 1, value]:
                wrong.append((value, got))

    with raycomm.compile(forked(workers), max_inflight=3) as graph:
        threads = [threading.Thread(target=lambda n=n: run(loop(graph, 1000 * n))) for n in range(4)]
        threads += [threading.Thread(target=plain, args=(graph, 1000 * n)) for n in range(4, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert not wrong
        assert graph.status().submitted == 4 * 80 + 4 * 60
        assert not armed(graph)


def test_one_ref_in_several_loops(workers: list[Any], gate: Gate) -> None:
    got: list[Any] = []

    async def value_of(ref: Any) -> Any:
        got.append(await ref)

    with raycomm.compile(held(workers, gate)) as graph:
        ref = graph.execute({"a": [1, 2]})
        threads = [threading.Thread(target=lambda: run(value_of(ref))) for _ in range(5)]
        threads.append(threading.Thread(target=lambda: got.append(ref.get(PATIENCE_S))))
        for thread in threads:
            thread.start()
        until(lambda: graph._waker.waiting == 5, "five loops wait")
        gate.open()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert len(got) == 6
        assert all(value is got[0] for value in got)
        assert not armed(graph)


def test_a_loop_that_is_closed_under_its_tasks(workers: list[Any], gate: Gate) -> None:
    """They never come back. Others do not wait for them, not even behind them in line."""
    waiting: list[Any] = []

    async def value_of(ref: Any) -> Any:
        return await ref

    with raycomm.compile(held(workers, gate), max_inflight=1) as graph:
        first = graph.execute(0)
        loop = asyncio.new_event_loop()
        waiting.append(loop.create_task(value_of(first)))
        waiting.append(loop.create_task(graph.execute_async(1)))
        while graph._waker.waiting < 2:
            loop.run_until_complete(asyncio.sleep(0.001))
        loop.close()
        for task in waiting:
            task._log_destroy_pending = False

        async def main() -> None:
            task = asyncio.ensure_future(graph.execute_async(2))
            await soon(lambda: graph._waker.waiting > 0 and len(graph._line) > 0, "one in line")
            gate.open()
            assert await (await task) == 2
            assert await first == 0

        run(main())
        waiting.clear()
        gc.collect()
        assert not graph._waker.waiting
        assert graph.status().submitted == 2


def test_a_loop_that_stands_still_holds_nobody_up(workers: list[Any], gate: Gate) -> None:
    """The first in line belongs to an event loop that does not run for a while: it gets its turn, and so do those behind it."""
    with raycomm.compile(held(workers, gate), max_inflight=1) as graph:
        first = graph.execute(0)
        still = asyncio.new_event_loop()
        task = still.create_task(graph.execute_async(1))
        while not graph._waker.waiting:
            still.run_until_complete(asyncio.sleep(0.001))

        async def main() -> None:
            mine = asyncio.ensure_future(graph.execute_async(2))
            await soon(lambda: len(graph._line) == 2, "two in line")
            gate.open()
            assert await (await mine) == 2

        run(main())
        ref = still.run_until_complete(task)
        assert (first.get(), ref.get(PATIENCE_S), ref._index) == (0, 1, 1)
        still.close()
        assert not armed(graph)


def test_no_threads_no_descriptors_and_nothing_left_over(workers: list[Any]) -> None:
    async def main(graph: Any) -> None:
        before = vitals()
        threads = set(threading.enumerate())
        for _ in range(5):
            await asyncio.gather(*[one(graph, value) for value in range(50)])
        assert set(threading.enumerate()) == threads
        assert vitals() == before
        assert not armed(graph)
        # The bell is not armed either: what is published from now on writes to no pipe.
        graph.execute(1).get()
        with pytest.raises(BlockingIOError):
            os.read(graph._arena.core.waker, 1)
        assert not [handle for handle in asyncio.get_running_loop()._scheduled if not handle.cancelled() and _ours(handle)]  # type: ignore[attr-defined]

    def _ours(handle: Any) -> bool:
        return "Waker" in getattr(handle._callback, "__qualname__", "")

    with raycomm.compile(chain(workers[0].echo), max_inflight=4) as graph:
        graph.execute(0).get()
        run(main(graph))
    for _ in range(3):  # graph after graph: the pipe goes with each
        before = vitals()["descriptors"]
        with raycomm.compile(chain(workers[0].echo)) as graph:
            assert run(one(graph, 1)) == 1
        del graph
        until(lambda before=before: gc.collect() >= 0 and vitals()["descriptors"] <= before, "descriptors are back")


def test_a_graph_that_only_its_ref_holds(workers: list[Any], gate: Gate) -> None:
    async def main() -> None:
        graph = raycomm.compile(held(workers, gate), name="forgotten")
        ref = await graph.execute_async(3)
        del graph
        task = asyncio.ensure_future(value_of(ref))
        await asyncio.sleep(0.01)
        gc.collect()
        gate.open()
        assert await task == 3
        del task
        kept = [ref]
        del ref
        with pytest.warns(ResourceWarning, match="'forgotten' was dropped"):
            kept.clear()

    async def value_of(ref: Any) -> Any:
        return await ref

    run(main())


def test_many_graphs_in_one_loop(workers: list[Any]) -> None:
    async def main(graphs: list[Any]) -> None:
        values = await asyncio.gather(*[one(graph, value) for value in range(30) for graph in graphs])
        assert values == [value + number for value in range(30) for number in range(3)]

    with (
        raycomm.compile(chain(workers[0].echo)) as a,
        raycomm.compile(chain(workers[0].add)) as b,
        raycomm.compile(chain(workers[0].add, workers[1].add)) as c,
    ):
        run(main([a, b, c]))


def test_a_long_wait_is_told_in_the_log(
    workers: list[Any], gate: Gate, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raycomm.observe import notice

    async def main(graph: Any) -> None:
        monkeypatch.setattr(notice, "FIRST_NOTICE_S", 0.05)  # not before: set-up may take longer than that
        ref = await graph.execute_async(1)
        tasks = [asyncio.ensure_future(value_of(ref)), asyncio.ensure_future(graph.execute_async(2))]
        await soon(lambda: len(caplog.records) >= 2, "two lines")
        gate.open()
        assert await tasks[0] == 1
        assert await (await tasks[1]) == 2

    async def value_of(ref: Any) -> Any:
        return await ref

    with raycomm.compile(held(workers, gate), max_inflight=1, name="slow") as graph:
        run(main(graph))
    said = sorted(record.getMessage() for record in caplog.records)
    assert len(said) == 2  # the next ones are due a minute later
    assert "execute of graph 'slow' waits for room" in said[0] + said[1]
    assert "execution 0 of graph 'slow'" in said[0] + said[1]
    assert all("alive" in line and ".hold#0" in line for line in said)


@pytest.mark.skipif(importlib.util.find_spec("uvloop") is None, reason="uvloop is not installed")
def test_uvloop(workers: list[Any]) -> None:
    import uvloop

    async def main(graph: Any) -> None:
        assert await asyncio.gather(*[one(graph, value) for value in range(100)]) == list(range(100))

    with raycomm.compile(chain(workers[0].echo), max_inflight=2) as graph:
        uvloop.run(main(graph))
        assert not armed(graph)


def test_a_driver_that_is_an_asynchronous_actor(workers: list[Any]) -> None:
    replica = Replica.remote(workers)
    assert ray.get(replica.call.remote(0)) == 1
    before = ray.get(replica.vitals.remote())
    assert ray.get([replica.call.remote(value) for value in range(200)]) == list(range(1, 201))
    after = ray.get(replica.vitals.remote())
    assert after["python"] <= before["python"]
    assert after["descriptors"] <= before["descriptors"] + 8  # Ray's own connections
    both = [replica.call_late.remote(1), *[replica.call.remote(value) for value in range(20)], replica.call_late.remote(2)]
    assert ray.get(both) == [3, *range(1, 21), 4]
    ray.get(replica.end.remote())
    with pytest.raises(ChannelClosedError, match="'replica' was torn down"):
        ray.get(replica.call.remote(1))


def test_an_asynchronous_driver_sees_a_death(workers: list[Any]) -> None:
    victim = start(1)[0]
    pid = ray.get(victim.pid.remote())
    replica = Replica.remote([workers[0], victim])
    assert ray.get(replica.call.remote(0)) == 1
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(ActorDiedError) as caught:
        while True:
            ray.get(replica.call.remote(1))
    assert time.monotonic() - begin < _DEATH_S
    assert caught.value.cause.pid == pid  # type: ignore[attr-defined]
    ray.get(replica.end.remote())
