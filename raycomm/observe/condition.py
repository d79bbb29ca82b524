"""What the kernel says of a process: whether it lets it run, and how it ended. The board has the last it could say of itself."""

from __future__ import annotations

import os
import signal
from enum import Enum
from pathlib import Path


class Condition(Enum):
    """Of a living process; the value stands behind its pid in reports."""

    ALIVE = "alive"
    STOPPED = "stopped: state T"
    TRACED = "held by a debugger: state t"
    IN_KERNEL = "alive, state D"

    @property
    def runs(self) -> bool:
        """Whether it gets anything done without help from outside."""
        return self not in (Condition.STOPPED, Condition.TRACED)


_BY_LETTER = {"T": Condition.STOPPED, "t": Condition.TRACED, "D": Condition.IN_KERNEL}


def condition_of(pid: int) -> Condition:
    """The condition of process `pid`, from `/proc`; `ALIVE` where that cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
    except OSError:
        return Condition.ALIVE
    # "pid (name) state ...": a name may itself hold parentheses and spaces.
    state = text.rpartition(")")[2].split()[:1]
    return _BY_LETTER.get(state[0], Condition.ALIVE) if state else Condition.ALIVE


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
