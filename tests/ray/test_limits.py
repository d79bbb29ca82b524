"""Time limits, room for executions, buffered results: what happens when something runs out."""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from typing import Any

import pytest
import ray
import ray.exceptions

import raycomm
from raycomm import (
    ArgumentError,
    CapacityExceededError,
    ChannelTimeoutError,
    InputNode,
    MultiOutputNode,
    bind,
)
from tests.ray.workers import PATIENCE_S, Gate, Opaque, chain, start, until

pytestmark = pytest.mark.usefixtures("cluster")


def held(workers: list[Any], gate: Gate) -> Any:
    """input -> w0 holds at the gate -> w1 passes on."""
    with InputNode() as x:
        return bind(workers[1].echo, bind(workers[0].hold, x, gate.path))


@pytest.mark.parametrize("limit", [0, 0.0, 0.02])
def test_a_get_that_passes_its_limit_can_be_repeated(workers: list[Any], gate: Gate, limit: float) -> None:
    with raycomm.compile(held(workers, gate), name="g") as graph:
        ref = graph.execute(5)
        gate.wait_entered()
        for _ in range(3):
            begin = time.monotonic()
            with pytest.raises(ChannelTimeoutError) as caught:
                ref.get(timeout=limit)
            assert limit <= time.monotonic() - begin < PATIENCE_S
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, ray.exceptions.RayChannelTimeoutError)
        assert (caught.value.limit_s, caught.value.execution) == (limit, 0)
        gate.open()
        assert ref.get(timeout=PATIENCE_S) == 5
        assert ref.get(timeout=0) == 5


def test_a_time_out_says_who_waits_for_whom(workers: list[Any], gate: Gate) -> None:
    with raycomm.compile(held(workers, gate), name="g") as graph:
        ref = graph.execute(5)
        gate.wait_entered()
        with pytest.raises(ChannelTimeoutError) as caught:
            ref.get(timeout=0.05)
        text = str(caught.value)
        pids = ray.get([worker.pid.remote() for worker in workers[:2]])
        labels = [process.label for process in graph.plan.processes[1:]]
        assert "execution 0 of graph 'g'" in text
        assert f"{labels[1]} (pid {pids[1]}, alive) waits to read {labels[0]}.hold" in text
        assert f"{labels[0]} (pid {pids[0]}, alive) computes {labels[0]}.hold#0, execution 0" in text
        assert "get it again" in text
        assert caught.value.waits_for in text
        assert caught.value.graph == "g"
        gate.open()
        assert ref.get(timeout=PATIENCE_S) == 5


@pytest.mark.parametrize("limit", [None, -1, -1.0, 60, 1e12, float("inf")])
def test_limits_that_do_not_pass(workers: list[Any], limit: Any) -> None:
    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        assert graph.execute(1, timeout=limit).get(timeout=limit) == 1


@pytest.mark.parametrize("limit", [-2, -0.5, float("nan"), "5", True])
def test_what_is_no_limit(workers: list[Any], limit: Any) -> None:
    with raycomm.compile(chain(workers[0].echo)) as graph:
        ref = graph.execute(1)
        calls = {
            "Ref.get": ref.get,
            "execute": functools.partial(graph.execute, 2),
            "teardown": graph.teardown,
            "raycomm.wait": functools.partial(raycomm.wait, [ref]),
            "empty": functools.partial(graph.empty, 3, "uint8"),
            "execute_async": lambda timeout: asyncio.run(graph.execute_async(2, timeout=timeout)),
        }
        for name, call in calls.items():
            with pytest.raises(ArgumentError, match=f"^{name}: timeout=.* is not a time limit: give seconds") as caught:
                call(timeout=limit)
            assert (caught.value.given, isinstance(caught.value, ValueError)) == (f"timeout={limit!r}", True)
        assert (ref.get(), graph.execute(3).get()) == (1, 3)


def test_the_graphs_own_limits(workers: list[Any], gate: Gate) -> None:
    with raycomm.compile(held(workers, gate), get_timeout=0.03, submit_timeout=0.02, max_inflight=1) as graph:
        ref = graph.execute(5)
        with pytest.raises(ChannelTimeoutError, match=r"within 0\.03 s"):
            ref.get()
        with pytest.raises(ChannelTimeoutError, match=r"no room within 0\.02 s"):
            graph.execute(6)
        with pytest.raises(ChannelTimeoutError, match=r"within 0\.01 s"):
            ref.get(timeout=0.01)
        gate.open()
        assert ref.get(timeout=-1) == 5


def test_a_limit_of_ray_get(workers: list[Any], gate: Gate) -> None:
    with raycomm.compile(held(workers, gate)) as graph:
        refs = [graph.execute(value) for value in range(3)]
        with pytest.raises(ray.exceptions.RayChannelTimeoutError):
            ray.get(refs[1], timeout=0.02)
        gate.open()
        assert ray.get(refs, timeout=PATIENCE_S) == [0, 1, 2]


def test_execute_waits_for_room(workers: list[Any], gate: Gate) -> None:
    with raycomm.compile(held(workers, gate), max_inflight=3, name="g") as graph:
        refs = [graph.execute(value) for value in range(3)]
        gate.wait_entered()
        for limit in (0, 0.02):
            with pytest.raises(ChannelTimeoutError, match="no room") as caught:
                graph.execute(99, timeout=limit)
        text = str(caught.value)
        assert "3 executions under way" in text
        assert ".hold#0, execution 0" in text
        assert " computes " in text
        assert "alive" in text
        assert "max_inflight" in text
        gate.open()
        refs.append(graph.execute(3, timeout=PATIENCE_S))
        # What timed out was not submitted, and nothing has shifted.
        assert ray.get(refs) == [0, 1, 2, 3]


def test_execute_moves_results_aside(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo, workers[1].echo), max_inflight=2, max_buffered_results=50) as graph:
        refs = [graph.execute(value) for value in range(50)]
        assert [ref.get() for ref in reversed(refs)] == list(reversed(range(50)))


def test_results_of_several_outputs_are_moved_aside(workers: list[Any]) -> None:
    with InputNode() as x:
        a = bind(workers[0].echo, x)
        b = bind(workers[1].add, a)
    with raycomm.compile(MultiOutputNode([a, b]), max_inflight=2) as graph:
        rows = [graph.execute(value) for value in range(40)]
        assert [second.get() for _, second in rows] == list(range(1, 41))
        assert [first.get() for first, _ in rows] == list(range(40))


def test_too_many_unfetched_results(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo), max_inflight=2, max_buffered_results=5, name="g") as graph:
        refs = []
        with pytest.raises(CapacityExceededError) as caught:
            for value in range(100):
                refs.append(graph.execute(value, timeout=PATIENCE_S))
        assert 5 <= len(refs) <= 7  # five aside, up to two under way
        assert isinstance(caught.value, ray.exceptions.RayCgraphCapacityExceeded)
        assert (caught.value.limit, caught.value.count) == (5, 5)
        assert "max_buffered_results" in str(caught.value)
        assert "'g'" in str(caught.value)
        with pytest.raises(CapacityExceededError):  # as often as it is tried
            graph.execute(0)
        assert [ref.get() for ref in refs] == list(range(len(refs)))
        assert graph.execute(7).get() == 7


def test_get_out_of_order_is_bounded_too(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo), max_inflight=8, max_buffered_results=3) as graph:
        refs = [graph.execute(value) for value in range(8)]
        with pytest.raises(CapacityExceededError, match="max_buffered_results"):
            refs[7].get()
        assert [ref.get() for ref in refs] == list(range(8))


def test_an_error_that_is_kept_keeps_no_ref_once_its_traceback_is_gone(workers: list[Any]) -> None:
    """What raised inside, and is not shown, has a traceback of its own; a ref in its frames would count as wanted."""

    def failed(ref: Any) -> Exception:
        try:
            ref.get()
        except Exception as error:
            return error.with_traceback(None)
        raise AssertionError

    gc.collect()
    gc.disable()
    try:
        with raycomm.compile(chain(workers[0].echo), max_inflight=8, max_buffered_results=3) as graph:
            errors: list[Exception] = []
            for _ in range(5):
                refs = [graph.execute(value) for value in range(8)]
                error = failed(refs[7])
                assert isinstance(error, CapacityExceededError)
                errors.append(error)
                del refs
            assert [graph.execute(value, timeout=PATIENCE_S).get() for value in range(9)] == list(range(9))
    finally:
        gc.enable()


def test_dropped_refs_free_their_places(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo), max_inflight=2, max_buffered_results=3) as graph:
        for value in range(200):
            graph.execute(value, timeout=PATIENCE_S)  # far more than could be kept
        kept = [graph.execute(value) for value in range(4)]
        del kept[1]
        assert [ref.get() for ref in kept] == [0, 2, 3]
        for _ in range(100):
            refs = [graph.execute(value) for value in range(3)]
            assert refs[2].get() == 2  # two are moved aside, and dropped from there
            del refs
        assert graph.execute(9).get() == 9


@pytest.mark.parametrize("how", ["get", "await", "wait", "done"])
def test_a_short_ring_of_one_output_does_not_stop_another(workers: list[Any], how: str) -> None:
    with InputNode() as n:
        first = raycomm.with_channel_options(bind(workers[0].add, n), slots=1)
        root = MultiOutputNode([first, bind(workers[1].echo, bind(workers[0].echo, n))])
    with raycomm.compile(root) as graph:
        refs = [graph.execute(number) for number in range(6)]
        last = refs[-1][1]
        if how == "wait":
            assert raycomm.wait([last], timeout=PATIENCE_S) == ([last], [])
        elif how == "done":
            until(last.done, "the last result")
        assert (asyncio.run(awaited(last)) if how == "await" else last.get(timeout=PATIENCE_S)) == 5
        assert [first.get() for first, _ in refs] == list(range(1, 7))
        assert [second.get() for _, second in refs] == list(range(6))


def test_a_short_ring_to_the_driver_does_not_wait_for_it(workers: list[Any]) -> None:
    """Executions go on while nobody asks for a result, up to `max_inflight` of them, whoever else reads the value."""
    counter = start(1)[0]
    with InputNode() as n:
        both = raycomm.with_channel_options(bind(workers[0].echo, n), slots=1)
        alone = raycomm.with_channel_options(bind(counter.note, both), slots=1)
    with raycomm.compile(MultiOutputNode([both, alone]), max_inflight=8) as graph:
        refs = [graph.execute(number, timeout=PATIENCE_S) for number in range(8)]
        until(lambda: ray.get(counter.seen_so_far.remote()) == list(range(8)), "all executions have run")
        assert [[ref.get(timeout=PATIENCE_S) for ref in row] for row in refs] == [[number] * 2 for number in range(8)]


async def awaited(ref: Any) -> Any:
    return await ref


def test_many_executions_in_a_row(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].add, workers[1].add)) as graph:
        assert [graph.execute(value).get() for value in range(1000)] == list(range(2, 1002))


def test_a_failed_execute_takes_no_place(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo), max_inflight=2) as graph:
        for _ in range(20):
            with pytest.raises(TypeError):
                graph.execute(Opaque(), timeout=PATIENCE_S)
        refs = [graph.execute(value, timeout=PATIENCE_S) for value in range(10)]
        assert ray.get(refs) == list(range(10))


def test_a_compile_that_passes_its_limit(workers: list[Any], gate: Gate) -> None:
    """An actor that is busy with a plain call when the graph is compiled."""
    worker = start(1)[0]
    busy = worker.hold.remote(1, gate.path)
    gate.wait_entered()
    with pytest.raises(ChannelTimeoutError, match=r"not ready within 0\.2 s.*WorkerBody") as caught:
        raycomm.compile(chain(workers[0].echo, worker.echo), compile_timeout=0.2, name="g")
    assert "compile_timeout" in str(caught.value)
    assert caught.value.limit_s == 0.2
    gate.open()
    assert ray.get(busy) == 1
    # Neither actor runs a loop: not the one that had been ready, not the one that answered too late.
    for actor in (workers[0], worker):
        end = time.monotonic() + PATIENCE_S
        while ray.get(actor.vitals.remote())["loops"]:
            assert time.monotonic() < end
    with raycomm.compile(chain(workers[0].echo, worker.echo)) as graph:
        assert graph.execute(1).get() == 1
