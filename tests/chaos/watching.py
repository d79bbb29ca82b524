"""Looks for what must not happen: hangs, leaks, growth. And keeps the times that are printed at the end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HANG_S = 60.0
_SETTLE_S = 10.0


def belongings() -> dict[str, float]:
    """What this process holds of graphs, and its memory in use in bytes."""
    memfds = pidfds = descriptors = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        descriptors += 1
        memfds += "memfd:raycomm" in target
        pidfds += "pidfd" in target
    return {
        "memfds": memfds,
        "mappings": Path("/proc/self/maps").read_text().count("memfd:raycomm"),
        "pidfds": pidfds,
        "graph threads": sum(thread.name.startswith("raycomm:") for thread in threading.enumerate()),
        "descriptors": descriptors,
        "threads": len(os.listdir("/proc/self/task")),
        "in use": bytes_in_use(),
    }


OF_GRAPHS = ("memfds", "mappings", "pidfds", "graph threads")


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    ]


_mallinfo = ctypes.CDLL(None).mallinfo2
_mallinfo.restype = _Mallinfo
_BLOCK_BYTES = 128  # of Python's own allocator, by estimate: it counts blocks, of up to 512 bytes


def bytes_in_use() -> int:
    """What malloc and Python's allocator have handed out and not got back.

    Resident memory says less: of what was given back, glibc keeps what lies between things in use, in as many arenas as there
    were threads at once; some 100 MiB in ten minutes.
    """
    heap = _mallinfo()
    return int(heap.uordblks) + int(heap.hblkhd) + sys.getallocatedblocks() * _BLOCK_BYTES


def settled(look: Callable[[], dict[str, float]], allowed: dict[str, float]) -> dict[str, float]:
    """What is left over `allowed` of the things of graphs, once they have had time to go."""
    end = time.monotonic() + _SETTLE_S
    while True:
        now = look()
        left = {name: now[name] - allowed.get(name, 0) for name in OF_GRAPHS if now[name] > allowed.get(name, 0)}
        if not left or time.monotonic() > end:
            return left
        gc.collect()
        time.sleep(0.02)


class Times:
    """Durations by name, in seconds."""

    def __init__(self) -> None:
        self._rows: dict[str, list[float]] = defaultdict(list)

    def add(self, what: str, seconds: float) -> None:
        """One more."""
        self._rows[what].append(seconds)

    def table(self) -> list[tuple[str, int, float, float, float]]:
        """(what, how often, median, p99, maximum)."""
        rows = []
        for what, times in sorted(self._rows.items()):
            times = sorted(times)
            rows.append((what, len(times), times[len(times) // 2], times[int(len(times) * 0.99)], times[-1]))
        return rows


class Watchdog:
    """Ends the run if an operation takes longer than the hang guard.

    Args:
        report: what to print besides this process's stacks.
        end: called then; does not return.
        times: where durations go.
    """

    def __init__(self, report: Callable[[], str], end: Callable[[], None], times: Times) -> None:
        self._report = report
        self._end = end
        self._times = times
        self._numbers = itertools.count()
        self._running: dict[int, tuple[str, float]] = {}
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @contextlib.contextmanager
    def guard(self, what: str, record: str | None = None) -> Iterator[None]:
        """An operation that must not take longer than the hang guard; recorded as `record` when it ends well or ill."""
        number, begin = next(self._numbers), time.monotonic()
        self._running[number] = (what, begin)
        try:
            yield
        finally:
            del self._running[number]
            if record is not None:
                self._times.add(record, time.monotonic() - begin)

    def _watch(self) -> None:
        while True:
            time.sleep(0.5)
            now = time.monotonic()
            stuck = [(what, now - begin) for what, begin in list(self._running.values()) if now - begin > HANG_S]
            if stuck:
                print("HANG:", "; ".join(f"{what} for {seconds:.0f} s" for what, seconds in stuck), flush=True)
                faulthandler.dump_traceback(file=sys.stdout, all_threads=True)
                report: Any = "no report"
                try:
                    report = self._report()
                finally:
                    print(report, flush=True)
                    self._end()
