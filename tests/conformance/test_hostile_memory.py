"""Shared memory that somebody scribbled over: the reader decodes or raises SerializationError, frees the slot, and goes on.

Runs in a process of its own, so that a crash is a failed test; by hand:
`python -m tests.conformance.test_hostile_memory SEED ROUNDS`.
"""

from __future__ import annotations

import gc
import random
import struct
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from raycomm import _core
from raycomm.errors import SerializationError
from tests.conformance.net import Net
from tests.conformance.peer import GUARD_S, ROOT, Agent, peek, poke
from tests.unit.test_codec_malformed import touch

SLOTS, INLINE = 4, 1024
LAYOUT = _core.layout()
WORDS = (0, 1, 2, 3, 31, 64, 32768, 2**16, 2**31, 2**32 - 1)


def values(rng: random.Random) -> list[Any]:
    return [
        *([1, "two", 3.0], b"x" * rng.randrange(900), b"y" * 5000, {"k": np.arange(5), "t": torch.arange(3)}),
        *(
            np.arange(10_000),
            torch.arange(20_000.0),
            [np.arange(9000), torch.arange(9000), np.arange(40)],
            [np.zeros(0), torch.zeros(0)],
        ),
    ]


def spots(writer: Agent, number: int) -> dict[str, tuple[int, int]]:
    """Where the parts of message `number` lie in the arena, and how long they are."""
    ring = peek(writer.arena, LAYOUT["ArenaHeader"], "Q")
    slot_bytes = peek(writer.arena, ring + 4, "I")
    slot = ring + LAYOUT["RingHeader"] + LAYOUT["Cursor"] + number % SLOTS * slot_bytes
    blocks = peek(writer.arena, LAYOUT["ArenaHeader.blocks_offset"], "Q")
    header, entry = LAYOUT["SlotHeader"], LAYOUT["BufferEntry"]
    found = {"slot header": (slot, header), "inline frame": (slot + header, 128)}
    payload, buffers = peek(writer.arena, slot + 8, "Q"), peek(writer.arena, slot + 16, "I")
    frame_block = peek(writer.arena, slot + 20, "I")
    frame = slot + header
    if frame_block != 2**32 - 1:
        frame = peek(writer.arena, blocks + frame_block * LAYOUT["BlockHeader"] + 48, "Q")
        pool, end = (
            peek(writer.arena, LAYOUT["ArenaHeader.pool_offset"], "Q"),
            peek(writer.arena, LAYOUT["ArenaHeader.file_bytes"], "Q"),
        )
        if not pool <= frame < end - 8192:  # the table was damaged earlier
            return found
        found["frame in a block"] = frame, 128
    if buffers:
        found["buffer entries"] = frame + (payload + 7 & ~7), buffers * entry
    found["block headers"] = blocks, 8 * LAYOUT["BlockHeader"]
    return found


def scribble(writer: Agent, at: int, length: int, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 4))):
        width = rng.choice((1, 4, 4, 8))
        place = at + rng.randrange(max(1, length - width + 1)) // width * width
        if width == 1:
            data = bytes((peek(writer.arena, place, "B") ^ 1 << rng.randrange(8),))
        else:
            data = struct.pack("<Q", rng.choice((*WORDS, rng.getrandbits(64), 2**63, 2**64 - 1)))[:width]
        poke(writer.arena, place, data)


def round_of(rng: random.Random, seen: Counter[str]) -> None:
    """One graph: damaged messages among whole ones. Graphs are short, because a damaged block table stays damaged."""
    net = Net([Agent], slots=SLOTS, inline=INLINE)
    number = 0
    for _ in range(4):
        net.writer.write(rng.choice(values(rng)))
        where, (at, length) = rng.choice(list(spots(net.writer, number).items()))
        scribble(net.writer, at, length, rng)
        try:
            touch(net.reader.read(GUARD_S))
            seen[f"{where}: decoded"] += 1
        except SerializationError:
            seen[f"{where}: refused"] += 1
        number += 1
        assert net.reader.taken() == number
        net.writer.write(["whole", number], GUARD_S)  # no block: it must come, whatever happened to the block table
        assert net.reader.read(GUARD_S) == ["whole", number]
        number += 1


def scribble_over(seed: int, rounds: int) -> Counter[str]:
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    for _ in range(rounds):
        round_of(rng, seen)
    gc.collect()
    return seen


def run(seed: int, rounds: int) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.conformance.test_hostile_memory", str(seed), str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100 + rounds, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for where in ("slot header", "buffer entries", "block headers"):
        for outcome in ("decoded", "refused"):
            assert f"{where}: {outcome}" in done.stdout


def test_scribbled_memory(seed: int) -> None:
    run(seed, 600)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scribbled_memory_for_long(seed: int) -> None:
    run(seed, 20_000)


def test_an_impossible_cursor_of_a_reader_is_not_trusted() -> None:
    net = Net([Agent], slots=SLOTS)
    ring = peek(net.writer.arena, LAYOUT["ArenaHeader"], "Q")
    poke(net.writer.arena, ring + LAYOUT["RingHeader"], struct.pack("<Q", 2**63))
    for number in range(SLOTS):
        net.writer.write(number, 0)
    poke(net.writer.arena, ring + LAYOUT["RingHeader"], struct.pack("<Q", 0))
    with pytest.raises(_core.TimedOut):
        net.writer.write(SLOTS, 0)


if __name__ == "__main__":
    for what, count in sorted(scribble_over(int(sys.argv[1]), int(sys.argv[2])).items()):
        print(count, what)
