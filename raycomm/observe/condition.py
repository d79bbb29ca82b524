"""What the kernel says of a process: whether it lets it run, and how it ended. The board has the last it could say of itself."""

from __future__ import annotations

import os
import re
import signal
from enum import Enum
from pathlib import Path


class Condition(Enum):
    """Of a living process; the value stands behind its pid in reports."""

    ALIVE = "alive"
    STOPPED = "stopped: state T"
    TRACED = "held by a debugger: state t"
    IN_KERNEL = "alive, a thread in state D"

    @property
    def runs(self) -> bool:
        """Whether it gets anything done without help from outside."""
        return self not in (Condition.STOPPED, Condition.TRACED)


# Linux 6.15 tells a process with a pidfd how another one has ended.
KERNEL_TELLS_ENDINGS = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) >= (6, 15)


def condition_of(pid: int) -> Condition:
    """The condition of process `pid`, from the states of its threads in `/proc`; `ALIVE` where they cannot be read.

    Which of them runs the loop is not told: it stands still for sure where all do.
    """
    letters = set()
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            # "pid (name) state ...": a name may itself hold parentheses and spaces.
            letters.update((task / "stat").read_text("ascii", "replace").rpartition(")")[2].split()[:1])
    except OSError:  # a thread ends, or all of them
        pass
    if letters and letters <= {"T", "t"}:
        return Condition.TRACED if "t" in letters else Condition.STOPPED
    return Condition.IN_KERNEL if "D" in letters else Condition.ALIVE


def ending(wait_status: int | None) -> str:
    """How a process ended, in words that follow "died"; nothing for None."""
    if wait_status is None:
        return ""
    code = os.waitstatus_to_exitcode(wait_status)
    if code >= 0:
        return f" (exit code {code})"
    try:
        return f" (signal {signal.Signals(-code).name})"
    except ValueError:  # a real-time one
        return f" (signal {-code})"
