"""One end of a channel, in this process or in one of its own, with the same methods either way.

As a program (`python -m tests.conformance.peer FD`) it serves the calls of a `Remote` over the socket FD.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from raycomm import _core
from raycomm.channel import Address, RingLayout, ShmArena
from raycomm.codec import Failure
from raycomm.errors import SerializationError
from raycomm.options import Options

ROOT = Path(__file__).parents[2]
GUARD_S = 20.0  # no wait of a test lasts longer than this without being a failure
_ERRORS = {kind.__name__: kind for kind in (_core.TimedOut, _core.Closed, _core.PoolFull, _core.Misuse, SerializationError)}


class Agent:
    """A process of a graph: its arena, and perhaps a writing end, a reading end, and what it keeps of what it read."""

    def __init__(self, process: int, rings: list[RingLayout], limit: int = 64 << 20) -> None:
        options = Options(shm_limit_bytes=limit)
        self.arena = ShmArena.create(process, rings, options, loops=1)
        self.kept: list[Any] = []
        self._write: Any = None
        self._read: Any = None

    def address(self) -> Address:
        return self.arena.address

    def attach(self, addresses: list[Address]) -> None:
        for address in addresses:
            if address.process != self.arena.address.process:
                self.arena.attach(address)

    def open_writer(self, channels: list[int]) -> None:
        self.arena.join(self.arena.address.process)
        self._write = self.arena.writer(channels)

    def open_reader(self, writer: int, channel: int, index: int, drain: bool) -> None:
        self._read = self.arena.reader(writer, channel, index, drain=drain)

    def close(self, reason: int = _core.CLOSED_TEARDOWN, process: int = 0) -> None:
        self.arena.close(reason, process)

    def let_go(self) -> None:
        """Drops both ends and the arena, and keeps `kept`."""
        self._write = self._read = self.arena = None  # type: ignore[assignment]

    # the writing end

    def write(self, value: Any, timeout: float = GUARD_S) -> None:
        self._write.write(value, timeout)

    def write_all(self, values: tuple[Any, ...], timeout: float = GUARD_S) -> None:
        self._write.write_all(values, timeout)

    def write_numbers(self, count: int, seed: int | None = None) -> None:
        """0, 1, 2, ...; with a seed, with pauses now and then."""
        rng = None if seed is None else random.Random(seed)
        for number in range(count):
            if rng and rng.random() < 0.02:
                time.sleep(rng.random() * 0.003)
            self._write.write(number, GUARD_S)

    def write_forever(self) -> None:
        while True:
            self._write.write(0, GUARD_S)

    def published(self) -> int:
        return int(self._write.published)

    def in_use(self) -> int:
        return int(self.arena.core.pool_in_use)

    # the reading end

    def read(self, timeout: float = GUARD_S) -> Any:
        return self._read.read(timeout)

    def skip(self, timeout: float = GUARD_S) -> None:
        self._read.skip(timeout)

    def taken(self) -> int:
        return int(self._read.taken)

    def ready(self) -> bool:
        return bool(self._read.ready)

    def read_numbers(self, count: int, seed: int | None = None) -> int:
        """Expects 0, 1, 2, ...; how many came in order."""
        rng = None if seed is None else random.Random(seed)
        for number in range(count):
            if rng and rng.random() < 0.02:
                time.sleep(rng.random() * 0.003)
            if (value := self._read.read(GUARD_S)) != number:
                raise AssertionError(f"{value} came in place of {number}")
        return count

    def read_bytes(self, count: int, seed: int, top: int) -> int:
        """Expects the messages of `write_bytes`, every byte of them."""
        for number in range(count):
            value = self._read.read(GUARD_S)
            expected = message(number, seed, top)
            if type(value) is not type(expected) or digest(value) != digest(expected):
                raise AssertionError(f"message {number} is not what was written")
        return count

    def write_bytes(self, count: int, seed: int, top: int) -> None:
        for number in range(count):
            self._write.write(message(number, seed, top), GUARD_S)

    def keep(self, count: int = 1) -> list[str]:
        """Reads messages and holds on to them; what they were when they came."""
        values = [self._read.read(GUARD_S) for _ in range(count)]
        self.kept += values
        return [digest(value) for value in values]

    def kept_now(self) -> list[str]:
        return [digest(value) for value in self.kept]

    def drop(self) -> None:
        self.kept.clear()

    def scribble(self) -> list[bool]:
        """Tries to write into everything kept; where it could."""
        could = []
        for value in self.kept:
            try:
                value[...] = 0
                could.append(True)
            except ValueError:
                could.append(False)
        return could

    def pid(self) -> int:
        return os.getpid()

    def is_closed(self) -> tuple[int, int]:
        return self.arena.closed


def digest(value: Any) -> str:
    """Type, shape and every bit of a value, lists of arrays included."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}{[digest(item) for item in value]}"
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {tuple(value.shape)} {digest(value.contiguous().numpy())}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {hashlib.blake2b(value.tobytes(), digest_size=12).hexdigest()}"
    if isinstance(value, bytes):
        return f"bytes {hashlib.blake2b(value, digest_size=12).hexdigest()}"
    return f"failure {value.text}" if isinstance(value, Failure) else repr(value)


_NOISE = np.random.default_rng(5).integers(0, 256, (1 << 21) + 256, np.uint8)


def message(number: int, seed: int, top: int) -> Any:
    """The message `number` of a stress: bytes, array, tensor or several of them; sizes log-uniform from 0 to `top` bytes.

    Every part is a stretch of noise that depends on seed and number, so that no two messages are alike.
    """
    rng = random.Random(seed * 1_000_003 + number)

    def part() -> Any:
        size = int(top ** rng.random()) - 1 if top > 1 else 0
        start = rng.randrange(len(_NOISE) - size)
        raw = _NOISE[start : start + size]
        kind = rng.randrange(3)
        return raw.tobytes() if kind == 0 else raw if kind == 1 else torch.from_numpy(raw)

    return [number, *(part() for _ in range(rng.choice((0, 1, 1, 1, 2, 4))))]


class Remote:
    """A process that serves as one `Agent` after another. Usable by one thread at a time; `begin` and `end` split a call."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.conformance.peer", str(there.fileno())]
        self.popen = subprocess.Popen(command, cwd=ROOT, pass_fds=[there.fileno()])
        there.close()
        self._connection = Connection(here.detach())

    def become(self, process: int, rings: list[RingLayout], limit: int = 64 << 20) -> Remote:
        """A new agent, in place of the one before."""
        self._call("__init__", process, rings, limit)
        return self

    def begin(self, name: str, *args: Any) -> None:
        self._connection.send_bytes(pickle.dumps((name, args)))

    def end(self, timeout: float = 3 * GUARD_S) -> Any:
        if not self._connection.poll(timeout):
            raise AssertionError(f"no answer within {timeout} s")
        outcome, *rest = pickle.loads(self._connection.recv_bytes())
        if outcome == "error":
            name, arguments, text = rest
            raise _ERRORS[name](*arguments) if name in _ERRORS else RuntimeError(text)
        return rest[0]

    def _call(self, name: str, *args: Any) -> Any:
        self.begin(name, *args)
        return self.end()

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._call(name, *args)

    def stop(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._connection.close()


def serve(connection: Connection) -> None:
    agent = Agent.__new__(Agent)
    while True:
        try:
            name, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            reply: tuple[Any, ...] = "ok", getattr(agent, name)(*args)
        except BaseException as error:
            known = type(error).__name__ in _ERRORS
            reply = "error", type(error).__name__, error.args if known else (), f"{type(error).__name__}: {error}"
            del error
        connection.send_bytes(pickle.dumps(reply))


def poke(arena: ShmArena, offset: int, data: bytes) -> None:
    """Overwrites bytes of an arena of this process behind its back."""
    fd = os.open(f"/proc/self/fd/{arena.core.fd}", os.O_RDWR)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)


def peek(arena: ShmArena, offset: int, form: str) -> int:
    fd = os.open(f"/proc/self/fd/{arena.core.fd}", os.O_RDWR)
    try:
        (value,) = struct.unpack("<" + form, os.pread(fd, struct.calcsize("<" + form), offset))
        return int(value)
    finally:
        os.close(fd)


def die_with_parent() -> None:
    """A test run that is killed leaves no peers: forked children of it may hold the socket open."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    die_with_parent()
    torch.set_num_threads(1)
    serve(Connection(int(sys.argv[1])))
