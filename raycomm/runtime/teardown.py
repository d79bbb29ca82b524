"""How a graph ends, once its channels are closed: wait for the loops, name or kill those that stay."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray

from raycomm import _core
from raycomm.channel import Deadline, ShmArena
from raycomm.observe.board import Board, State
from raycomm.observe.notice import Notice
from raycomm.plan.actions import Plan
from raycomm.runtime.blueprint import DRIVER
from raycomm.runtime.outputs import OutputQueue

logger = logging.getLogger("raycomm")

EXIT_LIMIT_S = 0.5

_FIRST_NOTICE_S = 1.0  # sooner than elsewhere: whoever ends something expects it to end
_LEAVE_LIMIT_S = 1.0
_KILL_LIMIT_S = 5.0
_FETCH_LIMIT_S = 0.1  # for threads in the middle of a fetch, which has been closed under them
_IN_A_METHOD_S = 0.05
_EXIT_LOOK_S = 0.02
_ENDS_THEM = "ray.kill ends them now, or raycomm's teardown(timeout=0, kill_actors=True)"


class Teardown:
    """Of one graph.

    Args:
        plan: names its processes.
        arena: the driver's.
        board: who does what.
        handles: of its actors, by index; kept until their loops have left, for Ray ends an actor whose last handle is gone.
        queues: of its results.
    """

    def __init__(self, plan: Plan, arena: ShmArena, board: Board, handles: list[Any], queues: tuple[OutputQueue, ...]) -> None:
        self._name = plan.name
        self._actors = [process.index for process in plan.processes[1:]]
        self._arena = arena
        self._board = board
        self._handles = tuple(handles)
        self._queues = queues

    @contextmanager
    def to_the_end(self) -> Iterator[None]:
        """Around all of it: Ctrl-C ends the wait, and says who stays. However it ends, the driver's memory is given back."""
        try:
            yield
        except BaseException:
            self._tell_busy(self._late(), "its teardown was interrupted;", 0.0)
            raise
        finally:
            self._give_memory_back()

    def _give_memory_back(self) -> None:
        """Or what nobody can fetch any more would stay for as long as the graph object."""
        self._arena.leave(DRIVER, _FETCH_LIMIT_S)
        for queue in self._queues:  # afterwards: until then another thread's fetch may move results there
            queue.clear()

    def run(self, deadline: Deadline, limit_name: str, *, kill_actors: bool) -> None:
        """Wait until every loop has left, up to the deadline; then kill, or warn of, those that have not.

        Args:
            deadline: of the wait.
            limit_name: where the deadline comes from, for the log.
            kill_actors: kill them.
        """
        limit = "there is no limit" if deadline.limit_s is None else f"at most {deadline.limit_s} s ({limit_name})"
        what_then = "then their actors are killed" if kill_actors else _ENDS_THEM
        late = self._wait(deadline, f"{limit}; {what_then}")
        when = f"after {deadline.limit_s} s"
        handles = self._handles
        if late and kill_actors and handles:
            for process in late:
                ray.kill(handles[process - 1])
            late = self._wait(Deadline(_KILL_LIMIT_S), "they were killed")
            when = f"{_KILL_LIMIT_S} s after their actors were killed"
        self._finish(late, when)

    def leave(self, limit_s: float) -> None:
        """For a program on its way out (Ctrl-C, `sys.exit`, a cancelled task): a short wait, then say who still computes."""
        deadline = Deadline(min(limit_s, _LEAVE_LIMIT_S))
        self._finish(self._wait(deadline, _ENDS_THEM), f"after {deadline.limit_s} s")

    def wait_for_exit(self, limit_s: float) -> None:
        """For the interpreter's end, and Ray's, which kills the actors right after: silent, and short.

        A method that has run for longer than the whole limit is not waited for at all. So a program with many graphs, each with
        a method that hangs, waits once and not for each.
        """
        deadline = Deadline(limit_s)
        while not self._arena.core.wait_left(self._actors, deadline.left(at_most=_EXIT_LOOK_S)):
            rows = [self._board.row(process) for process in self._late()]
            if deadline.over or all(row.state is State.COMPUTING and row.seconds > limit_s for row in rows):
                return

    def _wait(self, deadline: Deadline, what_then: str) -> list[int]:
        """Wait until every loop has left or its process has died; gives those that had not when the deadline passed."""
        notice = Notice(_FIRST_NOTICE_S)
        while not self._arena.core.wait_left(self._actors, deadline.left(at_most=notice.left())):
            late = self._late()
            if deadline.over or not late:
                return late
            notice.give(partial(self._waits, late, what_then))
        return []

    def _late(self) -> list[int]:
        core = self._arena.core
        return [process for process in self._actors if core.loop_state(process) == _core.LOOP_RUNNING and core.alive(process)]

    def _waits(self, late: list[int], what_then: str) -> str:
        who = "; ".join(str(self._board.row(process)) for process in late)
        # Only this thread gets the signal.
        way_out = "; Ctrl-C leaves at once" if threading.current_thread() is threading.main_thread() else ""
        return f"teardown of graph {self._name!r} waits for {who}; {what_then}{way_out}"

    def _finish(self, late: list[int], when: str) -> None:
        # Not of those that have only just begun: they leave as soon as they look, as the others do.
        self._tell_busy(late, f"but {when}", _IN_A_METHOD_S)
        if not late:
            self._handles = ()

    def _tell_busy(self, late: list[int], how: str, longer_than_s: float) -> None:
        rows = map(self._board.row, late)
        busy = [str(row) for row in rows if row.state is State.COMPUTING and row.seconds > longer_than_s]
        if busy:
            logger.warning(
                "graph %r is torn down, %s still in a method: %s. They leave it when it returns; %s",
                self._name,
                how,
                "; ".join(busy),
                _ENDS_THEM,
            )


def dropped(arena: ShmArena, name: str) -> None:
    """A graph nobody holds any more was not torn down: let its loops leave, without waiting, and say so."""
    arena.close(_core.CLOSED_TEARDOWN, 0)
    warnings.warn(f"graph {name!r} was dropped without teardown(); its loops leave on their own", ResourceWarning, stacklevel=2)
