"""The floor: raycomm's native core between plain processes, without Ray and without a graph.

The partner processes are this module run as a program, told what to do on their command line and standard input.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from raycomm import _core
from raycomm.channel import Address, RingLayout, ShmArena
from raycomm.options import Options

LIMIT_S = 30.0  # of any single wait: a partner that has died ends the row with an error
PAYLOAD_8B = bytes(range(8))


def samples_ns(row: str, count: int) -> Sequence[int]:
    """Nanoseconds of `count` round trips of a native row."""
    if row == "floor_pingpong":
        return pingpong(2, count)
    if row == "floor_chain5":
        return pingpong(5, count)
    if row == "channel_pingpong_8B":
        return channel_pingpong(PAYLOAD_8B, count)
    raise ValueError(f"not a native row: {row!r}")


def pingpong(processes: int, count: int) -> Sequence[int]:
    """Nanoseconds of each of `count` round trips of a bare wait/post around a ring of `processes` processes.

    The calling process is one of them and posts first; the others each wait for the one before them and post to the one
    after. They are started here and have ended when this returns, also after an error.
    """
    options = Options()
    ring = _core.PingPong(processes, options.spin_us, options.yield_us)
    me = [str(os.getpid()), str(ring.fd)]
    with _partners([["ping", *me, str(party), str(processes), str(count)] for party in range(1, processes)]):
        samples = []
        for number in range(1, count + 1):
            begin = time.perf_counter_ns()
            ring.post(1 % processes, number)
            if not ring.wait(0, number, LIMIT_S):
                raise TimeoutError(f"round trip {number} did not come back within {LIMIT_S} s")
            samples.append(time.perf_counter_ns() - begin)
    return samples


def channel_pingpong(payload: bytes, count: int) -> Sequence[int]:
    """Nanoseconds of each of `count` round trips of `payload` over two of raycomm's rings, there and back.

    One other plain process, started here, reads each message and writes it back; it has ended when this returns. Raises
    `ValueError` when the last message came back changed.
    """
    arena = _arena(0)
    mine = arena.address
    with _partners([["echo", str(mine.pid), str(mine.fd), mine.nonce.hex(), str(count)]]) as (partner,):
        assert partner.stdout is not None
        pid, fd, nonce = partner.stdout.readline().split()
        arena.attach(Address(1, int(pid), int(fd), bytes.fromhex(nonce)))
        arena.join(0)
        write, read = arena.writer([0]).write, arena.reader(1, 1, 0, drain=True).read
        samples = []
        answer = None
        for _ in range(count):
            begin = time.perf_counter_ns()
            write(payload, LIMIT_S)
            answer = read(LIMIT_S)
            samples.append(time.perf_counter_ns() - begin)
        arena.close(_core.CLOSED_TEARDOWN, 0)
    if answer != payload:
        raise ValueError("the last message came back changed")
    return samples


def _arena(process: int) -> ShmArena:
    return ShmArena.create(process, [RingLayout(process, 16, 1024, (1 - process,))], Options(), loops=2)


@contextmanager
def _partners(commands: Sequence[Sequence[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            program = [sys.executable, "-m", __spec__.name, *command]
            started.append(subprocess.Popen(program, stdout=subprocess.PIPE, text=True))
        yield started
        for partner in started:
            partner.wait(LIMIT_S)
    finally:
        for partner in started:
            partner.kill()
            partner.communicate()


def _ping(pid: str, fd: str, party: str, processes: str, count: str) -> None:
    options = Options()
    ring = _core.PingPong.attach(int(pid), int(fd), options.spin_us, options.yield_us)
    for number in range(1, int(count) + 1):
        if not ring.wait(int(party), number, LIMIT_S):
            raise TimeoutError(f"nothing came within {LIMIT_S} s")
        ring.post((int(party) + 1) % int(processes), number)


def _echo(pid: str, fd: str, nonce: str, count: str) -> None:
    arena = _arena(1)
    arena.attach(Address(0, int(pid), int(fd), bytes.fromhex(nonce)))
    arena.join(0)
    write, read = arena.writer([1]).write, arena.reader(0, 0, 0, drain=False).read
    print(arena.address.pid, arena.address.fd, arena.address.nonce.hex(), flush=True)
    for _ in range(int(count)):
        write(read(LIMIT_S), LIMIT_S)
    # The arena must outlive the reader's last look.
    try:
        read(LIMIT_S)
    except _core.Closed:
        pass


_ROLES: dict[str, Any] = {"ping": _ping, "echo": _echo}

if __name__ == "__main__":
    _ROLES[sys.argv[1]](*sys.argv[2:])
