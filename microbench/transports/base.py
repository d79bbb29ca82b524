"""What a transport has to offer to be measured: one object per process, rank 0 writes, the others read.

They run in processes of their own, which have nothing in common but a directory and what `offer` tells.
"""

from __future__ import annotations

import pickle
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

LIMIT_S = 30.0  # of every wait in a transport
AHEAD = 4  # messages that the writer may be ahead of the slowest reader, in all transports alike


@dataclass(frozen=True)
class Place:
    """Which process this is.

    Attributes:
        readers: how many there are; their ranks begin with 1.
        directory: one that the processes of this broadcast have to themselves.
    """

    rank: int
    readers: int
    directory: Path

    @property
    def writes(self) -> bool:
        return self.rank == 0


class Transport(Protocol):
    """One process's end. Made in all processes, then `offer` in all, then `join` in all, then `prepare` for each row."""

    def offer(self) -> Any:
        """What the other processes need to know; goes to them through pickle."""

    def join(self, offers: Sequence[Any]) -> None:
        """Blocks until what rank 0 writes from now on reaches this rank. `offers`: by rank."""

    def prepare(self, encoded_bytes: int) -> None:
        """Messages of about so many bytes follow."""

    def encoded_bytes(self, value: Any) -> int:
        """Bytes that a message of `value` has, without what the transport puts around them."""

    def write(self, value: Any) -> None:
        """Rank 0: send to all readers. The value may be changed afterwards."""

    def read(self) -> Any:
        """The others: the next value."""

    def close(self) -> None:
        """Let go of everything."""


@contextmanager
def limited(what: str, limit_s: float = LIMIT_S) -> Iterator[None]:
    """A wait of the main thread for which its library takes no limit: `TimeoutError`, and what was not so, after `limit_s`."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(f"{what} within {limit_s:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def as_array(value: Any) -> Any:
    """A tensor as the numpy array that it is, for what pickles: torch's own way of pickling takes several times as long."""
    return value.numpy() if hasattr(value, "numpy") else value


def as_tensor(value: Any) -> Any:
    """An array as a tensor of the same memory."""
    if hasattr(value, "dtype"):
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may lie in memory that is read-only; nobody writes to it here
            return torch.from_numpy(value)
    return value


def pickled(value: Any) -> bytes:
    """The bytes most people send."""
    return pickle.dumps(as_array(value), protocol=5)


def unpickled(data: Any) -> Any:
    """The value of `pickled`."""
    return as_tensor(pickle.loads(data))
