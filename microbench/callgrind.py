"""Counting the instructions of `microbench.counted` under valgrind's callgrind, and what such counts depend on.

Callgrind is switched on when the child has imported and warmed up, by vgdb, which is part of valgrind: the import of torch alone
takes three times as long when its instructions are counted.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from microbench import counted
from microbench.counted import CALLS, GO, MARK, READY, VALUES, Group, Operation, sections
from raycomm import _core

LAYOUTS = 3
CHILD_LIMIT_S = 400.0
SWITCH_LIMIT_S = 60.0
REMEDY = "valgrind is not installed; on Debian or Ubuntu: apt-get install valgrind"

Counts = dict[str, dict[Operation, float]]  # instructions of one call, by value and operation

_ROOT = Path(__file__).resolve().parent.parent
_OUT = "counts"
# What valgrind passes on of a processor, and the C library and numpy choose their loops by.
_CPU_FLAGS = ("avx", "avx2", "bmi1", "f16c", "sse4_2", "asimd", "sve")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class CountingFailed(Exception):
    """Valgrind or the child failed; the text is one line that says how."""


def find_valgrind() -> str | None:
    """Its path, or None where it is not installed."""
    return shutil.which("valgrind")


def facts(valgrind: str) -> dict[str, str]:
    """All that counts depend on besides raycomm's own code: two are comparable only where every one of these is the same."""
    version = subprocess.run([valgrind, "--version"], capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=False).stdout
    return {
        "arch": platform.machine(),
        "cpu flags": " ".join(_cpu_flags()),
        "libc": " ".join(platform.libc_ver()),
        "python": sys.version,  # with its build date: two builds of one version differ by their profiles
        "compiler of the core": _compilers(Path(str(_core.__file__)).read_bytes()),
        "valgrind": version.strip(),
        **{package: _version(package) for package in ("nanobind", "numpy", "torch")},
    }


def count(valgrind: str, group: Group, layouts: Iterable[int] = range(LAYOUTS)) -> Counts:
    """Instructions of one call of each operation with each value of the group: the least of a child per layout.

    Which attribute names fall on one place of Python's cache, and how far `malloc` looks for a larger piece of memory, depends on
    addresses, and so on every line of code that was loaded before: up to 4 % of a short call. Most layouts have no such bad luck,
    so that the least moves little when unrelated code changes.

    Raises:
        CountingFailed: the child failed, or took longer than `CHILD_LIMIT_S`.
    """
    return least([_count_once(valgrind, group, layout) for layout in layouts])


def least(counts: Sequence[Counts]) -> Counts:
    """The least of each figure."""
    return {
        value: {operation: min(each[value][operation] for each in counts) for operation in by} for value, by in counts[0].items()
    }


def _count_once(valgrind: str, group: Group, layout: int) -> Counts:
    with tempfile.TemporaryDirectory(prefix="raycomm-counts-") as name:
        directory = Path(name)
        _run(valgrind, group, layout, directory)
        return per_call(group, totals(directory))


def _run(valgrind: str, group: Group, layout: int, directory: Path) -> None:
    prefix, log = f"--vgdb-prefix={directory}/vgdb", directory / "log"
    command = [
        *(valgrind, "--tool=callgrind", "--quiet", "--instr-atstart=no", prefix),
        *(f"--dump-before={MARK}", f"--callgrind-out-file={directory}/{_OUT}"),
        *(sys.executable, "-m", counted.__name__, group.value, str(layout)),
    ]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=_ROOT, env=_environment()
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        watchdog = threading.Timer(CHILD_LIMIT_S, child.kill)
        watchdog.start()
        try:
            ready = child.stdout.readline() == READY
            if ready:
                switch = [str(Path(valgrind).with_name("vgdb")), prefix, f"--pid={child.pid}", "instrumentation", "on"]
                told = subprocess.run(switch, capture_output=True, text=True, timeout=SWITCH_LIMIT_S, check=False)
                if told.returncode != 0:
                    raise CountingFailed(f"vgdb cannot switch callgrind on: {_last_line(told.stderr)}")
                child.communicate(GO)
            overdue = not watchdog.is_alive()
            if child.wait() != 0 or not ready:
                lines = log.read_text(encoding="utf-8", errors="replace")
                why = f"killed after {CHILD_LIMIT_S:.0f} s" if overdue else _last_line(lines)
                raise CountingFailed(f"{group} under valgrind ended with {child.returncode}: {why}")
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CountingFailed(f"{group} under valgrind: {error}") from error
        finally:
            watchdog.cancel()
            child.kill()


def totals(directory: Path) -> list[int]:
    """The count of every dump, in the order in which they were written.

    Raises:
        CountingFailed: a dump is not one of callgrind's.
    """
    dumps = sorted(directory.glob(f"{_OUT}.*"), key=lambda path: int(path.suffix[1:]))
    found = []
    for dump in dumps:
        match = re.search(r"^totals: (\d+)", dump.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        if match is None:
            raise CountingFailed(f"callgrind's {dump.name} has no total")
        found.append(int(match[1]))
    return found


def per_call(group: Group, dumps: Iterable[int]) -> Counts:
    """Instructions of one call, from the counts of all dumps of a child.

    The first dump is what came before the first mark; after it, those of a section and those between two sections alternate.

    Raises:
        CountingFailed: there are more or fewer dumps than marks, so nobody knows which is which.
    """
    expected = [*sections(group)]
    found = [*dumps]
    if len(found) != 2 * len(expected):
        raise CountingFailed(
            f"callgrind wrote {len(found)} counts in place of {2 * len(expected)}: it misses calls of {MARK}, or sees others'"
        )
    in_all = dict(zip(expected, found[1::2], strict=True))
    return {
        value: {op: (in_all[value, op, 2 * CALLS] - in_all[value, op, CALLS]) / CALLS for op in Operation}
        for value in VALUES[group]
    }


def _environment() -> dict[str, str]:
    """Nothing of what the caller has set but where to find things: no option of raycomm's, and no second thread to be counted.

    It lies on the stack, whose place decides on a few instructions of a copy: it always has the same length.
    """
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    environment = kept | dict.fromkeys(_ONE_THREAD, "1") | {"PYTHONHASHSEED": "0"}
    taken = sum(len(name) + len(value) for name, value in environment.items()) + len(sys.executable)
    return environment | {"PADDING": "x" * (-taken % 8192)}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no word of why"])[-1]


def _cpu_flags() -> list[str]:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    # x86 calls the line "flags", arm64 "Features".
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return sorted(set(line[1].split()) & set(_CPU_FLAGS)) if line else []


def _compilers(library: bytes) -> str:
    """What the compilers left of themselves in a library: a stripped one still has that."""
    found = set(re.findall(rb"(?:GCC: |clang version )[ -~]+", library))
    return ", ".join(sorted(text.decode() for text in found)) or "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
