"""Thousands of graphs, one after the other, on the same actors: nothing stays."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray

import raycomm
from raycomm import InputNode, bind
from tests.ray.measured import Measured, Memory, memory
from tests.ray.workers import PATIENCE_S, until, vitals

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.slow, pytest.mark.timeout(900)]

WARM = 100
# Private memory of a process that uses Ray goes up and down by most of a megabyte, whatever it does: among 400 graphs that is a
# slope of more than a kilobyte a graph out of nothing, among 2000 it is 200 bytes.
GRAPHS = 2000
DROPPED = 200
BLOCK = 50  # graphs from sample to sample
_CALLS = 2  # plain calls of each actor that one graph takes: who are you, here is your part
_BOUND_BYTES = 1024
_BOUND_OBJECTS = 1
_OF_GRAPHS = ("memfds", "maps", "loops")
_RAYS_OWN = 4


def memory_of_all(actors: list[Any]) -> list[Memory]:
    """Of the driver and of the actors, now."""
    return [memory(), *ray.get([actor.memory.remote() for actor in actors])]


def slopes(samples: list[list[Memory]]) -> np.ndarray:
    """What one round adds, shape (processes, 2): bytes and objects. The median of the slopes between all pairs of samples
    (Theil and Sen), which a few jumps of an allocator do not move."""
    rows = np.array(samples, float)
    first, second = np.triu_indices(len(rows), 1)
    steps = (second - first)[:, None, None] * BLOCK
    return np.asarray(np.median((rows[second] - rows[first]) / steps, axis=0))


@pytest.fixture(scope="module")
def actors(cluster: None) -> list[Any]:
    actors = [Measured.remote(f"m{index}") for index in range(2)]
    ray.get([actor.pid.remote() for actor in actors])
    return actors


def use_one(actors: list[Any], number: int) -> None:
    """A graph built, used, torn down."""
    with InputNode() as x:
        out = bind(actors[1].echo, bind(actors[0].add, x, 1))
    with raycomm.compile(out) as graph:
        assert graph.execute(number).get(timeout=PATIENCE_S) == number + 1


def call_plainly(actors: list[Any], number: int) -> None:
    """As many calls of each actor as a graph makes."""
    for _ in range(_CALLS):
        assert ray.get([actor.add.remote(number) for actor in actors]) == [number + 1] * 2


def held_by_all(actors: list[Any]) -> list[dict[str, int]]:
    return [vitals(), *ray.get([actor.vitals.remote() for actor in actors])]


def rounds(actors: list[Any], act: Callable[[list[Any], int], None]) -> list[list[Memory]]:
    """Samples along GRAPHS rounds of `act`."""
    samples = [memory_of_all(actors)]
    for number in range(GRAPHS):
        act(actors, number)
        if number % BLOCK == BLOCK - 1:
            samples.append(memory_of_all(actors))
    return samples


def test_thousands_of_graphs_leave_nothing(actors: list[Any], record_property: Any) -> None:
    for number in range(WARM):
        use_one(actors, number)
        call_plainly(actors, number)
    before = held_by_all(actors)
    samples = [rounds(actors, call_plainly), rounds(actors, use_one)]
    for process, who in enumerate(("driver", "first actor", "second actor")):  # shown where the test fails
        print(who, *([sample[process].private_bytes >> 10 for sample in phase] for phase in samples), "KiB", sep="\n  ")
    plain, graphs = map(slopes, samples)
    record_property("bytes and objects a graph", graphs.tolist())
    print(f"private memory and Python objects: a graph adds {graphs.tolist()}, as many plain calls add {plain.tolist()}")
    for earlier, later in zip(before, held_by_all(actors), strict=True):
        assert {name: later[name] for name in _OF_GRAPHS} == {name: earlier[name] for name in _OF_GRAPHS}
        # Ray's own threads and descriptors come and go by a few.
        assert later["threads"] <= earlier["threads"] + _RAYS_OWN
        assert later["descriptors"] <= earlier["descriptors"] + _RAYS_OWN
    beyond = (graphs - plain).max(axis=0)
    assert beyond[0] < _BOUND_BYTES
    assert beyond[1] < _BOUND_OBJECTS


def test_graphs_dropped_without_teardown_leave_nothing(actors: list[Any]) -> None:
    before = held_by_all(actors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        for number in range(DROPPED):
            with InputNode() as x:
                graph = raycomm.compile(bind(actors[1].echo, bind(actors[0].add, x, 1)))
            ref = graph.execute(number)
            if number % 2:
                assert ref.get(timeout=PATIENCE_S) == number + 1
            del graph, ref, x
        gc.collect()

    def nothing_left() -> bool:
        return all(
            later[name] <= earlier[name] + (0 if name in _OF_GRAPHS else _RAYS_OWN)
            for earlier, later in zip(before, held_by_all(actors), strict=True)
            for name in later
        )

    until(nothing_left, "the loops leave and everything is closed")
    use_one(actors, 1)
