"""Whether the kernel lets a process run. What the board says of a process is the last it could say of itself."""

from __future__ import annotations

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
