"""`graph.status()`: what every process of a graph does now, and what it did last."""

from __future__ import annotations

from dataclasses import dataclass

from raycomm import _core
from raycomm.channel import ShmArena
from raycomm.observe.board import Board, Row
from raycomm.plan.actions import Collective, Compute, Plan

_WORDS = {_core.READING: "read", _core.COMPUTING: "compute", _core.WRITING: "write"}
_RECENT = 8
_SET_UP = "set-up"


@dataclass(frozen=True, slots=True)
class Operation:
    """One entry of the flight recorder.

    Attributes:
        kind: "read" or "write", waits included, or "compute".
        subject: the value, or the call; "set-up" for what is said before the first execution.
        execution: the one it belonged to; 0 for set-up, which belongs to none.
        start_s, duration_s: seconds, on the clock of `time.monotonic`.
        bytes: of the message; 0 for a call.
    """

    kind: str
    subject: str
    execution: int
    start_s: float
    duration_s: float
    bytes: int

    def __str__(self) -> str:
        size = f", {self.bytes} bytes" if self.bytes else ""
        of = "" if self.subject == _SET_UP else f" of execution {self.execution}"
        return f"{self.kind} {self.subject}{of}: {self.duration_s * 1e6:.1f} us{size}"


@dataclass(frozen=True, slots=True)
class GraphStatus:
    """A graph, now. `print` it.

    Attributes:
        graph: its name.
        state: "running", "torn down", or "closed" where an actor has ended it.
        submitted, finished: executions so far; finished are those whose every result has reached the driver.
        rows: one per process, the driver first.
        recent: by process, its last operations, oldest first; they survive the process.
        reason: which actor ended it, and in which call; "" if none did.
    """

    graph: str
    state: str
    submitted: int
    finished: int
    rows: tuple[Row, ...]
    recent: tuple[tuple[Operation, ...], ...]
    reason: str = ""

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        lines = [f"graph {self.graph!r}: {self.state}{because}; {self.submitted} executions submitted, {self.finished} finished"]
        for row, recent in zip(self.rows, self.recent, strict=True):
            lines.append(f"  {row}")
            lines += [f"    {operation}" for operation in recent[-3:]]
        return "\n".join(lines)


def graph_status(
    plan: Plan, arena: ShmArena, board: Board, state: str, submitted: int, finished: int, reason: str
) -> GraphStatus:
    """The status of one graph, seen from its driver."""
    rows = tuple(board.row(process.index) for process in plan.processes)
    recent = tuple(recent_operations(plan, arena, process.index, _RECENT) for process in plan.processes)
    return GraphStatus(plan.name, state, submitted, finished, rows, recent, reason)


def recent_operations(plan: Plan, arena: ShmArena, process: int, last: int) -> tuple[Operation, ...]:
    """Up to `last` operations of a process, oldest first, from its flight recorder."""
    operations = []
    for kind, subject, execution, start_ns, duration_ns, size in arena.core.records(process, last):
        operations.append(
            Operation(
                _WORDS.get(kind, "?"), _subject(plan, process, kind, subject), execution, start_ns / 1e9, duration_ns / 1e9, size
            )
        )
    return tuple(operations)


def _subject(plan: Plan, process: int, kind: int, subject: int) -> str:
    if kind == _core.COMPUTING:
        actions = plan.actors[process - 1].actions if process else ()
        action = actions[subject] if subject < len(actions) else None
        if not isinstance(action, (Compute, Collective)):
            return "?"
        return f"{plan.processes[process].label}.{action.method}#{action.node}"
    return plan.channels[subject].value if subject < len(plan.channels) else _SET_UP
