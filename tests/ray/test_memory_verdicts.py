"""What is said about a shortage of memory: a circle of waits is called one, and nothing else is, however long it takes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray

import raycomm
from raycomm import ChannelTimeoutError, InputNode, MultiOutputNode, SharedMemoryError, bind
from raycomm.observe.board import State
from tests.ray.row_actors import shm_kib
from tests.ray.sized_actors import LONGER_S, Sized
from tests.ray.workers import PATIENCE_S, Gate, until

pytestmark = pytest.mark.usefixtures("cluster")

_MIB = 1 << 20
_PROMPTLY_S = 20.0  # a hang guard: verdicts take a second or two
_ENDS_S = 2.5  # likewise, of what takes a third of a second


@pytest.fixture(scope="module")
def actors(cluster: None) -> list[Any]:
    actors = [Sized.remote() for _ in range(3)]
    ray.get([actor.pid.remote() for actor in actors])
    return actors


def until_memory_is_waited_for(graph: Any) -> None:
    until(lambda: any(row.state is State.MEMORY for row in graph.status().rows), "somebody waits for memory")


def polled(ref: Any) -> Any:
    """As by a caller that does other things in between."""
    while True:
        try:
            return ref.get(timeout=0.1)
        except ChannelTimeoutError:
            continue


def asked_for(ref: Any) -> Any:
    until(ref.done, "it is done", limit_s=_PROMPTLY_S)
    return ref.get(timeout=0)


async def awaited(ref: Any) -> Any:
    return await ref


async def awaited_in_parts(ref: Any) -> Any:
    while True:
        try:
            return await asyncio.wait_for(awaited(ref), 0.1)
        except TimeoutError:
            continue


WAYS: dict[str, Callable[[Any], Any]] = {
    "get": lambda ref: ref.get(),
    "get again and again": polled,
    "done again and again": asked_for,
    "wait": lambda ref: raycomm.wait([ref])[0][0].get(timeout=0),
    "await": lambda ref: asyncio.run(awaited(ref)),
    "await again and again": lambda ref: asyncio.run(awaited_in_parts(ref)),
}


def circle(actors: list[Any], x: Any) -> Any:
    """One actor makes two values, another holds the first while it waits for the second."""
    return bind(actors[1].weigh, bind(actors[0].ones, x), bind(actors[0].ones, x))


def ends_as_a_circle(call: Callable[[], Any]) -> None:
    begin = time.monotonic()
    with pytest.raises(SharedMemoryError, match="wait for this process, so waiting would not help"):
        call()
    assert time.monotonic() - begin < _PROMPTLY_S


@pytest.mark.parametrize("way", WAYS)
def test_a_circle_however_it_is_waited_for(actors: list[Any], way: str) -> None:
    with InputNode() as x:
        node = circle(actors, x)
    with raycomm.compile(node, shm_limit_bytes=16 * _MIB) as graph:
        ref = graph.execute(10)
        ends_as_a_circle(lambda: WAYS[way](ref))
        assert WAYS[way](graph.execute(1)) == 2 * _MIB


@pytest.mark.parametrize("way", ["get again and again", "await"])
def test_a_circle_beside_other_outputs(actors: list[Any], way: str) -> None:
    """The others are of an actor of the circle and of one that has nothing to do with it."""
    with InputNode() as x:
        node = MultiOutputNode([circle(actors, x), bind(actors[1].echo, x), bind(actors[2].echo, x)])
    with raycomm.compile(node, shm_limit_bytes=16 * _MIB) as graph:
        rows = [graph.execute(10) for _ in range(2)]
        for first, second, third in rows:
            assert third.get(PATIENCE_S) == 10
            ends_as_a_circle(lambda ref=first: WAYS[way](ref))  # type: ignore[misc]
            assert second.get(PATIENCE_S) == 10
        assert [ref.get(PATIENCE_S) for ref in graph.execute(1)] == [2 * _MIB, 1, 1]


def test_a_circle_while_an_independent_actor_works(actors: list[Any]) -> None:
    """For as long as the circle lasts, and longer, that one reads, computes and writes all the time."""
    with InputNode() as x:
        node = MultiOutputNode([circle(actors, x[0]), bind(actors[2].slowly, x[1])])
    with raycomm.compile(node, shm_limit_bytes=16 * _MIB, max_inflight=100) as graph:
        rows = [graph.execute(10 if number == 0 else 1, number) for number in range(60)]
        ends_as_a_circle(lambda: rows[0][0].get())
        assert not rows[59][1].done(), "the independent actor had finished: the test shows nothing"
        assert [row[1].get(PATIENCE_S) for row in rows] == list(range(60))
        assert [row[0].get(PATIENCE_S) for row in rows[1:]] == [2 * _MIB] * 59


def test_a_receiver_that_takes_long_to_decode_is_in_no_circle(actors: list[Any]) -> None:
    with InputNode() as x:
        node = bind(actors[1].weigh, bind(actors[0].slow_to_decode, x))
    with raycomm.compile(node, shm_limit_bytes=8 * _MIB) as graph:
        refs = [graph.execute(5) for _ in range(2)]
        until_memory_is_waited_for(graph)
        assert [polled(ref) for ref in refs] == [5 * _MIB] * 2


@pytest.mark.parametrize("stops", ["nobody", "the receiver in its method", "the receiver while it waits"])
def test_a_process_that_stands_still_is_in_no_circle(actors: list[Any], gate: Gate, stops: str) -> None:
    """Memory is enough for one message at a time, and the receiver keeps it for longer than a circle needs to be seen."""
    with InputNode() as x:
        node = bind(actors[1].weigh, bind(actors[1].hold, bind(actors[0].ones, x), gate.path))
    with raycomm.compile(node, shm_limit_bytes=8 * _MIB) as graph:
        receiver = ray.get(actors[1].pid.remote())
        stopped = 0
        try:
            if stops == "the receiver while it waits":
                os.kill(stopped := receiver, signal.SIGSTOP)
            refs = [graph.execute(5) for _ in range(3)]
            if not stopped:
                gate.wait_entered()
            until_memory_is_waited_for(graph)
            if stops == "the receiver in its method":
                os.kill(stopped := receiver, signal.SIGSTOP)
            with pytest.raises(ChannelTimeoutError):
                refs[0].get(timeout=LONGER_S)
        finally:
            if stopped:
                os.kill(stopped, signal.SIGCONT)
        with pytest.raises(ChannelTimeoutError):
            refs[0].get(timeout=0.3)
        gate.open()
        assert [ref.get(PATIENCE_S) for ref in refs] == [5 * _MIB] * 3


def results(refs: list[Any], mib: int) -> int:
    """How many of the results there are, each right; the others had no memory. Lets go of all."""
    right = 0
    for ref in refs:
        try:
            value = ref.get(PATIENCE_S)
        except (SharedMemoryError, ray.exceptions.RayTaskError) as error:
            assert f"no {mib}.0 MiB of shared memory" in str(error)
            continue
        assert value.nbytes == mib * _MIB
        assert (value == value[0]).all()
        right += 1
        del value
    refs.clear()
    return right


def test_a_shortage_is_typed_though_there_is_no_memory_for_its_report(actors: list[Any]) -> None:
    with InputNode() as x:
        node = bind(actors[0].ones, x)
    with raycomm.compile(node, shm_limit_bytes=8 * _MIB, name="a graph of a long name " * 20) as graph:
        views = [graph.execute(2).get(PATIENCE_S) for _ in range(4)]
        with pytest.raises(SharedMemoryError, match=r"no 2\.0 MiB of shared memory"):
            graph.execute(2).get(PATIENCE_S)
        assert all(view.all() for view in views)


def test_empty_gets_the_memory_of_results_that_nobody_wants(actors: list[Any]) -> None:
    """They were not fetched, hold all memory, and go when they are moved aside."""
    with InputNode() as x:
        node = bind(actors[0].ones, x)
    with raycomm.compile(node, shm_limit_bytes=24 * _MIB) as graph:
        refs = [graph.execute(8) for _ in range(3)]
        until(lambda: graph.status().finished == 3, "all memory is full of results")
        del refs
        begin = time.monotonic()
        memory = graph.empty(20 * _MIB, np.uint8)
        assert time.monotonic() - begin < _PROMPTLY_S
        memory[:] = 3
        del memory
        assert graph.execute(8).get(PATIENCE_S).nbytes == 8 * _MIB


@pytest.mark.parametrize(("inputs", "limit"), [(3, None), (5, None), (5, 2.0), (4, 0)])
def test_empty_in_a_circle_through_the_driver(actors: list[Any], inputs: int, limit: float | None) -> None:
    """Nothing is fetched: results, and inputs that wait for the memory of results, fill it all."""
    with InputNode() as x:
        node = bind(actors[0].ten_more, x)
    with raycomm.compile(node, shm_limit_bytes=40 * _MIB) as graph:
        values = [np.ones((number + 1) * _MIB, np.uint8) for number in range(8)]
        refs = [graph.execute(value) for value in values[:inputs]]
        begin = time.monotonic()
        with pytest.raises((SharedMemoryError, ChannelTimeoutError)) as caught:
            for value in values[inputs:]:
                memory = graph.empty(value.size + 4 * _MIB, np.uint8, timeout=limit)
                memory[:] = 1
                refs.append(graph.execute(memory, timeout=limit))
        assert time.monotonic() - begin < _PROMPTLY_S
        assert isinstance(caught.value, SharedMemoryError) or limit is not None
        memory = None
        assert results(refs, 10)
        del caught
        assert graph.execute(np.ones(5 * _MIB, np.uint8), timeout=PATIENCE_S).get(PATIENCE_S)[-1] == 5


@pytest.mark.parametrize("way", ["wait", "await the last", "done", "await all", "get the last"])
def test_results_of_one_output_that_fill_all_memory(actors: list[Any], way: str) -> None:
    """Nothing was fetched when the wait begins. It ends; results there was no memory for failed, the others are right."""

    async def all_of(refs: list[Any]) -> None:
        await asyncio.wait_for(asyncio.gather(*map(awaited, refs), return_exceptions=True), _ENDS_S)

    def wait_for(refs: list[Any]) -> None:
        done, pending = raycomm.wait(refs, num_returns=len(refs), timeout=_ENDS_S)
        assert (done, pending) == (refs, [])

    waits: dict[str, Callable[[list[Any]], Any]] = {
        "wait": wait_for,
        "await the last": lambda refs: asyncio.run(all_of(refs[-1:])),
        "get the last": lambda refs: results(refs[-1:], 10),
        "await all": lambda refs: asyncio.run(all_of(refs)),
        "done": lambda refs: until(lambda: all(ref.done() for ref in refs), "all are done", limit_s=_ENDS_S),
    }
    with InputNode() as x:
        node = bind(actors[0].ones, x)
    with raycomm.compile(node, shm_limit_bytes=24 * _MIB) as graph:
        refs = [graph.execute(10) for _ in range(4)]
        begin = time.monotonic()
        waits[way](refs)
        assert time.monotonic() - begin < _PROMPTLY_S
        assert results(refs, 10) == 2
        assert graph.execute(20).get(PATIENCE_S).nbytes == 20 * _MIB


@pytest.mark.parametrize("in_flight", [1, 2])
def test_two_actors_share_the_memory_without_hoarding(actors: list[Any], in_flight: int) -> None:
    """A message of 16 MiB, one of 10, and 10 that the driver keeps almost fill it: no pool may keep more than it uses."""
    before = shm_kib(), *ray.get([actor.shm_kib.remote() for actor in actors[:2]])
    sizes = [16, 16, 3, 16, 10, 1, 16, 12, 16, 5] * 2
    with InputNode() as x:
        node = bind(actors[1].ten_more, bind(actors[0].ones, x))
    with raycomm.compile(node, shm_limit_bytes=40 * _MIB) as graph:
        kept = graph.execute(16).get(PATIENCE_S)
        waiting: list[tuple[int, Any]] = []
        failed = 0
        for size in [*sizes, *[0] * in_flight]:
            if len(waiting) == in_flight or not size:
                expected, ref = waiting.pop(0)
                begin = time.monotonic()
                try:
                    value = ref.get()
                    assert (value.nbytes, value.min(), value.max()) == (10 * _MIB, expected, expected)
                    del value
                except SharedMemoryError:
                    failed += 1
                del ref
                assert time.monotonic() - begin < _PROMPTLY_S
            stats = graph.stats()
            assert sum(pool.committed_bytes for pool in stats.pools) <= 40 * _MIB
            assert stats.budget_used <= 40 * _MIB
            if size:
                waiting.append((size, graph.execute(size)))
        assert failed == 0 or in_flight > 1
        assert failed < len(sizes) // 2
        assert (kept == 16).all()
        del kept
    del graph  # and with it the memory of the actors that this process maps
    after = shm_kib(), *ray.get([actor.shm_kib.remote() for actor in actors[:2]])
    assert all(now - then < 1024 for now, then in zip(after, before, strict=True)), (before, after)


def test_free_memory_of_a_process_that_computes_is_waited_for(actors: list[Any], gate: Gate) -> None:
    """The other asks for it only once the first is in its method: one that still waits to read gives it back."""
    asks = Gate(gate.path + ".asks")
    with InputNode() as x:
        node = MultiOutputNode([bind(actors[0].ones_at_gate, x[0], x[2]), bind(actors[1].ones_at_gate, x[1], x[3])])
    with raycomm.compile(node, shm_limit_bytes=8 * _MIB) as graph:
        assert [ref.get(PATIENCE_S).nbytes for ref in graph.execute(6, 0, "", "")] == [6 * _MIB, 0]
        refs = graph.execute(1, 6, gate.path, asks.path)
        try:
            gate.wait_entered()
            asks.wait_entered()
        finally:
            asks.open()
        until_memory_is_waited_for(graph)
        with pytest.raises(ChannelTimeoutError):
            refs[1].get(timeout=2)
        gate.open()
        assert [ref.get(PATIENCE_S).nbytes for ref in refs] == [_MIB, 6 * _MIB]
        assert graph.stats().budget_used <= 8 * _MIB
