"""What runs inside the bench process of the broadcast bench: one system at a time, its readers beside it, a row at a time."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from microbench.fleet import Fleet, clock
from microbench.harness import Measurement, latency
from microbench.systems import SYSTEMS
from microbench.workloads import SEED, WORKLOADS, Sort, Workload

_MIB = 1 << 20
UNPACED_UP_TO = 16 * _MIB  # bytes of a message: eight of them lie ready. No irregular pauses beyond it, either


@dataclass(frozen=True)
class BroadcastEffort:
    """How much is sent in a row and round.

    Attributes:
        pace_s: the least time from the last reader's receipt of a message to the next one.
        most_bytes: of all timed messages of a row together, however many it should have; at least `fewest` are sent, and half as
            many warm-ups.
        turn_limit_s: wall-clock limit of one system's turn, start of its processes included.
    """

    warmups: int
    messages: int
    turn_limit_s: float
    pace_s: float = 0.002
    most_bytes: int = 1024 * _MIB
    fewest: int = 5

    def messages_of(self, workload: Workload) -> tuple[int, int]:
        """Warm-ups and timed messages of a row."""
        count = max(self.fewest, min(self.messages, self.most_bytes // workload.nbytes))
        return min(self.warmups, count // 2), count


FULL = BroadcastEffort(warmups=10, messages=100, turn_limit_s=600.0)
QUICK = BroadcastEffort(warmups=3, messages=15, turn_limit_s=120.0, most_bytes=256 * _MIB)


class Broadcast(Protocol):
    """A system that is up, seen from its writer."""

    def begin(self, workload: Workload, messages: int) -> int:
        """Have all readers ready for so many messages; bytes of one, encoded."""

    def write(self, value: Any) -> None:
        """Send to all readers."""

    def wait_for(self, number: int) -> int:
        """The clock's time at which the last reader had message `number`."""

    def wait_until_near(self, number: int) -> None:
        """Return once no reader is too far behind `number`."""

    def finish(self) -> None:
        """Raises if a reader found a message wrong."""

    def close(self) -> None:
        """Leave nothing behind."""


def paced(system: Broadcast, workload: Workload, effort: BroadcastEffort, pauses: Iterator[float]) -> Measurement:
    """One message after the other, each once all readers have had the last for a while: for the next of `pauses`, in seconds."""
    warmups, count = effort.messages_of(workload)
    encoded = system.begin(workload, warmups + count)
    received, calls = [], []
    for number in range(warmups + count):
        message = workload.message(number)
        time.sleep(next(pauses))
        start = clock()
        system.write(message)
        stop = clock()
        last = system.wait_for(number)
        if number >= warmups:
            received.append(last - start)
            calls.append(stop - start)
    system.finish()
    caller = {f"call_{key}": figure for key, figure in latency(calls).items() if key != "count"}
    return {"encoded_bytes": encoded, **latency(received), **caller}


def regular(effort: BroadcastEffort) -> Iterator[float]:
    """The same pause each time: readers can know when a message is due."""
    return itertools.repeat(effort.pace_s)


def irregular(effort: BroadcastEffort) -> Iterator[float]:
    """Of any length from half to one and a half times as long: they cannot."""
    lengths = random.Random(SEED)
    while True:
        yield effort.pace_s * lengths.uniform(0.5, 1.5)


def unpaced(system: Broadcast, workload: Workload, effort: BroadcastEffort) -> Measurement:
    """As many as go: microseconds a message, from the first timed write to the last reader's last message."""
    warmups, count = effort.messages_of(workload)
    total = warmups + count
    system.begin(workload, total)
    # Made before, and enough of them that none is changed while it may still be on its way.
    messages = [workload.message(number) for number in range(8 if workload.sort is Sort.TENSOR else total)]
    start = 0
    for number in range(total):
        if number == warmups:
            system.wait_for(number - 1)  # warm-ups that are still on their way are not to be counted
            start = clock()
        system.wait_until_near(number)
        system.write(messages[number % len(messages)])
    last = system.wait_for(total - 1)
    system.finish()
    return {"unpaced_us": (last - start) / 1e3 / count}


class Session:
    """See `microbench.harness.Rounds`, whose requests this answers."""

    def __init__(self) -> None:
        self._open: Broadcast | None = None

    def open(self, system: str, topology: str) -> None:
        """Start a system with its readers. `topology`: such as "4 readers"."""
        readers = int(topology.split()[0])
        chosen = SYSTEMS[system]
        self._open = chosen.load()(readers) if chosen.lone else Fleet(system, chosen.load(), readers)

    def measure(self, row: str, effort: BroadcastEffort) -> Measurement:
        """One row."""
        assert self._open is not None
        workload = WORKLOADS[row]
        if workload.sort is Sort.TENSOR:
            import torch

            torch.set_num_threads(1)  # as in the readers
        measurement = paced(self._open, workload, effort, regular(effort))
        if workload.nbytes <= UNPACED_UP_TO:
            figures = paced(self._open, workload, effort, irregular(effort))
            measurement |= {f"irregular_{key}": figures[key] for key in ("mean_us", "p50_us", "p99_us")}
            measurement |= unpaced(self._open, workload, effort)
        return measurement

    def close(self, discard: bool) -> None:
        """End it."""
        system, self._open = self._open, None
        if system is not None:
            system.close()

    def shutdown(self) -> None:
        """The same, whatever it is at."""
        with contextlib.suppress(Exception):
            self.close(discard=True)
