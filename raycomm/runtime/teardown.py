"""How a graph ends, once its channels are closed: wait for the loops, name or kill those that stay, give memory back."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import ray

from raycomm import _core
from raycomm.channel import Deadline, ShmArena
from raycomm.observe.board import Board, State
from raycomm.observe.notice import Notice
from raycomm.plan import Plan

logger = logging.getLogger("raycomm")

_KILL_LIMIT_S = 5.0
_IN_A_METHOD_S = 0.05


class Teardown:
    """Of one graph.

    Args:
        plan: names its processes.
        arena: the driver's.
        board: who does what.
        handles: of its actors, by index; kept until their loops have left, for Ray ends an actor whose last handle is gone.
    """

    def __init__(self, plan: Plan, arena: ShmArena, board: Board, handles: list[Any]) -> None:
        self._name = plan.name
        self._actors = [process.index for process in plan.processes[1:]]
        self._arena = arena
        self._board = board
        self._handles = tuple(handles)

    def run(self, deadline: Deadline, kill_actors: bool) -> None:
        """Wait until every loop has left, up to the deadline; then kill, or warn of, those that have not."""
        late = self.wait(deadline)
        handles = self._handles
        if late and kill_actors and handles:
            for process in late:
                ray.kill(handles[process - 1])
            late = self.wait(Deadline(_KILL_LIMIT_S))
        rows = [self._board.row(process) for process in late]
        # The others leave as soon as they look, and so does one that has only just begun.
        busy = [str(row) for row in rows if row.state is State.COMPUTING and row.seconds > _IN_A_METHOD_S]
        if busy:
            logger.warning(
                "graph %r is torn down, but after %s s still in a method: %s. They leave it when it returns; "
                "teardown(kill_actors=True) or ray.kill ends them now",
                self._name,
                deadline.limit_s,
                "; ".join(busy),
            )
        if not late:
            self._handles = ()
            self._arena.core.trim()

    def wait(self, deadline: Deadline) -> list[int]:
        """Wait until every loop has left or its process has died; gives those that had not when the deadline passed."""
        core, notice = self._arena.core, Notice()
        while not core.wait_left(self._actors, deadline.left(at_most=notice.left())):
            late = [process for process in self._actors if core.loop_state(process) == _core.LOOP_RUNNING and core.alive(process)]
            if deadline.over or not late:
                return late
            notice.give(partial(self._waits, late))
        return []

    def _waits(self, late: list[int]) -> str:
        return f"teardown of graph {self._name!r}: {'; '.join(str(self._board.row(process)) for process in late)}"
