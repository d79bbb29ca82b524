"""How a graph ends: teardown at any time, a graph that is dropped, and what stays of it."""

from __future__ import annotations

import gc
import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
import ray
import ray.exceptions

import raycomm
from raycomm import ChannelClosedError, InputNode, bind
from tests.ray.workers import PATIENCE_S, Gate, until, vitals

pytestmark = pytest.mark.usefixtures("cluster")


def chain(workers: list[Any]) -> Any:
    with InputNode() as x:
        return bind(workers[1].add, bind(workers[0].add, x))


def held(workers: list[Any], gate: Gate) -> Any:
    """input -> w0 -> w1 holds at the gate -> w2."""
    with InputNode() as x:
        return bind(workers[2].echo, bind(workers[1].hold, bind(workers[0].echo, x), gate.path))


def loops(worker: Any) -> int:
    return int(ray.get(worker.vitals.remote())["loops"])


def test_use_after_teardown(workers: list[Any]) -> None:
    graph = raycomm.compile(chain(workers), name="g")
    fetched, pending = graph.execute(1), graph.execute(2)
    assert fetched.get() == 3
    graph.teardown()
    for use in (lambda: graph.execute(3), pending.get, lambda: pending.get(timeout=0), lambda: ray.get(pending)):
        with pytest.raises(ChannelClosedError, match="graph 'g' was torn down; compile it again") as caught:
            use()
        assert isinstance(caught.value, ray.exceptions.RayChannelError)
        assert (caught.value.graph, caught.value.reason) == ("g", "teardown")
    assert fetched.get() == 3
    # No loop is left when teardown returns.
    assert [loops(worker) for worker in workers[:2]] == [0, 0]
    assert ray.get([worker.add.remote(1) for worker in workers[:2]]) == [2, 2]


def test_teardown_is_idempotent_and_works_from_other_threads(workers: list[Any]) -> None:
    graph = raycomm.compile(chain(workers))
    assert graph.execute(1).get() == 3
    threads = [threading.Thread(target=graph.teardown) for _ in range(4)]
    for thread in threads:
        thread.start()
    graph.teardown()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    graph.teardown(timeout=0)
    with graph:
        pass
    with pytest.raises(ChannelClosedError):
        graph.execute(1)


def test_teardown_of_a_graph_that_never_ran(workers: list[Any]) -> None:
    raycomm.compile(chain(workers)).teardown()
    assert loops(workers[0]) == 0


@pytest.mark.parametrize("limit", [0, 0.1])
def test_teardown_while_a_method_runs(workers: list[Any], gate: Gate, caplog: pytest.LogCaptureFixture, limit: float) -> None:
    graph = raycomm.compile(held(workers, gate), name="g")
    ref = graph.execute(1)
    gate.wait_entered()
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING, "raycomm"):
        graph.teardown(timeout=limit)
    assert time.monotonic() - begin < limit + 10
    if limit:
        text = "\n".join(record.getMessage() for record in caplog.records if record.name == "raycomm")
        label = graph.plan.processes[2].label
        assert f"graph 'g' is torn down, but after {limit} s still in a method: {label}" in text
        assert " computes " in text
        assert ".hold#" in text
        assert str(ray.get(workers[1].pid.remote())) in text
        assert graph.plan.processes[1].label not in text
    # Those whose method has returned are free, the held one is as far as plain calls go.
    until(lambda: loops(workers[0]) == loops(workers[2]) == 0, "the others leave")
    assert loops(workers[1]) == 1
    assert ray.get(workers[1].add.remote(1), timeout=PATIENCE_S) == 2
    with pytest.raises(ChannelClosedError):
        ref.get()
    with raycomm.compile(chain([workers[0], workers[2]])) as again:
        assert again.execute(1).get() == 3
    gate.open()
    until(lambda: loops(workers[1]) == 0, "it leaves when its method returns")


def test_teardown_waits_for_a_method_within_its_limit(workers: list[Any], gate: Gate) -> None:
    graph = raycomm.compile(held(workers, gate))
    graph.execute(1)
    gate.wait_entered()
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    graph.teardown(timeout=PATIENCE_S)
    opener.join()
    assert [loops(worker) for worker in workers] == [0, 0, 0]


def test_teardown_ends_a_get_in_another_thread(workers: list[Any], gate: Gate) -> None:
    graph = raycomm.compile(held(workers, gate), max_inflight=1)
    ref = graph.execute(1)
    errors: list[Any] = []

    def expect(call: Any) -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=expect, args=[call]) for call in (ref.get, lambda: graph.execute(2))]
    for thread in threads:
        thread.start()
    gate.wait_entered()
    graph.teardown(timeout=0)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert [type(error).__mro__[1] for error in errors] == [ChannelClosedError] * 2
    gate.open()
    until(lambda: loops(workers[1]) == 0, "the loop leaves")


def test_a_full_graph_is_torn_down(workers: list[Any]) -> None:
    graph = raycomm.compile(chain(workers), max_inflight=4)
    refs = [graph.execute(value) for value in range(4)]
    begin = time.monotonic()
    graph.teardown()
    assert time.monotonic() - begin < 20
    assert [loops(worker) for worker in workers[:2]] == [0, 0]
    del refs


def test_a_block_that_raises_is_torn_down(workers: list[Any]) -> None:
    with pytest.raises(KeyError), raycomm.compile(chain(workers)) as graph:
        graph.execute(1)
        raise KeyError
    assert [loops(worker) for worker in workers[:2]] == [0, 0]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_graph_lets_its_loops_go(workers: list[Any]) -> None:
    graph = raycomm.compile(chain(workers), name="forgotten")
    assert graph.execute(1).get() == 3
    assert loops(workers[0]) == 1
    with pytest.warns(ResourceWarning, match=r"graph 'forgotten' was dropped without teardown"):
        del graph
        # By its reference count alone: nobody has to wait for a garbage collection.
    until(lambda: loops(workers[0]) == loops(workers[1]) == 0, "the loops leave")


def test_a_ref_keeps_its_graph(workers: list[Any]) -> None:
    graph = raycomm.compile(chain(workers))
    ref = graph.execute(1)
    del graph
    gc.collect()
    assert ref.get() == 3
    ref._graph.teardown()


def test_two_graphs_on_the_same_actors_at_once(workers: list[Any]) -> None:
    with InputNode() as x:
        one = bind(workers[1].add, bind(workers[0].add, x))
    with InputNode() as x:
        two = bind(workers[0].add, bind(workers[1].add, x, 10), 100)
    with raycomm.compile(one) as first, raycomm.compile(two) as second:
        pairs = [(first.execute(i), second.execute(i)) for i in range(30)]
        assert [(a.get(), b.get()) for a, b in pairs] == [(i + 2, i + 110) for i in range(30)]
        first.teardown()
        assert second.execute(1).get() == 111
        with raycomm.compile(one) as again:
            assert (again.execute(5).get(), second.execute(5).get()) == (7, 115)


def test_compile_again_and_again(workers: list[Any]) -> None:
    """Thirty graphs in one process: nothing is left of any, here or in the actors."""
    node = chain(workers)

    def once(number: int) -> None:
        with raycomm.compile(node) as graph:
            refs = [graph.execute(np.full(50_000, value)) for value in range(3)]
            assert [int(ref.get()[-1]) for ref in refs] == [2, 3, 4], number

    for number in range(3):
        once(number)
    gc.collect()
    before = [vitals(), *ray.get([worker.vitals.remote() for worker in workers])]
    for number in range(30):
        once(number)
    gc.collect()

    def after() -> list[dict[str, int]]:
        return [vitals(), *ray.get([worker.vitals.remote() for worker in workers])]

    def nothing_left() -> bool:  # Ray's own threads and descriptors come and go by a few
        return all(
            (now["memfds"], now["maps"], now["loops"]) == (0, 0, 0)
            and all(now[name] <= then[name] + 4 for name in ("threads", "descriptors"))
            for now, then in zip(after(), before, strict=True)
        )

    until(nothing_left, "memory, threads and descriptors go", 20)


def test_memory_is_returned(workers: list[Any]) -> None:
    """A torn-down graph's shared memory is gone once no view of it is left."""
    graph = raycomm.compile(chain(workers))
    view = graph.execute(np.zeros(64 << 20, np.uint8)).get()
    held_bytes = vitals()["maps"]
    graph.teardown()
    assert held_bytes > 0
    assert int(view.sum()) == 2 * (64 << 20)
    del graph
    gc.collect()
    assert vitals()["maps"] == 1  # the view's own
    del view
    gc.collect()
    assert vitals()["maps"] == 0
