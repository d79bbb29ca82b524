"""An actor that knows its own memory."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import ray

from tests.ray.workers import WorkerBody


def private_bytes() -> int:
    """Memory that this process alone has, after the allocator has given back what it holds in vain."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(row.split()[1]) for row in rows if row.startswith(("Private_Clean", "Private_Dirty"))) * 1024


class MeasuredBody(WorkerBody):
    """Knows its own memory."""

    def private_bytes(self) -> int:
        return private_bytes()


Measured = ray.remote(num_cpus=0)(MeasuredBody)
