"""The block pool at its limit: what is free can be used, in whatever sizes it was used before."""

from __future__ import annotations

import random

import numpy as np
import pytest

from raycomm import _core
from raycomm.channel import RingLayout, ShmArena
from raycomm.options import Options

MIB = 1 << 20
SLOTS = 128


class Pair:
    """Writer and reader in one process, with a pool of `limit` bytes."""

    def __init__(self, limit: int) -> None:
        options = Options(shm_limit_bytes=limit)
        self.writer_arena = ShmArena.create(0, [RingLayout(0, SLOTS, 256, (1,))], options, loops=2)
        self.reader_arena = ShmArena.create(1, [], options, loops=2)
        self.writer_arena.attach(self.reader_arena.address)
        self.reader_arena.attach(self.writer_arena.address)
        self.writer_arena.join(0)
        self.writer = self.writer_arena.writer([0])
        self.reader = self.reader_arena.reader(0, 0, 0, drain=True)

    def send(self, size: int, fill: int = 0) -> np.ndarray:
        """One array there; the view that arrives holds its block."""
        self.writer.write(np.full(size, fill, np.uint8), 0)
        array = self.reader.read(0)
        assert isinstance(array, np.ndarray)
        return array


def fill_up(pair: Pair, size: int) -> list[np.ndarray]:
    views = []
    try:
        while True:
            views.append(pair.send(size, len(views) % 251))
    except _core.PoolFull:
        return views


@pytest.mark.parametrize("size", [40_000, 100_000, 300_000, MIB])
def test_a_full_pool_that_was_let_go_takes_any_size(size: int) -> None:
    pair = Pair(4 * MIB)
    views = fill_up(pair, size)
    assert len(views) >= 4 * MIB * 0.7 / max(size, 40_960)
    views.clear()
    assert pair.writer_arena.core.pool_in_use == 0
    for wanted in (MIB, 3 * MIB, 33_000, 2 * MIB, 4 * MIB - 65_536):
        array = pair.send(wanted, 7)
        assert array.size == wanted
        assert (array == 7).all()
        del array


def test_neighbours_are_joined_around_what_is_held() -> None:
    pair = Pair(4 * MIB)
    views = fill_up(pair, 100_000)
    kept = views[len(views) // 2]
    number = len(views) // 2 % 251
    del views
    assert (pair.send(3 * MIB // 2, 9) == 9).all()
    with pytest.raises(_core.PoolFull) as caught:
        pair.send(3 * MIB)
    wanted, free, limit, errno, holders, shortage, others = caught.value.args
    assert (wanted, limit, errno, shortage, others) == (3 * MIB, 4 * MIB, 0, _core.SHORTAGE_PINNED, 0)
    assert free < 4 * MIB
    assert set(holders) == {1}
    assert (kept == number).all()


def test_random_sizes_and_holds_never_mix_bytes(rng: random.Random) -> None:
    pair = Pair(8 * MIB)
    held: list[tuple[np.ndarray, int, int]] = []
    full = 0
    for number in range(3000):
        size = int(2 ** rng.uniform(15, 21.5))
        try:
            held.append((pair.send(size, number % 251), size, number % 251))
        except _core.PoolFull:
            full += 1
            assert held, "full although nothing is held"
        while held and (len(held) > 12 or rng.random() < 0.3):
            array, length, fill = held.pop(rng.randrange(len(held)))
            assert array.size == length
            assert (array == fill).all()
    assert full, "the pool never filled: the test shows nothing"
    held.clear()
    del array
    assert pair.writer_arena.core.pool_in_use == 0
    assert pair.send(7 * MIB, 1).all()


def test_a_small_value_does_not_take_a_large_block_whole() -> None:
    pair = Pair(16 * MIB)
    array = pair.send(15 * MIB, 1)
    del array
    held = [pair.send(64 << 10, number) for number in range(100)]
    assert pair.writer_arena.core.pool_in_use < 8 * MIB
    assert [int(array[0]) for array in held] == list(range(100))
