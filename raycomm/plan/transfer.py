"""The parts of a plan that move values from device to device: links, streams, sends and receives.

A link is a communicator of its own, used in one direction only. A value travels on it as one operation with two ends, a send
and a receive, each launched on a stream of its actor; neither end completes without the other. What says that a value is coming,
or that there is none, is a control record on the ordinary channel of the same number: the send writes it, the receive takes it
first.

A collective on devices is one operation of all ranks of its group, launched after all of them have said what they have.

    link 0 1 -> 2
    link 1 2 -> 1, 3 over nccl
    link 2 1 -> 3 over own 0 "SocketLink"
    link 3 3 -> 1 over own 1 "RaysGroup" ranks 1, 3
    group 0 1, 2, 3 over nccl
    streams 1 link
    streams 2 direction instead of link 9 links limit 6 given 3, 4
      send 3 from r1 on link 0 stream 1
      r2 = recv 3 on link 0 stream 2

Streams are numbered per actor. Stream 0 is the one its computations run on.

A channel whose value was given a hint says so, and why it moves as it does where the hint leaves that open:

    channel 1 "W1.forward#0" 1 -> 2 transport device hint nccl static_shape yes direct_return yes
    channel 2 "W2.forward#1" 2 -> 3 hint auto device cpu because "device 'cpu' asks for host memory"
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from raycomm.graph.tensor_transport import TensorDevice, TensorTransport
from raycomm.options import StreamPolicy

COMPUTE_STREAM = 0


class Backend(StrEnum):
    """What carries tensors over a link."""

    NCCL = "nccl"
    GLOO = "gloo"
    SIMULATED = "simulated"


@dataclass(frozen=True, slots=True)
class OwnBackend:
    """A communicator that the user brought: its `number` among those of the graph, and what it is called.

    `ranks`: processes by rank, of one that is one communicator for all its links and groups. Its operations run in the order in
    which an actor launches them, so they are on one stream. Empty where each link and group has a communicator to itself.
    """

    number: int
    name: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = f"own {self.number} {json.dumps(self.name)}"
        return f"{text} ranks {', '.join(map(str, self.ranks))}" if self.ranks else text


# What carries tensors.
Carrier: TypeAlias = Backend | OwnBackend


def on_one_device(first: Carrier | None, second: Carrier | None) -> bool:
    """Whether the ends that an actor has over both are on one device: streams of the one can wait for events of the other."""
    return first == second and (not isinstance(first, OwnBackend) or in_one_order(first))


def in_one_order(over: Carrier | None) -> bool:
    """Whether all links and groups over it are one communicator, whose operations run in one order."""
    return isinstance(over, OwnBackend) and bool(over.ranks)


@dataclass(frozen=True, slots=True)
class Link:
    """A communicator from actor `writer` to actors `readers` (indices of processes). Its operations run in the order of launch.

    With several readers each operation is a broadcast: none of its ends completes without the others. `over` is None where the
    plan leaves open what carries it.
    """

    id: int
    writer: int
    readers: tuple[int, ...]
    over: Carrier | None = None

    def __str__(self) -> str:
        text = f"link {self.id} {self.writer} -> {', '.join(map(str, self.readers))}"
        return text if self.over is None else f"{text} over {self.over}"


@dataclass(frozen=True, slots=True)
class Group:
    """A communicator of several actors, for collectives: `processes` by rank. Its operations run in the order of launch.

    `over` is None where the plan leaves open what carries it. `because`: why there is one, where nobody asked for it.
    """

    id: int
    processes: tuple[int, ...]
    over: Carrier | None = None
    because: str | None = None

    def __str__(self) -> str:
        text = f"group {self.id} {', '.join(map(str, self.processes))}"
        text += f" over {self.over}" if self.over is not None else ""
        return text if self.because is None else f"{text} because {json.dumps(self.because)}"


@dataclass(frozen=True, slots=True)
class TensorEdge:
    """What `with_tensor_transport` asked of a channel.

    Attributes:
        hint: the transport that was asked for.
        device: where tensors are to lie at the reader.
        static_shape: dtypes, shapes and layouts never change. Only on a channel between devices, as `direct_return`.
        direct_return: each value is exactly one tensor.
        because: why the value moves as it does, where the hint leaves that open; else None.
    """

    hint: TensorTransport
    device: TensorDevice = TensorDevice.DEFAULT
    static_shape: bool = False
    direct_return: bool = False
    because: str | None = None

    def __str__(self) -> str:
        text = f"hint {self.hint}"
        text += f" device {self.device}" if self.device is not TensorDevice.DEFAULT else ""
        text += " static_shape yes" if self.static_shape else ""
        text += " direct_return yes" if self.direct_return else ""
        return text if self.because is None else f"{text} because {json.dumps(self.because)}"


@dataclass(frozen=True, slots=True)
class DeviceStreams:
    """How the streams of an actor's device were chosen.

    Attributes:
        process: index of the actor's process.
        policy: the policy in force.
        instead_of: the policy asked for, where the `links` of this device, groups among them, are more than its `limit`; else all
            three are None.
        given: channels whose stream at this device the user chose.
    """

    process: int
    policy: StreamPolicy
    instead_of: StreamPolicy | None = None
    links: int | None = None
    limit: int | None = None
    given: tuple[int, ...] = ()

    def __str__(self) -> str:
        text = f"streams {self.process} {self.policy}"
        if self.instead_of is not None:
            text += f" instead of {self.instead_of} {self.links} links limit {self.limit}"
        return text + (f" given {', '.join(map(str, self.given))}" if self.given else "")


@dataclass(frozen=True, slots=True)
class Send:
    """Write the control record of a channel and launch the send of a register's value; wait for neither.

    `stream` is None until a policy was applied. `beside`: the actor's next computation does not wait for this send.
    """

    channel: int
    register: int
    link: int
    stream: int | None = None
    beside: bool = False

    def __str__(self) -> str:
        text = f"send {self.channel} from r{self.register} on link {self.link}"
        text += f" stream {self.stream}" if self.stream is not None else ""
        return text + (" beside" if self.beside else "")


@dataclass(frozen=True, slots=True)
class Recv:
    """Wait for the control record of a channel, then launch the receive into a register; who uses the register waits for it.

    `stream` is None until a policy was applied.
    """

    channel: int
    register: int
    link: int
    stream: int | None = None

    def __str__(self) -> str:
        text = f"r{self.register} = recv {self.channel} on link {self.link}"
        return text + (f" stream {self.stream}" if self.stream is not None else "")
