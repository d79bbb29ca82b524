"""Budget and quota, from cgroup files as the kernel writes them (version 2 and version 1)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raycomm.channel import memory

GIB = 1 << 30


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A group two levels down, as this process's own."""
    group = tmp_path / "outer" / "inner"
    group.mkdir(parents=True)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_cgroups", lambda: [group, group.parent, tmp_path])
    return group


def test_without_limits_a_quarter_of_the_machine(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("max\n")
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert machine // 4 - 4096 < memory.default_limit() <= machine // 4
    assert memory.cpu_quota() == float("inf")


def test_half_of_what_the_cgroup_leaves(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text(f"{GIB}\n")
    (cgroup / "memory.current").write_text(f"{GIB // 2}\n")
    assert memory.default_limit() == GIB // 4


def test_a_limit_of_an_outer_group_holds(cgroup: Path) -> None:
    (cgroup.parent / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (cgroup.parent / "memory.usage_in_bytes").write_text(f"{GIB // 2}\n")
    (cgroup.parent / "cpu.max").write_text("50000 100000\n")
    assert memory.default_limit() == GIB // 4
    assert memory.cpu_quota() == 0.5


def test_a_full_cgroup_still_leaves_something_to_start_with(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text(f"{GIB}\n")
    (cgroup / "memory.current").write_text(f"{2 * GIB}\n")
    assert memory.default_limit() == 16 << 20


@pytest.mark.parametrize("text", ["max 100000\n", "rubbish\n", "\n"])
def test_an_unlimited_or_odd_quota_is_none(cgroup: Path, text: str) -> None:
    (cgroup / "cpu.max").write_text(text)
    assert memory.cpu_quota() == float("inf")


def test_own_groups_are_read_from_proc() -> None:
    for directory in memory._cgroups():
        assert os.path.isdir(directory)
