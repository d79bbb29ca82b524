"""Who waits for whom, from what each process last stored in its arena (`activity` in `_core/layout.hpp`)."""

from __future__ import annotations

from collections.abc import Mapping

from raycomm.channel import ShmArena
from raycomm.plan import Compute, Plan

_READING, _COMPUTING, _WRITING = 1, 2, 3


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

    def doing(self, process: int) -> str:
        """What one actor does now: "W2 computes W2.forward", "W3 waits for W2.forward#1", with its pid and whether it lives."""
        label = self._plan.processes[process].label
        alive = self._arena.core.alive(process)
        who = f"{label} (pid {self.pid(process)}, {'alive' if alive else 'dead'})"
        kind, subject = self._arena.core.activity(process)
        if kind == _READING:
            return f"{who} waits to read {self._value(subject)}"
        if kind == _WRITING:
            return f"{who} waits for room to write {self._value(subject)}"
        if kind == _COMPUTING:
            return f"{who} computes {self._call(process, subject)}"
        return f"{who} has not begun"

    def blame(self, channel: int) -> str:
        """Follows the wait for `channel` from writer to writer up to whoever is not itself waiting to read."""
        chain: list[str] = []
        seen: set[int] = set()
        while True:
            writer = self._plan.channels[channel].writer
            if writer == 0:
                chain.append("the driver has not written it" if not chain else "which waits for the driver's input")
                break
            if writer in seen:
                break
            seen.add(writer)
            chain.append(self.doing(writer))
            kind, subject = self._arena.core.activity(writer)
            if kind != _READING or subject >= len(self._plan.channels):
                break
            channel = subject
        return "; ".join(chain)

    def everyone(self) -> str:
        """One clause per actor."""
        return "; ".join(self.doing(process.index) for process in self._plan.processes[1:])

    def _value(self, channel: int) -> str:
        return self._plan.channels[channel].value if channel < len(self._plan.channels) else "its set-up message"

    def _call(self, process: int, place: int) -> str:
        for action in self._plan.actors[process - 1].actions[place:]:
            if isinstance(action, Compute):
                return f"{action.method} (node {action.node})"
        return "its last call"
