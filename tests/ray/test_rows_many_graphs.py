"""Graphs by the dozen on the same actors: one after the other, forgotten, and at once."""

from __future__ import annotations

import gc
import os
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
from ray._private.internal_api import memory_summary

import raycomm
from raycomm import InputNode, MultiOutputNode, bind
from tests.ray.workers import PATIENCE_S, chain, until, vitals

pytestmark = pytest.mark.usefixtures("cluster")


def loops(worker: Any) -> int:
    return int(ray.get(worker.vitals.remote())["loops"])


def test_a_variable_that_is_assigned_a_second_graph(workers: list[Any]) -> None:
    """The first is dropped without teardown: it says so, the second works, and so do plain calls."""
    graph = raycomm.compile(chain(workers[0].add, workers[1].add), name="one")
    assert graph.execute(1).get() == 3
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        graph = raycomm.compile(chain(workers[0].add, workers[1].add), name="two")
        gc.collect()
    assert any("'one' was dropped without teardown" in str(warning.message) for warning in said)
    assert graph.name == "two"
    assert [graph.execute(value).get() for value in range(20)] == list(range(2, 22))
    assert ray.get([worker.add.remote(1) for worker in workers]) == [2] * 3
    graph.teardown()
    until(lambda: loops(workers[0]) == 0, "both loops have left")


def _flat(workers: list[Any], rounds: int, end: Callable[[Any], None]) -> None:
    """Build, use and end `rounds` graphs: descriptors, threads and mappings stay as they were."""

    def look() -> list[dict[str, int]]:
        gc.collect()
        return [vitals(), *ray.get([worker.vitals.remote() for worker in workers])]

    def one(number: int) -> None:
        with InputNode() as inp:
            a = bind(workers[0].add, inp[0])
            out = MultiOutputNode([bind(workers[1].pair, a, inp.k), a])
        holder = [raycomm.compile(out, max_inflight=3)]
        refs = [holder[0].execute(np.full(20_000, number), k=number) for _ in range(2)]
        assert int(refs[0][1].get()[3]) == number + 1
        del refs
        end(holder)

    for number in range(5):
        one(number)
    before = look()
    for number in range(rounds):
        one(number)
    until(lambda: all(now["loops"] == now["maps"] == 0 for now in look()), "loops and mappings go", 20)

    def nothing_left() -> bool:  # Ray's own come and go by a few
        return all(
            now[name] <= then[name] + 4 for now, then in zip(look(), before, strict=True) for name in ("threads", "descriptors")
        )

    until(nothing_left, "threads and descriptors go", 20)


def _tear_down(holder: list[Any]) -> None:
    holder.pop().teardown()


def _drop(holder: list[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        holder.clear()
        gc.collect()


@pytest.mark.parametrize("end", [_tear_down, _drop])
def test_dozens_of_graphs_leave_nothing(workers: list[Any], end: Callable[[Any], None]) -> None:
    _flat(workers[:2], 40, end)


@pytest.mark.slow
@pytest.mark.parametrize("end", [_tear_down, _drop])
def test_hundreds_of_graphs_leave_nothing(workers: list[Any], end: Callable[[Any], None]) -> None:
    _flat(workers[:2], 250, end)


def test_no_named_shared_memory(workers: list[Any]) -> None:
    """Nothing of a graph ever has a name: in /dev/shm there is no more while one runs than before."""
    before = set(os.listdir("/dev/shm"))
    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        assert graph.execute(np.zeros(4 << 20)).get().shape == (4 << 20,)
        new = {name for name in os.listdir("/dev/shm") if name not in before}
        assert not [name for name in new if "ray" in name.lower() and "comm" in name.lower()]


def test_neither_another_actor_nor_the_object_store_is_used(workers: list[Any]) -> None:
    """Ray's own graphs make an actor that reads for the driver, and take their buffers from the object store."""
    address = ray.get_runtime_context().gcs_address

    def stored() -> int:
        found = re.search(r"Plasma memory usage .*, (\d+) objects", memory_summary(address, stats_only=True))
        assert found is not None
        return int(found[1])

    gc.collect()
    actors, objects = set(ray._private.state.actors()), stored()
    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        held = graph.execute(np.zeros(4 << 20)).get()
        assert set(ray._private.state.actors()) == actors
        assert stored() <= objects
        assert held.shape == (4 << 20,)
    kept = ray.put(held)
    assert stored() > 0, "the summary shows what is there"
    del kept


def test_many_graphs_on_one_actor_at_once(workers: list[Any]) -> None:
    graphs = [raycomm.compile(chain(workers[0].add, workers[1].add)) for _ in range(12)]
    try:
        refs = [(number + 2, graph.execute(number)) for number, graph in enumerate(graphs) for _ in range(3)]
        for want, ref in reversed(refs):
            assert ref.get(timeout=PATIENCE_S) == want
        for graph in graphs[::2]:
            graph.teardown()
        assert [graph.execute(1).get() for graph in graphs[1::2]] == [3] * 6
        assert loops(workers[0]) == 6
    finally:
        for graph in graphs:
            graph.teardown()
