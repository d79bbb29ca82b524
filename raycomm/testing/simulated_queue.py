"""A channel between simulated host programs: messages in order, to every reader, as many under way as it has slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from raycomm.testing.simulated_order import Clock, join
from raycomm.testing.simulated_world import Task, World


class _Condition:
    """What a host program waits for at a queue."""

    __slots__ = ("_queue", "_ready", "_text", "waiters")

    def __init__(self, queue: Queue, ready: Callable[[], bool], text: str) -> None:
        self.waiters: list[Task] = []
        self._queue = queue
        self._ready = ready
        self._text = text

    def ready(self) -> bool:
        return self._queue.failure is not None or self._ready()

    def __str__(self) -> str:
        return self._text


class Queue:
    """A ring of `capacity` slots; a slot is free again once the slowest of `readers` has taken its message.

    A program yields `room`, then calls `put`; yields `message(reader)`, then calls `take(reader)`.
    """

    def __init__(self, world: World, capacity: int, name: str, readers: int = 1) -> None:
        self.name = name
        self.failure: Exception | None = None
        self._world = world
        self._freed: Clock = {}
        self._under_way = [deque[Any]() for _ in range(readers)]
        self.room = _Condition(self, lambda: all(len(left) < capacity for left in self._under_way), f"room in {name}")
        self._messages = [_Condition(self, partial(bool, left), f"a message in {name}") for left in self._under_way]

    def message(self, reader: int = 0) -> _Condition:
        """That there is a message for `reader`."""
        return self._messages[reader]

    def put(self, value: Any) -> None:
        """Publish. There has to be room. Raises what the queue was closed with."""
        if self.failure is not None:
            raise self.failure
        host = self._world.host
        host.learn(self._freed)
        for left, message in zip(self._under_way, self._messages, strict=True):
            left.append((value, dict(host.clock)))
            self._world.changed(message)

    def take(self, reader: int = 0) -> Any:
        """The next message of `reader`. Raises what the queue was closed with, once it is empty."""
        left = self._under_way[reader]
        if not left and self.failure is not None:
            raise self.failure
        value, clock = left.popleft()
        self._world.host.learn(clock)
        join(self._freed, self._world.host.clock)
        self._world.changed(self.room)
        return value

    def close(self, failure: Exception) -> None:
        """End all waits here with `failure`."""
        self.failure = self.failure or failure
        for condition in (self.room, *self._messages):
            self._world.changed(condition)

    def __str__(self) -> str:
        return self.name
