"""What a process holds: memory, descriptors, threads; read from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Footprint:
    """One process at one moment.

    Attributes:
        rss_kib: resident memory, shared memory included.
        shared_kib: of it shared memory: memfds, /dev/shm, shared anonymous mappings.
        descriptors: open ones.
        threads: Python's and native ones.
    """

    rss_kib: int
    shared_kib: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """Of a process of this user. Raises `OSError` when it has ended."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
        try:
            rss, shared, threads = (int(status[name][0]) for name in ("VmRSS", "RssShmem", "Threads"))
        except KeyError as error:
            raise ProcessLookupError(f"process {pid} has ended") from error  # a zombie has no memory
        return cls(rss, shared, len(os.listdir(f"/proc/{pid}/fd")), threads)
