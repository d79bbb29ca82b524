"""``RAY_CGRAPH_ENABLE_PROFILING``: when each call of an actor read, computed and wrote, kept where Ray keeps it.

Ray has one READ, one COMPUTE and one WRITE per call. Here a value may need no reading (an earlier call of this actor has read or
made it) or no writing; that operation then takes no time. Several reads for one call count from the first to the last.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import ray

from raycomm.plan.actions import Collective, Compute, Read, Write
from raycomm.runtime.calls import Step
from raycomm.runtime.loop import Loop

EVENTS: Final = "__ray_cgraph_events"
_KEPT: Final = 100_000  # records per actor; Ray keeps all, for ever


@dataclass(slots=True)
class Record:
    """One operation of one call in one execution. Times are `time.perf_counter()` of the actor's machine, in seconds."""

    actor_classname: str
    actor_name: str
    actor_id: str
    method_name: str
    bind_index: int
    operation: str
    start_t: float
    end_t: float

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


class ProfiledLoop(Loop):
    """A loop that records. Slower than `Loop`: it goes step by step.

    Args:
        bind_indexes: by actor id, the bind index of each call of that actor, in the order of the calls.
        instance: the actor's object, which gets the list of records.
        *rest: what `Loop` takes further.
    """

    def __init__(self, bind_indexes: dict[str, list[int]], instance: Any, *rest: Any) -> None:
        context = ray.get_runtime_context()
        actor_id = str(context.get_actor_id())
        self._who = (type(instance).__name__, context.get_actor_name() or "", actor_id)
        self._bind_indexes = iter(bind_indexes[actor_id])
        if not hasattr(instance, EVENTS):
            setattr(instance, EVENTS, [])
        self._events: list[Record] = getattr(instance, EVENTS)
        self._call_made = ("", -1)  # the call that what is being prepared belongs to: its method and bind index
        self._writes = 0  # how many of its writes are still to be prepared
        self._reading: list[float] = []  # when the reads since the last call began and ended
        self._writing: list[float] = []
        super().__init__(instance, *rest)

    def _relay(self) -> Step | None:
        return None

    def _read(self, action: Read, place: int) -> Step:
        return _timed(super()._read(action, place), self._reading, lambda: None)

    def _compute(self, action: Compute) -> Step:
        return self._called(super()._compute(action), action, action.method)

    def _exchange(self, action: Collective) -> Step:
        return self._called(super()._exchange(action), action, str(action.kind))

    def _write(self, action: Write) -> Step:
        made = self._call_made
        self._writes -= 1
        last = self._writes == 0
        return _timed(super()._write(action), self._writing, lambda: self._record(made, "WRITE", self._writing) if last else None)

    def _called(self, step: Step, action: Compute | Collective, method: str) -> Step:
        made = self._call_made = (method, next(self._bind_indexes, -1))
        writes = self._writes = self._writes_after(action)
        computing: list[float] = []

        def done() -> None:
            if not self._reading:
                self._reading += computing[:1]
            self._record(made, "READ", self._reading)
            end = computing[-1]
            self._record(made, "COMPUTE", computing)
            if not writes:
                self._record(made, "WRITE", [end])

        return _timed(step, computing, done)

    def _writes_after(self, action: Compute | Collective) -> int:
        actions = self._actor.actions
        count = 0
        for following in actions[next(place for place, other in enumerate(actions) if other is action) + 1 :]:
            if isinstance(following, (Compute, Collective)):
                break
            count += isinstance(following, Write)
        return count

    def _record(self, made: tuple[str, int], operation: str, times: list[float]) -> None:
        if len(self._events) >= _KEPT:
            del self._events[: _KEPT // 2]
        self._events.append(Record(*self._who, *made, operation, times[0], times[-1]))
        times.clear()


def _timed(step: Step, times: list[float], done: Step) -> Step:
    def timed() -> None:
        times.append(time.perf_counter())
        step()
        times.append(time.perf_counter())
        done()

    return timed
