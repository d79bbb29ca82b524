"""Hundreds of graphs, one after the other, on the same actors: nothing stays."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import numpy as np
import pytest
import ray

import raycomm
from raycomm import InputNode, bind
from tests.ray.measured import Measured, private_bytes
from tests.ray.workers import PATIENCE_S, until, vitals

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.slow, pytest.mark.timeout(900)]

GRAPHS = 500
WARM = 100
DROPPED = 200
BLOCK = 20  # graphs from sample to sample
_BOUND_BYTES = 1024
_OF_GRAPHS = ("memfds", "maps", "loops")
_RAYS_OWN = 4


class Memory:
    """Private memory of the driver and of the actors, sampled along some rounds."""

    def __init__(self, actors: list[Any]) -> None:
        self._actors = actors
        self._samples: list[list[int]] = []

    def sample(self) -> None:
        """Once more."""
        self._samples.append([private_bytes(), *ray.get([actor.private_bytes.remote() for actor in self._actors])])

    def slopes(self, per_sample: int) -> list[float]:
        """Bytes a round, for each process: the median of the slopes between all pairs of samples (Theil and Sen), which a few
        jumps of an allocator do not move."""
        rows = np.array(self._samples, float)
        first, second = np.triu_indices(len(rows), 1)
        steps = (second - first)[:, None] * per_sample
        return [float(slope) for slope in np.median((rows[second] - rows[first]) / steps, axis=0)]


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
    assert ray.get([actor.add.remote(number) for actor in actors]) == [number + 1] * 2


def held_by_all(actors: list[Any]) -> list[dict[str, int]]:
    return [vitals(), *ray.get([actor.vitals.remote() for actor in actors])]


def test_five_hundred_graphs_leave_nothing(actors: list[Any], record_property: Any) -> None:
    for number in range(WARM):
        use_one(actors, number)
        call_plainly(actors, number)
    before = held_by_all(actors)
    plain, graphs = Memory(actors), Memory(actors)
    for memory, act in ((plain, call_plainly), (graphs, use_one)):
        memory.sample()
        for number in range(GRAPHS - WARM):
            act(actors, number)
            if number % BLOCK == BLOCK - 1:
                memory.sample()
    beyond = [ours - theirs for ours, theirs in zip(graphs.slopes(BLOCK), plain.slopes(BLOCK), strict=True)]
    record_property("bytes a graph", beyond)
    print(f"private memory, bytes a graph: {graphs.slopes(BLOCK)}; a round of plain calls: {plain.slopes(BLOCK)}")
    after = held_by_all(actors)
    for earlier, later in zip(before, after, strict=True):
        assert {name: later[name] for name in _OF_GRAPHS} == {name: earlier[name] for name in _OF_GRAPHS}
        # Ray's own threads and descriptors come and go by a few.
        assert later["threads"] <= earlier["threads"] + _RAYS_OWN
        assert later["descriptors"] <= earlier["descriptors"] + _RAYS_OWN
    assert max(beyond) < _BOUND_BYTES


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
