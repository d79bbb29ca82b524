"""A plan: for each actor the list of actions it repeats, and what moves between processes. Immutable data with a text form.

`plan.to_text()` gives text for people, one statement a line, and `raycomm.plan.text.parse_plan` reads it back to an equal plan:

    plan "demo"
    signature whole
    process 0 "driver"
    process 1 "Worker"
    channel 0 "input" 0 -> 1
    channel 1 "Worker.forward#0" 1 -> 0
    input whole -> channel 0
    output channel 1
    returns one
    actor 1 registers 2
      r0 = read 0
      r1 = 0:forward(r0, scale=c0)
      write 1 from r1
      release r0, r1

A call that waits for values that it is not given names their registers:

      r1 = 1:note(c0) after r0, r2

A register is a place in the loop's list of values; `c0` is constant 0 of the graph. Names appear bare where they are plain
identifiers and as JSON strings otherwise. A channel with settings of its own names them after its readers:

    channel 1 "Worker.forward#0" 1 -> 0 inline_bytes 4096 slots 2 share_tensors yes allow_pickle no

A collective is an action of each of its actors:

      r1 = collective 2 allreduce sum rank 0 from r0 parts 4, 5 slices 6, 7
      r1 = collective 4 broadcast root 1 rank 0 from r0 parts 8, 9

What moves between devices is in `raycomm.plan.transfer`; a channel of that kind says so, and whether its values stay untouched:

    channel 3 "Worker.forward#0" 1 -> 2 transport device sender_keeps yes
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from raycomm.graph.model import CollectiveKind, Key, Nothing, Position, Projection, ReduceOp, Whole
from raycomm.plan.placement import Transport
from raycomm.plan.transfer import DeviceStreams, Group, Link, Recv, Send, TensorEdge

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True, slots=True)
class Process:
    """A process of the graph. Index 0 is the driver, index i + 1 is actor i of the graph."""

    index: int
    label: str

    def __str__(self) -> str:
        return f"process {self.index} {json.dumps(self.label)}"


@dataclass(frozen=True, slots=True)
class Channel:
    """A value that leaves its process: `readers` are the other processes that use it, each once, ascending; never the writer.

    The four fields after `readers` are settings of this edge, see `raycomm.with_channel_options`; None: the graph's. With
    transport DEVICE the channel has one reader and carries control records only; `sender_keeps` says that the writer never
    overwrites what it sends on it, so that its next computation need not wait for the send. `tensors` is what a hint asked for.
    """

    id: int
    value: str
    writer: int
    readers: tuple[int, ...]
    inline_bytes: int | None = None
    slots: int | None = None
    share_tensors: bool | None = None
    allow_pickle: bool | None = None
    transport: Transport = Transport.SHARED_MEMORY
    sender_keeps: bool = False
    tensors: TensorEdge | None = None

    def __str__(self) -> str:
        text = f"channel {self.id} {json.dumps(self.value)} {self.writer} -> {_list(self.readers)}"
        for name in ("inline_bytes", "slots"):
            if (number := getattr(self, name)) is not None:
                text += f" {name} {number}"
        for name in ("share_tensors", "allow_pickle"):
            if (flag := getattr(self, name)) is not None:
                text += f" {name} {'yes' if flag else 'no'}"
        if self.transport is not Transport.SHARED_MEMORY:
            text += f" transport {self.transport.value}"
        text += " sender_keeps yes" if self.sender_keeps else ""
        return text if self.tensors is None else f"{text} {self.tensors}"


@dataclass(frozen=True, slots=True)
class Register:
    """Argument: the value in a register."""

    index: int

    def __str__(self) -> str:
        return f"r{self.index}"


@dataclass(frozen=True, slots=True)
class Constant:
    """Argument: constant `index` of the graph."""

    index: int

    def __str__(self) -> str:
        return f"c{self.index}"


Argument: TypeAlias = Register | Constant


@dataclass(frozen=True, slots=True)
class Read:
    """Take the next value of a channel into a register."""

    channel: int
    register: int

    def __str__(self) -> str:
        return f"r{self.register} = read {self.channel}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Call a method. `node` is the call's id in the graph; `outputs` holds one register per returned value.

    `awaited` are registers whose values the call waits for and is not given.
    """

    node: int
    method: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    outputs: tuple[int, ...]
    awaited: tuple[int, ...] = ()

    def __str__(self) -> str:
        given = [*map(str, self.args), *(f"{name_text(name)}={argument}" for name, argument in self.kwargs)]
        text = f"{_registers(self.outputs)} = {self.node}:{name_text(self.method)}({', '.join(given)})"
        return text + (f" after {_registers(self.awaited)}" if self.awaited else "")


@dataclass(frozen=True, slots=True)
class Collective:
    """Take part in a collective: publish the tensors in `args`, take the others' parts, fill `outputs` with the result.

    Attributes:
        node: the call's id in the graph.
        op: how tensors are combined; None where they are not.
        root: the rank whose tensor all get, for a broadcast.
        rank: this actor's place among the others.
        args: registers, one per tensor; `outputs` likewise.
        parts: by rank, the channel on which that actor publishes its tensors to all others; empty where there are no others.
        slices: by rank, the channel on which that actor publishes what it has combined for all, if there are enough of them to
            share the work; else empty. Every channel carries one message per execution, used or not.
        group: on which the tensors are combined, after `parts` have said what they are; None: in host memory, and `parts` have
            them.
        stream: of this actor's device, for that; None until a policy was applied.
    """

    node: int
    kind: CollectiveKind
    op: ReduceOp | None
    root: int | None
    rank: int
    args: tuple[int, ...]
    outputs: tuple[int, ...]
    parts: tuple[int, ...]
    slices: tuple[int, ...]
    group: int | None = None
    stream: int | None = None

    def __str__(self) -> str:
        text = f"{_registers(self.outputs)} = collective {self.node} {self.kind}"
        text += f" {self.op}" if self.op is not None else ""
        text += f" root {self.root}" if self.root is not None else ""
        text += f" rank {self.rank} from {_registers(self.args)}"
        text += f" parts {_list(self.parts)}" if self.parts else ""
        text += f" slices {_list(self.slices)}" if self.slices else ""
        text += f" on group {self.group}" if self.group is not None else ""
        return text + (f" stream {self.stream}" if self.stream is not None else "")

    @property
    def method(self) -> str:
        """What stands in the place of a method's name."""
        return str(self.kind)

    @property
    def written(self) -> tuple[int, ...]:
        """The channels this actor publishes on."""
        return tuple(channels[self.rank] for channels in (self.parts, self.slices) if channels)

    @property
    def read(self) -> tuple[int, ...]:
        """The channels this actor reads, each once."""
        both = (self.parts, self.slices)
        return tuple(channel for channels in both for rank, channel in enumerate(channels) if rank != self.rank)


@dataclass(frozen=True, slots=True)
class Write:
    """Publish registers on channels, pairwise. All values of one call that leave the process are in one such action."""

    channels: tuple[int, ...]
    registers: tuple[int, ...]

    def __str__(self) -> str:
        return f"write {_list(self.channels)} from {_registers(self.registers)}"


@dataclass(frozen=True, slots=True)
class Release:
    """Forget the values of registers, which may then be used again."""

    registers: tuple[int, ...]

    def __str__(self) -> str:
        return f"release {_registers(self.registers)}"


Action: TypeAlias = Read | Compute | Collective | Write | Send | Recv | Release


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """What one actor repeats, on `registers` registers."""

    process: Process
    actions: tuple[Action, ...]
    registers: int

    def __str__(self) -> str:
        head = f"actor {self.process.index} registers {self.registers}"
        return "\n".join([head, *(f"  {action}" for action in self.actions)])


@dataclass(frozen=True, slots=True)
class Input:
    """The driver writes this part of the arguments of `execute` to a channel."""

    channel: int
    projection: Projection

    def __str__(self) -> str:
        return f"input {projection_text(self.projection)} -> channel {self.channel}"


@dataclass(frozen=True, slots=True)
class FromChannel:
    """A result that the driver reads from a channel; two results may name one channel, which is read once."""

    channel: int

    def __str__(self) -> str:
        return f"output channel {self.channel}"


@dataclass(frozen=True, slots=True)
class FromInput:
    """A result that is part of the arguments of the same execution and never leaves the driver."""

    projection: Projection

    def __str__(self) -> str:
        return f"output input {projection_text(self.projection)}"


Output: TypeAlias = FromChannel | FromInput


@dataclass(frozen=True, slots=True)
class Signature:
    """What `execute` takes: the whole input (`arity` None, one positional argument), or `arity` positional ones and `keys`."""

    arity: int | None
    keys: tuple[str, ...]

    def __str__(self) -> str:
        if self.arity is None and not self.keys:
            return "signature whole"
        return " ".join(["signature", "whole" if self.arity is None else str(self.arity), *map(name_text, self.keys)])


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything the runtime does, except for the values of constants, which stay in the graph."""

    name: str
    processes: tuple[Process, ...]
    channels: tuple[Channel, ...]
    actors: tuple[ActorPlan, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    single_output: bool
    signature: Signature
    links: tuple[Link, ...] = ()
    streams: tuple[DeviceStreams, ...] = ()
    groups: tuple[Group, ...] = ()

    def to_text(self) -> str:
        """The text form; `parse_plan` reads it back."""
        lines: list[object] = [f"plan {json.dumps(self.name)}", self.signature, *self.processes, *self.channels]
        lines += [*self.links, *self.groups, *self.streams, *self.inputs]
        lines += [*self.outputs, f"returns {'one' if self.single_output else 'list'}", *self.actors]
        return "\n".join(map(str, lines)) + "\n"

    def __str__(self) -> str:
        return self.to_text()


def name_text(name: str) -> str:
    """`name` bare where it is a plain identifier, else as a JSON string."""
    return name if _BARE.match(name) else json.dumps(name)


def projection_text(projection: Projection) -> str:
    """Text form of a projection inside a plan."""
    match projection:
        case Whole():
            return "whole"
        case Position(index):
            return f"position {index}"
        case Key(name):
            return f"key {json.dumps(name)}"
        case Nothing():
            return "nothing"


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _registers(numbers: Iterable[int]) -> str:
    return ", ".join(f"r{number}" for number in numbers)
