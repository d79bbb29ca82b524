"""`install()`: refs that are fetched once, limits that fail instead of waiting, time limits, refs that are dropped."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import RayCgraphCapacityExceeded, RayChannelError, RayChannelTimeoutError
from ray.experimental.compiled_dag_ref import CompiledDAGRef

import raycomm
from tests.ray.install_fixtures import compiled, context, dag
from tests.ray.workers import Gate, Worker, until

pytestmark = pytest.mark.usefixtures("cluster", "installed")


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    raycomm.install()
    yield
    raycomm.uninstall()


def empty(graph: Any) -> bool:
    return not (graph._result_buffer or graph._destructed_ref_idxs or graph._got_ref_idxs)


def test_refs_are_numbered_and_fetched_once(workers: list[Any]) -> None:
    a, b, _ = workers
    with compiled(lambda inp: a.echo.bind(inp)) as graph:
        for index in range(3):
            value = np.ones(100) * index
            ref = graph.execute(value)
            assert str(ref) == f"CompiledDAGRef({graph.get_id()}, execution_index={index}, channel_index=None)"
            assert (ray.get(ref) == value).all()
        for fetch in (ref.get, lambda: ray.get(ref), lambda: ray.get([ref])):
            with pytest.raises(ValueError, match=r"ray.get\(\) can only be called once on a CompiledDAGRef, and it was already"):
                fetch()
        assert graph._execution_index == 2
    with compiled(lambda inp: [a.echo.bind(inp), b.echo.bind(inp)]) as graph:
        first, second = graph.execute(5)
        assert str(second) == f"CompiledDAGRef({graph.get_id()}, execution_index=0, channel_index=1)"
        assert second.get() == first.get(timeout=10) == 5


def test_refs_stay_where_they_are(workers: list[Any]) -> None:
    a = workers[0]
    with compiled(lambda inp: a.echo.bind(inp)) as graph:
        ref = graph.execute(1)
        assert isinstance(ref, CompiledDAGRef)
        with pytest.raises(ValueError, match="CompiledDAGRef cannot be copied."):
            copy.copy(ref)
        with pytest.raises(ValueError, match="CompiledDAGRef cannot be deep copied."):
            copy.deepcopy(ref)
        with pytest.raises(ValueError, match="CompiledDAGRef cannot be pickled."):
            pickle.dumps(ref)
        for thing in (ref, [ref]):
            with pytest.raises(TypeError, match="was found to be non-serializable"):
                ray.put(thing)
        with pytest.raises(TypeError, match="CompiledDAGRef cannot be used as Ray task/actor argument."):
            a.echo.remote(ref)
        with pytest.raises(TypeError, match="Could not serialize the argument"):
            a.echo.remote([ref])
        wanted = "wait() expected a list of ray.ObjectRef or ray.ObjectRefGenerator, got "
        shown = "<class 'ray.experimental.compiled_dag_ref.CompiledDAGRef'>"
        with pytest.raises(TypeError, match=re.escape(wanted + shown)):
            ray.wait(ref)
        with pytest.raises(TypeError, match=re.escape(f"{wanted}list containing {shown}")):
            ray.wait([ref])
        with pytest.raises(ValueError, match="must be a list of CompiledDAGRefs if there is any CompiledDAGRef within it"):
            ray.get([ref, None])
        assert ray.get(ref) == 1


def test_results_in_any_order(workers: list[Any]) -> None:
    with compiled(lambda inp: [workers[0].add.bind(inp), workers[1].add.bind(inp)]) as graph:
        refs = [graph.execute(value) for value in range(8)]
        for index in (3, 0, 7, 5, 6, 1, 4, 2):
            assert [ref.get() for ref in reversed(refs[index])] == [index + 1] * 2
        assert empty(graph)


def test_in_flight_limit(workers: list[Any], gate: Gate) -> None:
    with compiled(lambda inp: workers[0].hold.bind(inp, gate.path), _max_inflight_executions=2) as graph:
        refs = [graph.execute(value) for value in range(2)]
        for _ in range(2):
            with pytest.raises(
                RayCgraphCapacityExceeded,
                match=re.escape(
                    "The compiled graph can't have more than 2 in-flight executions, and you currently have 2 in-flight "
                    "executions. Retrieve an output using ray.get before submitting more requests or increase "
                    "`_max_inflight_executions`. `dag.experimental_compile(_max_inflight_executions=...)`"
                ),
            ) as caught:
                graph.execute(2)
        assert isinstance(caught.value, raycomm.CapacityExceededError)
        assert (caught.value.limit, caught.value.count) == (2, 2)
        gate.open()
        # Finished, but not fetched, is still in flight.
        workers_done = ray.get(refs[0])
        refs.append(graph.execute(2))
        with pytest.raises(RayCgraphCapacityExceeded):
            graph.execute(3)
        assert [workers_done, *ray.get(refs[1:])] == [0, 1, 2]


def test_the_limit_counts_what_a_later_get_brought_over_as_done(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].echo.bind(inp), _max_inflight_executions=3) as graph:
        kept = []
        for value in range(0, 30, 3):
            refs = [graph.execute(value + place) for place in range(3)]
            assert ray.get(refs[2]) == value + 2
            kept += refs[:2]
        assert [ray.get(ref) for ref in kept] == [value for value in range(30) if value % 3 < 2]
        assert empty(graph)


def test_buffered_limit(workers: list[Any]) -> None:
    text = re.escape(
        "The compiled graph can't have more than 1 buffered results, and you currently have 1 buffered results. Call `ray.get()` "
        "on CompiledDAGRef's (or await on CompiledDAGFuture's) to retrieve results, or increase `_max_buffered_results` if "
        "buffering is desired, note that this will increase driver memory usage."
    )
    with compiled(lambda inp: workers[0].echo.bind(inp), _max_buffered_results=1) as graph:
        refs = [graph.execute(value) for value in range(2)]
        for _ in range(2):
            with pytest.raises(RayCgraphCapacityExceeded, match=text):
                ray.get(refs[1])
        assert [ray.get(ref) for ref in refs] == [0, 1], "a refused get may be repeated"


def test_an_execution_with_an_unfetched_output_is_buffered(workers: list[Any]) -> None:
    with compiled(lambda inp: [w.echo.bind(inp) for w in workers[:2]], _max_buffered_results=1) as graph:
        first, second = graph.execute(0), graph.execute(1)
        assert ray.get(first[0]) == 0
        with pytest.raises(RayCgraphCapacityExceeded, match="currently have 1 buffered results"):
            ray.get(second)
        del first[1]
        assert ray.get(second) == [1, 1]
        assert empty(graph)


def test_limits_come_from_the_context(workers: list[Any], gate: Gate) -> None:
    with (
        context(max_inflight_executions=3, max_buffered_results=7, get_timeout=0.2, submit_timeout=5),
        compiled(lambda inp: workers[0].hold.bind(inp, gate.path)) as graph,
    ):
        refs = [graph.execute(value) for value in range(3)]
        with pytest.raises(RayCgraphCapacityExceeded, match="more than 3 in-flight"):
            graph.execute(3)
        began = time.monotonic()
        with pytest.raises(RayChannelTimeoutError, match="RAY_CGRAPH_get_timeout which is currently 0.2 seconds"):
            ray.get(refs[0])
        assert time.monotonic() - began >= 0.2
        assert graph.options.max_inflight == 3
        gate.open()
        assert ray.get(refs, timeout=60) == [0, 1, 2]


def test_rays_defaults(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].echo.bind(inp)) as graph:
        assert (graph.options.submit_timeout, graph.options.get_timeout, graph.options.teardown_timeout) == (10, 10, 30)
        refs = [graph.execute(value) for value in range(10)]
        with pytest.raises(RayCgraphCapacityExceeded, match="more than 10 in-flight"):
            graph.execute(10)
        assert ray.get(refs) == list(range(10))


def test_a_get_that_comes_too_early_can_be_repeated(workers: list[Any], gate: Gate) -> None:
    with compiled(lambda inp: [workers[0].hold.bind(inp, gate.path), workers[1].echo.bind(inp)]) as graph:
        refs = graph.execute(1)
        gate.wait_entered()
        for limit in (0, 0.3):
            began = time.monotonic()
            with pytest.raises(
                RayChannelTimeoutError,
                match="If the execution is expected to take a long time, increase RAY_CGRAPH_get_timeout which is currently 10 "
                "seconds. Otherwise, this may indicate that the execution is hanging.",
            ) as caught:
                ray.get(refs[1], timeout=limit)
            assert time.monotonic() - began >= limit
            assert isinstance(caught.value, TimeoutError)
            assert f"within {limit:.1f} s" in str(caught.value)
            assert "hold" in str(caught.value), "who is waited for is named"
        with pytest.raises(ValueError, match="time limit"):
            ray.get(refs[0], timeout=-2)
        gate.open()
        assert [ray.get(ref, timeout=-1) for ref in refs] == [1, 1]
        ref = graph.execute(2)
        until(lambda: _fetched_without_waiting(ref) == [2, 2], "both results are there")


def _fetched_without_waiting(refs: list[Any]) -> Any:
    try:
        return ray.get(refs, timeout=0)
    except RayChannelTimeoutError:
        return None


def test_dropped_refs_make_room(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].echo.bind(inp), _max_inflight_executions=3) as graph:
        for value in range(50):
            graph.execute(np.ones(100) * value)
        assert (ray.get(graph.execute(np.ones(5))) == 1).all()
        assert empty(graph)


def test_dropping_does_not_wait(workers: list[Any], gate: Gate) -> None:
    """Ray's destructor waits for the execution. Here nothing does until a new execution needs its place."""
    with compiled(lambda inp: workers[0].hold.bind(inp, gate.path), _max_inflight_executions=2, _submit_timeout=0.2) as graph:
        for value in range(2):
            graph.execute(value)
        with pytest.raises(RayChannelTimeoutError, match="RAY_CGRAPH_submit_timeout which is currently 0.2 seconds"):
            graph.execute(2)
        gate.open()
        for value in range(20):
            assert ray.get(graph.execute(value)) == value


def test_a_ref_dropped_before_or_after_others(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].add.bind(inp), _max_inflight_executions=3) as graph:
        refs = [graph.execute(value) for value in range(3)]
        del refs[1:]
        assert ray.get(refs.pop()) == 1
        assert empty(graph)
        refs = [graph.execute(value) for value in range(3)]
        del refs[:2]
        assert ray.get(refs.pop()) == 3
        assert empty(graph)
        held = graph.execute(0)
        for value in range(10):
            graph.execute(value)  # between held ones, a dropped one counts no more
        assert ray.get(held) == 1
        assert empty(graph)


def test_outputs_dropped_one_by_one(workers: list[Any]) -> None:
    with compiled(lambda inp: [workers[0].add.bind(inp), workers[0].add.bind(inp, by=2)]) as graph:
        whole = graph.execute(1)
        assert empty(graph)
        first, second = graph.execute(2)
        del first
        assert graph._destructed_ref_idxs == {1: {0}}
        assert ray.get(second) == 4
        assert graph._result_buffer == {0: {0: 2, 1: 3}}, "the earlier execution was brought over, the dropped output was not"
        assert ray.get(whole) == [2, 3]
        assert empty(graph)
        first, second = graph.execute(3)
        assert ray.get(first) == 4
        del second
        assert empty(graph)


def test_refs_that_die_in_a_garbage_collection(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].echo.bind(inp), _max_inflight_executions=4) as graph:
        gc.disable()
        try:
            for value in range(4):
                cycle: list[Any] = [graph.execute(value)]
                cycle.append(cycle)
            del cycle
            with pytest.raises(RayCgraphCapacityExceeded):
                graph.execute(4)
            gc.collect()
            assert ray.get(graph.execute(5)) == 5
        finally:
            gc.enable()


def test_threads(workers: list[Any]) -> None:
    """Ray's graphs are for one thread. Here each result goes to who asked for it."""
    wrong: list[Any] = []
    with compiled(lambda inp: [w.add.bind(inp) for w in workers[:2]], _max_inflight_executions=8) as graph:

        def use(first: int) -> None:
            for value in range(first, first + 100):
                got = ray.get(graph.execute(value), timeout=60)
                if got != [value + 1] * 2:
                    wrong.append((value, got))

        threads = [threading.Thread(target=use, args=(1000 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert empty(graph)


def test_after_teardown(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].echo.bind(inp)) as graph:
        ref = graph.execute(1)
        graph.teardown()
        graph.teardown()
        with pytest.raises(RayChannelError, match="Channel closed."):
            ray.get(ref)
        with pytest.raises(RayChannelError, match="Channel closed."):
            graph.execute(1)
        assert graph.is_teardown
    assert ray.get(workers[0].echo.remote(2)) == 2


def test_a_dropped_graph_lets_its_actors_go(workers: list[Any]) -> None:
    for value in range(5):
        with compiled(lambda inp: workers[0].echo.bind(inp)) as torn_down:
            assert ray.get(torn_down.execute(value)) == value
    graph = dag(lambda inp: workers[0].echo.bind(inp)).experimental_compile()
    ref = graph.execute(1)
    del graph
    assert ray.get(ref) == 1, "a ref keeps its graph"
    del ref
    gc.collect()
    until(lambda: ray.get(workers[0].vitals.remote())["loops"] == 0, "the loop has left")


def is_dead(member: Any) -> bool:
    try:
        ray.get(member.echo.remote(1), timeout=60)
    except ray.exceptions.RayActorError:
        return True
    return False


@pytest.mark.parametrize("torn_down_before", [False, True])
def test_teardown_kills_all_actors_when_asked_and_only_then(torn_down_before: bool) -> None:
    members = [Worker.remote(), Worker.remote()]
    pids = ray.get([member.pid.remote() for member in members])
    with compiled(lambda inp: members[1].echo.bind(members[0].echo.bind(inp))) as graph:
        assert ray.get(graph.execute(1)) == 1
        if torn_down_before:
            graph.teardown()
            assert ray.get([member.pid.remote() for member in members], timeout=60) == pids
        graph.teardown(kill_actors=True)
    for member in members:  # Ray kills a moment later
        until(lambda member=member: is_dead(member), "it is dead")


def test_teardown_kills_an_actor_that_does_not_return(gate: Gate) -> None:
    worker = Worker.remote()
    with context(teardown_timeout=0.2), compiled(lambda inp: worker.hold.bind(inp, gate.path)) as graph:
        ref = graph.execute(1)
        gate.wait_entered()
        graph.teardown(kill_actors=True)
        with pytest.raises(RayChannelError):
            ray.get(ref)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(worker.echo.remote(1), timeout=60)
