"""What becomes of shared memory when processes leave a graph or die in it: it goes back, but for what is still looked at."""

from __future__ import annotations

import os
import signal
import struct
import threading
from typing import Any

import numpy as np
import pytest

from raycomm import _core
from raycomm.channel import RingLayout, ShmArena
from raycomm.options import Options
from tests.conformance.net import Net
from tests.conformance.peer import GUARD_S, Agent, Remote, peek, poke

MIB = 1 << 20
LAYOUT = _core.layout()
_GIVEN_BACK = 44  # where it lies in a BlockHeader


class Pair:
    """A driver that writes and another process of the graph that reads, both here."""

    def __init__(self, slots: int = 8, drain: bool = False) -> None:
        options = Options(shm_limit_bytes=64 * MIB)
        self.writer_arena = ShmArena.create(0, [RingLayout(0, slots, 256, (1,))], options, loops=2)
        self.reader_arena = ShmArena.create(1, [], options, loops=2)
        self.writer_arena.attach(self.reader_arena.address)
        self.reader_arena.attach(self.writer_arena.address)
        self.writer_arena.join(0)
        self.reader_arena.join(0)
        self.writer = self.writer_arena.writer([0])
        self.reader = self.reader_arena.reader(0, 0, 0, drain=drain)

    def send(self, *fills: int) -> None:
        for fill in fills:
            self.writer.write(np.full(MIB, fill, np.uint8), 0)

    def close(self) -> None:
        self.writer_arena.close(_core.CLOSED_TEARDOWN, 0)


def taken_bytes(arena: ShmArena) -> int:
    """Memory behind the pool of an arena: as the system counts it, and as the arena does."""
    pool = peek(arena, LAYOUT["ArenaHeader.pool_offset"], "Q")
    descriptor = arena.core.fd
    size = os.fstat(descriptor).st_size
    taken, at = 0, pool
    while at < size:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError:
            break
        hole = os.lseek(descriptor, at, os.SEEK_HOLE)
        taken += hole - at
        at = hole
    assert arena.core.committed(arena.address.process) == taken
    return taken


@pytest.mark.parametrize("first", ["reader", "writer"])
def test_what_was_not_taken_goes_whoever_leaves_first(first: str) -> None:
    pair = Pair()
    pair.send(1, 2, 3)
    pair.close()
    arenas = [pair.reader_arena, pair.writer_arena]
    for arena in arenas if first == "reader" else reversed(arenas):
        arena.leave(0)
    assert taken_bytes(pair.writer_arena) == 0


def test_every_reader_of_an_arena_lets_go() -> None:
    pair = Pair()
    pair.send(1)
    pair.reader = None  # type: ignore[assignment]  # whoever made it has forgotten it
    pair.close()
    pair.reader_arena.leave(0)
    pair.writer_arena.leave(0)
    assert taken_bytes(pair.writer_arena) == 0


def test_views_stay_whole_and_go_with_their_last_one() -> None:
    pair = Pair()
    pair.send(1, 2, 3)
    views = [pair.reader.read(0), pair.reader.read(0)]
    pair.close()
    pair.reader_arena.leave(0)
    pair.writer_arena.leave(0)
    assert [int(view.min()) for view in views] == [int(view.max()) for view in views] == [1, 2]
    assert taken_bytes(pair.writer_arena) == 2 * MIB
    part = views.pop()[5:10]
    views.clear()
    assert taken_bytes(pair.writer_arena) == MIB
    assert part.tolist() == [2] * 5
    del part
    assert taken_bytes(pair.writer_arena) == 0


def test_published_after_its_reader_has_left() -> None:
    """Of what was taken nothing is let go of for it: it may have handed out views."""
    pair = Pair()
    pair.send(1, 2)
    view = pair.reader.read(0)
    pair.reader_arena.leave(0)
    pair.send(3, 4)
    pair.close()
    pair.writer_arena.leave(0)
    assert taken_bytes(pair.writer_arena) == MIB
    assert (view == 1).all()
    del view
    assert taken_bytes(pair.writer_arena) == 0


@pytest.mark.parametrize("reader_left", [True, False])
def test_published_after_its_writer_has_ended(reader_left: bool) -> None:
    """By another thread of the driver, which has the memory already."""
    pair = Pair()
    lent = np.frombuffer(pair.writer_arena.core.lend(MIB), np.uint8)
    lent[:] = 7
    if reader_left:
        pair.reader_arena.leave(0)
    pair.writer_arena.core.end()
    pair.writer.write(lent, 0)
    pair.close()
    pair.reader_arena.leave(0)
    assert taken_bytes(pair.writer_arena) == MIB
    assert (lent == 7).all()
    del lent
    assert taken_bytes(pair.writer_arena) == 0


def test_nothing_is_acquired_from_a_pool_that_has_ended() -> None:
    pair = Pair()
    pair.send(1)
    pair.reader.skip(0)
    pair.close()
    pair.writer_arena.leave(0)
    for acquire in (lambda: pair.send(2), lambda: pair.writer_arena.core.lend(MIB)):
        with pytest.raises(_core.Closed):
            acquire()
    assert taken_bytes(pair.writer_arena) == 0


class Slow:
    """A value whose decoding calls back."""

    during: Any = None

    def __init__(self, during: Any) -> None:
        Slow.during = during

    def __reduce__(self) -> Any:
        return Slow.decode, ()

    @staticmethod
    def decode() -> str:
        Slow.during, during = None, Slow.during
        during()
        return "decoded"


def fetch(pair: Pair, results: dict[int, Any], index: int) -> None:
    pair.reader.fetch(None, results, set(), index, 10, GUARD_S)


def test_another_thread_is_in_the_middle_of_a_fetch() -> None:
    """It discards the rest at the end of its turn; what it reads meanwhile is whole."""
    pair = Pair(drain=True)
    entered, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert go_on.wait(GUARD_S)

    pair.writer.write([Slow(hold), np.full(MIB, 5, np.uint8)], 0)
    pair.send(1, 2)
    results: dict[int, Any] = {}
    thread = threading.Thread(target=fetch, args=(pair, results, 0))
    thread.start()
    try:
        assert entered.wait(GUARD_S)
        pair.close()
        pair.reader_arena.leave(0, 0.01)
        pair.writer_arena.leave(0)
        assert taken_bytes(pair.writer_arena) == 3 * MIB
    finally:
        go_on.set()
        thread.join()
    assert results == {}
    assert taken_bytes(pair.writer_arena) == 0
    with pytest.raises(_core.Closed):
        fetch(pair, results, 4)


def test_this_thread_is_in_the_middle_of_a_fetch() -> None:
    """The end comes in a signal handler, a finalizer or a reducer."""
    pair = Pair(drain=True)

    def end() -> None:
        pair.close()
        pair.reader_arena.leave(0, 0.01)
        pair.writer_arena.leave(0)

    pair.writer.write(Slow(end), 0)
    pair.send(1, 2)
    results: dict[int, Any] = {}
    fetch(pair, results, 0)
    assert results == {}
    assert taken_bytes(pair.writer_arena) == 0


def test_a_drained_reader_hands_out_nothing_after_it_has_left() -> None:
    pair = Pair(drain=True)
    pair.send(1)
    pair.reader_arena.close(_core.CLOSED_TEARDOWN, 0)
    assert pair.reader.read(0)[0] == 1
    pair.reader_arena.leave(0)
    with pytest.raises(_core.Closed):
        pair.reader.read(0)


@pytest.mark.parametrize("mark", [1, 2, 3])
def test_a_mark_that_a_mad_reader_sets_is_not_believed(mark: int) -> None:
    pair = Pair()
    core = pair.writer_arena.core
    pair.send(1)
    view = pair.reader.read(0)
    table = peek(pair.writer_arena, LAYOUT["ArenaHeader.blocks_offset"], "Q")
    poke(pair.writer_arena, table + _GIVEN_BACK, struct.pack("<I", mark))
    del view
    before = core.budget_used, core.pool_committed, core.committed(0)
    pair.send(2)
    assert (core.budget_used, core.pool_committed, core.committed(0)) == before
    assert (pair.reader.read(0) == 2).all()
    pair.send(3)
    view = pair.reader.read(0)
    pair.close()
    pair.writer_arena.leave(0)
    assert (view == 3).all()
    del view
    assert taken_bytes(pair.writer_arena) == 0


@pytest.mark.parametrize("takes", [0, 2])
def test_the_holds_of_the_dead(takes: int) -> None:
    """Taken or not; what somebody else holds stays whole."""
    victim = Remote()
    try:
        net = Net([Agent, victim.become], drain=True)
        for number in range(3):
            net.writer.write(np.full(MIB, number, np.uint8))
        net.readers[1].keep(takes) if takes else None
        view = net.reader.read()
        victim.popen.send_signal(signal.SIGKILL)
        victim.popen.wait()
        assert net.writer.arena.core.look_for_dead()
        net.reader.arena.leave(0)
        net.writer.arena.leave(0)
        assert taken_bytes(net.writer.arena) == MIB
        assert (view == 0).all()
        del view
        assert taken_bytes(net.writer.arena) == 0
    finally:
        victim.stop()
