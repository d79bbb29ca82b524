"""Shared memory goes back to the system when a graph ends, though its object, refs and some of its values are kept."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import raycomm
from raycomm import ActorDiedError, ChannelClosedError, InputNode, MultiOutputNode, _core, bind
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


def test_teardown_that_is_interrupted(actors: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    before = taken_bytes()
    graph = raycomm.compile(chain(actors), shm_limit_bytes=120 * _MIB)
    for _ in range(3):
        graph.execute(1)
    until(lambda: graph.status().finished == 3, "all results are there")
    monkeypatch.setattr(graph._teardown, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        graph.teardown()
    # The actors were not waited for: each gives back what is its own when it leaves, a moment later.
    until(lambda: taken_bytes() - before < _BOOKKEEPING, "the memory goes back")


def test_teardown_while_an_actor_is_late(actors: list[Any], gate: Gate) -> None:
    """Of what nobody holds the memory goes back at once; the rest when the actor leaves, unread input and its result included."""
    before = taken_bytes()
    with InputNode() as x:
        node = MultiOutputNode([bind(actors[1].weigh, x[0]), bind(actors[0].ones_at_gate, 16, x[1])])
    graph = raycomm.compile(node, shm_limit_bytes=200 * _MIB)
    refs = [graph.execute(np.ones(8 * _MIB, np.uint8), gate.path) for _ in range(5)]
    gate.wait_entered()
    until(lambda: refs[-1][0].done(), "the other actor is done with all of it")
    assert graph.stats().pools[0].committed_bytes >= 8 * _MIB
    graph.teardown(timeout=0)
    assert taken_bytes() - before < _BOOKKEEPING
    gate.open()
    until(lambda: graph._arena.core.loop_state(1) == _core.LOOP_LEFT == graph._arena.core.loop_state(2), "both have left")
    until(lambda: taken_bytes() - before < _BOOKKEEPING, "the late actor's memory goes back")


def test_input_of_an_actor_whose_method_ends_the_graph(cluster: None, gate: Gate) -> None:
    leaver = Sized.remote()
    before = taken_bytes()
    with InputNode() as x:
        node = bind(leaver.weigh_and_die, x[0], x[1], "sys.exit", gate.path)
    graph = raycomm.compile(node, shm_limit_bytes=120 * _MIB)
    refs = [graph.execute(np.ones(8 * _MIB, np.uint8), number) for number in range(4)]
    gate.open()
    with pytest.raises(ActorDiedError):
        refs[-1].get(PATIENCE_S)
    graph.teardown()
    assert taken_bytes() - before < _BOOKKEEPING


@pytest.mark.parametrize("victim", [0, 1])
def test_an_actor_that_was_killed(cluster: None, gate: Gate, victim: int) -> None:
    """What it held of others, what others held of it, and what was free in its own memory."""
    actors = [Sized.remote() for _ in range(2)]
    pids = ray.get([actor.pid.remote() for actor in actors])
    before = taken_bytes()
    with InputNode() as x:
        made = bind(actors[0].ones_at_gate, 16, x[0])
        node = MultiOutputNode([made, bind(actors[1].weigh_at_gate, made, x[1], x[2])])
    graph = raycomm.compile(node, shm_limit_bytes=200 * _MIB)
    big = np.ones(8 * _MIB, np.uint8)
    view = graph.execute("", big, "")[0].get(PATIENCE_S)
    for _ in range(3):
        graph.execute(gate.path if victim == 0 else "", big, gate.path if victim == 1 else "")
    gate.wait_entered()
    os.kill(pids[victim], signal.SIGKILL)
    graph.teardown()
    assert 16 * _MIB <= taken_bytes() - before < 16 * _MIB + _BOOKKEEPING
    assert (view == 1).all()
    del view
    assert taken_bytes() - before < _BOOKKEEPING


def test_parts_of_a_collective_that_were_not_taken(actors: list[Any], gate: Gate) -> None:
    before = taken_bytes()
    with InputNode() as x:
        parts = [bind(actor.ones_at_gate, 8, x[place]) for place, actor in enumerate(actors)]
        node = MultiOutputNode(raycomm.allreduce(parts))
    graph = raycomm.compile(node, shm_limit_bytes=120 * _MIB)
    graph.execute("", gate.path)
    gate.wait_entered()
    until(lambda: graph.stats().pools[1].committed_bytes >= 8 * _MIB, "the first rank has sent its part")
    opener = threading.Timer(0.2, gate.open)
    opener.start()
    graph.teardown()
    opener.join()
    assert taken_bytes() - before < _BOOKKEEPING
