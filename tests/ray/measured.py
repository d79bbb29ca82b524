"""An actor that knows its own memory."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import NamedTuple

import ray

from tests.ray.workers import WorkerBody


class Memory(NamedTuple):
    """What a process has: bytes that are its alone, after the allocator has given back what it holds in vain, and blocks that
    Python's own allocator has given out, a count that does not waver."""

    private_bytes: int
    objects: int


def memory() -> Memory:
    """Of this process, now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = sum(int(row.split()[1]) for row in rows if row.startswith(("Private_Clean", "Private_Dirty"))) * 1024
    return Memory(private, sys.getallocatedblocks())


class MeasuredBody(WorkerBody):
    """Knows its own memory."""

    def memory(self) -> Memory:
        return memory()


Measured = ray.remote(num_cpus=0)(MeasuredBody)
