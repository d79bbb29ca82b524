"""Lent memory: sent as it is, once and whole; otherwise copied; and never another value than was written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from raycomm import _core
from raycomm.channel import RingLayout, ShmArena
from raycomm.errors import SerializationError
from raycomm.options import Options

KIB = 1 << 10
MIB = 1 << 20
SIZE = 256 * KIB  # a size of which blocks are made, so that a lent one takes just that


class Opaque:
    """Cannot be sent."""

    def __reduce__(self) -> Any:
        raise TypeError("an Opaque stays where it is")


class Interrupts:
    """Ends its sending as Ctrl-C does."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class Pair:
    """Process 0 lends and writes on two channels, process 1 reads both; both are this process."""

    def __init__(self, limit: int = 64 * MIB, slots: int = 4) -> None:
        options = Options(shm_limit_bytes=limit)
        self.arena = ShmArena.create(0, [RingLayout(channel, slots, 512, (1,)) for channel in (0, 1, 2)], options, loops=2)
        self.reading = ShmArena.create(1, [], options, loops=2)
        self.arena.attach(self.reading.address)
        self.reading.attach(self.arena.address)
        self.arena.join(0)
        self.core = self.arena.core
        self.writer = self.arena.writer([0])
        self.both = self.arena.writer([1, 2])
        self.reader, *self.readers = (self.reading.reader(0, channel, 0, drain=True) for channel in (0, 1, 2))

    @property
    def in_use(self) -> int:
        return self.core.pool_in_use

    def lend(self, size: int = SIZE, fill: int = 1) -> np.ndarray:
        array = np.frombuffer(memoryview(self.core.lend(size)), np.uint8)
        array[:] = fill
        return array

    def send(self, value: Any) -> Any:
        self.writer.write(value, 5)
        return self.reader.read(5)

    def sends_as_it_is(self, array: np.ndarray) -> bool:
        """Sends a lent array of which the reader holds nothing, and tells whether what arrives is the very memory."""
        before = self.in_use
        received = self.send(array)
        assert received.tobytes() == array.tobytes()
        same = same_memory(array, received)
        assert self.in_use == before + (0 if same else -(-array.nbytes // SIZE) * SIZE)
        return same


def same_memory(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether a write to the first byte of `ours` is seen in `theirs`: they are two mappings, so addresses do not tell."""
    first = (0,) * theirs.ndim
    old, seen = int(ours[0]), theirs[first].tobytes()
    ours[0] = old ^ 1
    changed = theirs[first].tobytes() != seen
    ours[0] = old
    return changed


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    in_use = pair.in_use
    pair.__dict__.clear()  # pytest holds the pair longer than the look for leaks allows
    assert in_use == 0, "blocks stay in use although nobody has a view"


def test_a_whole_one_is_sent_as_it_is(pair: Pair) -> None:
    array = pair.lend()
    assert pair.in_use == SIZE
    assert pair.core.held_blocks(0) == (SIZE, {0: SIZE})
    received = pair.send(array)
    assert same_memory(array, received)
    assert pair.in_use == SIZE
    assert pair.core.held_blocks(0) == (SIZE, {0: SIZE, 1: SIZE})
    del array
    assert pair.core.held_blocks(0) == (SIZE, {1: SIZE})
    assert (received == 1).all()
    assert pair.in_use == SIZE


@pytest.mark.parametrize("look", ["float64", "shape", "turned", "tensor", "turned tensor", "in a dict", "not quite a block"])
def test_a_whole_one_in_another_dress(pair: Pair, look: str) -> None:
    size = SIZE - 8 if look == "not quite a block" else SIZE
    array = pair.lend(size)
    array[:] = np.arange(size) % 251
    value: Any = {
        "float64": lambda: array.view(np.float64),
        "shape": lambda: array.reshape(4, 2, -1),
        "turned": lambda: array.reshape(512, 512).T,
        "tensor": lambda: torch.from_numpy(array).view(torch.int32),
        "turned tensor": lambda: torch.from_numpy(array).view(512, 512).T,
        "in a dict": lambda: {"a": [1, array]},
    }.get(look, lambda: array)()
    sent = array if look == "in a dict" else value
    received = pair.send(value)
    if look == "in a dict":
        received = received["a"][1]
    elif "tensor" in look:
        assert (received.dtype, received.shape) == (value.dtype, value.shape)
        received = received.numpy()
    else:
        assert (received.dtype, received.shape) == (value.dtype, value.shape)
    assert same_memory(array, received)
    assert pair.in_use == SIZE
    assert received.tobytes() == np.asarray(sent).tobytes()


PARTS: dict[str, Any] = {
    "prefix": lambda a: a[: SIZE // 2],
    "all but the last byte": lambda a: a[:-1],
    "end": lambda a: a[SIZE // 2 :],
    "middle": lambda a: a[64 * KIB : 192 * KIB],
    "every other": lambda a: a[::2],
    "backwards": lambda a: a[::-1],
    "columns": lambda a: a.reshape(512, 512)[:, :256],
    "tensor prefix": lambda a: torch.from_numpy(a)[: SIZE // 2],
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_copied_and_the_whole_may_come_yet(pair: Pair, part: str) -> None:
    array = pair.lend()
    array[:] = np.arange(SIZE) % 251
    value = PARTS[part](array)
    received = np.asarray(pair.send(value))
    assert pair.in_use > SIZE
    expected = np.asarray(value).copy()
    array[:] = 0
    assert received.shape == expected.shape
    assert (received == expected).all()
    del received
    assert pair.in_use == SIZE
    assert pair.sends_as_it_is(array)


def test_a_small_one_is_copied(pair: Pair) -> None:
    array = pair.lend(1000)
    received = pair.send(array)
    assert not same_memory(array, received)
    assert (received == 1).all()


def test_a_second_send_is_copied(pair: Pair) -> None:
    array = pair.lend()
    first = pair.send(array)
    array[:] = 2  # the first receiver sees it, and the second gets it
    second, third = pair.send(array), pair.send(array.view(np.int64))
    assert pair.in_use == 3 * SIZE
    assert same_memory(array, first)
    assert not same_memory(array, second)
    array[:] = 3
    assert (int(first[0]), int(second[0]), int(second[-1])) == (3, 2, 2)
    assert (third.view(np.uint8) == 2).all()
    del first
    assert pair.in_use == 3 * SIZE, "the writer still has a view of the lent one"
    assert not pair.sends_as_it_is(array), "its receiver is gone, but it was sent"


def test_the_same_one_twice_in_a_message(pair: Pair) -> None:
    array = pair.lend()
    one, two = pair.send([array, array])
    assert one is two
    assert same_memory(array, one)
    assert pair.in_use == SIZE
    other = pair.lend(fill=5)
    one, two, part = pair.send((other, other[:], other[: 64 * KIB]))
    assert [same_memory(other, view) for view in (one, two, part)] == [True, False, False]
    other[:] = 6
    assert [int(view[-1]) for view in (one, two, part)] == [6, 5, 5]


def test_on_two_channels_of_one_writer(pair: Pair) -> None:
    """One of the two gets the memory itself, the other a copy; a change after the send shows in one only."""
    array = pair.lend(fill=7)
    pair.both.write_all((array, array), 5)
    first, second = (reader.read(5) for reader in pair.readers)
    assert pair.in_use == 2 * SIZE
    assert (first == 7).all()
    assert (second == 7).all()
    assert sorted(same_memory(array, view) for view in (first, second)) == [False, True]
    array[:] = 8
    assert sorted((int(first[9]), int(second[9]))) == [7, 8]
    del array, first
    assert (second % 7 <= 1).all()


def test_two_lent_ones_on_two_channels(pair: Pair) -> None:
    arrays = pair.lend(fill=3), pair.lend(fill=4)
    pair.both.write_all(arrays, 5)
    received = [reader.read(5) for reader in pair.readers]
    assert [same_memory(*both) for both in zip(arrays, received, strict=True)] == [True, True]
    assert pair.in_use == 2 * SIZE


def test_a_failed_write_leaves_it_lent(pair: Pair) -> None:
    array = pair.lend(fill=9)
    for companion, error in ((Opaque(), SerializationError), (Interrupts(), KeyboardInterrupt)):
        for value in ([array, companion], [companion, array]):
            with pytest.raises(error):
                pair.writer.write(value, 5)
            with pytest.raises(error):
                pair.both.write_all((array, companion), 5)
    assert pair.in_use == SIZE
    assert pair.sends_as_it_is(array)
    assert pair.writer.published == 1
    assert pair.both.published == 0


def test_a_write_without_memory_leaves_it_lent() -> None:
    pair = Pair(limit=2 * MIB)
    array = pair.lend(MIB, fill=9)
    pinned = pair.send(np.full(768 * KIB, 1, np.uint8))
    large = np.ones(512 * KIB, np.uint8)
    for value in ([array, large], [large, array], [array, array[1:]]):
        with pytest.raises(_core.PoolFull):
            pair.writer.write(value, 5)
        with pytest.raises(_core.PoolFull):
            pair.both.write_all((array, value), 5)
    with pytest.raises(_core.PoolFull):
        pair.both.write_all((array, array), 5)  # of two channels one would need a copy
    assert (pinned == 1).all()
    assert pair.in_use == MIB + 768 * KIB
    assert pair.sends_as_it_is(array)
    del array, pinned, value
    assert pair.in_use == 0
    assert (pair.send(np.full(2 * MIB, 2, np.uint8)) == 2).all()


def test_a_write_without_room_leaves_it_lent(pair: Pair) -> None:
    array = pair.lend(fill=9)
    for number in range(4):
        pair.writer.write(number, 5)
    for limit in (0, 0.05):
        with pytest.raises(_core.TimedOut):
            pair.writer.write(array, limit)
    assert [pair.reader.read(5) for _ in range(4)] == [0, 1, 2, 3]
    assert pair.sends_as_it_is(array)


@pytest.mark.parametrize("first", ["writer", "reader"])
def test_memory_goes_back_when_neither_side_has_a_view(pair: Pair, first: str) -> None:
    array = pair.lend()
    received = pair.send(array)
    part = received[100:200]
    if first == "writer":
        del array, received
        assert pair.in_use == SIZE
        assert (part == 1).all()
    else:
        del received, part
        assert pair.in_use == SIZE
        assert (array == 1).all()


def test_a_message_that_is_not_taken_holds_it(pair: Pair) -> None:
    array = pair.lend()
    pair.writer.write(array, 5)
    del array
    assert pair.in_use == SIZE
    pair.reader.skip(5)
    assert pair.in_use == 0


def test_lent_and_never_sent(pair: Pair) -> None:
    for fill in range(50):
        array = pair.lend(8 * MIB, fill)
        part = array[5:]
        del array
        assert pair.in_use == 8 * MIB
        assert part[-1] == fill
        del part
        assert pair.in_use == 0
    assert pair.core.budget_used <= 8 * MIB, "each was a new block"


def test_the_limit_holds_for_lent_memory() -> None:
    pair = Pair(limit=4 * MIB)
    arrays = [pair.lend(MIB, fill) for fill in range(4)]
    with pytest.raises(_core.PoolFull) as caught:
        pair.core.lend(MIB, 5.0)
    assert caught.value.args[4] == {0: 4 * MIB}
    assert caught.value.args[5] == _core.SHORTAGE_PINNED
    received = [pair.send(array) for array in arrays]
    assert [int(view[77]) for view in received] == [0, 1, 2, 3]
    arrays.clear()
    with pytest.raises(_core.PoolFull):
        pair.core.lend(MIB, 5.0)
    received.pop()
    assert pair.lend(MIB, 9).sum() == 9 * MIB


def test_a_block_that_was_lent_before_carries_ordinary_messages(pair: Pair) -> None:
    """Where a lent block lay another begins: a message from there is a copy, or a new loan, never the old one's."""
    array = pair.lend(MIB, 1)
    del array
    small = pair.lend(64 * KIB, 2)  # at the same place
    held = [pair.send(np.full(MIB, 3, np.uint8)) for _ in range(2)]
    assert pair.sends_as_it_is(small)
    assert all((view == 3).all() for view in held)


@pytest.mark.parametrize("limit", [6 * MIB, 64 * MIB], ids=["little memory", "much memory"])
def test_random_loans_sends_and_holds_are_never_torn(rng: random.Random, limit: int) -> None:
    """What is lent is written to before it is sent only, so each view keeps the value it had; kept ones are looked at again."""
    pair = Pair(limit)
    lent: list[tuple[np.ndarray, int]] = []  # not sent whole yet, with its fill
    held: list[tuple[Any, int]] = []
    refused = sent = parts = 0
    for number in range(2500):
        fill, size = number % 251, int(2 ** rng.uniform(14.5, 20))
        step = rng.random()
        try:
            if step < 0.3:
                lent.append((pair.lend(size, fill), fill))
            elif step < 0.55 and lent:
                place = rng.randrange(len(lent))
                array, fill = lent[place]
                held.append((pair.send(array), fill))
                sent += 1
                lent.pop(place)
                if rng.random() < 0.3:
                    held.append((array, fill))  # the writer keeps it too, and sends it again
                    held.append((pair.send(array), fill))
            elif step < 0.65 and lent:
                array, fill = rng.choice(lent)
                begin = rng.randrange(array.size)
                held.append((pair.send(array[begin : begin + rng.randint(1, array.size)]), fill))
                parts += 1
            elif step < 0.75 and lent:
                array, fill = lent.pop(rng.randrange(len(lent)))
                array[:] = fill = (fill + 100) % 251
                held += [(view, fill) for view in pair.send([array, array[: array.size // 2], array])]
            elif step < 0.8 and lent:
                lent.pop(rng.randrange(len(lent)))  # never sent
            else:
                held.append((pair.send(np.full(size, fill, np.uint8)), fill))
        except _core.PoolFull:
            refused += 1
        for kept in (lent, held):
            while len(kept) > 8 or (kept and rng.random() < 0.15):
                array, fill = kept.pop(rng.randrange(len(kept)))
                assert (array == fill).all(), number
        for array, fill in rng.sample(held, min(2, len(held))):
            assert (array == fill).all(), number
        array = None
    assert all((array == fill).all() for array, fill in lent + held)
    assert min(sent, parts) > 50
    assert (refused > 0) is (limit < 10 * MIB)
    del array
    lent.clear()
    held.clear()
    assert pair.in_use == 0
    assert pair.core.budget_used <= limit
