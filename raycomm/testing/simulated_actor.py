"""What one actor of a plan does on its simulated device, and what its registers hold. See `simulated_plan`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from raycomm.plan.actions import Action, Argument, Collective, Compute, Read, Register, Release, Write
from raycomm.plan.transfer import COMPUTE_STREAM, Recv, Send
from raycomm.testing.simulated_device import Tensor
from raycomm.testing.simulated_operations import Event
from raycomm.testing.simulated_world import Program

if TYPE_CHECKING:
    from raycomm.testing.simulated_plan import PlanRun


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


@dataclass(slots=True)
class OnDevice:
    """In a register: memory of the actor's device, and what to wait for before it is used."""

    tensor: Tensor
    filled: Event | None
    release: bool


class Actor:
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
                            if isinstance(value, OnDevice) and value.release:
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
        if not isinstance(value, OnDevice):  # The call failed: the record says so, and nothing is launched.
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
        self._registers[action.register] = OnDevice(tensor, filled, release=True)

    def _call(self, action: Compute, execution: int) -> Program:
        arguments = [*action.args, *(argument for _, argument in action.kwargs)]
        values = [self._value(argument) for argument in arguments]
        awaited = [self._registers[register] for register in action.awaited]
        for value in (*values, *awaited):
            if isinstance(value, OnDevice) and value.filled is not None:
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
        reads = [value.tensor for value in values if isinstance(value, OnDevice)]
        names = [name for name, _ in action.kwargs]

        def terms(contents: list[Any]) -> list[Any]:
            left = iter(contents)
            given = [next(left) if isinstance(value, OnDevice) else value for value in values]
            args, named = given[: len(action.args)], given[len(action.args) :]
            pairs = tuple(sorted(zip(names, named, strict=True)))
            return [(action.node, element, tuple(args), pairs) for element in range(len(outputs))]

        done = self._compute.compute(f"{action.node}:{action.method}", reads, outputs, terms)
        for tensor in reads:
            self._run.keep_for(tensor, self._compute)
        for register, tensor in zip(action.outputs, outputs, strict=True):
            self._registers[register] = OnDevice(tensor, done, release=self._run.returned is Results.FRESH)
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

    def _launch(self, action: Collective, element: int, content: object) -> OnDevice:
        """Launch this rank's part for one tensor, after it was seen on the host."""
        assert action.group is not None
        stream = self._device.stream(str(action.stream))
        value = self._registers[action.args[element]]
        if isinstance(value, OnDevice):
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
        return OnDevice(out, done, release=True)

    def _host_value(self, register: int) -> Program:
        """The value as the host sees it, copied on the stream of computations."""
        value = self._registers[register]
        yield self._compute.record()
        if not isinstance(value, OnDevice):
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
