"""Shared memory goes back to the system when a graph ends, though its object, refs and some of its values are kept."""

from __future__ import annotations

import ctypes
import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import raycomm
from raycomm import ChannelClosedError, InputNode, MultiOutputNode, bind
from tests.ray.sized_actors import Sized
from tests.ray.workers import PATIENCE_S, Gate, until

pytestmark = pytest.mark.usefixtures("cluster")

_MIB = 1 << 20
_BOOKKEEPING = 2 * _MIB  # of a graph of three processes: rings, tables, recorders


@pytest.fixture(scope="module")
def actors(cluster: None) -> list[Any]:
    actors = [Sized.remote() for _ in range(2)]
    ray.get([actor.pid.remote() for actor in actors])
    return actors


def taken_bytes() -> int:
    """Memory behind all arenas that this process maps, as the system counts it: pages that are there, whoever touched them."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:raycomm" in line:
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            there = (ctypes.c_ubyte * ((end - begin) // mmap.PAGESIZE))()
            assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), there) == 0
            pages += sum(bytes(there))
    return pages * mmap.PAGESIZE


def chain(actors: list[Any]) -> Any:
    with InputNode() as x:
        return bind(actors[1].ten_more, bind(actors[0].ones, x))


def test_memory_of_actors(actors: list[Any]) -> None:
    before = taken_bytes()
    with raycomm.compile(chain(actors), shm_limit_bytes=40 * _MIB) as graph:
        assert graph.execute(16).get(PATIENCE_S).nbytes == 10 * _MIB
        assert [pool.committed_bytes for pool in graph.stats().pools] == [0, 16 * _MIB, 10 * _MIB]
        assert taken_bytes() - before >= 26 * _MIB
    assert [pool.committed_bytes for pool in graph.stats().pools] == [0, 0, 0]
    assert taken_bytes() - before < _BOOKKEEPING
    assert graph.stats().budget_used == 0


@pytest.mark.parametrize("aside", [False, True])
def test_results_that_were_not_fetched(actors: list[Any], aside: bool) -> None:
    """They wait in their ring, or were moved aside for one that was asked for."""
    before = taken_bytes()
    with raycomm.compile(chain(actors), shm_limit_bytes=120 * _MIB) as graph:
        refs = [graph.execute(1) for _ in range(4)]
        if aside:
            assert refs.pop().get(PATIENCE_S).nbytes == 10 * _MIB
        until(lambda: graph.status().finished == 4, "all results are there")
        assert taken_bytes() - before >= 30 * _MIB
    assert taken_bytes() - before < _BOOKKEEPING
    assert [pool.committed_bytes for pool in graph.stats().pools] == [0, 0, 0]
    for ref in refs:
        with pytest.raises(ChannelClosedError, match="torn down"):
            ref.get()


def test_values_that_are_kept_stay_whole_and_go_with_their_last_view(actors: list[Any]) -> None:
    before = taken_bytes()
    with raycomm.compile(chain(actors), shm_limit_bytes=120 * _MIB) as graph:
        refs = [graph.execute(number) for number in (1, 2, 3)]
        views = [ref.get(PATIENCE_S) for ref in refs]
    assert 30 * _MIB <= taken_bytes() - before < 30 * _MIB + _BOOKKEEPING
    assert [(view == number).all() for view, number in zip(views, (1, 2, 3), strict=True)] == [True] * 3
    part = views[1][5:10]
    del refs, views
    assert (part == 2).all()
    assert 10 * _MIB <= taken_bytes() - before < 10 * _MIB + _BOOKKEEPING
    assert graph.stats().budget_used == sum(pool.committed_bytes for pool in graph.stats().pools) == 10 * _MIB
    del part
    assert taken_bytes() - before < _BOOKKEEPING
    assert graph.stats().budget_used == 0


def test_input_that_no_actor_has_read(actors: list[Any], gate: Gate) -> None:
    before = taken_bytes()
    with InputNode() as x:
        node = MultiOutputNode([bind(actors[1].weigh, x[0]), bind(actors[0].ones_at_gate, 1, x[1])])
    graph = raycomm.compile(node, shm_limit_bytes=120 * _MIB)
    refs = [graph.execute(np.ones(8 * _MIB, np.uint8), gate.path) for _ in range(5)]
    gate.wait_entered()
    first = refs[0][0].get(PATIENCE_S)
    lent = graph.empty(8 * _MIB, np.uint8)
    lent[:] = 7
    opener = threading.Timer(0.2, gate.open)
    opener.start()
    graph.teardown()
    opener.join()
    assert first == 8 * _MIB
    assert (lent == 7).all()
    assert 8 * _MIB <= taken_bytes() - before < 8 * _MIB + _BOOKKEEPING
    del lent
    assert taken_bytes() - before < _BOOKKEEPING


def test_a_graph_left_by_an_interrupt(actors: list[Any]) -> None:
    before = taken_bytes()
    with pytest.raises(KeyboardInterrupt), raycomm.compile(chain(actors), shm_limit_bytes=120 * _MIB) as graph:
        refs = [graph.execute(1) for _ in range(3)]
        until(lambda: graph.status().finished == 3, "all results are there")
        raise KeyboardInterrupt
    assert taken_bytes() - before < _BOOKKEEPING
    assert not any(ref._value.__class__ is np.ndarray for ref in refs)
