"""What every channel offers: one writer, a fixed set of readers, first in first out, every reader sees every message."""

from __future__ import annotations

import time
from typing import Any, Protocol

from raycomm.options import check_limit

NO_LIMIT = -1.0


class Deadline:
    """A point in time by which a wait must end, made once at the edge of the library and handed down.

    Args:
        limit_s: seconds from now; None or -1: no limit; 0: already over, so that a wait takes one look and no more.
        call: the user's, for the message if that is no limit.

    Raises:
        ArgumentError: another negative number, or no number.
    """

    __slots__ = ("_end", "limit_s")

    def __init__(self, limit_s: float | None, call: str | None = None) -> None:
        limit = NO_LIMIT if limit_s is None else check_limit("timeout", limit_s, call)
        self.limit_s: float | None = None if limit < 0 else limit
        self._end = None if self.limit_s is None else time.monotonic() + self.limit_s

    def left(self, at_most: float | None = None) -> float:
        """Seconds left, as native waits take them: -1 without a limit, never below 0 with one; cut to `at_most`."""
        if self._end is None:
            return NO_LIMIT if at_most is None else at_most
        left = max(0.0, self._end - time.monotonic())
        return left if at_most is None else min(left, at_most)

    @property
    def over(self) -> bool:
        """True once the limit has passed; never without one."""
        return self._end is not None and time.monotonic() >= self._end


class Writer(Protocol):
    """The writing end. Used by one thread at a time, in the process that opened it."""

    def write(self, value: Any, timeout: float = NO_LIMIT) -> None:
        """Publish a value; blocks while the slowest reader is a whole ring behind. The value is copied before this returns.

        Raises:
            raycomm._core.TimedOut: no room within `timeout` seconds; nothing was published.
            raycomm._core.Closed: the channel was closed.
            SerializationError: the value cannot be sent; nothing was published.
        """

    def write_failure(self, payload: Any, buffers: Any, timeout: float = NO_LIMIT) -> None:
        """Publish an encoded `raycomm.codec.Failure` in place of a value."""


class Reader(Protocol):
    """A reading end. Used by one thread at a time, in the process that opened it."""

    def read(self, timeout: float = NO_LIMIT) -> Any:
        """The next value, or a `raycomm.codec.Failure`. Blocks until there is one.

        Large arrays and tensors lie in shared memory until their last view dies; everything else belongs to the caller.

        Raises:
            raycomm._core.TimedOut: nothing came within `timeout` seconds.
            raycomm._core.Closed: closed, and everything published before was read.
            SerializationError: the message is malformed; it was consumed.
        """

    def skip(self, timeout: float = NO_LIMIT) -> None:
        """Consume the next message without decoding it."""
