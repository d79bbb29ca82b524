"""Shared memory that runs out: what is on its way is waited for, what is pinned raises, and afterwards the graph goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
import ray

import raycomm
from raycomm import CapacityExceededError, ChannelTimeoutError, InputNode, MultiOutputNode, SharedMemoryError, bind
from raycomm.observe.board import State
from tests.ray.workers import PATIENCE_S, Gate, chain, start, until

pytestmark = pytest.mark.usefixtures("cluster")

_MIB = 1 << 20
_PROMPTLY_S = 20.0


def summed(actor: Any, gate: Gate) -> Any:
    """input -> held at the gate -> its sum."""
    with InputNode() as x:
        return bind(actor.total, bind(actor.hold, x, gate.path))


def ones(mib: int) -> Any:
    return np.ones(mib * _MIB, np.uint8)


async def one(graph: Any, *args: Any, **kwargs: Any) -> Any:
    return await (await graph.execute_async(*args, **kwargs))


def right_again(graph: Any, *args: Any, value: Any) -> None:
    """The graph gives right values as if nothing had happened, several times, and awaited too."""
    for _ in range(3):
        assert graph.execute(*args, timeout=PATIENCE_S).get(PATIENCE_S) == value
    assert asyncio.run(one(graph, *args)) == value


def test_inputs_on_their_way_are_waited_for(workers: list[Any], gate: Gate) -> None:
    with raycomm.compile(summed(workers[0], gate), shm_limit_bytes=8 * _MIB) as graph:
        refs = [graph.execute(ones(3)) for _ in range(2)]
        gate.wait_entered()
        threading.Thread(target=lambda: (until(lambda: _state(graph, 0) is State.MEMORY, "it waits"), gate.open())).start()
        refs += [graph.execute(ones(3), timeout=PATIENCE_S) for _ in range(4)]
        assert ray.get(refs) == [3 * _MIB] * 6
        assert graph.stats().budget_used <= 8 * _MIB
        right_again(graph, ones(3), value=3 * _MIB)


def _state(graph: Any, process: int) -> State:
    state: State = graph.status().rows[process].state
    return state


def test_limits_under_full_memory(workers: list[Any], gate: Gate) -> None:
    with raycomm.compile(summed(workers[0], gate), shm_limit_bytes=8 * _MIB, name="g") as graph:
        refs = [graph.execute(ones(3)) for _ in range(2)]
        gate.wait_entered()
        for limit in (0, 0.05, 1.2):
            for call in (lambda limit=limit: graph.execute(ones(3), timeout=limit), lambda limit=limit: run_async(graph, limit)):
                begin = time.monotonic()
                with pytest.raises(ChannelTimeoutError) as caught:
                    call()
                assert limit <= time.monotonic() - begin < _PROMPTLY_S
                text = str(caught.value)
                assert f"execute of graph 'g' found no shared memory for its input within {limit} s, of {8 * _MIB} bytes" in text
                assert "shm_limit_bytes" in text
                assert ".hold#0" in text
        assert graph.execute(np.zeros(10, np.uint8), timeout=0) is not None  # what needs no block passes
        with pytest.raises(ChannelTimeoutError):
            graph.execute(ones(3), timeout=0)
        gate.open()
        assert ray.get(refs) == [3 * _MIB] * 2
        right_again(graph, ones(3), value=3 * _MIB)
        assert graph.status().submitted == 3 + 4  # nothing of what timed out


def run_async(graph: Any, limit: float) -> Any:
    return asyncio.run(graph.execute_async(ones(3), timeout=limit))


def test_execute_async_waits_for_memory(workers: list[Any], gate: Gate) -> None:
    async def main(graph: Any) -> None:
        tasks = [asyncio.ensure_future(one(graph, ones(3))) for _ in range(6)]
        while _state(graph, 0) is not State.MEMORY:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # the event loop goes on meanwhile
        gate.open()
        assert await asyncio.gather(*tasks) == [3 * _MIB] * 6

    with raycomm.compile(summed(workers[0], gate), shm_limit_bytes=8 * _MIB) as graph:
        asyncio.run(main(graph))
        assert not graph._waker.waiting
        right_again(graph, ones(3), value=3 * _MIB)


def test_results_on_their_way_are_waited_for(workers: list[Any]) -> None:
    """The driver does not fetch: the actor waits in its fifth execution, and goes on as results are fetched and let go of."""
    with raycomm.compile(chain(workers[0].zeros), shm_limit_bytes=8 * _MIB) as graph:
        refs = [graph.execute(2 * _MIB) for _ in range(10)]
        until(lambda: _state(graph, 1) is State.MEMORY, "the actor waits for memory")
        assert graph.status().rows[1].waits_for == ("driver",)
        while refs:
            assert refs.pop(0).get(PATIENCE_S).nbytes == 2 * _MIB
        assert graph.stats().edges[1].waits >= 1
        assert asyncio.run(one(graph, 2 * _MIB)).nbytes == 2 * _MIB


def test_pinned_views_raise_promptly_and_are_named(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].zeros), shm_limit_bytes=8 * _MIB, name="g") as graph:
        views = [graph.execute(2 * _MIB).get() for _ in range(4)]
        begin = time.monotonic()
        with pytest.raises(SharedMemoryError) as caught:
            graph.execute(2 * _MIB).get(PATIENCE_S)
        assert time.monotonic() - begin < _PROMPTLY_S
        error = caught.value
        assert (error.graph, error.wanted_bytes, error.limit_bytes) == ("g", 2 * _MIB, 8 * _MIB)
        assert error.holders == "driver 8.0 MiB"
        assert "Fetch results or drop their refs, let go of received arrays and tensors, or compile with a larger" in str(error)
        views.pop()
        views.append(graph.execute(2 * _MIB).get(PATIENCE_S))  # one is let go of, one fits
        with pytest.raises(SharedMemoryError):
            asyncio.run(one(graph, 2 * _MIB))
        views.clear()
        for _ in range(5):
            assert graph.execute(2 * _MIB).get(PATIENCE_S).nbytes == 2 * _MIB


def test_results_that_nobody_fetches_are_named(workers: list[Any]) -> None:
    """More executions than results fit: those that find no memory fail, and say that it is results that lie there unfetched."""
    with raycomm.compile(chain(workers[0].zeros), shm_limit_bytes=8 * _MIB) as graph:
        refs = [graph.execute(2 * _MIB, timeout=PATIENCE_S) for _ in range(20)]
        with pytest.raises(SharedMemoryError, match="results that were not fetched yet") as caught:
            [ref.get(PATIENCE_S) for ref in refs]
        assert caught.value.holders == "driver 8.0 MiB"


def test_an_input_and_a_result_that_do_not_fit_together(workers: list[Any]) -> None:
    """The actor holds its input until it has returned: only a larger limit helps, and the text says so, and who holds what."""
    with raycomm.compile(chain(workers[0].echo), shm_limit_bytes=8 * _MIB, share_tensors=False) as graph:
        name = graph.plan.processes[1].label
        with pytest.raises(SharedMemoryError, match="waiting would not help.*larger shm_limit_bytes") as caught:
            graph.execute(ones(6)).get(PATIENCE_S)
        assert caught.value.holders == f"{name} 6.0 MiB"
        assert graph.execute(ones(2)).get(PATIENCE_S).nbytes == 2 * _MIB


def test_an_actor_that_keeps_its_inputs(workers: list[Any]) -> None:
    keeper = start(1)[0]
    with raycomm.compile(chain(keeper.keep), shm_limit_bytes=8 * _MIB, name="g") as graph:
        for count in range(1, 5):
            assert graph.execute(ones(2)).get() == count
        name = graph.plan.processes[1].label
        for call in (lambda: graph.execute(ones(2)), lambda: asyncio.run(one(graph, ones(2)))):
            begin = time.monotonic()
            with pytest.raises(SharedMemoryError, match="for the input") as caught:
                call()
            assert time.monotonic() - begin < _PROMPTLY_S
            assert caught.value.holders == f"{name} 8.0 MiB"
        ray.get(keeper.let_go.remote())
        assert graph.execute(ones(2), timeout=PATIENCE_S).get() == 1
        ray.get(keeper.let_go.remote())


@pytest.mark.parametrize("side", ["input", "result"])
def test_one_value_above_the_limit(workers: list[Any], side: str) -> None:
    method, value = (workers[0].total, ones(5)) if side == "input" else (workers[0].zeros, 5 * _MIB)
    with raycomm.compile(chain(method), shm_limit_bytes=4 * _MIB) as graph:
        for call in (lambda: graph.execute(value).get(PATIENCE_S), lambda: asyncio.run(one(graph, value))):
            begin = time.monotonic()
            with pytest.raises(SharedMemoryError, match=r"no 5\.0 MiB.*It alone is larger than the limit"):
                call()
            assert time.monotonic() - begin < _PROMPTLY_S
        if side == "input":
            right_again(graph, ones(1), value=_MIB)
        else:
            assert graph.execute(_MIB).get(PATIENCE_S).nbytes == _MIB


def twice(workers: list[Any], *, total_first: bool) -> Any:
    """w0 writes two big values to w1, which holds the first while it waits for the second."""
    with InputNode() as x:
        a, b = bind(workers[0].zeros, x), bind(workers[0].zeros, x)
        both = bind(workers[1].join, a, b)
        return MultiOutputNode([bind(workers[1].total, a), both]) if total_first else both


def test_an_execution_that_needs_more_than_the_limit(workers: list[Any]) -> None:
    with raycomm.compile(twice(workers, total_first=False), shm_limit_bytes=8 * _MIB) as graph:
        ref = graph.execute(5 * _MIB)
        until(lambda: ref.done(), "it fails", limit_s=_PROMPTLY_S)
        with pytest.raises(SharedMemoryError, match="Those who hold them wait for this process, so waiting would not help"):
            ref.get()
        parts, _ = graph.execute(1000).get(PATIENCE_S)
        assert [part.nbytes for part in parts] == [1000, 1000]


def test_a_circle_is_seen_while_the_driver_waits(workers: list[Any]) -> None:
    with raycomm.compile(twice(workers, total_first=True), shm_limit_bytes=8 * _MIB) as graph:
        _, second = graph.execute(5 * _MIB)
        with pytest.raises(SharedMemoryError, match="so waiting would not help"):
            second.get(5)


def test_later_inputs_do_not_starve_the_oldest_execution(workers: list[Any]) -> None:
    """Each execution needs 4 of 16 MiB."""
    with raycomm.compile(chain(workers[0].echo), shm_limit_bytes=16 * _MIB) as graph:
        refs = [graph.execute(np.full(2 * _MIB, 0, np.uint8)) for _ in range(8)]
        while refs:
            assert refs.pop(0).get(PATIENCE_S).nbytes == 2 * _MIB


def test_inputs_leave_room_for_the_first_result(workers: list[Any], gate: Gate) -> None:
    """No result can be made until the gate opens; inputs come until there is no room for more."""
    with InputNode() as x:
        node = bind(workers[0].echo, bind(workers[0].hold, x, gate.path))
    with raycomm.compile(node, shm_limit_bytes=16 * _MIB, max_inflight=100) as graph:
        refs = [graph.execute(np.full(2 * _MIB, 0, np.uint8))]
        gate.wait_entered()
        with pytest.raises(ChannelTimeoutError, match="no shared memory for its input"):
            while len(refs) < 100:
                refs.append(graph.execute(np.full(2 * _MIB, len(refs), np.uint8), timeout=0.5))
        assert 4 <= len(refs) <= 6
        gate.open()
        for number, ref in enumerate(refs):
            assert (ref.get(PATIENCE_S) == number).all()


@pytest.mark.parametrize("wait", ["get", "await"])
def test_results_of_another_output_that_cannot_be_moved_aside(workers: list[Any], wait: str) -> None:
    """They hold the memory without which the awaited output does not come, and are more than may be kept."""

    async def await_it(ref: Any) -> Any:
        return await ref

    with InputNode() as x:
        node = MultiOutputNode([bind(workers[0].zeros, x), bind(workers[0].echo, x)])
    with raycomm.compile(node, shm_limit_bytes=8 * _MIB, max_buffered_results=1) as graph:
        rows = [graph.execute(2 * _MIB) for _ in range(8)]
        begin = time.monotonic()
        with pytest.raises(CapacityExceededError, match="max_buffered_results"):
            _ = asyncio.run(await_it(rows[7][1])) if wait == "await" else rows[7][1].get(PATIENCE_S)
        assert time.monotonic() - begin < _PROMPTLY_S
        while rows:
            big, small = rows.pop(0)
            assert (big.get(PATIENCE_S).nbytes, small.get(PATIENCE_S)) == (2 * _MIB, 2 * _MIB)
            del big, small


def test_two_actors_compete_for_the_budget(workers: list[Any]) -> None:
    """The idle pool of one gives its memory up for the other, again and again."""
    with InputNode() as x:
        node = MultiOutputNode([bind(workers[0].zeros, x[0]), bind(workers[1].zeros, x[1])])
    with raycomm.compile(node, shm_limit_bytes=8 * _MIB) as graph:
        for sizes in [(6 * _MIB, 1), (1, 6 * _MIB)] * 3:
            begin = time.monotonic()
            assert [ref.get(PATIENCE_S).nbytes for ref in graph.execute(*sizes)] == list(sizes)
            assert time.monotonic() - begin < _PROMPTLY_S
            assert graph.stats().budget_used <= 8 * _MIB
        committed = [pool.committed_bytes for pool in graph.stats().pools]
        assert committed[1] < 6 * _MIB <= committed[2]


def test_many_executions_through_little_memory(workers: list[Any]) -> None:
    """Thirty times the pool, sixteen at once, in tasks and threads: each result is that of its execution."""
    wrong: list[Any] = []

    async def main(graph: Any) -> None:
        assert await asyncio.gather(*[one(graph, np.full(_MIB, v, np.uint8)) for v in range(60)]) == [v * _MIB for v in range(60)]

    def plain(graph: Any, base: int) -> None:
        for value in range(base, base + 30):
            got = graph.execute(np.full(_MIB, value, np.uint8), timeout=PATIENCE_S).get(PATIENCE_S)
            if got != value * _MIB:
                wrong.append((value, got))

    with raycomm.compile(chain(workers[0].total), shm_limit_bytes=5 * _MIB, max_inflight=16) as graph:
        threads = [threading.Thread(target=plain, args=(graph, base)) for base in (100, 150, 200)]
        for thread in threads:
            thread.start()
        asyncio.run(main(graph))
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert not wrong
        assert graph.stats().budget_used <= 5 * _MIB
