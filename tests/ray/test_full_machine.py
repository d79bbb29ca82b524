"""A system that has no memory left although the graph's own limit is far: an error in time, in place of a kill or a bus error.

The system is a control group of files as the kernel writes them, for the driver's process or for an actor's.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import raycomm
from raycomm import SharedMemoryError
from raycomm.channel import memory
from tests.ray.workers import PATIENCE_S, chain, start

pytestmark = pytest.mark.usefixtures("cluster")

MIB = 1 << 20
TOP = 1 << 30


def group(directory: Path, used: int) -> None:
    (directory / "memory.max").write_text(f"{TOP}\n")
    (directory / "memory.current").write_text(f"{used}\n")


def check(error: SharedMemoryError, what: str) -> None:
    assert isinstance(error, MemoryError)
    assert (error.graph, error.limit_bytes) == ("full", 256 * MIB)
    assert error.wanted_bytes is not None
    assert error.wanted_bytes >= 32 * MIB
    assert error.free_bytes is not None
    for part in (
        "'full'",
        what,
        f"the system refused: errno {errno.ENOMEM}",
        "32.0 MiB",
        "free of 256.0 MiB",
        "has no memory left",
    ):
        assert part in str(error)
    assert "larger shm_limit_bytes" not in str(error)


def test_the_system_refuses_memory_for_an_input(workers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group(tmp_path, 0)
    monkeypatch.setattr(memory, "_cgroups", lambda: [str(tmp_path)])
    with raycomm.compile(chain(workers[0].total), shm_limit_bytes=256 * MIB, name="full") as graph:
        assert graph.execute(np.ones(10)).get() == 10
        group(tmp_path, TOP)
        for _ in range(2):
            with pytest.raises(SharedMemoryError) as caught:
                graph.execute(np.ones(32 * MIB, np.uint8), timeout=PATIENCE_S)
            check(caught.value, "the input")
        assert graph.execute(np.ones(10)).get(timeout=PATIENCE_S) == 10
        group(tmp_path, 0)
        assert graph.execute(np.ones(32 * MIB, np.uint8), timeout=PATIENCE_S).get(timeout=PATIENCE_S) == 32 * MIB


def test_the_system_refuses_memory_for_a_result(cluster: None, tmp_path: Path) -> None:
    actor = start(1)[0]
    group(tmp_path, 0)

    def confine(_: Any, directory: str) -> None:
        from raycomm.channel import memory

        memory._cgroups = lambda: [directory]

    ray.get(actor.__ray_call__.remote(confine, str(tmp_path)))
    with raycomm.compile(chain(actor.zeros), shm_limit_bytes=256 * MIB, name="full") as graph:
        assert graph.execute(10).get().nbytes == 10
        group(tmp_path, TOP)
        refs = [graph.execute(size) for size in (32 * MIB, 10, 32 * MIB)]
        for ref in refs[::2]:
            with pytest.raises(SharedMemoryError) as caught:
                ref.get(timeout=PATIENCE_S)
            check(caught.value, "zeros")
        assert refs[1].get(timeout=PATIENCE_S).nbytes == 10
        group(tmp_path, 0)
        assert graph.execute(32 * MIB).get(timeout=PATIENCE_S).nbytes == 32 * MIB
