"""How much of this machine a graph may use: memory and processor time, cgroup limits included."""

from __future__ import annotations

import os

# Plain strings: pathlib interns every part of a path, for good, and this runs for each graph.
_CGROUP = "/sys/fs/cgroup"


def default_limit() -> int:
    """Bytes of shared memory a graph may use by default: the smaller of a quarter of the machine's memory and half of what the
    cgroup leaves.

    Under a cgroup limit the kernel kills instead of refusing memory, so the budget must stay below it.
    """
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    for directory in _cgroups():
        top = _number(f"{directory}/memory.max") or _number(f"{directory}/memory.limit_in_bytes")
        used = _number(f"{directory}/memory.current") or _number(f"{directory}/memory.usage_in_bytes")
        if top is not None and used is not None:
            limit = min(limit, max(0, top - used) // 2)
    return max(limit, 16 << 20) & ~4095


def limits() -> list[tuple[int, str]]:
    """Every memory limit that holds for this process: bytes, and the file that says how many of them are used now."""
    found = []
    for directory in _cgroups():
        for top_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            top = _number(f"{directory}/{top_name}")
            if top is not None and top < 1 << 60:  # cgroup v1 writes a huge number for "none"
                found.append((top, f"{directory}/{used_name}"))
    return found


def cpu_quota() -> float:
    """Processors this process may use: the cgroup's quota, or infinite without one (more waiters than cores is the normal case).

    A yield spin under half a core's quota stalled 50 ms, twenty times in two seconds (measured).
    """
    quota = float("inf")
    for directory in _cgroups():
        try:
            words = (_text(f"{directory}/cpu.max") or "").split()
            if len(words) == 2 and words[0] != "max":
                quota = min(quota, int(words[0]) / int(words[1]))
        except ValueError:
            continue
    return quota


def _cgroups() -> list[str]:
    """The cgroup directories of this process, from its own up to the root (limits of every level hold)."""
    directories = []
    for line in (_text("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        base = f"{_CGROUP}/{controllers}" if controllers else _CGROUP
        parts = [part for part in path.split("/") if part]
        directories += ["/".join([base, *parts[:depth]]) for depth in range(len(parts), -1, -1)]
    return [directory for directory in dict.fromkeys(directories) if os.path.isdir(directory)]


def _number(file: str) -> int | None:
    text = (_text(file) or "").strip()
    return int(text) if text.isdigit() else None


def _text(file: str) -> str | None:
    try:
        with open(file) as opened:
            return opened.read()
    except OSError:
        return None
