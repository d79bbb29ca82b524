"""Who does what and who waits for whom, from the status board in shared memory (`BoardRow` in `_core/layout.hpp`).

Each process of a graph keeps a row there: what it does, since when, in which execution, and for whom it waits. Reading it costs
those processes nothing, and works while they hang, compute or are dead. But a process that does not run cannot say that what it
waited for has come. So every wait is compared with what the rings hold, and the kernel is asked whether the process runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from raycomm import _core
from raycomm.channel import ShmArena
from raycomm.observe.condition import Condition, condition_of
from raycomm.observe.messages import Messages
from raycomm.plan.actions import Collective, Compute, Plan, Read

_DRIVER = 0
_LOOKED_AT = 4  # operations of the recorder that are searched for the last call
_LOOKS = 10  # at processes that move on while they are looked at
_NOTED_S = 0.1  # shorter times are not worth a word


class State(Enum):
    """What a process of a graph does now."""

    IDLE = "idle"
    READING = "waits to read"
    UNREAD = "has not read what is there"
    COMPUTING = "computes"
    WRITING = "waits for room to write"
    UNWRITTEN = "has room and has not written"
    MEMORY = "waits for shared memory"
    ARRIVING = "waits for tensors"
    LEFT = "has left its loop"
    DEAD = "dead"


_STATES = {
    _core.IDLE: State.IDLE,
    _core.READING: State.READING,
    _core.COMPUTING: State.COMPUTING,
    _core.WRITING: State.WRITING,
    _core.MEMORY: State.MEMORY,
    _core.ARRIVING: State.ARRIVING,
}
_WAITS = (State.READING, State.WRITING, State.MEMORY, State.ARRIVING)


@dataclass(frozen=True, slots=True)
class Row:
    """One process, now.

    Attributes:
        process, label, pid: who; process 0 is the driver.
        state: what it does; `DEAD` if its process is gone.
        subject: the value it waits to read or write ("W2.forward#1"), or the call it runs; "" where there is none.
        seconds: since when.
        execution: the one it is at; of a wait, the one whose message it waits to read or write.
        waits_for: labels of those it waits for; nobody where what it waited for is there.
        condition: whether the kernel lets it run.
        begun: whether it has taken up any execution.
        writer, written_s: of what is there and unread, who wrote it, and how many seconds ago; None: not known.
    """

    process: int
    label: str
    pid: int
    state: State
    subject: str
    seconds: float
    execution: int
    waits_for: tuple[str, ...]
    condition: Condition = Condition.ALIVE
    begun: bool = True
    writer: str = ""
    written_s: float | None = None

    @property
    def alive(self) -> bool:
        """Whether its process lives."""
        return self.state is not State.DEAD

    def __str__(self) -> str:
        shown = "dead" if not self.alive else self.condition.value if not self.condition.runs else "alive"
        return f"{self.label} (pid {self.pid}, {shown}){self._what()}{self._why()}"

    def _what(self) -> str:
        since = f" for {self.seconds:.1f} s" if self.seconds >= _NOTED_S else ""
        peers = ", ".join(self.waits_for)
        of = f"{self.subject} of execution {self.execution}" if self.execution >= 0 else self.subject
        match self.state:
            case State.DEAD:
                return f", last seen at {self.subject}, execution {self.execution}" if self.subject else ""
            case State.COMPUTING if not self.condition.runs:
                return f" is in {self.subject}, execution {self.execution}, begun {self.seconds:.1f} s ago"
            case State.COMPUTING:
                return f" computes {self.subject}, execution {self.execution},{since or ' just now'}"
            case State.READING:
                return f" waits to read {of} from {peers}{since}"
            case State.UNREAD:
                ago = f" {self.written_s:.1f} s ago" if self.written_s is not None else ""
                return f" has not yet read {of}, which {self.writer} wrote{ago}"
            case State.WRITING:
                return f" waits for room to write {of}, which {peers} must take first{since}"
            case State.UNWRITTEN:
                return f" has not yet written {of}, for which there is room"
            case State.MEMORY:
                return f" waits for shared memory{f', which {peers} holds' if peers else ''}{since}"
            case State.ARRIVING:
                return f" waits for the tensors of {of}, which come from {peers}{since}"
            case State.LEFT:
                return " has left its loop"
            case State.IDLE if not self.process:
                return " is in other code"
            case State.IDLE if self.begun:
                return f" is between two steps of execution {self.execution}"
        return " has not begun"

    def _why(self) -> str:
        """Why it does not go on although it could."""
        if self.state in (State.DEAD, State.LEFT):
            return ""
        match self.condition:
            case Condition.STOPPED:
                return ": it does not run before it gets SIGCONT"
            case Condition.TRACED:
                return ": it does not run before its debugger lets it go on"
        if self.state is not State.UNREAD or self.written_s is None or self.written_s < _NOTED_S:
            return ""
        if self.condition is Condition.IN_KERNEL:
            return ": the kernel holds a thread of it in a call that cannot be interrupted (state D)"
        return ": its thread does not get to run (another thread of it may hold the interpreter, or the processors are busy)"


class Board:
    """The processes of one graph, seen from the driver.

    Args:
        plan: names processes and channels.
        arena: the driver's, to which all others are attached.
        pids: process index -> process id.
        slots: channel -> messages its ring holds.
    """

    def __init__(self, plan: Plan, arena: ShmArena, pids: Mapping[int, int], slots: Mapping[int, int]) -> None:
        self._plan = plan
        self._arena = arena
        self._pids = pids
        self._messages = Messages(plan, arena, slots)

    def pid(self, process: int) -> int:
        """The process id of a process of the graph; 0 if it is not known."""
        return self._pids.get(process, 0)

    def row(self, process: int) -> Row:
        """What one process does now."""
        for _ in range(_LOOKS):
            before = self._arena.core.doing(process)
            row = self._look(process, *before)
            kind, place, _, execution, _ = self._arena.core.doing(process)
            if (kind, place, execution) == (before[0], before[1], before[3]):
                break
        return row

    def _look(self, process: int, kind: int, place: int, seconds: float, execution: int, peers: tuple[int, ...]) -> Row:
        state = _STATES.get(kind, State.IDLE)
        subject = writer = ""
        written_s: float | None = None
        if state is State.COMPUTING:
            subject = self._call(process, place)
        elif state in (State.READING, State.WRITING) and place >= len(self._plan.channels):
            subject, execution = "its set-up message", -1
        elif state is State.READING:
            subject = self._plan.channels[place].value
            execution = self._messages.taken(place, process)
            if self._messages.written(place) > execution:
                state = State.UNREAD
                writer = self._author(place)
                written_s = self._messages.age_s(place, execution)
        elif state is State.ARRIVING:
            subject = self._plan.channels[place].value
            execution = self._messages.taken(place, process) - 1  # the message that says that they come
        elif state is State.WRITING:
            subject = self._plan.channels[place].value
            execution = self._messages.written(place)
            peers = self._messages.in_the_way(place)
            if not peers:
                state = State.UNWRITTEN
        if not self._arena.core.alive(process):
            state = State.DEAD
        elif process and self._arena.core.loop_state(process) == _core.LOOP_LEFT:
            state = State.LEFT
        waits_for = tuple(self._label(peer) for peer in peers) if state in _WAITS else ()
        pid = self.pid(process)
        return Row(
            process,
            self._label(process),
            pid,
            state,
            subject,
            seconds,
            execution,
            waits_for,
            condition_of(pid) if process and state is not State.DEAD else Condition.ALIVE,
            self._begun(process),
            writer,
            written_s,
        )

    def blame(self, channel: int, execution: int) -> str:
        """Follows the wait for a message from process to process, up to those that do not wait for another one."""
        for _ in range(_LOOKS):
            if self._messages.written(channel) > execution:
                return f"it has come, from {self._author(channel)}"
            rows, clauses = self._follow(self._plan.channels[channel].writer)
            # Each link must still hold now that those behind it were looked at: else the parts are true and the whole is not.
            held = all(self._still(row) for row in rows if row.waits_for)
            if held and self._messages.written(channel) <= execution:
                return "; ".join(clauses)
        return f"they move on while they are looked at: {self.everyone()}"

    def _follow(self, process: int) -> tuple[list[Row], list[str]]:
        rows: list[Row] = []
        clauses: list[str] = []
        todo = [process]
        seen = {process}
        while todo:
            row = self.row(todo.pop(0))
            rows.append(row)
            clauses.append(str(row))
            for peer in self._plan.processes:
                if peer.label not in row.waits_for or peer.index in seen:
                    continue
                if peer.index or self.row(_DRIVER).state in (State.WRITING, State.MEMORY):
                    seen.add(peer.index)
                    todo.append(peer.index)
                elif row.state is State.READING and row.execution >= 0:
                    clauses.append(f"the driver has not submitted execution {row.execution}")
                else:
                    clauses.append("the driver has not let go of results")
        return rows, clauses

    def _still(self, row: Row) -> bool:
        now = self.row(row.process)
        return (now.state, now.subject, now.execution) == (row.state, row.subject, row.execution)

    def everyone(self) -> str:
        """One clause per actor."""
        return "; ".join(str(self.row(process.index)) for process in self._plan.processes[1:])

    def last_call(self, process: int) -> tuple[str | None, int | None]:
        """The call and the execution a process was at when it ended, or just before; None where it waited for the next."""
        kind, place, _, execution, _ = self._arena.core.doing(process)
        if kind == _core.COMPUTING:
            return self._call(process, place), execution
        if kind not in (_core.READING, _core.ARRIVING):
            for kind, place, execution, *_ in reversed(self._arena.core.records(process, _LOOKED_AT)):
                if kind == _core.COMPUTING:
                    return self._call(process, place), execution
        return None, None

    def _label(self, process: int) -> str:
        return self._plan.processes[process].label if process < len(self._plan.processes) else f"process {process}"

    def _author(self, channel: int) -> str:
        writer = self._plan.channels[channel].writer
        return self._label(writer) if writer else "the driver"

    def _begun(self, process: int) -> bool:
        if process == _DRIVER:
            return True
        actions = self._plan.actors[process - 1].actions
        return any(self._messages.taken(action.channel, process) for action in actions if isinstance(action, Read))

    def _call(self, process: int, place: int) -> str:
        if process == _DRIVER:
            return "user code"
        for action in self._plan.actors[process - 1].actions[place:]:
            if isinstance(action, (Compute, Collective)):
                return f"{self._label(process)}.{action.method}#{action.node}"
        return "its last call"
