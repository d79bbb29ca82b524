"""What goes wrong around a graph: deaths, faults at chosen points, teardown in the middle."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from typing import Any

import ray

from raycomm.testing import Exit, ExitActor, Fault, Kill, Point, Raise, Sleep, inject
from tests.chaos.actors import Crew
from tests.chaos.driving import ActorDiedError, ChannelClosedError, Expected
from tests.chaos.graphs import Spec

_LONGEST_DELAY_S = 0.3


class Event:
    """Nothing happens. Base of what does."""

    in_compile = False  # whether it may strike while the graph is compiled
    ends_graph = False  # whether it surely ends the graph
    struck_at: float | None = None

    def __init__(self, rng: random.Random, spec: Spec, crew: Crew) -> None:
        self.rng = rng
        self.spec = spec
        self.crew = crew
        self.victims: list[int] = []

    def expect(self, expected: Expected) -> None:
        """Add the errors that it accounts for."""

    def around_compile(self) -> Any:
        """A context to compile in."""
        return contextlib.nullcontext()

    def begin(self, graph: Any) -> None:
        """The graph runs."""

    def join(self) -> None:
        """Returns once it has struck."""

    def __str__(self) -> str:
        return type(self).__name__


class Delayed(Event):
    """Strikes from a thread of its own."""

    ends_graph = True

    def begin(self, graph: Any) -> None:
        delay = self.rng.random() ** 2 * _LONGEST_DELAY_S

        def work() -> None:
            time.sleep(delay)
            self.struck_at = time.monotonic()
            self.strike(graph)

        self._thread = threading.Thread(target=work, name="event")
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def strike(self, graph: Any) -> None:
        """Do it."""
        raise NotImplementedError


class Killed(Delayed):
    """An actor is killed from outside."""

    def expect(self, expected: Expected) -> None:
        expected.ends.add(ActorDiedError)
        self.victims = [self.rng.choice(self.spec.actors)]
        self._by_ray = self.rng.random() < 0.3

    def strike(self, graph: Any) -> None:
        if self._by_ray:
            ray.kill(self.crew.handles[self.victims[0]])
        else:
            os.kill(self.crew.pids[self.victims[0]], signal.SIGKILL)

    def __str__(self) -> str:
        return f"actor {self.victims[0]} is killed {'by Ray' if self._by_ray else 'with SIGKILL'}"


class TornDown(Delayed):
    """The graph is torn down by another thread while it is used."""

    def expect(self, expected: Expected) -> None:
        expected.ends.add(ChannelClosedError)

    def strike(self, graph: Any) -> None:
        graph.teardown()


class Faulty(Event):
    """A fault at a point of an actor's loop."""

    def expect(self, expected: Expected) -> None:
        rng = self.rng
        victim = rng.choice(self.spec.actors)
        point = rng.choice(list(Point))
        at_call = point in (Point.BEFORE_CALL, Point.AFTER_CALL)
        setup = point.name.startswith("SETUP_")
        in_execution = not setup and point is not Point.LEAVING
        mark = f"fault {rng.getrandbits(32)}"
        actions: list[Any] = [Kill(), Kill(), Exit(rng.choice((0, 1))), Sleep(rng.choice((0.001, 0.1)))]
        if in_execution:
            actions += [Raise(LookupError(mark)), ExitActor()]
        action = rng.choice(actions)
        execution = rng.choice((None, 0, 1, 2, 5)) if in_execution else None
        self._fault = (point, action, execution)
        if isinstance(action, Raise) and at_call:
            expected.marks.append(mark)
        elif not isinstance(action, Sleep):
            expected.ends.add(ActorDiedError)
            self.victims = [victim]
            self.in_compile = setup or point is Point.BEFORE_READ  # a loop reads as soon as it runs
        self._context = inject(Fault(actor=self.crew.handles[victim], point=point, execution=execution, action=action))

    def around_compile(self) -> Any:
        return self._context

    def __str__(self) -> str:
        return f"fault {self._fault} in actor {self.victims}"


EVENTS: tuple[tuple[type[Event], int], ...] = ((Event, 8), (Killed, 2), (TornDown, 2), (Faulty, 3))


def draw_event(rng: random.Random, spec: Spec, crew: Crew) -> Event:
    """One of them."""
    kinds, weights = zip(*EVENTS, strict=True)
    event: Event = rng.choices(kinds, weights)[0](rng, spec, crew)
    return event
