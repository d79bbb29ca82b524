"""The loop of one actor: its list of actions as prepared closures, run over and over. No policy here; the plan has it all.

A value on its way is what a method returned, or a `Failure`: what a method raised, or a message that could not be decoded or
sent. A call one of whose arguments is a failure is skipped, and the failure passed on in its place, so every channel carries
exactly one message per execution.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from raycomm import _core
from raycomm.channel import NO_LIMIT, ShmArena, ShmReader, ShmWriter, Writer
from raycomm.codec import Failure, encode_failure
from raycomm.errors import RaycommError, SerializationError, TensorMismatchError
from raycomm.options import Options
from raycomm.plan.actions import ActorPlan, Collective, Compute, Plan, Read, Register, Release, Write
from raycomm.plan.transfer import Send
from raycomm.runtime.blueprint import DRIVER, shares_tensors
from raycomm.runtime.calls import ENDS, FAILS, Calls, Step
from raycomm.runtime.fault_points import AFTER, BEFORE, FaultPoints
from raycomm.runtime.hinted_devices import HintedDevices
from raycomm.runtime.links import Links
from raycomm.runtime.memory_error import shared_memory_error

if TYPE_CHECKING:
    from raycomm.runtime.transfers import Transfers


class Loop:
    """Interprets one actor's list. Made once the arenas of all peers are attached.

    Args:
        instance: the actor's object; its methods are looked up once, here.
        plan: the plan of the whole graph.
        process: this actor's index in it.
        constants: the graph's constants; the same objects are passed in every execution.
        arena: this process's memory in the graph.
        options: the driver's.
        faults: what is to go wrong, for tests; none without.
        links: this actor's, warmed up.
    """

    def __init__(
        self,
        instance: Any,
        plan: Plan,
        process: int,
        constants: tuple[Any, ...],
        arena: ShmArena,
        options: Options,
        faults: FaultPoints,
        links: Links,
    ) -> None:
        self._plan = plan
        self._options = options
        self._actor: ActorPlan = plan.actors[process - 1]
        self._arena = arena
        self._faults = faults
        self._registers: list[Any] = [None] * self._actor.registers
        self._execution = 0
        self._links = links
        self._calls = Calls(instance, self._actor.process.label, self._registers, constants, arena, faults, self._now)
        self._transfers: Transfers | None = None
        self._steps = self._prepare()

    def run(self) -> None:
        """Loop until the graph is closed.

        Raises:
            raycomm._core.Closed: always, in the end.
        """
        steps = self._steps
        while True:
            for step in steps:
                step()
            self._execution += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # They know this loop: left to a garbage collection, the graph's memory would stay mapped until then.
        self._registers.clear()
        self._steps.clear()
        del self._calls, self._transfers

    def _prepare(self) -> list[Step]:
        moves = HintedDevices(self._plan, self._options, self._registers, self._actor.process.label, self._now)
        if not (self._faults or moves.any_of(self._actor)) and (whole := self._relay()) is not None:
            return [whole]
        steps: list[Step] = []
        marked = False  # whether the activity others see already names the coming call
        transfers = self._transfers = self._make_transfers() if self._links else None
        for place, action in enumerate(self._actor.actions):
            steps += self._faults.steps(BEFORE.get(type(action)), self._now)
            if isinstance(action, Compute) and not marked and self._links.on_streams:
                steps.append(self._mark(place))  # what it is given may arrive while it runs
                marked = True
            if transfers is not None:
                steps += transfers.before(place)
            if isinstance(action, Read):
                steps.append(self._read(action, place))
                steps += moves.after(action)
                marked = self._call_after(place) is not None
            elif isinstance(action, Compute):
                if not marked:
                    steps.append(self._mark(place))
                marked = False
                steps.append(self._compute(action))
            elif isinstance(action, Collective):
                marked = False
                steps.append(self._exchange(action))
            elif isinstance(action, Write):
                steps += moves.around(action, self._write)
            elif isinstance(action, Release):
                steps.append(self._release(action))
            else:
                assert transfers is not None
                steps.append(transfers.send(action) if isinstance(action, Send) else transfers.recv(action))
            if transfers is not None:
                steps += transfers.after(action)
            steps += self._faults.steps(AFTER.get(type(action)), self._now)
        return steps

    def _make_transfers(self) -> Transfers:
        from raycomm.runtime.transfers import Transfers  # torch comes with it

        ends = (self._registers, self._write_failure, self._unsent, self._now)
        return Transfers(self._plan, self._actor, self._arena, self._options, self._links, *ends)

    def _now(self) -> int:
        return self._execution

    def _relay(self) -> Step | None:
        """The commonest list (one read, one call on what was read, one write) as one closure; None for any other list."""
        match self._actor.actions:
            case (Read() as source, Compute(kwargs=()) as call, Write(channels=(channel,)), Release()):
                if call.args != (Register(source.register),) or len(call.outputs) != 1:
                    return None
            case _:
                return None
        read, method = self._reader(source, 0).read, self._calls.method(call)
        writer = self._arena.writer((channel,))
        write = writer.write
        origin = f"{self._actor.process.label}.{call.method}"

        def step() -> None:
            try:
                value = read()
            except SerializationError as error:
                value = self._unread(error, source)
            if type(value) is not Failure:
                try:
                    value = method(value)
                except ENDS:
                    raise
                except FAILS as error:
                    value = Failure.capture(error, origin, self._execution)
            if type(value) is not Failure:
                try:
                    write(value)
                    return
                except (_core.Closed, _core.Misuse):
                    raise
                except Exception as error:  # nothing was published: this execution fails, the next is untouched
                    value = self._unsent(error, (channel,))
            self._write_failure(writer, value)

        return step

    def _mark(self, place: int) -> Step:
        mark = self._arena.core.mark
        return lambda: mark(place)

    def _read(self, action: Read, place: int) -> Step:
        read = self._reader(action, place).read
        registers, register = self._registers, action.register

        def step() -> None:
            try:
                registers[register] = read()
            except SerializationError as error:
                registers[register] = self._unread(error, action)

        return step

    def _reader(self, action: Read, place: int) -> ShmReader:
        channel = self._plan.channels[action.channel]
        return self._arena.reader(
            channel.writer,
            channel.id,
            channel.readers.index(self._actor.process.index),
            drain=False,
            subject=self._call_after(place),
            first=place == 0,
            claims=channel.writer == DRIVER,
            share_tensors=shares_tensors(channel, self._options),
        )

    def _call_after(self, place: int) -> int | None:
        """The place of the call that comes right after the action at `place`; with links it may have to wait for what arrives."""
        actions = self._actor.actions
        is_call = not self._links and place + 1 < len(actions) and isinstance(actions[place + 1], Compute)
        return place + 1 if is_call else None

    def _unread(self, error: SerializationError, action: Read) -> Failure:
        # The message was consumed: this execution fails, the next is untouched.
        value = self._plan.channels[action.channel].value
        return Failure.capture(error, f"{self._actor.process.label} reading {value}", self._execution)

    def _compute(self, action: Compute) -> Step:
        return self._calls.step(action)

    def _exchange(self, action: Collective) -> Step:
        process, place = self._actor.process.index, self._actor.actions.index(action)
        if action.group is not None:
            assert self._transfers is not None
            return self._transfers.exchange(action, place)
        from raycomm.runtime.collectives import Exchange  # imports numpy

        exchange = Exchange(action, self._plan, process, self._arena, self._write_failure, self._unsent, place)
        registers, args, outputs = self._registers, action.args, action.outputs

        def step() -> None:
            values = exchange.run([registers[register] for register in args], self._execution)
            for register, value in zip(outputs, values, strict=True):
                registers[register] = value

        return step

    def _write(self, action: Write) -> Step:
        registers = self._registers
        if len(action.channels) == 1:
            return self._write_one(self._arena.writer(action.channels), action.registers[0], action.channels[0])
        together = self._arena.writer(action.channels)
        sources = action.registers

        def step() -> None:
            values = tuple([registers[register] for register in sources])
            failures = [value for value in values if type(value) is Failure]
            if not failures:
                try:
                    together.write_all(values)
                    return
                except (_core.Closed, _core.Misuse):
                    raise
                except Exception as error:
                    failures = [self._unsent(error, action.channels)]
            # Values of one call succeed or fail together: they were made, or could not be sent, by the same execution.
            self._write_failure(together, failures[0])

        return step

    def _write_one(self, writer: ShmWriter, register: int, channel: int) -> Step:
        registers, write = self._registers, writer.write

        def step() -> None:
            value = registers[register]
            if type(value) is Failure:
                self._write_failure(writer, value)
                return
            try:
                write(value)
            except (_core.Closed, _core.Misuse):
                raise
            except Exception as error:
                self._write_failure(writer, self._unsent(error, (channel,)))

        return step

    def _write_failure(self, writer: Writer, failure: Failure) -> None:
        kind, text, origin = failure.type_name, failure.message, failure.origin
        reports = [(failure, NO_LIMIT)]
        # There may be no memory for all of it. Without its traceback it often fits a ring slot; one of our own errors, which say
        # everything by themselves, more often still; else the text alone may.
        reports.append((replace(failure, traceback="", wire=None), 0.0))
        if isinstance(failure.exception, RaycommError):
            reports.append((replace(failure, message="", traceback="", wire=None), 0.0))
        reports.append((Failure(None, kind, text, "", origin, failure.execution), 0.0))
        for report, limit_s in reports:
            try:
                writer.write_failure(*encode_failure(report), limit_s)
                return
            except (SerializationError, _core.PoolFull, _core.TimedOut):
                continue
        # What always fits is the beginning of that.
        kind, text, origin = brief(kind), brief(text), brief(origin)
        writer.write_failure(*encode_failure(Failure(None, kind, text, "", origin, failure.execution)))

    def _unsent(self, error: Exception, channels: tuple[int, ...]) -> Failure:
        names = ", ".join(self._plan.channels[channel].value for channel in channels)
        if isinstance(error, _core.PoolFull):
            error = shared_memory_error(error, self._arena.core, self._plan, names)
        elif isinstance(error, SerializationError):
            text = f"{names} of graph {self._plan.name!r}, execution {self._execution}: {error}"
            if error.type_name == "coroutine":
                text = text.rstrip(".")
                text += ". Only what an 'async def' method returns is awaited: declare the method 'async def', or return a value"
            error = SerializationError(text, **{**error.attributes, "channel": names})
        elif isinstance(error, TensorMismatchError):
            where = {"graph": self._plan.name, "channel": names, "execution": self._execution}
            text = f"graph {self._plan.name!r}, execution {self._execution}: {error}"
            error = TensorMismatchError(text, **{**error.attributes, **where})
        return Failure.capture(error, f"{self._actor.process.label} sending {names}", self._execution)

    def _release(self, action: Release) -> Step:
        registers, released = self._registers, action.registers
        if len(released) == 1:
            only = released[0]

            def release_one() -> None:
                registers[only] = None

            return release_one

        def release() -> None:
            for register in released:
                registers[register] = None

        return release


def brief(text: str) -> str:
    """At most 60 bytes of a text: three of them fit every ring slot."""
    return text.encode("ascii", "backslashreplace")[:60].decode()
