"""The world that simulated devices live in: a virtual clock, host programs, and the notice that nothing can happen any more.

Nothing here takes real time. Whatever happens is a callback at a point of virtual time; where two stand at one point, the seed
decides which comes first. So a run is repeated exactly by its seed, and another seed is another interleaving.

A host program is a generator that yields a `Condition` to wait for or a float, virtual seconds to pass; or a plain function,
which then runs on a thread of its own and waits by calling `World.wait`. Only one of them runs at a time, never beside the world.

A world is quiescent where no callback is left. If a program or a stream then still waits, it waits for ever, which is what
`SimulatedHang` says. There are no real limits of time to choose, and none to be too short on a slow machine.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from raycomm.errors import RaycommError
from raycomm.testing.simulated_order import Agent, Clock

Callback: TypeAlias = Callable[[], None]


class SimulatedHang(RaycommError):
    """Nothing can happen any more, and somebody still waits. Attributes: `heads` (one text per host program and per stream that
    waits: what stands at its head, and what that waits for), `time` (virtual seconds)."""

    heads: tuple[str, ...] = ()
    time: float = 0.0


class SimulatedDeath(BaseException):
    """Ends the program of a rank that was killed; no `except Exception` of the program holds it up."""


class Condition(Protocol):
    """What a host program can wait for. Whoever may have made it true calls `World.changed`."""

    waiters: list[Task]

    def ready(self) -> bool:
        """Whether to go on."""

    def __str__(self) -> str:
        """What is waited for, as it reads after "waits for"."""


Wanted: TypeAlias = "Condition | float"
Program: TypeAlias = Generator[Wanted, None, Any]


@dataclass(frozen=True, slots=True)
class Delays:
    """How long things take, in virtual seconds: from and to, drawn evenly.

    Attributes:
        host: between two steps of a host program.
        compute: a kernel.
        transfer: a send with its receive, or a collective, once all its ranks have met.
        notice: until the others learn that a rank died.
    """

    host: tuple[float, float] = (0.0, 1.0)
    compute: tuple[float, float] = (0.0, 4.0)
    transfer: tuple[float, float] = (0.0, 4.0)
    notice: tuple[float, float] = (0.0, 2.0)

    def draw(self, kind: str, rng: random.Random) -> float:
        low, high = getattr(self, kind)
        return float(low + (high - low) * rng.random())


class Waiter(Protocol):
    """What is left to do somewhere, for the report of a hang: lines "who: what stands at its head waits for what"."""

    def heads(self) -> Iterator[str]: ...


class Task:
    """A host program. `outcome` is what it returned, `failure` what it raised."""

    def __init__(self, world: World, name: str, program: Program | _Thread, rank: object) -> None:
        self.name = name
        self.rank = rank
        self.program = program
        self.finished = False
        self.outcome: Any = None
        self.failure: BaseException | None = None
        self.waits_for: Condition | None = None
        self.agent = Agent()
        self._wanted: Wanted = 0.0
        self._world = world

    def resume(self) -> None:
        """Run the program up to its next wait."""
        self._go(lambda: self.program.send(None))

    def end(self, error: BaseException) -> None:
        """Raise `error` where the program waits."""
        if self.finished:
            return
        if self.waits_for is not None:
            self.waits_for.waiters.remove(self)
            self.waits_for = None
        self._go(lambda: self.program.throw(error))

    def _go(self, step: Callable[[], Wanted]) -> None:
        if self.finished:
            return
        self.waits_for = None
        self.agent.learn(_clock(self._wanted))
        outer, self._world.host = self._world.host, self.agent
        try:
            wanted = step()
        except StopIteration as stop:
            self.finished, self.outcome = True, stop.value
        except SimulatedDeath:
            self.finished = True
        except Exception as error:
            self.finished, self.failure = True, error
        else:
            self._wanted = wanted
            if isinstance(wanted, float):
                self._world.after(wanted, self.resume)
            elif wanted.ready():
                self._world.after(0.0, self.resume)
            else:
                self.waits_for = wanted
                wanted.waiters.append(self)
        finally:
            self._world.host = outer


class World:
    """A virtual clock and everything that happens on it.

    Args:
        seed: decides delays and ties.
        delays: how long things take.

    Attributes:
        host: the host program that runs now; outside of all, the one that made this world.
        agents: all streams and host programs.
    """

    def __init__(self, seed: int = 0, delays: Delays | None = None) -> None:
        self.seed = seed
        self.now = 0.0
        self.rng = random.Random(seed)
        self.delays = delays or Delays()
        self.host = Agent()
        self.agents: list[Agent] = []
        self.tasks: list[Task] = []
        self.watched: list[Waiter] = []
        self._agenda: list[tuple[float, float, int, Callback]] = []
        self._count = 0

    def after(self, delay: float, callback: Callback) -> None:
        """Call back after `delay` virtual seconds."""
        self._count += 1
        heapq.heappush(self._agenda, (self.now + delay, self.rng.random(), self._count, callback))

    def draw(self, kind: str) -> float:
        """A delay of this kind, see `Delays`."""
        return self.delays.draw(kind, self.rng)

    def start(self, name: str, program: Program | Callable[[], Any], rank: object = None) -> Task:
        """Add a host program. It begins when the world runs, and ends with `rank`, if that is killed."""
        task = Task(self, name, _Thread(name, program) if callable(program) else program, rank)
        self.tasks.append(task)
        self.agents.append(task.agent)
        self.after(self.draw("host"), task.resume)
        return task

    def changed(self, condition: Condition) -> None:
        """Let those who wait for `condition` go on if it holds."""
        if condition.waiters and condition.ready():
            for task in condition.waiters:
                task.waits_for = None
                self.after(0.0, task.resume)
            condition.waiters.clear()

    def wait(self, condition: Condition, limit_s: float | None = None) -> bool:
        """From a program on a thread, or from outside all programs: wait. False if `limit_s` virtual seconds passed before.

        Raises:
            SimulatedHang: nothing can happen any more that could make `condition` true.
        """
        if limit_s is not None:
            condition = _Limited(self, condition, limit_s)
        thread = getattr(_current, "thread", None)
        if thread is None:
            self.run(condition.ready)
        else:
            while not condition.ready():
                thread.hand_over(condition)
        self.host.learn(_clock(condition))
        return not (isinstance(condition, _Limited) and condition.passed)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Let happen what can happen, up to `until` or to the end. A failure of a program stays with its `Task`.

        Raises:
            SimulatedHang: the end was reached, and somebody still waits; all programs have been ended.
        """
        agenda = self._agenda
        while not (until is not None and until()):
            if not agenda:
                if until is not None or self._heads():
                    raise self._hang()
                for agent in self.agents:  # Everything is over, and would be in any run.
                    self.host.learn(agent.clock)
                return
            self.now, _, _, callback = heapq.heappop(agenda)
            callback()

    def results(self) -> list[Any]:
        """Run to the end; what the programs returned, in the order of their start. Raises what the first of them raised."""
        self.run()
        for task in self.tasks:
            if task.failure is not None:
                raise task.failure
        return [task.outcome for task in self.tasks]

    def _heads(self) -> tuple[str, ...]:
        waiting = [f"{task.name}: waits for {task.waits_for}" for task in self.tasks if not task.finished]
        return (*waiting, *(text for watched in self.watched for text in watched.heads()))

    def _hang(self) -> SimulatedHang:
        heads = self._heads()
        lines = "\n".join(f"  {head}" for head in heads)
        hang = SimulatedHang(
            f"nothing can happen any more at {self.now:.3f} virtual seconds (seed {self.seed}), and these wait:\n{lines}",
            heads=heads,
            time=self.now,
        )
        for task in self.tasks:
            task.end(hang)
        return hang


class _Limited:
    """A condition, or a point of time if that comes first."""

    def __init__(self, world: World, inner: Condition, limit_s: float) -> None:
        self.waiters: list[Task] = []
        self.passed = False
        self._inner = inner
        self._world = world
        # The inner condition's news come to its own waiters only: this one looks at it through a waiter that is no program.
        world.after(0.0, Task(world, "limit", self._watch(), None).resume)
        world.after(limit_s, self._pass)

    @property
    def clock(self) -> Clock:
        return _clock(self._inner) if self._inner.ready() else {}

    def ready(self) -> bool:
        return self.passed or self._inner.ready()

    def __str__(self) -> str:
        return str(self._inner)

    def _pass(self) -> None:
        self.passed = not self._inner.ready()
        self._world.changed(self)

    def _watch(self) -> Program:
        yield self._inner
        self._world.changed(self)


class _Thread:
    """A plain function that runs like a generator: on a thread, but only while the world waits for it."""

    def __init__(self, name: str, function: Callable[[], Any]) -> None:
        self._function = function
        self._thread: threading.Thread | None = None
        self._name = name
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._wanted: Wanted | None = None
        self._thrown: BaseException | None = None
        self._returned: Any = None
        self._raised: BaseException | None = None

    def send(self, nothing: None) -> Wanted:
        return self._step()

    def throw(self, error: BaseException) -> Wanted:
        if self._thread is None:
            raise error
        self._thrown = error
        return self._step()

    def hand_over(self, wanted: Wanted) -> None:
        """On the thread: let the world go on until `wanted`."""
        self._wanted = wanted
        self._back.release()
        self._go.acquire()
        if self._thrown is not None:
            thrown, self._thrown = self._thrown, None
            raise thrown

    def _step(self) -> Wanted:
        self._forget()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"simulated {self._name}", daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        if self._wanted is not None:
            return self._wanted
        self._thread.join()
        if self._raised is not None:
            raise self._raised
        raise StopIteration(self._returned)

    def _forget(self) -> None:
        self._wanted = None

    def _run(self) -> None:
        _current.thread = self
        try:
            self._returned = self._function()
        except BaseException as error:
            self._raised = error
        finally:
            self._back.release()


def _clock(wanted: Wanted) -> Clock:
    """What a program knows once it has waited for this."""
    clock: Clock = getattr(wanted, "clock", {})
    return clock


_current = threading.local()
