"""Sends, receives and collectives on groups in an actor's loop, over its links.

A register that a receive fills holds the value while it still arrives; whoever uses it lets it settle first. Where the actor's
code runs on the host, the host waits for that. Where it runs on a stream of the device, the stream waits, and the host goes on;
then three things are seen to:

- the next call waits, on the stream, for sends that read memory which it may write to;
- before anything leaves on an ordinary channel the host waits for all that the calls before it were given. A link that breaks
  ends its transfers as if they were good, and what was computed from them must go nowhere;
- for the same reason the host looks, before it says on a link that a value comes, at what has ended by then. What ends later is
  the business of `Links`: what is still to be sent is ended first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from raycomm import _core
from raycomm.channel import NO_LIMIT, ShmArena, Writer
from raycomm.channel.device import Arriving, DeviceReader, DeviceWriter
from raycomm.codec import Failure
from raycomm.device import Communicator, Device, Event, Stream
from raycomm.errors import CommunicatorError, TransferTimeoutError
from raycomm.options import Options
from raycomm.plan.actions import Action, ActorPlan, Collective, Compute, Plan, Release, Write
from raycomm.plan.registers import filled_and_used, given
from raycomm.plan.transfer import COMPUTE_STREAM, Recv, Send
from raycomm.runtime.blueprint import DRIVER
from raycomm.runtime.device_collectives import DeviceExchange
from raycomm.runtime.hinted_devices import HintedDevices
from raycomm.runtime.links import Links

Step: TypeAlias = Callable[[], None]

_LOOK_EVERY_S = 0.2
_TOLD_S = 1.0  # how long it may take until the graph is known to have ended, of which a broken link is the first sign


class _Unseen(NamedTuple):
    """A receive that a stream waits for, and not yet the host."""

    event: Event
    channel: int
    writer: int
    execution: int


class Transfers:
    """One actor's sends, receives and collectives on groups.

    Args:
        plan: has the channels.
        actor: whose they are.
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
        actor: ActorPlan,
        arena: ShmArena,
        options: Options,
        links: Links,
        registers: list[Any],
        send_failure: Callable[[Writer, Failure], None],
        unsent: Callable[[Exception, tuple[int, ...]], Failure],
        now: Callable[[], int],
    ) -> None:
        self._plan = plan
        self._process = actor.process
        self._arena = arena
        self._options = options
        self._links = links
        self._registers = registers
        self._send_failure = send_failure
        self._unsent = unsent
        self._now = now
        self._actions = actor.actions
        self._moves = HintedDevices(plan, options, registers, actor.process.label, now)
        self._arriving = arriving(actor.actions)
        self._lent: list[tuple[Device, list[Event]]] = []  # sends that read what the next call may write to
        self._unseen: deque[_Unseen] = deque()
        self._called: float | None = None  # since when a call runs
        links.late = self._late

    def send(self, action: Send) -> Step:
        """Writes the record and launches the sends, or writes a failure."""
        registers, register, guarded = self._registers, action.register, self._guarded
        writer, device = self._writer(action), self._device(action)

        def step() -> None:
            value, after = registers[register], ()
            if type(value) is Arriving:  # from a collective on this device, and sent on: nobody has to wait for it here
                value, after = value.value(), value.events
            if type(value) is not Failure:
                try:
                    guarded(writer.write, value, NO_LIMIT, after)
                    if writer.lent and not action.beside:
                        self._lent.append((device, writer.lent))
                    return
                except (_core.Closed, _core.Misuse):
                    raise
                except Exception as error:
                    if _breaks(error):
                        raise
                    value = self._unsent(error, (action.channel,))
            self._send_failure(writer, value)

        return step

    def recv(self, action: Recv) -> Step:
        """Reads the record and launches the receives; or there is a failure."""
        registers, register, guarded = self._registers, action.register, self._guarded
        link, peer = self._links.end(action.link)
        channel = self._plan.channels[action.channel]
        place, first = channel.readers.index(self._process.index), action is self._actions[0]
        record = self._arena.reader(channel.writer, channel.id, place, drain=False, first=first)
        read = DeviceReader(record, link, peer, _stream(link, action), name=channel.value).read

        def step() -> None:
            registers[register] = guarded(read)

        return step

    def exchange(self, action: Collective, place: int) -> Step:
        """Takes part in a collective on a group: the results are arriving, or there is a failure."""
        assert action.group is not None
        registers, guarded, now = self._registers, self._guarded, self._now
        group, link = self._plan.groups[action.group], self._links.member(action.group)
        rest = (action, self._plan, self._process.index, self._arena, self._send_failure, self._unsent, place)
        run = DeviceExchange(link, _stream(link, action), group.over, group.because is None, *rest).run

        def step() -> None:
            values = guarded(run, [registers[register] for register in action.args], now())
            for register, value in zip(action.outputs, values, strict=True):
                registers[register] = value

        return step

    def before(self, place: int) -> list[Step]:
        """What comes before the action at `place`: waits for what still arrives in the registers that it uses."""
        action = self._actions[place]
        steps: list[Step] = []
        for arrival in self._arriving[place]:
            if isinstance(action, Send) and self._device(arrival.action) is self._device(action):
                continue  # the send waits for it
            steps.append(self._settle(arrival))
            if isinstance(arrival.action, Recv):
                steps += self._moves.after(arrival.action)
        if isinstance(action, Compute):
            steps.append(self._take_back)
        if self._links.on_streams:
            through_host = isinstance(action, Collective) and action.group is None
            if isinstance(action, Send):  # over a link of the host, what is on a device goes with the record
                through_host = self._device(action).current_stream() is None
            if isinstance(action, Write) or through_host:
                steps.append(self._see_all)
            elif isinstance(action, (Send, Collective)):
                steps.append(self._see_ended)
        return steps

    def after(self, action: Action) -> list[Step]:
        """What comes after an action."""
        return [self._returned] if isinstance(action, Compute) and self._links.on_streams else []

    def _returned(self) -> None:
        self._called = None

    def _settle(self, arrival: Arrival) -> Step:
        registers, register, action = self._registers, arrival.register, arrival.action
        number = action.channel if isinstance(action, Recv) else action.read[0]
        device, channel = self._device(action), self._plan.channels[number]
        origin = f"{self._process.label} receiving {channel.value}"

        def step() -> None:
            value = registers[register]
            if type(value) is not Arriving:
                return
            stream = device.current_stream()
            if stream is None:
                for event in value.events:
                    self._await(event, number, channel.writer)
            else:
                value.join(stream)
                self._unseen += [_Unseen(event, number, channel.writer, self._now()) for event in value.events]
            try:
                registers[register] = value.value()
            except Exception as error:  # of what is not a tensor, and cannot be decoded
                registers[register] = Failure.capture(error, origin, self._now())

        return step

    def _device(self, action: Send | Recv | Collective) -> Device:
        if isinstance(action, Collective):
            assert action.group is not None
            return self._links.member(action.group).device
        return self._links.end(action.link)[0].device

    def _take_back(self) -> None:
        """Have what the coming call does wait for the sends of what it may write to."""
        self._called = time.monotonic()
        for device, events in self._lent:
            stream = device.current_stream()
            for event in events:
                if stream is None:
                    self._wait(event)
                else:
                    stream.wait(event)
        self._lent.clear()

    def _see_all(self) -> None:
        """Wait, on the host, for all that calls were given."""
        while self._unseen:
            entry = self._unseen[0]
            self._await(entry.event, entry.channel, entry.writer)
            self._unseen.popleft()
        # Whoever aborts a link ends the graph at the driver before: what has arrived here may come of that, by way of others.
        closed = self._arena.core.closed_at(DRIVER)
        if closed[0]:
            raise _core.Closed(*closed)

    def _see_ended(self) -> None:
        """Of what calls were given, look at what has ended. Does not block."""
        for _ in range(len(self._unseen)):
            entry = self._unseen.popleft()
            if entry.event.complete:
                self._guarded(entry.event.synchronize, 0.0)
            else:
                self._unseen.append(entry)

    def _late(self) -> tuple[float, str] | None:
        """For how many seconds a call runs that was given what the host has not seen arrive, and what that is.

        Any thread may ask. Events are not looked at: that would end the capture of a graph on the device, if one is under way.
        """
        entries, called = self._unseen.copy(), self._called
        if not entries or called is None:
            return None
        first, channel = entries[0], self._plan.channels[entries[0].channel]
        text = f"a call of {self._process.label} runs, which was given {channel.value} of execution {first.execution}; that may "
        return time.monotonic() - called, f"{text}not have arrived from {self._plan.processes[first.writer].label}"

    def _await(self, event: Event, channel: int, writer: int) -> None:
        if not event.complete:
            self._arena.core.await_transfer(channel, writer)
        try:
            self._wait(event)
        except (_core.Closed, CommunicatorError):
            raise
        except Exception as error:  # of a class of the user's
            what = f"receiving {self._plan.channels[channel].value} from {self._plan.processes[writer].label}"
            raise CommunicatorError(f"{what} failed: {type(error).__name__}: {error}") from error

    def _writer(self, action: Send) -> DeviceWriter:
        channel = self._plan.channels[action.channel]
        link, peer = self._links.end(action.link)
        hint = channel.tensors
        return DeviceWriter(
            self._arena.writer((channel.id,)),
            link,
            peer,
            _stream(link, action),
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


def _stream(link: Communicator, action: Send | Recv | Collective) -> Stream:
    """The stream of an action: its own, or the one that the loop's code runs on."""
    computing = link.device.current_stream() if action.stream == COMPUTE_STREAM else None
    return computing or link.device.stream(f"stream {action.stream}")


def _breaks(error: Exception) -> bool:
    """Whether a link is of no use after this error; those about a value were raised before anything was launched."""
    return isinstance(error, CommunicatorError) and not isinstance(error, ValueError)


class Arrival(NamedTuple):
    """A register in which something arrives, and what launched that."""

    register: int
    action: Recv | Collective


def arriving(actions: tuple[Action, ...]) -> list[tuple[Arrival, ...]]:
    """For each action, what arrives in registers that it uses, with no look in between. To send something on is no look."""
    pending: dict[int, Arrival] = {}
    rows: list[tuple[Arrival, ...]] = []
    for action in actions:
        filled, used = filled_and_used(action)
        if isinstance(action, Compute):
            used = given(action)
        needed = () if isinstance(action, Release) else used
        rows.append(tuple(pending[register] for register in dict.fromkeys(needed) if register in pending))
        for register in (*filled, *(() if isinstance(action, Send) else used)):
            pending.pop(register, None)
        if isinstance(action, Recv):
            pending[action.register] = Arrival(action.register, action)
        elif isinstance(action, Collective) and action.group is not None:
            pending |= {register: Arrival(register, action) for register in action.outputs}
    return rows
