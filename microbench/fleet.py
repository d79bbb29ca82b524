"""One writer and its readers, each a process of its own; this one writes.

What is timed is the writer's clock before the call to every reader's clock after the value is there (and summed, for a tensor):
CLOCK_MONOTONIC, which all processes of a machine share. Readers put their times into a file that all of them map, so that nothing
of the transport under test is used to tell that a message has arrived.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from microbench.leftovers import scratch_directory
from microbench.transports.base import AHEAD, LIMIT_S, Place, Transport
from microbench.workloads import Workload

MOST_MESSAGES = 4096
START_LIMIT_S = 90.0  # five interpreters that import torch, on two cores
_LEAVE_S = 5.0
_LOOK_EVERY_S = 0.0003
_LOOKS_UNTIL_CHECK = 50
_CHECK_EVERY_S = 0.02

clock = time.monotonic_ns


class ReaderFailed(Exception):
    """A reader failed or died; says which and why."""


class Times:
    """When each reader had each message, in nanoseconds; 0: not yet. In a file, mapped by all. Use `close`."""

    def __init__(self, path: Path, readers: int) -> None:
        size = readers * MOST_MESSAGES * 8
        with path.open("a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._map).cast("q")
        self._readers = readers

    def of(self, rank: int) -> memoryview[int]:
        """One reader's row. It writes there."""
        return self._words[(rank - 1) * MOST_MESSAGES : rank * MOST_MESSAGES]

    def last(self, number: int) -> int:
        """When the last reader had that message; 0 if one has it not yet."""
        times = [self._words[reader * MOST_MESSAGES + number] for reader in range(self._readers)]
        return 0 if 0 in times else max(times)

    def clear(self) -> None:
        """Forget all."""
        for place in range(len(self._words)):
            self._words[place] = 0

    def close(self) -> None:
        """Unmap the file. Rows have to have been let go of."""
        self._words.release()
        self._map.close()


class Fleet:
    """The processes. Use `close`.

    Args:
        system: name in `microbench.systems.SYSTEMS`, for the readers.
        make: this rank's end.

    Raises:
        ReaderFailed, TimeoutError
    """

    def __init__(self, system: str, make: Callable[[Place], Transport], readers: int) -> None:
        self._directory = scratch_directory()
        place = Place(0, readers, Path(self._directory.name))
        self.times = Times(place.directory / "times", readers)
        self._started: list[subprocess.Popen[bytes]] = []
        self._talks: list[Connection[Any, Any]] = []
        self._end: Transport | None = None
        try:
            for rank in range(1, readers + 1):
                self._start(system, rank, place)
            self._end = make(place)
            mine = self._end.offer()
            offers = [mine, *(self._answer(rank, START_LIMIT_S) for rank in range(1, readers + 1))]
            self._tell(offers)
            self._end.join(offers)
            self._answers(START_LIMIT_S)
        except BaseException:
            with suppress(Exception):  # what went wrong first is what is told
                self.close()
            raise

    def write(self, value: Any) -> None:
        """What is timed."""
        assert self._end is not None
        self._end.write(value)

    def begin(self, workload: Workload, messages: int) -> int:
        """Have all ranks ready for so many messages; what one takes encoded."""
        assert self._end is not None
        encoded = self._end.encoded_bytes(workload.message(0))
        self.times.clear()
        self._tell((workload, messages, encoded))
        self._end.prepare(encoded)
        self._answers(START_LIMIT_S)  # the first tensors have torch imported
        return encoded

    def finish(self) -> None:
        """Hear from all readers that every message was right."""
        self._tell(None)
        self._answers(LIMIT_S)

    def wait_for(self, number: int) -> int:
        """When the last reader had message `number`. Sleeps first and looks seldom: the readers are to have the cores."""
        end = time.monotonic() + LIMIT_S
        for looks in itertools.count(1):
            time.sleep(_LOOK_EVERY_S)
            if (last := self.times.last(number)) != 0:
                return last
            if looks % _LOOKS_UNTIL_CHECK == 0:
                self._check()
                if time.monotonic() > end:
                    break
        raise TimeoutError(f"message {number} did not reach every reader within {LIMIT_S:g} s")

    def wait_until_near(self, number: int) -> None:
        """Return once no reader is more than `AHEAD` messages behind `number`."""
        if number < AHEAD:
            return
        end = time.monotonic() + LIMIT_S
        check = time.monotonic() + _CHECK_EVERY_S
        while not self.times.last(number - AHEAD):
            os.sched_yield()
            if (now := time.monotonic()) > check:
                self._check()
                check = now + _CHECK_EVERY_S
            if now > end:
                raise TimeoutError(f"message {number - AHEAD} did not reach every reader within {LIMIT_S:g} s")

    def close(self) -> None:
        """End the readers, by force those that do not leave, and let go of this end."""
        for talk in self._talks:
            with suppress(OSError):
                talk.close()  # which they take for the end
        deadline = time.monotonic() + _LEAVE_S
        for started in self._started:
            with suppress(subprocess.TimeoutExpired):
                started.wait(max(0.0, deadline - time.monotonic()))
        for started in self._started:
            started.kill()
            started.wait()
        end, self._end = self._end, None
        try:
            if end is not None:
                end.close()
        finally:
            self.times.close()
            with suppress(OSError):
                self._directory.cleanup()

    def _start(self, system: str, rank: int, place: Place) -> None:
        ours, theirs = Pipe()
        _limit_sends(ours, LIMIT_S)
        with theirs:
            command = [sys.executable, "-m", "microbench.reader", str(theirs.fileno())]
            arguments = [system, str(rank), str(place.readers), str(place.directory)]
            self._started.append(subprocess.Popen(command + arguments, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL))
        self._talks.append(ours)

    def _tell(self, what: Any) -> None:
        for rank, talk in enumerate(self._talks, 1):
            try:
                talk.send(what)
            except BrokenPipeError:
                pass  # it has died; its answer says so
            except BlockingIOError as error:
                raise TimeoutError(f"reader {rank} did not listen within {LIMIT_S:g} s") from error

    def _answers(self, limit_s: float) -> None:
        for rank in range(1, len(self._talks) + 1):
            self._answer(rank, limit_s)

    def _answer(self, rank: int, limit_s: float) -> Any:
        talk = self._talks[rank - 1]
        if not talk.poll(limit_s):
            raise TimeoutError(f"reader {rank} did not answer within {limit_s:g} s")
        try:
            done, answer = talk.recv()
        except (EOFError, OSError) as error:
            raise ReaderFailed(f"reader {rank} died") from error
        if not done:
            raise ReaderFailed(f"reader {rank}: {answer}")
        return answer

    def _check(self) -> None:
        """Raises if a reader has something to say before its time: it failed."""
        for rank, talk in enumerate(self._talks, 1):
            if talk.poll(0):
                self._answer(rank, 0)


def _limit_sends(talk: Connection[Any, Any], limit_s: float) -> None:
    """From now on a send that finds no room for so long raises `BlockingIOError`."""
    seconds, rest = divmod(limit_s, 1)
    with socket.socket(fileno=os.dup(talk.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(rest * 1e6)))
