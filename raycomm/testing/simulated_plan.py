"""Runs a plan on simulated devices, one per actor: what the runtime does with it on real ones, under a virtual clock.

Values are terms that show what they were computed from, so that a wrong, stale or torn value is another value. Per actor, the
host passes its actions in order:

- a read waits for its message, a write for room in its channel, a collective does both on its channels;
- a send waits for room, writes the control record and launches; a receive waits for the control record and launches. Neither
  waits for the transfer;
- a collective on a group publishes only whether it has its tensors, and then launches; it does not wait for the result;
- a call runs on stream 0, after the receives that filled its registers and after the earlier sends of its actor that are not
  `beside` it. It may look at its values, so the host waits for it. For what a write or a collective takes it waits, too;
- a release gives memory back, to be used again once the computations and sends so far are past it.

`PlanRun` has a method for each of these duties; a test that leaves one out proves that the simulation notices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

from raycomm.errors import ActorDiedError
from raycomm.plan.actions import (
    Action,
    Argument,
    Collective,
    Compute,
    FromChannel,
    FromInput,
    Plan,
    Read,
    Register,
    Release,
    Write,
)
from raycomm.plan.arguments import project, split_arguments
from raycomm.plan.placement import DRIVER
from raycomm.plan.transfer import COMPUTE_STREAM, Recv, Send
from raycomm.testing.simulated_device import Device, Stream, Tensor
from raycomm.testing.simulated_group import Group
from raycomm.testing.simulated_memory import MemoryFault, SimulatedMemoryError
from raycomm.testing.simulated_operations import Event
from raycomm.testing.simulated_queue import Queue
from raycomm.testing.simulated_world import Delays, Program, World

Arguments: TypeAlias = tuple[Sequence[object], Mapping[str, object]]


class Results(Enum):
    """Where the methods of a simulated actor put what they return."""

    FRESH = auto()
    """Into memory of its own, freed when the register is released."""
    KEPT = auto()
    """Into the same memory in each execution, as a method does that returns its weights or its cache."""


@dataclass(frozen=True, slots=True)
class Failed:
    """In place of a value: call `node` failed."""

    node: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated run gave.

    Attributes:
        results: per execution, its outputs.
        time: when it ended, in virtual seconds.
        transfers: how many sends were launched.
    """

    results: list[list[object]]
    time: float
    transfers: int


@dataclass(slots=True)
class _OnDevice:
    """In a register: memory of the actor's device, and what to wait for before it is used."""

    tensor: Tensor
    filled: Event | None
    release: bool


def simulate(
    plan: Plan,
    executions: Sequence[Arguments] | int = 3,
    *,
    constants: Sequence[object] = (),
    seed: int = 0,
    delays: Delays | None = None,
    slots: int = 2,
    hardware_queues: int | None = None,
    results: Results = Results.FRESH,
    failing: frozenset[tuple[int, int]] = frozenset(),
    deaths: Mapping[int, float] | None = None,
    run: type[PlanRun] | None = None,
) -> Outcome:
    """Run `plan` to the end. Its inputs are those of `executions`, or as many made-up ones.

    Args:
        slots: capacity of channels that do not say theirs.
        hardware_queues: of each device; None: a stream never holds up another one.
        failing: calls that fail, as (node, execution).
        deaths: actors that die, by index of the process, and when, in virtual seconds.
        run: how actors do their duties.

    Raises:
        SimulatedHang: the plan cannot go on.
        SimulatedMemoryError: memory was read, written or freed at a wrong time.
        ActorDiedError, PeerDiedError: an actor died, and so the others could not end.
    """
    given = _made_up(plan, executions) if isinstance(executions, int) else executions
    running = (run or PlanRun)(plan, given, constants, World(seed, delays), slots, hardware_queues, results, failing)
    for process, time in (deaths or {}).items():
        running.kill_at(process, time)
    return running.outcome()


class PlanRun:
    """One run of one plan."""

    def __init__(
        self,
        plan: Plan,
        executions: Sequence[Arguments],
        constants: Sequence[object],
        world: World,
        slots: int,
        hardware_queues: int | None,
        results: Results,
        failing: frozenset[tuple[int, int]],
    ) -> None:
        self.plan = plan
        self.world = world
        self.constants = constants
        self.failing = failing
        self.returned = results
        self.transfers = 0
        self._executions = executions
        self.devices = {actor.process.index: Device(world, actor.process.label, hardware_queues) for actor in plan.actors}
        self.links = {
            link.id: Group(world, f"link {link.id}", [self.devices[end] for end in (link.writer, *link.readers)])
            for link in plan.links
        }
        self.groups = {
            group.id: Group(world, f"group {group.id}", [self.devices[process] for process in group.processes])
            for group in plan.groups
        }
        self.queues: dict[int, Queue] = {}
        for channel in plan.channels:
            capacity = slots if channel.slots is None else channel.slots
            self.queues[channel.id] = Queue(world, capacity, f"channel {channel.id} ({channel.value})", len(channel.readers))
        self._results: list[list[object]] = []
        world.start("driver's execute", self._submit())
        world.start("driver's get", self._fetch())
        for actor in plan.actors:
            device = self.devices[actor.process.index]
            launched = [action for action in actor.actions if isinstance(action, (Send, Recv, Collective))]
            for number in range(max((action.stream or COMPUTE_STREAM for action in launched), default=COMPUTE_STREAM) + 1):
                device.stream(str(number))
            world.start(actor.process.label, _Actor(self, actor.process.index, actor.actions).program(len(executions)), device)

    def outcome(self) -> Outcome:
        """Run to the end. See `simulate`."""
        self.world.run()
        faults: list[MemoryFault] = [fault for device in self.devices.values() for fault in device.faults]
        if faults:
            raise SimulatedMemoryError.of(faults)
        for task in self.world.tasks:
            if task.failure is not None:
                raise task.failure
        return Outcome(self._results, self.world.now, self.transfers)

    def kill_at(self, process: int, time: float) -> None:
        """At `time` the actor dies; after a while the others learn of it."""
        device = self.devices[process]
        error = ActorDiedError(f"{device} died at {time:.3f} virtual seconds", graph=self.plan.name, actor=str(device))
        device.on_death.append(lambda: self.world.after(self.world.draw("notice"), lambda: self._close(error)))
        self.world.after(time, device.kill)

    def reader_of(self, channel: int, process: int) -> int:
        """The place of a process among the readers of a channel."""
        return self.plan.channels[channel].readers.index(process)

    def wait_for_receive(self, compute: Stream, value: Event) -> None:
        """Before a computation: hold it up until what it is given was received."""
        compute.wait(value)

    def wait_for_send(self, compute: Stream, sent: Event) -> None:
        """Before a computation, which may overwrite what the actor returned earlier: hold it up until that was sent."""
        compute.wait(sent)

    def keep_for(self, tensor: Tensor, stream: Stream) -> None:
        """After something was launched that uses the tensor: keep its memory until that has ended."""
        tensor.record_stream(stream)

    def _close(self, error: ActorDiedError) -> None:
        for queue in self.queues.values():
            queue.close(error)

    def _submit(self) -> Program:
        for args, kwargs in self._executions:
            for item, value in zip(self.plan.inputs, split_arguments(self.plan, args, kwargs), strict=True):
                queue = self.queues[item.channel]
                yield queue.room
                queue.put(value)
            yield self.world.draw("host")

    def _fetch(self) -> Program:
        channels = list(dict.fromkeys(output.channel for output in self.plan.outputs if isinstance(output, FromChannel)))
        for args, kwargs in self._executions:
            taken: dict[int, object] = {}
            for channel in channels:
                reader = self.reader_of(channel, DRIVER)
                yield self.queues[channel].message(reader)
                taken[channel] = self.queues[channel].take(reader)
            self._results.append(
                [
                    project(output.projection, args, kwargs) if isinstance(output, FromInput) else taken[output.channel]
                    for output in self.plan.outputs
                ]
            )


class _Actor:
    """The host program of one actor."""

    def __init__(self, run: PlanRun, process: int, actions: tuple[Action, ...]) -> None:
        self._run = run
        self._world = run.world
        self._process = process
        self._actions = actions
        self._device = run.devices[process]
        self._compute = self._device.stream(str(COMPUTE_STREAM))
        self._registers: dict[int, Any] = {}
        self._sends: list[Event] = []
        self._kept: dict[tuple[int, int], Tensor] = {}

    def program(self, executions: int) -> Program:
        for execution in range(executions):
            for action in self._actions:
                yield self._world.draw("host")
                match action:
                    case Read(channel, register):
                        self._registers[register] = yield from self._take(channel)
                        yield self._compute.record()
                    case Write(channels, registers):
                        for channel, register in zip(channels, registers, strict=True):
                            value = yield from self._host_value(register)
                            yield from self._put(channel, value)
                    case Send():
                        yield from self._send(action)
                    case Recv():
                        yield from self._recv(action)
                    case Compute():
                        yield from self._call(action, execution)
                    case Collective():
                        yield from self._meet(action)
                    case Release(registers):
                        for register in registers:
                            value = self._registers.pop(register)
                            if isinstance(value, _OnDevice) and value.release:
                                value.tensor.free()

    def _put(self, channel: int, value: object) -> Program:
        queue = self._run.queues[channel]
        yield queue.room
        queue.put(value)

    def _take(self, channel: int) -> Program:
        queue = self._run.queues[channel]
        reader = self._run.reader_of(channel, self._process)
        yield queue.message(reader)
        return queue.take(reader)

    def _send(self, action: Send) -> Program:
        value = self._registers[action.register]
        if not isinstance(value, _OnDevice):  # The call failed: the record says so, and nothing is launched.
            yield from self._put(action.channel, value)
            return
        yield from self._put(action.channel, None)
        stream = self._device.stream(str(action.stream))
        stream.wait(self._compute.record())
        if value.filled is not None:
            stream.wait(value.filled)
        link, tag = self._run.links[action.link], f"channel {action.channel}"
        if len(link.devices) == 2:
            sent = link.post_send(0, 1, value.tensor, stream, tag)
        else:
            sent = link.post_broadcast(0, 0, value.tensor, stream, tag)
        self._run.keep_for(value.tensor, stream)
        self._run.transfers += 1
        if not action.beside:
            self._sends.append(sent)

    def _recv(self, action: Recv) -> Program:
        failure = yield from self._take(action.channel)
        if failure is not None:
            self._registers[action.register] = failure
            return
        stream = self._device.stream(str(action.stream))
        tensor = self._device.allocate((), "term", stream, f"value of channel {action.channel}")
        link, tag = self._run.links[action.link], f"channel {action.channel}"
        if len(link.devices) == 2:
            filled = link.post_recv(1, 0, tensor, stream, tag)
        else:
            rank = 1 + self._run.reader_of(action.channel, self._process)
            filled = link.post_broadcast(rank, 0, tensor, stream, tag)
        self._registers[action.register] = _OnDevice(tensor, filled, release=True)

    def _call(self, action: Compute, execution: int) -> Program:
        arguments = [*action.args, *(argument for _, argument in action.kwargs)]
        values = [self._value(argument) for argument in arguments]
        awaited = [self._registers[register] for register in action.awaited]
        for value in (*values, *awaited):
            if isinstance(value, _OnDevice) and value.filled is not None:
                self._run.wait_for_receive(self._compute, value.filled)
        for sent in self._sends:
            self._run.wait_for_send(self._compute, sent)
        self._sends.clear()
        failure = next((value for value in (*values, *awaited) if isinstance(value, Failed)), None)
        if (action.node, execution) in self._run.failing:
            failure = Failed(action.node)
        if failure is not None:
            self._registers.update(dict.fromkeys(action.outputs, failure))
            return
        outputs = [self._output(action.node, element) for element in range(len(action.outputs))]
        reads = [value.tensor for value in values if isinstance(value, _OnDevice)]
        names = [name for name, _ in action.kwargs]

        def terms(contents: list[Any]) -> list[Any]:
            left = iter(contents)
            given = [next(left) if isinstance(value, _OnDevice) else value for value in values]
            args, named = given[: len(action.args)], given[len(action.args) :]
            pairs = tuple(sorted(zip(names, named, strict=True)))
            return [(action.node, element, tuple(args), pairs) for element in range(len(outputs))]

        done = self._compute.compute(f"{action.node}:{action.method}", reads, outputs, terms)
        for tensor in reads:
            self._run.keep_for(tensor, self._compute)
        for register, tensor in zip(action.outputs, outputs, strict=True):
            self._registers[register] = _OnDevice(tensor, done, release=self._run.returned is Results.FRESH)
        yield done
        if done.failure is not None:
            raise done.failure

    def _output(self, node: int, element: int) -> Tensor:
        name = f"result {element} of call {node}"
        if self._run.returned is Results.FRESH:
            return self._device.allocate((), "term", self._compute, name)
        if (node, element) not in self._kept:
            self._kept[node, element] = self._device.allocate((), "term", self._compute, name)
        return self._kept[node, element]

    def _meet(self, action: Collective) -> Program:
        given: list[object] = []
        for register in action.args:
            value = yield from self._host_value(register)
            given.append(value)
        ranks = [given]
        for phase in filter(None, (action.parts, action.slices)):
            yield from self._put(phase[action.rank], given)
            ranks = [given] * len(phase)
            for rank, channel in enumerate(phase):
                if rank != action.rank:
                    ranks[rank] = yield from self._take(channel)
        op = None if action.op is None else str(action.op)
        failure = next((value for values in ranks for value in values if isinstance(value, Failed)), None)
        for element, register in enumerate(action.outputs):
            if action.group is not None and failure is None:
                self._registers[register] = self._launch(action, element, given[element])
                continue
            given_here = tuple(values[element] for values in ranks)
            term = (str(action.kind), op, action.rank, given_here) if action.root is None else given_here[action.root]
            self._registers[register] = term if failure is None else failure

    def _launch(self, action: Collective, element: int, content: object) -> _OnDevice:
        """Launch this rank's part for one tensor, after it was seen on the host."""
        assert action.group is not None
        stream = self._device.stream(str(action.stream))
        value = self._registers[action.args[element]]
        if isinstance(value, _OnDevice):
            tensor = value.tensor
            stream.wait(self._compute.record())
            if value.filled is not None:
                stream.wait(value.filled)
        else:  # made on the host, by a collective there
            tensor = self._device.allocate((), "term", stream, "a copy from the host")
            stream.compute("copy from the host", (), (tensor,), lambda _: [content])
        out = self._device.allocate((), "term", stream, f"result {element} of call {action.node}")
        op = None if action.op is None else str(action.op)
        group = self._run.groups[action.group]
        if action.root is None:
            done = group.post_collective(str(action.kind), action.rank, tensor, out, stream, op)
        else:
            if action.root == action.rank:
                stream.compute("copy of what is sent", (tensor,), (out,), lambda contents: contents)
            done = group.post_broadcast(action.rank, action.root, out, stream)
        self._run.keep_for(tensor, stream)
        return _OnDevice(out, done, release=True)

    def _host_value(self, register: int) -> Program:
        """The value as the host sees it, copied on the stream of computations."""
        value = self._registers[register]
        yield self._compute.record()
        if not isinstance(value, _OnDevice):
            return value
        if value.filled is not None:
            yield value.filled
            if value.filled.failure is not None:
                raise value.filled.failure
        return value.tensor.content

    def _value(self, argument: Argument) -> Any:
        if isinstance(argument, Register):
            return self._registers[argument.index]
        return self._run.constants[argument.index] if self._run.constants else f"constant {argument.index}"


def _made_up(plan: Plan, count: int) -> list[Arguments]:
    signature = plan.signature
    width = 1 if signature.arity is None else signature.arity
    return [
        (
            [f"input {place} of {execution}" for place in range(width)],
            {key: f"input {key} of {execution}" for key in signature.keys},
        )
        for execution in range(count)
    ]
