"""Any thread of the driver may execute and get, at any time; results are never mixed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import raycomm
from raycomm import ChannelTimeoutError, InputNode, MultiOutputNode, bind
from tests.ray.workers import PATIENCE_S, Gate, start

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return start(2)


def chain(workers: list[Any]) -> Any:
    with InputNode() as x:
        return bind(workers[1].echo, bind(workers[0].echo, x))


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work` with 0..count-1 at once; the first error of any is raised."""
    errors: list[BaseException] = []
    begin = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            begin.wait(PATIENCE_S)
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[index], daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("max_inflight", [1, 3, 10])
def test_eight_threads_execute_and_get(workers: list[Any], max_inflight: int, seed: int) -> None:
    with raycomm.compile(chain(workers), max_inflight=max_inflight) as graph:

        def work(index: int) -> None:
            rng = random.Random(seed + index)
            pending: list[tuple[Any, Any]] = []
            for number in range(150):
                pending.append(((index, number), graph.execute((index, number), timeout=PATIENCE_S)))
                while pending and rng.random() < 0.6:
                    sent, ref = pending.pop(rng.randrange(len(pending)))
                    assert ref.get(timeout=PATIENCE_S) == sent
            for sent, ref in pending:
                assert ref.get(timeout=PATIENCE_S) == sent

        in_threads(8, work)
        assert graph.execute("after").get() == "after"


def test_threads_with_several_outputs_and_arrays(workers: list[Any]) -> None:
    with InputNode() as inp:
        a = bind(workers[0].echo, inp[0])
        b = bind(workers[1].pair, a, inp[1])
    with raycomm.compile(MultiOutputNode([a, b])) as graph:

        def work(index: int) -> None:
            for number in range(30):
                array = np.full(3000, 100 * index + number)
                first, second = graph.execute(array, number, timeout=PATIENCE_S)
                if number % 2:
                    assert second.get(timeout=PATIENCE_S)[2] == number
                    assert np.array_equal(first.get(timeout=PATIENCE_S), array)
                else:
                    assert np.array_equal(first.get(timeout=PATIENCE_S), array)
                    assert np.array_equal(second.get(timeout=PATIENCE_S)[1], array)

        in_threads(6, work)


def test_many_threads_get_one_ref(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        out = bind(workers[0].hold, x, gate.path)
    with raycomm.compile(out) as graph:
        ref = graph.execute([1, 2, 3])
        later = graph.execute("later")
        got: list[Any] = []
        opener = threading.Thread(target=lambda: (gate.wait_entered(), gate.open()))
        opener.start()
        in_threads(8, lambda index: got.append((ref if index % 2 else later).get(timeout=PATIENCE_S)))
        opener.join()
        assert sorted(map(str, got)) == ["[1, 2, 3]"] * 4 + ["later"] * 4
        assert len({id(value) for value in got if value != "later"}) == 1  # one value, not four


def test_a_limit_holds_while_another_thread_waits(workers: list[Any], gate: Gate) -> None:
    """A get with a limit is not kept by a get without one that came first."""
    with InputNode() as x:
        out = bind(workers[0].hold, x, gate.path)
    with raycomm.compile(out) as graph:
        first, second = graph.execute(1), graph.execute(2)
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(first.get()))
        waiting.start()
        gate.wait_entered()
        for limit in (0, 0.02):
            with pytest.raises(ChannelTimeoutError):
                second.get(timeout=limit)
        gate.open()
        assert second.get(timeout=PATIENCE_S) == 2
        waiting.join(PATIENCE_S)
        assert got == [1]


def test_dropping_refs_in_other_threads(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers), max_inflight=4, max_buffered_results=40) as graph:

        def work(index: int) -> None:
            for number in range(200):
                ref = graph.execute((index, number), timeout=PATIENCE_S)
                if number % 3 == index % 3:
                    assert ref.get(timeout=PATIENCE_S) == (index, number)
                del ref

        in_threads(6, work)
        refs = [graph.execute(value) for value in range(30)]
        assert [ref.get() for ref in refs] == list(range(30))
