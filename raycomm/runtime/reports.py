"""What a driver raises and logs: errors that say what happened, where, who waits for whom, and what to do."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from raycomm import _core
from raycomm.channel import ShmArena
from raycomm.codec import Failure, encode
from raycomm.errors import RaycommError, SerializationError
from raycomm.observe.board import Board, State
from raycomm.observe.condition import KERNEL_TELLS_ENDINGS, ending
from raycomm.options import Options
from raycomm.plan.actions import Plan
from raycomm.runtime import ray_errors
from raycomm.runtime.blueprint import DRIVER, report_channel
from raycomm.runtime.connection import RayConnection
from raycomm.runtime.memory_error import shared_memory_error

_REAPED_S = 0.02


class Reports:
    """Of one graph.

    Args:
        plan, options: the graph's.
        arena: the driver's.
        board: who does what.
        actor_ids: process index -> Ray's actor id, in hex.
        connection: to the Ray that the graph was compiled under.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        arena: ShmArena,
        board: Board,
        actor_ids: Mapping[int, str],
        connection: RayConnection,
    ) -> None:
        self._name = plan.name
        self._plan = plan
        self._options = options
        self._arena = arena
        self._asked: set[int] = set()  # dead processes whose end was asked for
        self._words: dict[int, str] = {}
        self._board = board
        self._actor_ids = actor_ids
        self._connection = connection

    def check_open(self, *, torn_down: bool) -> None:
        """Raise `ChannelClosedError` after teardown. What had arrived is not handed out then, or it would be a matter of luck."""
        if not torn_down:
            return
        if self._connection.closed:  # first, and so the reason
            raise self._shut_down()
        raise ray_errors.ChannelClosedError(
            f"graph {self._name!r} was torn down; compile it again to go on",
            graph=self._name,
            channel=None,
            reason="teardown",
        )

    def _shut_down(self) -> BaseException:
        return _error(
            ray_errors.ChannelClosedError,
            f"graph {self._name!r} has ended: Ray was shut down in this process, and actors that belong to it are gone. "
            "Call ray.init(), make the actors again, and compile a new graph",
            graph=self._name,
            channel=None,
            reason="shutdown",
        )

    @property
    def foreign(self) -> str:
        """Whose graph it is, where that is not this process; else ""."""
        owner = self._board.pid(DRIVER)
        return "" if os.getpid() == owner else f"process {owner}, which compiled it"

    def check_process(self) -> None:
        """Raise `RaycommError` in a forked child: what it sees of the graph is its parent's."""
        if self.foreign:
            raise RaycommError(
                f"graph {self._name!r} belongs to {self.foreign}, and this process was forked from it; compile a graph here, or "
                "start processes with spawn"
            )

    def get_waits(self, execution: int, channel: int) -> str:
        """The log line of a `get` that takes long."""
        return f"execution {execution} of graph {self._name!r}: {self._board.blame(channel, execution)}"

    def get_timed_out(self, limit: float | None, execution: int, channel: int) -> BaseException:
        """`ChannelTimeoutError` for a `get` whose limit passed."""
        waits = self._board.blame(channel, execution)
        return _error(
            ray_errors.ChannelTimeoutError,
            f"execution {execution} of graph {self._name!r} gave no result within {limit} s: {waits}. The ref stays usable: get "
            "it again, with a larger timeout",
            graph=self._name,
            limit_s=limit,
            execution=execution,
            channel=self._plan.channels[channel].value,
            waits_for=waits,
        )

    def unsent(self, error: SerializationError, values: Sequence[Any]) -> SerializationError:
        """Names the graph and the input that cannot be sent. Nothing was submitted."""
        names = [self._plan.channels[item.channel].value for item in self._plan.inputs]
        name = names[0]
        for candidate, value in zip(names, values, strict=True) if len(names) > 1 else ():
            try:
                encode(value, allow_pickle=self._options.allow_pickle)
            except SerializationError:
                name = candidate
                break
        text = f"{name} of graph {self._name!r}: {str(error).rstrip('.')}. Nothing was submitted"
        return SerializationError(text, **{**error.attributes, "channel": name})

    def execute_waits(self) -> str:
        """The log line of an `execute` that takes long."""
        for_what = "shared memory" if self._memory_is_short() else "room"
        return f"execute of graph {self._name!r} waits for {for_what}: {self._board.everyone()}"

    def execute_timed_out(self, limit: float | None) -> BaseException:
        """`ChannelTimeoutError` for an `execute` whose limit passed."""
        waits = self._board.everyone()
        if self._memory_is_short():
            what = f"no shared memory for its input within {limit} s, of {self._arena.limit_bytes} bytes"
            remedy = "Fetch results and let go of them, or give a larger timeout or shm_limit_bytes"
        else:
            what = f"no room within {limit} s, with at most {self._options.max_inflight} executions under way"
            remedy = "Fetch results, or give a larger timeout or max_inflight"
        self._arena.core.rest()  # the wait is over, also as others see it
        return _error(
            ray_errors.ChannelTimeoutError,
            f"execute of graph {self._name!r} found {what}: {waits}. {remedy}",
            graph=self._name,
            limit_s=limit,
            waits_for=waits,
        )

    def raised_by_method(self, failure: Failure) -> BaseException:
        """What `get` raises for an execution that failed."""
        for process in self._plan.processes[1:]:
            if failure.origin.startswith((f"{process.label}.", f"{process.label} ")):
                index = process.index
                place = ray_errors.Place(process.label, self._board.pid(index), self._actor_ids.get(index))
                return ray_errors.raised_by_method(failure, self._name, place)
        return ray_errors.raised_by_method(failure, self._name, None)

    def _memory_is_short(self) -> bool:
        """Whether the driver's last wait was one for memory."""
        return self._board.row(0).state is State.MEMORY

    def raise_native(self, error: Exception, execution: int | None, *, torn_down: bool) -> NoReturn:
        """Turn what the native part raised into an error that says what happened, where, and what to do."""
        error.__traceback__ = None  # never shown, and whoever keeps the new error would keep its frames, with refs and values
        if isinstance(error, _core.PoolFull):
            raise shared_memory_error(error, self._arena.core, self._plan, "the input") from None
        if isinstance(error, _core.Overfull):
            limit = self._options.max_buffered_results
            raise _error(
                ray_errors.CapacityExceededError,
                f"graph {self._name!r}: {limit} results of earlier executions wait unfetched, as many as max_buffered_results "
                "allows. Fetch them or drop their refs first, or compile with a larger max_buffered_results",
                graph=self._name,
                limit=limit,
                count=limit,
            ) from None
        if isinstance(error, _core.Misuse):
            raise RaycommError(f"graph {self._name!r}: {error}") from None
        self.check_open(torn_down=torn_down)
        raise (self._shut_down() if self._connection.closed else self._ended(execution)) from None

    @property
    def reason(self) -> str:
        """Which actor ended the graph, and in which call; "" if none did."""
        reason, process = self._arena.closed
        if reason not in (_core.CLOSED_PEER_DIED, _core.CLOSED_FAILED) or process == DRIVER:
            return ""
        label = self._plan.processes[process].label
        return f"actor {label} (pid {self._board.pid(process)}) {self._end_of(reason, process)}"

    def _end_of(self, reason: int, process: int) -> str:
        how = f"left its loop ({self._last_words(process) or 'a method ended it'})"
        if reason == _core.CLOSED_PEER_DIED:
            how = f"died{ending(self._wait_status(process))}"
        node, at = self._board.last_call(process)
        return f"{how} in {node}, execution {at}" if node is not None else how

    def _last_words(self, process: int) -> str:
        """Why the loop of an actor has failed, if it said so."""
        if process not in self._words:
            self._words[process] = ""
            with suppress(RaycommError, _core.TimedOut, _core.Closed):
                report = self._arena.reader(process, report_channel(self._plan, process), 0, drain=True)
                self._words[process] = str(report.read(0.0))
        return self._words[process]

    def _wait_status(self, process: int) -> int | None:
        """How a dead process ended. Its parent learns of the death when we do: the first time it gets a moment to take it in."""
        core = self._arena.core
        end = time.monotonic() + (_REAPED_S if KERNEL_TELLS_ENDINGS and process not in self._asked else 0.0)
        self._asked.add(process)
        while (status := core.ended_with(process)) is None and time.monotonic() < end:
            time.sleep(0.001)
        return status

    def _ended(self, execution: int | None) -> BaseException:
        reason, process = self._arena.closed
        label = self._plan.processes[process].label
        pid = self._board.pid(process)
        node, at = self._board.last_call(process)
        lost = f"; execution {execution} will give no result" if execution is not None else ""
        lives = reason == _core.CLOSED_FAILED and bool(self._last_words(process))  # its loop alone has ended, and said why
        then = "with it once it has restarted" if not lives else "with it once that is mended"
        return _error(
            ray_errors.ActorDiedError,
            f"actor {label} (pid {pid}) of graph {self._name!r} {self._end_of(reason, process)}{lost}. The other actors are "
            f"free; tear the graph down and compile a new one without it, or {then}",
            graph=self._name,
            actor=label,
            actor_id=self._actor_ids.get(process),
            pid=pid,
            node=node,
            execution=at if execution is None else execution,
        )


def _error(kind: type[BaseException], message: str, **attributes: object) -> BaseException:
    return kind(message, **attributes)
