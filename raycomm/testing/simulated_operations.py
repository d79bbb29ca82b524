"""What stands in the streams of a simulated device, and the queues it stands in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from raycomm.errors import TransferTimeoutError
from raycomm.testing.simulated_memory import Access, Hazard, MemoryFault, Poison, computed
from raycomm.testing.simulated_order import Clock, Moment, join
from raycomm.testing.simulated_world import Task, World

if TYPE_CHECKING:
    from raycomm.testing.simulated_device import Stream, Tensor

Kernel: TypeAlias = Callable[[list[Any]], list[Any]]


class Event:
    """A point in a stream. Complete once everything before it has ended; a host program can wait for it.

    `failure` is what the operations before it ended with, if they did not end well.
    """

    __slots__ = ("_reached", "failure", "operation", "streams", "waiters", "world")

    def __init__(self, world: World, operation: Operation) -> None:
        self.world = world
        self.operation = operation
        self._reached = False
        self.failure: Exception | None = None
        self.waiters: list[Task] = []
        self.streams: list[Stream] = []

    def ready(self) -> bool:
        """Whether a host program that waits goes on."""
        return self._reached

    @property
    def clock(self) -> Clock:
        """What is over where it is complete."""
        return self.operation.moment.clock

    @property
    def complete(self) -> bool:
        """Whether it has been reached; a program that sees so may use what was made before it."""
        if self._reached:
            self.world.host.learn(self.clock)
        return self._reached

    def finish(self, failure: Exception | None) -> None:
        """Reached."""
        self._reached, self.failure = True, failure
        self.world.changed(self)
        for stream in self.streams:
            stream.queue.advance()

    def synchronize(self, limit_s: float | None = None) -> None:
        """Block the host program until complete, for `limit_s` virtual seconds at most.

        Raises:
            TransferTimeoutError: not complete within the limit.
            CommunicatorError, CollectiveError: `failure`, whatever it is.
        """
        if not self.world.wait(self, limit_s) and not self.complete:
            text = f"{self.operation} did not end within {limit_s} s; it waits for {self.operation.waits_for()}"
            raise TransferTimeoutError(text, limit_s=limit_s, waits_for=self.operation.waits_for())
        if self.failure is not None:
            raise self.failure

    def __str__(self) -> str:
        return f"the end of {self.operation}"


class Operation:
    """Something in a stream. It stands in its queue until it has ended."""

    __slots__ = ("_known", "begun", "end_event", "moment", "name", "stream")

    def __init__(self, name: str, stream: Stream) -> None:
        self.name = name
        self.stream = stream
        self.begun = False
        self.moment = Moment(stream.agent, 0, {})
        self._known = dict(stream.world.host.clock)
        self.end_event = Event(stream.world, self)

    def ready(self) -> bool:
        """Whether it can begin; asked while it stands at the head of its queue."""
        return True

    def start(self) -> None:
        """It begins: after what was over at its launch, and what is over in its stream."""
        self.begun = True
        self.moment = self.stream.agent.step(self._known)

    def begin(self) -> None:
        """It has begun. Calls `over` when it ends."""
        self.over()

    def over(self, failure: Exception | None = None) -> None:
        """It has ended: the next one stands at the head."""
        self.stream.device.leave(self, failure)

    def waits_for(self) -> str:
        """What it waits for, where it stands or behind what."""
        head = self.stream.queue.operations[0] if self.stream.queue.operations else self
        return "nothing" if head is self else f"{head}, which waits for {head.waits_for()}"

    def __str__(self) -> str:
        return f"{self.name} on {self.stream}"


class Compute(Operation):
    """A kernel: takes what it reads when it begins, puts what it writes when it ends."""

    __slots__ = ("_access", "_function", "_reads", "_writes")

    def __init__(self, name: str, stream: Stream, reads: Sequence[Tensor], writes: Sequence[Tensor], function: Kernel) -> None:
        super().__init__(name, stream)
        self._reads = tuple(tensor.piece for tensor in reads)
        self._writes = tuple(tensor.piece for tensor in writes)
        self._function = function
        self._access = Access(str(self), stream.device.faults)

    def begin(self) -> None:
        world = self.stream.world
        self._access.begin(self._reads, self._writes, world.now, self.moment)
        world.after(world.draw("compute"), self._finish)

    def _finish(self) -> None:
        now = self.stream.world.now
        inputs = self._access.taken(now)
        poisoned = any(isinstance(given, Poison) for given in inputs)
        contents = [None] * len(self._writes) if poisoned else self._function(inputs)
        self._access.end([computed(content, inputs) for content in contents], now)
        self.over()


class WaitEvent(Operation):
    """Holds up its stream until an event is complete."""

    __slots__ = ("_event",)

    def __init__(self, event: Event, stream: Stream) -> None:
        super().__init__("next operation", stream)
        self._event = event
        event.streams.append(stream)

    def ready(self) -> bool:
        return self._event.ready()

    def begin(self) -> None:
        join(self.moment.clock, self._event.clock)
        self.over(self._event.failure)

    def waits_for(self) -> str:
        return str(self._event)


class Reuse(Operation):
    """From here on the memory is somebody else's."""

    __slots__ = ("_block", "_name")

    def __init__(self, tensor: Tensor, stream: Stream) -> None:
        super().__init__(f"reuse of {tensor}", stream)
        self._block = tensor.block
        self._name = tensor.name
        join(self._known, tensor.seen)

    def begin(self) -> None:
        other = self._block.unordered(self.moment, writes=True)
        if other is not None:
            why = "it was freed, and its memory given to another tensor without waiting for this"
            now = self.stream.world.now
            self.stream.device.faults.append(MemoryFault(Hazard.EARLY_FREE, other[0], str(self._block), why, now))
        self._block.used(str(self), self.moment, writes=True)
        self._block.put(Poison(Hazard.EARLY_READ, f"nothing was written to it since {self._name} was freed"))
        self._block.life += 1
        self._block.writer = None
        self.over()


class HardwareQueue:
    """Operations of one or more streams, in the order of their launch; only the one at the head makes progress."""

    __slots__ = ("_moving", "operations")

    def __init__(self) -> None:
        self.operations: deque[Operation] = deque()
        self._moving = False

    def at_head(self, operation: Operation) -> bool:
        """Whether it could begin as far as its queue goes."""
        return not operation.begun and bool(self.operations) and self.operations[0] is operation

    def advance(self) -> None:
        """Begin what stands at the head, if it can."""
        if self._moving:
            return  # Called by what the loop below began.
        self._moving = True
        while self.operations and not self.operations[0].begun and self.operations[0].ready():
            head = self.operations[0]
            head.start()
            head.begin()
        self._moving = False
