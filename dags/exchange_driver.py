"""The driver of the exchange between processes: starts the ranks, tells them the plan and each other's addresses, and checks what
comes. Nobody calls `raycomm.compile`, and there is no cluster."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from dags.exchange_ranks import WEIGHT, Start, tensor_of
from raycomm import _core
from raycomm.channel import Address, Deadline, ShmArena, ShmReader
from raycomm.observe.board import Board
from raycomm.observe.condition import ending
from raycomm.options import Options
from raycomm.plan.actions import Plan
from raycomm.plan.transfer import Backend
from raycomm.runtime.blueprint import DRIVER, READY, Blueprint, address_channel, read_at, report_channel, ring_slots, rings_of
from raycomm.runtime.links import Meeting, meeting_point

SETUP_S = 60.0  # until both ranks are ready; torch and NCCL take their time
_LOOK_EVERY_S = 0.2
_LEAVE_S = 5.0
_ROOT = Path(__file__).parents[1]


class ExchangeHangs(Exception):
    """No result within the limit."""


class ExchangeFailed(Exception):
    """A rank cannot take part, or has died."""


class WrongValue(Exception):
    """A result is not what it has to be."""


class Ranks:
    """The two rank processes, running the plan. Use as a context manager; on the way out they are gone.

    Args:
        plan: verified or not.

    Raises:
        ExchangeFailed: they were not ready within `SETUP_S` seconds, or cannot be; says which and why.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._ranks = [process.index for process in plan.processes[1:]]
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._reports: dict[int, ShmReader] = {}  # which end with why a loop has failed
        options = Options(name=plan.name)
        size = len(plan.processes)
        self._arena = ShmArena.create(DRIVER, rings_of(plan, DRIVER, options), options, loops=size, processes=size)
        self._arena.join(DRIVER)
        try:
            with meeting_point(plan) as meeting:
                self._board = self._set_up(options, meeting)
        except BaseException:
            self.close()
            raise
        self._input = self._arena.writer((plan.inputs[0].channel,))
        channels = [plan.channels[output.channel] for output in plan.outputs if hasattr(output, "channel")]
        self._results = [(channel, self._arena.reader(channel.writer, channel.id, 0, drain=True)) for channel in channels]

    def exchange(self, execution: int, limit_s: float) -> None:
        """Run the plan once, and look at every element that comes of it.

        Raises:
            ExchangeHangs: not within `limit_s` seconds; says what each rank waits for.
            ExchangeFailed: a rank died or left.
            WrongValue: says the first element that is wrong.
        """
        import torch

        deadline = Deadline(limit_s)
        try:
            self._input.write(execution, limit_s)
            results = [reader.read(deadline.left()) for _, reader in self._results]
        except _core.TimedOut:
            waits = "; ".join(f"{row}{self._launched(row.process)}" for row in map(self._board.row, self._ranks))
            raise ExchangeHangs(f"execution {execution} gave no result within {limit_s:g} s: {waits}") from None
        except _core.Closed:
            raise self._ended(f"in execution {execution}") from None
        for rank, result in enumerate(results):
            if not isinstance(result, torch.Tensor):
                raise ExchangeFailed(f"execution {execution}: rank{rank} failed: {result.type_name}: {result.message}")
            right = tensor_of(rank, execution) + WEIGHT * tensor_of(1 - rank, execution)
            wrong = (result != right).nonzero() if result.shape == right.shape else torch.zeros(1, 1)
            if len(wrong):
                at = int(wrong[0])
                text = f"element {at} of {tuple(result.shape)} is {result.reshape(-1)[at]:g} and has to be {right[at]:g}"
                raise WrongValue(f"execution {execution}, rank{rank}: {len(wrong)} elements are wrong; {text}")

    def close(self) -> None:
        """End the ranks, by force those that do not leave within some seconds."""
        self._arena.close(_core.CLOSED_TEARDOWN, DRIVER)
        deadline = Deadline(_LEAVE_S)
        for started in self._started.values():
            with suppress(subprocess.TimeoutExpired):
                started.wait(deadline.left())
        for started in self._started.values():
            started.kill()
            started.wait()
            for pipe in (started.stdin, started.stdout):
                assert pipe is not None
                with suppress(OSError):
                    pipe.close()
        self._arena.leave(DRIVER)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _set_up(self, options: Options, meeting: Meeting | None) -> Board:
        plan, arena, deadline = self._plan, self._arena, Deadline(SETUP_S)
        gpus = gpus_of(plan)
        environment = dict(os.environ)
        path = [str(_ROOT), environment.get("PYTHONPATH", "")]  # last, so that an installed raycomm comes before the sources
        environment["PYTHONPATH"] = os.pathsep.join(entry for entry in reversed(path) if entry)
        command = [sys.executable, "-P", "-m", "dags.exchange_ranks"]
        for process in self._ranks:
            blueprint = Blueprint(plan, process, (), options, arena.address, "", meeting=meeting)
            gpu = None if gpus is None else gpus[process - 1]
            start = Start(blueprint, gpu, 0 if gpus is None else gpus.count(gpu))
            started = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._started[process] = started
            assert started.stdin is not None
            with suppress(BrokenPipeError):  # it has died; what reads its answer says so
                started.stdin.write(pickle.dumps(start))
                started.stdin.close()
        addresses = [self._address(process, deadline) for process in self._ranks]
        for address in addresses:
            arena.attach(address)
        board = Board(plan, arena, {address.process: address.pid for address in addresses}, ring_slots(plan, options))
        control = arena.writer([address_channel(plan)])
        control.write([(address.process, address.pid, address.fd, address.nonce) for address in addresses])
        self._await_ready(board, deadline)
        return board

    def _address(self, process: int, deadline: Deadline) -> Address:
        started = self._started[process]
        assert started.stdout is not None
        if not select.select([started.stdout], [], [], deadline.left())[0]:
            raise ExchangeFailed(f"{self._label(process)} did not begin within {SETUP_S:g} s")
        try:
            address = pickle.load(started.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise ExchangeFailed(f"{self._label(process)} died before it began{self._how(process)}") from None
        assert isinstance(address, Address)
        return address

    def _await_ready(self, board: Board, deadline: Deadline) -> None:
        arena, plan = self._arena, self._plan
        for process in self._ranks:
            self._reports[process] = arena.reader(process, report_channel(plan, process), 0, drain=True)
        waiting = dict(self._reports)
        while waiting:
            for process, report in list(waiting.items()):
                try:
                    answer = report.read(deadline.left(at_most=_LOOK_EVERY_S))
                except _core.TimedOut:
                    if deadline.over:
                        rows = "; ".join(str(board.row(process)) for process in waiting)
                        raise ExchangeFailed(f"the links were not set up within {SETUP_S:g} s: {rows}") from None
                    arena.core.look_for_dead()
                    continue
                except _core.Closed:
                    raise self._ended("during set-up") from None
                if read_at(answer) is not None:  # because that takes long
                    continue
                if answer != READY:
                    raise ExchangeFailed(f"{self._label(process)} cannot take part: {answer}")
                del waiting[process]

    def _launched(self, process: int) -> str:
        """What was launched on a stream for more than one transfer, in its order."""
        by_stream: dict[int, list[str]] = {}
        for action in self._plan.actors[process - 1].actions:
            stream = getattr(action, "stream", None)
            if stream is not None:
                by_stream.setdefault(stream, []).append(str(action))
        crowded = [f"stream {stream} holds {', then '.join(held)}" for stream, held in by_stream.items() if len(held) > 1]
        return f" ({'; '.join(crowded)})" if crowded else ""

    def _ended(self, when: str) -> ExchangeFailed:
        reason, process = self._arena.closed
        if reason == _core.CLOSED_PEER_DIED:
            return ExchangeFailed(f"{self._label(process)} died{self._how(process)} {when}")
        why = "see what it logged"
        with suppress(_core.TimedOut, _core.Closed):
            why = self._reports[process].read(_LOOK_EVERY_S)
        return ExchangeFailed(f"{self._label(process)} left its loop {when}: {why}")

    def _how(self, process: int) -> str:
        """How a process that is dead ended."""
        with suppress(subprocess.TimeoutExpired):
            code = self._started[process].wait(_LOOK_EVERY_S)
            return f" by signal {-code}" if code < 0 else f" with exit status {code}"
        return ending(None)

    def _label(self, process: int) -> str:
        return self._plan.processes[process].label


def gpus_of(plan: Plan) -> list[int | None] | None:
    """The GPU of each rank; all share one where there are fewer than ranks. None: the plan needs none.

    Raises:
        ExchangeFailed: it needs one, and there is none.
    """
    if all(link.over is not Backend.NCCL for link in plan.links):
        return None
    import torch

    found = torch.cuda.device_count()  # in this process nothing else is asked of CUDA
    if not found:
        raise ExchangeFailed("torch finds no CUDA device here; see nvidia-smi and CUDA_VISIBLE_DEVICES, or take --device gloo")
    ranks = len(plan.actors)
    return list(range(ranks)) if found >= ranks else [0] * ranks
