"""The shared-memory channel: rings and blocks in one memfd per process and graph (drawn in `_core/layout.hpp`).

`ShmArena` is this process's memory in one graph. Set-up between any processes of one user on one machine:

    mine = ShmArena.create(process=0, rings=[...], options=...)     # in every process
    mine.attach(peer.process, peer_address)                         # for every peer, told over any secure way
    mine.join(driver)                                               # whose arena counts the memory of all
    writer = mine.writer([channel])                                 # ends of channels whose ring lies here
    reader = mine.reader(writer_process, channel, reader_index)     # ends of channels whose ring lies in a peer's arena
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raycomm.channel import memory
from raycomm.channel.base import Deadline
from raycomm.errors import ChannelError
from raycomm.options import Options

if sys.platform == "linux":
    from raycomm import _core

if TYPE_CHECKING:
    from typing import TypeAlias

ShmWriter: TypeAlias = "_core.Writer"
ShmReader: TypeAlias = "_core.Reader"

_LINE = 64
# What waiters may spend on being awake when a regular message is due: of one waiter's time, and of the time of all cores.
_DUE_SHARE = 0.1
_DUE_SHARE_OF_ALL = 0.2
# How long a park lasts before its thread looks for dead peers. A loop waits whenever its graph is idle, which must cost nothing;
# the driver only while a caller wants something, who is told of a death the sooner.
_LOOP_SLICE_MS = 200.0
_DRIVER_SLICE_MS = 20.0
_SMALLEST_SLOT = 5 * _LINE  # a failure cut to its beginning always fits without a block (`runtime.loop.brief`)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process's arena can be attached. The nonce proves that what is found there is that arena."""

    process: int
    pid: int
    fd: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class RingLayout:
    """One channel's ring: `slots` messages of up to `inline_bytes` each without a block, read by the processes `readers`."""

    channel: int
    slots: int
    inline_bytes: int
    readers: tuple[int, ...]
    allow_pickle: bool = True

    @property
    def slot_bytes(self) -> int:
        """Slot header and inline bytes, rounded up to a cache line."""
        wanted = _core.SLOT_HEADER_BYTES + self.inline_bytes
        return max(_SMALLEST_SLOT, -(-wanted // _LINE) * _LINE)


def slots_for(in_flight: int) -> int:
    """The ring length, a power of two, at which `in_flight` executions never wait for room."""
    return 1 << max(1, (in_flight - 1).bit_length())


class ShmArena:
    """This process's shared memory in one graph: owns its rings and blocks, and knows its peers'.

    Use `create`. `close` wakes every waiter of every attached process. The memory itself is unmapped when this object, its
    readers and writers, and every view of a received block are gone; views stay valid however late that is.
    """

    RECORDS = 2048  # operations the flight recorder remembers
    BLOCKS = 65536  # entries of the block table: at most so many blocks at once

    def __init__(self, core: _core.Arena, address: Address, rings: Sequence[RingLayout], limit_bytes: int) -> None:
        self.core = core
        self.limit_bytes = limit_bytes
        self.address = address
        self._rings = {ring.channel: ring for ring in rings}
        self._readers: list[ShmReader] = []  # all of them: when this process leaves, they let go of what they have not taken

    @classmethod
    def create(
        cls, process: int, rings: Sequence[RingLayout], options: Options, loops: int, *, processes: int = 0, nodes: int = 0
    ) -> ShmArena:
        """Make the arena of `process`.

        Args:
            rings: of the channels it writes.
            loops: how many processes wait at once on this machine: it decides whether spinning pays.
            processes: of the graph, in the driver's arena, which holds what they share: status board, claims, event loop waker.
            nodes: length of the process's list of actions, for which calls are counted.

        Raises:
            OSError: the memory for header and rings cannot be had.
        """
        if sys.platform != "linux":
            raise ChannelError(f"shared-memory channels need Linux (memfd, futex, pidfd); this is {sys.platform}")
        limit = options.shm_limit_bytes or memory.default_limit()
        nonce = secrets.token_bytes(16)
        throttled = memory.cpu_quota() < loops
        cores = len(os.sched_getaffinity(0))
        core = _core.Arena.create(
            process=process,
            rings=[(ring.channel, ring.slots, ring.slot_bytes, len(ring.readers)) for ring in rings],
            block_capacity=cls.BLOCKS,
            pool_bytes=limit,
            budget_bytes=limit,
            nonce=nonce,
            spin_us=0.0 if throttled else options.spin_us,
            yield_us=0.0 if throttled else options.yield_us,
            slice_ms=_DRIVER_SLICE_MS if processes else _LOOP_SLICE_MS,
            due_share=0.0 if throttled else min(_DUE_SHARE, _DUE_SHARE_OF_ALL * cores / loops),
            processes=processes,
            claims=2 * slots_for(options.max_inflight) if processes else 0,
            records=cls.RECORDS,
            nodes=nodes,
            waker=processes > 0,
        )
        return cls(core, Address(process, os.getpid(), core.fd, nonce), rings, limit)

    def attach(self, address: Address) -> None:
        """Map a peer's arena.

        Raises:
            OSError (`_core.ArenaError`): it cannot be reached through `/proc`, or is not what was announced.
        """
        self.core.attach(address.process, address.pid, address.fd, address.nonce)

    def join(self, driver: int) -> None:
        """From now on `driver`'s arena, own or attached, is the one with the budget and the board. Before any writer is made."""
        self.core.join(driver, memory.limits())

    def writer(self, channels: Sequence[int]) -> ShmWriter:
        """The writing end of one or more of this arena's rings; several are written in one step, all or none."""
        rings = [self._rings[channel] for channel in channels]
        return _core.Writer(self.core, [(ring.channel, list(ring.readers), ring.allow_pickle) for ring in rings])

    def reader(
        self,
        writer: int,
        channel: int,
        index: int,
        *,
        drain: bool,
        subject: int | None = None,
        first: bool = False,
        claims: bool = False,
        share_tensors: bool = False,
    ) -> ShmReader:
        """The reading end of a ring in `writer`'s arena, as its reader number `index`.

        Args:
            drain: after a close, first hand out what was published (the driver), instead of leaving at once (a loop).
            subject: the call that begins once a read has returned, by its place in the list of actions; shown to others.
            first: this read begins an iteration of the loop.
            claims: what is read is input: the read says that an execution has begun, or finds it cancelled.
            share_tensors: tensors stand on memory that other processes read too; the user has promised not to write to them.
        """
        policy = _core.AfterClose.DRAIN if drain else _core.AfterClose.LEAVE
        place = _core.NO_CALL if subject is None else subject
        reader = _core.Reader(
            self.core, writer, channel, index, policy, place, first=first, claims=claims, share_tensors=share_tensors
        )
        self._readers.append(reader)
        return reader

    def close(self, reason: int, process: int) -> None:
        """Close this arena and every attached one, and wake all their waiters. Idempotent: the first reason stays."""
        self.core.close(reason, process)

    def leave(self, watcher: int, limit_s: float = 0.0) -> None:
        """The last thing a process does in a graph that is closed: what it has not taken is let go of, its memory given back.

        What others still hold of it is given back when they let go. Idempotent. `_core/ending.cpp` has the whole picture.

        Args:
            watcher: the process that is told, and waits for it.
            limit_s: how long to wait for threads that are in the middle of a read. They discard the rest themselves then, and the
                process does not count as having left.
        """
        deadline = Deadline(limit_s)
        idle = self._discard_rest(deadline)
        self.core.end()
        if idle:
            self.core.set_loop_state(_core.LOOP_LEFT, watcher)
            self._discard_rest(deadline)  # published meanwhile, by who could not know that nobody reads it

    def _discard_rest(self, deadline: Deadline) -> bool:
        idle = True
        for reader in self._readers:
            try:
                reader.discard_rest(deadline.left())
            except (_core.TimedOut, _core.Misuse):
                idle = False
        return idle

    @property
    def closed(self) -> tuple[int, int]:
        """(reason, process concerned); reason 0 while open."""
        return self.core.closed
