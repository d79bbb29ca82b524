"""Sends and receives in an actor's loop, over its links.

A register that a receive fills holds the value while it still arrives; whoever uses it lets it settle first, see `using`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

from raycomm import _core
from raycomm.channel import ShmArena, ShmReader, Writer
from raycomm.channel.device import Arriving, DeviceReader, DeviceWriter
from raycomm.codec import Failure
from raycomm.device import Event
from raycomm.errors import CommunicatorError, TransferTimeoutError
from raycomm.options import Options
from raycomm.plan import Action, Compute, Plan, Release
from raycomm.plan.registers import filled_and_used, given
from raycomm.plan.transfer import Recv, Send
from raycomm.runtime.links import Links

Step: TypeAlias = Callable[[], None]

_LOOK_EVERY_S = 0.2
_TOLD_S = 1.0  # how long it may take until the graph is known to have ended, of which a broken link is the first sign


class Transfers:
    """One actor's sends and receives.

    Args:
        plan: has the channels.
        process: the actor's index in it.
        arena: its memory in the graph; control records go through it.
        options: of the graph.
        links: warmed up.
        registers: of the loop.
        send_failure: publishes a failure with a writer.
        unsent: what a failed write on some channels means for an execution.
        now: the number of the execution.
    """

    def __init__(
        self,
        plan: Plan,
        process: int,
        arena: ShmArena,
        options: Options,
        links: Links,
        registers: list[Any],
        send_failure: Callable[[Writer, Failure], None],
        unsent: Callable[[Exception, tuple[int, ...]], Failure],
        now: Callable[[], int],
    ) -> None:
        self._plan = plan
        self._label = plan.processes[process].label
        self._arena = arena
        self._options = options
        self._links = links
        self._registers = registers
        self._send_failure = send_failure
        self._unsent = unsent
        self._now = now

    def send(self, action: Send) -> Step:
        """Writes the record and launches the sends, or writes a failure."""
        registers, register, guarded = self._registers, action.register, self._guarded
        writer = self._writer(action)

        def step() -> None:
            value = registers[register]
            if type(value) is not Failure:
                try:
                    guarded(writer.write, value)
                    return
                except (_core.Closed, _core.Misuse):
                    raise
                except Exception as error:
                    if _breaks(error):
                        raise
                    value = self._unsent(error, (action.channel,))
            self._send_failure(writer, value)

        return step

    def recv(self, action: Recv, record: ShmReader) -> Step:
        """Reads the record and launches the receives; or there is a failure."""
        registers, register, guarded = self._registers, action.register, self._guarded
        link, peer = self._links.end(action.link)
        read = DeviceReader(record, link, peer, link.device.stream(f"stream {action.stream}")).read

        def step() -> None:
            registers[register] = guarded(read)

        return step

    def settle(self, register: int) -> Step:
        """Waits for what still arrives in a register."""
        registers, wait = self._registers, self._wait

        def step() -> None:
            value = registers[register]
            if type(value) is Arriving:
                try:
                    registers[register] = value.settle(wait)
                except (_core.Closed, CommunicatorError):
                    raise
                except Exception as error:  # of what is not a tensor, and cannot be decoded
                    registers[register] = Failure.capture(error, f"{self._label} receiving", self._now())

        return step

    def _writer(self, action: Send) -> DeviceWriter:
        channel = self._plan.channels[action.channel]
        link, peer = self._links.end(action.link)
        hint = channel.tensors
        return DeviceWriter(
            self._arena.writer((channel.id,)),
            link,
            peer,
            link.device.stream(f"stream {action.stream}"),
            name=channel.value,
            keeps=channel.sender_keeps,
            static_shape=hint is not None and hint.static_shape,
            direct_return=hint is not None and hint.direct_return,
            allow_pickle=self._options.allow_pickle if channel.allow_pickle is None else channel.allow_pickle,
        )

    def _guarded(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call what uses a link. Where that is broken because the graph has ended, `_core.Closed` is raised."""
        try:
            return call(*args)
        except CommunicatorError as error:
            if _breaks(error) and not isinstance(error, TransferTimeoutError):
                self._see_whether_closed()
            raise

    def _wait(self, event: Event) -> None:
        """Wait for a transfer, looking at the graph now and then. There is no limit: who waits for the result has one."""
        while True:
            try:
                self._guarded(event.synchronize, _LOOK_EVERY_S)
                return
            except TransferTimeoutError:
                self._arena.core.look_for_dead()
                self._raise_if_closed()

    def _see_whether_closed(self) -> None:
        end = time.monotonic() + _TOLD_S
        while time.monotonic() < end:
            self._arena.core.look_for_dead()
            self._raise_if_closed()
            time.sleep(0.01)

    def _raise_if_closed(self) -> None:
        if self._arena.closed[0]:
            raise _core.Closed(*self._arena.closed)


def _breaks(error: Exception) -> bool:
    """Whether a link is of no use after this error; those about a value were raised before anything was launched."""
    return isinstance(error, CommunicatorError) and not isinstance(error, ValueError)


def arriving(actions: tuple[Action, ...], place: int) -> tuple[int, ...]:
    """The registers that the action at `place` uses and that a receive filled, with no use in between."""
    action = actions[place]
    if isinstance(action, Release):
        return ()
    used = given(action) if isinstance(action, Compute) else filled_and_used(action)[1]
    pending: set[int] = set()
    for earlier in actions[:place]:
        filled, looked_at = filled_and_used(earlier)
        if isinstance(earlier, Compute):
            looked_at = given(earlier)
        pending -= {*filled, *looked_at}
        if isinstance(earlier, Recv):
            pending.add(earlier.register)
    return tuple(dict.fromkeys(register for register in used if register in pending))
