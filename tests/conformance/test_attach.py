"""What is not the arena that was announced is refused, whatever it is; nothing is mapped, nothing crashes."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from raycomm import _core
from raycomm.channel import RingLayout
from tests.conformance.peer import Agent, peek, poke

AT = {name.split(".", 1)[1]: at for name, at in _core.layout().items() if name.startswith("ArenaHeader.")}


@pytest.fixture
def here() -> Iterator[Agent]:
    agent = Agent(1, [])
    yield agent
    agent.let_go()


@pytest.fixture
def there() -> Iterator[Agent]:
    agent = Agent(0, [RingLayout(1, 4, 1024, (1,))])
    yield agent
    agent.let_go()


def refused(here: Agent, address: Any, match: str) -> None:
    with pytest.raises(_core.ArenaError, match=match) as caught:
        here.attach([address])
    assert isinstance(caught.value, OSError)


def test_the_right_one_is_accepted(here: Agent, there: Agent) -> None:
    here.attach([there.address()])


def test_a_wrong_nonce(here: Agent, there: Agent) -> None:
    nonce = there.address().nonce
    for wrong in (bytes(16), nonce[::-1], nonce[:15] + bytes([nonce[15] ^ 1])):
        refused(here, replace(there.address(), nonce=wrong), "not reachable this way")
    for length in (0, 15, 17):
        with pytest.raises(ValueError, match="16 bytes"):
            here.attach([replace(there.address(), nonce=bytes(length))])


@pytest.fixture
def fifo() -> Iterator[int]:
    ends = os.pipe()
    yield ends[0]
    for end in ends:
        os.close(end)


def test_a_descriptor_of_another_kind(here: Agent, there: Agent, fifo: int, tmp_path: Any) -> None:
    refused(here, replace(there.address(), fd=fifo), "not reachable this way")
    refused(here, replace(there.address(), fd=987_654), "not reachable this way")
    for path in ("/dev/null", "/dev/zero", str(tmp_path)):
        fd = os.open(path, os.O_RDONLY if path == str(tmp_path) else os.O_RDWR)
        refused(here, replace(there.address(), fd=fd), "not reachable this way")
        os.close(fd)


def test_a_process_that_is_gone_or_another(here: Agent, there: Agent) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    refused(here, replace(there.address(), pid=gone.pid), "not reachable this way")
    refused(here, replace(there.address(), pid=-1), "not reachable this way")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        refused(here, replace(there.address(), pid=other.pid), "not reachable this way")
        other.communicate()


def test_files_cut_short(here: Agent, there: Agent) -> None:
    header = os.pread(there.arena.core.fd, 512, 0)
    for size in (0, 1, 16, 511, 512, 4096):
        fd = os.memfd_create("raycomm-fake", os.MFD_ALLOW_SEALING)
        os.write(fd, header[:size].ljust(size, b"\0"))
        refused(here, replace(there.address(), fd=fd), "not reachable this way" if size < 512 else "impossible header")
        os.close(fd)


def test_another_layout_version(here: Agent, there: Agent) -> None:
    poke(there.arena, AT["layout_version"], struct.pack("<I", 77))
    refused(here, there.address(), f"layout 77, this one {_core.LAYOUT_VERSION}")


@pytest.mark.parametrize("field", ["file_bytes", "rings_offset", "blocks_offset", "pool_offset"])
@pytest.mark.parametrize("value", [2**64 - 1, 2**63, 2**64 - 64, "+4096", "+1"])
def test_impossible_headers(here: Agent, there: Agent, field: str, value: Any) -> None:
    was = peek(there.arena, AT[field], "Q")
    poke(there.arena, AT[field], struct.pack("<Q", was + int(value) if isinstance(value, str) else value))
    if field == "pool_offset" and isinstance(value, str):  # blocks may begin anywhere behind their table
        here.attach([there.address()])
    elif field == "rings_offset" and isinstance(value, str):
        attach_and_open(here, there, "outside its arena|impossible header")
    else:
        refused(here, there.address(), "impossible header")


@pytest.mark.parametrize("field", ["ring_count", "block_capacity"])
def test_impossible_counts(here: Agent, there: Agent, field: str) -> None:
    poke(there.arena, AT[field], struct.pack("<I", 2**32 - 1))
    refused(here, there.address(), "impossible header")


def attach_and_open(here: Agent, there: Agent, match: str) -> None:
    with pytest.raises(_core.ArenaError, match=match):
        here.attach([there.address()])
        here.open_reader(0, 1, 0, True)


@pytest.mark.parametrize("offset", [0, 64, 512, 513, 2**64 - 1, 2**64 - 64, 2**64 - 128, 2**63, 1 << 40])
def test_a_ring_outside_the_arena(here: Agent, there: Agent, offset: int) -> None:
    poke(there.arena, _core.layout()["ArenaHeader"], struct.pack("<Q", offset))
    attach_and_open(here, there, "outside its arena")


@pytest.mark.parametrize(
    ("slots", "slot_bytes", "readers"),
    [
        (3, 1024, 1),
        (0, 1024, 1),
        (2**31, 1024, 1),
        (4, 0, 1),
        (4, 100, 1),
        (4, 2**31, 1),
        (2**16, 2**22, 1),
        (4, 1024, 0),
        (4, 1024, 257),
        (4, 1024, 2**32 - 1),
    ],
)
def test_impossible_rings(here: Agent, there: Agent, slots: int, slot_bytes: int, readers: int) -> None:
    ring = peek(there.arena, _core.layout()["ArenaHeader"], "Q")
    poke(there.arena, ring, struct.pack("<III", slots, slot_bytes, readers))
    attach_and_open(here, there, "impossible shape")


def test_wrong_ends(here: Agent, there: Agent) -> None:
    here.attach([there.address()])
    for writer, channel, index, match in (
        (0, 2, 0, "no ring for channel 2"),
        (0, 1, 1, "fewer readers"),
        (5, 1, 0, "not attached"),
    ):
        with pytest.raises(_core.ArenaError, match=match):
            here.open_reader(writer, channel, index, True)
    with pytest.raises(_core.ArenaError, match="not attached"):
        there.open_writer([1])
    there.attach([here.address()])
    there.arena.join(0)
    with pytest.raises(_core.ArenaError, match="another number of readers"):
        _core.Writer(there.arena.core, [(1, [1, 1])])
    with pytest.raises(_core.ArenaError, match="256 processes"):
        _core.Writer(there.arena.core, [(1, [256])])
    with pytest.raises(_core.ArenaError, match="at least one channel"):
        _core.Writer(there.arena.core, [])
    with pytest.raises(ValueError, match="out of range"):
        here.arena.core.attach(256, os.getpid(), there.address().fd, there.address().nonce)


def test_an_arena_cannot_be_cut_short_under_its_readers(there: Agent) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(there.arena.core.fd, 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(there.arena.core.fd, 1 << 40)
    with mmap.mmap(there.arena.core.fd, 4096) as view:
        assert view[:8] == b"RAYCOMM1"
