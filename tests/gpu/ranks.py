"""Processes of a step with a GPU each, or sharing one. They are forked, so the step's own process never touches CUDA."""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed

from raycomm.device.cpu import CpuDevice
from raycomm.device.gloo import GlooCommunicator
from tests.gpu.setting import Setting, StepFailed
from tests.unit.communicator_ranks import place_of

dist: Any = torch.distributed  # Its type stubs leave out what is used here.
PATIENCE_S = 30.0  # for what takes milliseconds


class Ending(Enum):
    """How a rank is to end: it returns something, or is killed by its own hand."""

    RETURNS = auto()
    KILLED = auto()


@dataclass(frozen=True, slots=True)
class Part:
    """One process.

    Attributes:
        program: called there with its place; what it returns goes through JSON.
        rank, size: in the communicators that its place makes.
        environment: set before CUDA is touched.
    """

    program: Callable[[Any], Any]
    rank: int
    size: int = 2
    ending: Ending = Ending.RETURNS
    environment: Mapping[str, str] = field(default_factory=dict)


def run(setting: Setting, parts: Sequence[Part], limit_s: float) -> list[Any]:
    """What each program returned. All processes have ended when this returns.

    Raises:
        StepFailed: a rank raised, died, or said nothing within `limit_s` seconds; says which.
    """
    torch.set_num_threads(1)  # the threads of a pool do not come along when a process forks
    end = time.monotonic() + limit_s
    started: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory(prefix="raycomm-ranks-") as directory:
        try:
            for part in parts:
                reading, writing = os.pipe()
                pid = os.fork()
                if not pid:
                    _be(part, setting, f"{directory}/store", writing, limit_s)
                os.close(writing)
                started.append((pid, reading))
            answers = [_answer(reading, end) for _, reading in started]
        finally:
            for pid, reading in started:
                os.kill(pid, signal.SIGKILL)  # ours and not yet waited for, so the number is not another's
                os.waitpid(pid, 0)
                os.close(reading)
    wrong = []
    for part, answer in zip(parts, answers, strict=True):
        if part.ending is Ending.KILLED and answer is not None:
            wrong.append(f"rank {part.rank} was to be killed and was not: {answer}")
        elif part.ending is Ending.RETURNS and (answer is None or "returned" not in answer):
            what = f"said nothing within {limit_s:g} s, or died" if answer is None else answer["raised"]
            wrong.append(f"rank {part.rank} of {part.size}: {what}")
    if wrong:
        raise StepFailed("; ".join(wrong))
    return [None if answer is None else answer["returned"] for answer in answers]


def pair(setting: Setting, first: Callable[[Any], Any], second: Callable[[Any], Any], limit_s: float) -> list[Any]:
    """Two ranks of one communicator."""
    return run(setting, (Part(first, 0), Part(second, 1)), limit_s)


class Meeting:
    """Where the hosts of ranks wait for each other, and tell each other small things; nothing of it touches a GPU."""

    def __init__(self, place: Any, size: int = 2) -> None:
        self._link = GlooCommunicator(place._store, "meeting", place.rank, size, device=CpuDevice(f"host of rank {place.rank}"))
        self._link.warm_up(PATIENCE_S)
        self._store = dist.PrefixStore("told", place._store)

    def wait(self) -> None:
        """Until all are here."""
        self._link.allreduce(torch.zeros(1)).event.synchronize(PATIENCE_S)

    def tell(self, key: str, value: str) -> None:
        """For `ask` of the others, once per key."""
        self._store.set(key, value)

    def ask(self, key: str) -> str:
        """What another one tells; waits for it."""
        return bytes(self._store.get(key)).decode()


def on(stream: Any) -> AbstractContextManager[Any]:
    """Inside, torch code runs on `stream`, as a method's code runs on an actor's. With the stand-in it runs at once."""
    context: AbstractContextManager[Any] = torch.cuda.stream(stream.torch) if _is_real(stream) else nullcontext()
    return context


def finish(stream: Any) -> None:
    """Wait for a stream, by spinning in the driver where it is real: for measurements. Without a limit but the step's."""
    if _is_real(stream):
        stream.torch.synchronize()
    else:
        stream.synchronize(PATIENCE_S)


def _is_real(stream: Any) -> bool:
    return isinstance(stream.torch, torch.cuda.Stream)


def _be(part: Part, setting: Setting, store: str, writing: int, limit_s: float) -> None:
    """The forked process."""
    try:
        os.environ.update(part.environment)
        answer = {"returned": part.program(place_of(setting.kind, part.rank, part.size, store))}
    except BaseException as error:
        traceback.print_exc()
        answer = {"raised": f"{type(error).__name__}: {error}"}
    try:
        os.write(writing, json.dumps(answer).encode() + b"\n")
        signal.alarm(round(limit_s) + 1)
        signal.pause()  # until all have said theirs: who leaves while another still receives is a dead peer
    finally:
        os._exit(1)


def _answer(reading: int, end: float) -> dict[str, Any] | None:
    said = b""
    while (
        not said.endswith(b"\n")
        and select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]
        and (more := os.read(reading, 1 << 16))
    ):
        said += more
    answer: dict[str, Any] | None = json.loads(said) if said.endswith(b"\n") else None
    return answer
