"""Actors that raise, and values that do, what no ordinary code does."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Callable
from typing import Any

import ray

from tests.ray.workers import WorkerBody


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Forbids every assignment, `__traceback__` included."""

    code: int


class Stubborn(Exception):
    """Forbids it in its own way, and has odd ideas of its text and its cause."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise RuntimeError("stays as it is")

    def __str__(self) -> str:
        return Text("stubborn")

    @property
    def __cause__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("has no cause")


class Text(str):
    """Cannot be encoded."""

    def encode(self, *args: Any) -> bytes:
        raise RuntimeError("not encoded")


class Odd(WorkerBody):
    """Raises what is asked for; gives back everything else."""

    def raises(self, x: Any) -> Any:
        kinds: dict[str, Callable[[], BaseException]] = {
            "frozen": lambda: Frozen(7),
            "stubborn": Stubborn,
            "generator": GeneratorExit,
            "cancelled": asyncio.CancelledError,
        }
        if x in kinds:
            raise kinds[x]()
        return x

    def interrupts(self, x: Any) -> Any:
        return Interrupts()


class Interrupts:
    """Sends this process a signal while it is being unpickled at the driver."""

    def __reduce__(self) -> Any:
        return _interrupt, ()


def _interrupt() -> str:
    signal.raise_signal(signal.SIGUSR1)
    return "unpickled"


class Leaves:
    """An input whose reducer raises what no `except Exception` catches."""

    def __reduce__(self) -> Any:
        raise GeneratorExit


OddWorker: Any = ray.remote(num_cpus=0)(Odd)
