"""Where injected faults strike (`raycomm.testing`). Without faults nothing of this is in a loop's list of steps."""

from __future__ import annotations

import copy
import dataclasses
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

import ray.actor

from raycomm.errors import CompileError
from raycomm.graph.actor import read_actor
from raycomm.graph.model import Graph
from raycomm.plan.actions import Read, Write
from raycomm.plan.transfer import Recv, Send
from raycomm.testing.faults import Action, Exit, ExitActor, Fault, Kill, Point, Raise, Sleep, Stall

Step = Callable[[], None]

# By kind of action. A receive is a read, and a send a write, of its control record.
BEFORE: dict[type, Point] = {
    Read: Point.BEFORE_READ,
    Recv: Point.BEFORE_READ,
    Write: Point.BEFORE_WRITE,
    Send: Point.BEFORE_WRITE,
}
AFTER: dict[type, Point] = {
    Read: Point.AFTER_READ,
    Recv: Point.AFTER_READ,
    Write: Point.AFTER_WRITE,
    Send: Point.AFTER_WRITE,
}


class FaultPoints:
    """The faults of one actor in one graph.

    Args:
        faults: those of this actor.
    """

    def __init__(self, faults: tuple[Fault, ...]) -> None:
        self._waiting = list(faults)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def reach(self, point: Point, execution: int | None = None, method: str | None = None) -> None:
        """The actor is at this point: do what is due there, once."""
        for fault in self._waiting.copy():
            if fault.point is point and fault.method in (None, method) and fault.execution in (None, execution):
                self._waiting.remove(fault)
                perform(fault.action)

    def steps(self, point: Point | None, execution: Callable[[], int]) -> list[Step]:
        """The step to put at this point of the loop's list; none if no fault belongs there."""
        if point is None or all(fault.point is not point for fault in self._waiting):
            return []
        return [lambda: self.reach(point, execution())]

    def around(self, method: Callable[..., Any], name: str, execution: Callable[[], int]) -> Callable[..., Any]:
        """`method` with the faults at its calls."""
        if all(fault.point not in (Point.BEFORE_CALL, Point.AFTER_CALL) for fault in self._waiting):
            return method

        def call(*args: Any, **kwargs: Any) -> Any:
            self.reach(Point.BEFORE_CALL, execution(), name)
            result = method(*args, **kwargs)
            self.reach(Point.AFTER_CALL, execution(), name)
            return result

        return call


def perform(action: Action) -> None:
    """Do it, in this process, on this thread."""
    match action:
        case Kill():
            os.kill(os.getpid(), signal.SIGKILL)
        case Exit(code):
            os._exit(code)
        case ExitActor():
            leave: Any = ray.actor.exit_actor
            leave()
        case Raise(exception):
            raise copy.copy(exception)  # the fault itself would keep its traceback, whose frames keep the fault
        case Sleep(seconds):
            time.sleep(seconds)
        case Stall():
            action.stay()


def faults_by_actor(graph: Graph, name: str, faults: tuple[Fault, ...]) -> dict[int, tuple[Fault, ...]]:
    """The faults of each actor of a graph, by its index.

    Raises:
        CompileError: a fault names no actor of the graph, or several.
    """
    found: dict[int, tuple[Fault, ...]] = {}
    for fault in faults:
        identity = read_actor(fault.actor)
        if identity is not None:
            fits = [actor for actor in graph.actors if actor.key == identity.key]
        else:
            fits = [actor for actor in graph.actors if actor.label == fault.actor]
            fits = fits or [actor for actor in graph.actors if actor.label.partition("#")[0] == fault.actor]
        if len(fits) != 1:
            _refuse(fault, name, [actor.label for actor in graph.actors])
        [actor] = fits
        # The label goes along, not the handle: nobody needs that there.
        found[actor.index] = (*found.get(actor.index, ()), dataclasses.replace(fault, actor=actor.label))
    return found


def _refuse(fault: Fault, name: str, labels: list[str]) -> NoReturn:
    remedy = f"name one of: {', '.join(labels)}"
    raise CompileError(
        f"graph {name!r}: the fault at {fault.point.name} is for actor {fault.actor!r}, which fits none of its actors, or "
        f"several; {remedy}",
        node=str(fault.actor),
        argument="actor",
        remedy=remedy,
    )
