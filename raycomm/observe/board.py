"""Who does what and who waits for whom, from the status board in shared memory (`BoardRow` in `_core/layout.hpp`).

Each process of a graph keeps a row there: what it does, since when, in which execution, and for whom it waits. Reading it costs
those processes nothing, and works while they hang, compute or are dead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from raycomm import _core
from raycomm.channel import ShmArena
from raycomm.plan import Collective, Compute, Plan

_LOOKED_AT = 4  # operations of the recorder that are searched for the last call


class State(Enum):
    """What a process of a graph does now."""

    IDLE = "idle"
    READING = "waits to read"
    COMPUTING = "computes"
    WRITING = "waits for room to write"
    MEMORY = "waits for shared memory"
    LEFT = "has left its loop"
    DEAD = "dead"


_STATES = {
    _core.IDLE: State.IDLE,
    _core.READING: State.READING,
    _core.COMPUTING: State.COMPUTING,
    _core.WRITING: State.WRITING,
    _core.MEMORY: State.MEMORY,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One process, now.

    Attributes:
        process, label, pid: who; process 0 is the driver.
        state: what it does; `DEAD` if its process is gone.
        subject: the value it waits to read or write ("W2.forward#1"), or the call it runs; "" where there is none.
        seconds: since when.
        execution: the one it is at.
        waits_for: labels of those it waits for.
    """

    process: int
    label: str
    pid: int
    state: State
    subject: str
    seconds: float
    execution: int
    waits_for: tuple[str, ...]

    @property
    def alive(self) -> bool:
        """Whether its process lives."""
        return self.state is not State.DEAD

    def __str__(self) -> str:
        who = f"{self.label} (pid {self.pid}, {'alive' if self.alive else 'dead'})"
        since = f" for {self.seconds:.1f} s" if self.seconds >= 0.1 else ""
        if self.state is State.DEAD:
            return f"{who}, last seen at {self.subject}, execution {self.execution}" if self.subject else who
        if self.state is State.COMPUTING:
            return f"{who} computes {self.subject}, execution {self.execution},{since or ' just now'}"
        peers = f" from {', '.join(self.waits_for)}" if self.waits_for else ""
        if self.state is State.READING:
            return f"{who} waits to read {self.subject}{peers}{since}"
        if self.state is State.WRITING:
            late = f", which {', '.join(self.waits_for)} must take first" if self.waits_for else ""
            return f"{who} waits for room to write {self.subject}{late}{since}"
        if self.state is State.MEMORY:
            held = f", which {', '.join(self.waits_for)} holds" if self.waits_for else ""
            return f"{who} waits for shared memory{held}{since}"
        if self.state is State.LEFT:
            return f"{who} has left its loop"
        return f"{who} {'has not begun' if self.process else 'is in other code'}"


class Board:
    """The processes of one graph, seen from the driver.

    Args:
        plan: names processes and channels.
        arena: the driver's, to which all others are attached.
        pids: process index -> process id.
    """

    def __init__(self, plan: Plan, arena: ShmArena, pids: Mapping[int, int]) -> None:
        self._plan = plan
        self._arena = arena
        self._pids = pids

    def pid(self, process: int) -> int:
        """The process id of a process of the graph; 0 if it is not known."""
        return self._pids.get(process, 0)

    def row(self, process: int) -> Row:
        """What one process does now."""
        kind, place, seconds, execution, peers = self._arena.core.doing(process)
        state = _STATES.get(kind, State.IDLE)
        subject = ""
        if state is State.COMPUTING:
            subject = self._call(process, place)
        elif state in (State.READING, State.WRITING):
            subject = self._value(place)
        if not self._arena.core.alive(process):
            state = State.DEAD
        elif process and self._arena.core.loop_state(process) == _core.LOOP_LEFT:
            state = State.LEFT
        waits_for = tuple(self._plan.processes[peer].label for peer in peers if peer < len(self._plan.processes))
        if state not in (State.READING, State.WRITING, State.MEMORY):
            waits_for = ()
        label = self._plan.processes[process].label
        return Row(process, label, self.pid(process), state, subject, seconds, execution, waits_for)

    def blame(self, channel: int) -> str:
        """Follows the wait for `channel` from process to process up to those that do not wait for another one."""
        chain: list[str] = []
        seen: set[int] = set()
        todo = [self._plan.channels[channel].writer]
        while todo:
            process = todo.pop(0)
            if process in seen:
                continue
            seen.add(process)
            if process == 0:
                chain.append("the driver has not written it" if not chain else "they wait for the driver")
                continue
            row = self.row(process)
            chain.append(str(row))
            if row.waits_for:
                todo += [peer.index for peer in self._plan.processes if peer.label in row.waits_for]
        return "; ".join(chain)

    def everyone(self) -> str:
        """One clause per actor."""
        return "; ".join(str(self.row(process.index)) for process in self._plan.processes[1:])

    def last_call(self, process: int) -> tuple[str | None, int | None]:
        """The call and the execution a process was at when it ended, or just before; None where it waited for the next."""
        kind, place, _, execution, _ = self._arena.core.doing(process)
        if kind == _core.COMPUTING:
            return self._call(process, place), execution
        if kind != _core.READING:
            for kind, place, execution, *_ in reversed(self._arena.core.records(process, _LOOKED_AT)):
                if kind == _core.COMPUTING:
                    return self._call(process, place), execution
        return None, None

    def _value(self, channel: int) -> str:
        return self._plan.channels[channel].value if channel < len(self._plan.channels) else "its set-up message"

    def _call(self, process: int, place: int) -> str:
        if process == 0:
            return "user code"
        for action in self._plan.actors[process - 1].actions[place:]:
            if isinstance(action, (Compute, Collective)):
                return f"{self._plan.processes[process].label}.{action.method}#{action.node}"
        return "its last call"
