"""The simulated device behind the interface of `raycomm.device.Communicator`: one object per rank, all in one process.

    world = World(seed=7)
    ends = communicators(world, "link", [Device(world, "left"), Device(world, "right")])
    for end in ends:
        world.start(f"rank {end.rank}", lambda end=end: program(end))   # blocks as on a real device, in virtual time
    results = world.results()

Like NCCL's, a communicator that was not warmed up blocks the host at its first operation until all ranks have come to theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycomm.device.checks import about, check_buffer, check_parts, check_peer, check_stream, check_tensor, who
from raycomm.device.communicator import Received, Use, chosen_stream
from raycomm.errors import RankMissingError, TensorMismatchError
from raycomm.testing.simulated_device import Device, Stream
from raycomm.testing.simulated_group import Group
from raycomm.testing.simulated_operations import Event
from raycomm.testing.simulated_world import Task, World


def communicators(world: World, name: str, devices: Sequence[Device]) -> list[SimulatedCommunicator]:
    """One communicator over `devices`: its ends, by rank."""
    group = Group(world, name, devices)
    meeting = _Meeting(group)
    return [SimulatedCommunicator(group, rank, meeting) for rank in range(len(devices))]


class SimulatedCommunicator:
    """A rank's end. See `raycomm.device.Communicator`; limits are virtual seconds."""

    def __init__(self, group: Group, rank: int, meeting: _Meeting) -> None:
        self.name = group.name
        self.rank = rank
        self.size = len(group.devices)
        self.device = group.devices[rank]
        self._group = group
        self._meeting = meeting
        self._own = self.device.stream(f"{group.name} at rank {rank}")

    def warm_up(self, limit_s: float) -> None:
        """Meet all others. See the interface."""
        missing = self._meeting.come(self.rank, limit_s)
        self.poll()
        if missing:
            ranks = ", ".join(f"{rank} ({self._group.devices[rank]})" for rank in missing)
            text = f"{who(self)} waited {limit_s} s in vain for rank {ranks} to warm up; see why that process is not there"
            error = RankMissingError(text, limit_s=limit_s, missing=missing, waits_for=f"rank {ranks}", **about(self))
            self._group.fail(error)
            raise error

    def send(self, tensor: Any, peer: int, *, stream: Stream | None = None) -> Event:
        """Launch a send. See the interface."""
        check_peer(self, peer)
        check_tensor(self, tensor, peer)
        on = self._ready(Use.SEND, stream, peer)
        sent = self._group.post_send(self.rank, peer, tensor, on)
        tensor.record_stream(on)
        return sent

    def recv(
        self, shape: tuple[int, ...], dtype: Any, peer: int, *, stream: Stream | None = None, into: Any | None = None
    ) -> Received:
        """Launch a receive. See the interface."""
        check_peer(self, peer)
        if into is not None:
            check_buffer(self, into, shape, dtype, peer)
        on = self._ready(Use.RECV, stream, peer)
        if into is None:
            into = self.device.allocate(tuple(shape), dtype, on, f"value from rank {peer}")
        event = self._group.post_recv(self.rank, peer, into, on)
        into.record_stream(on)
        return Received(into, event)

    def allreduce(self, tensor: Any, op: str = "sum", *, stream: Stream | None = None) -> Received:
        """Launch an allreduce. See the interface."""
        return self._collective("allreduce", tensor, tuple(tensor.shape), stream, op=str(op))

    def allgather(self, tensor: Any, *, stream: Stream | None = None) -> Received:
        """Launch an allgather. See the interface."""
        if not tensor.shape:
            text = f"allgather at {who(self)} puts tensors one after the other, was given one without dimensions"
            raise TensorMismatchError(text, expected="a dimension", given="none", **about(self))
        return self._collective("allgather", tensor, (tensor.shape[0] * self.size, *tensor.shape[1:]), stream)

    def reducescatter(self, tensor: Any, op: str = "sum", *, stream: Stream | None = None) -> Received:
        """Launch a reducescatter. See the interface."""
        check_parts(self, tensor)
        return self._collective("reducescatter", tensor, (tensor.shape[0] // self.size, *tensor.shape[1:]), stream, op=str(op))

    def broadcast(self, tensor: Any, root: int, *, stream: Stream | None = None) -> Received:
        """Launch a broadcast. See the interface."""
        if root != self.rank:
            check_peer(self, root)
            check_buffer(self, tensor, tuple(tensor.shape), tensor.dtype, root)
        check_tensor(self, tensor)
        on = self._ready(Use.COLLECTIVE, stream, None)
        event = self._group.post_broadcast(self.rank, root, tensor, on)
        tensor.record_stream(on)
        return Received(tensor, event)

    def poll(self) -> None:
        """Raise what has gone wrong. See the interface."""
        if self._group.failure is not None:
            raise self._group.failure

    def abort(self, limit_s: float) -> None:
        """End all operations. See the interface."""
        if self._group.failure is None:
            self._group.abort(self.rank)

    def _collective(
        self,
        kind: str,
        tensor: Any,
        shape: tuple[int, ...],
        stream: Stream | None,
        op: str | None = None,
    ) -> Received:
        check_tensor(self, tensor)
        on = self._ready(Use.COLLECTIVE, stream, None)
        out = self.device.allocate(shape, tensor.dtype, on, f"result of {kind}")
        event = self._group.post_collective(kind, self.rank, tensor, out, on, op)
        tensor.record_stream(on)
        return Received(out, event)

    def _ready(self, use: Use, stream: Stream | None, peer: int | None) -> Stream:
        """The stream to launch on, once the communicator can be used."""
        on: Stream = chosen_stream(self, use, self._own) if stream is None else stream
        check_stream(self, on, peer)
        self.poll()
        self._meeting.come(self.rank, None)
        self.poll()
        return on


class _Meeting:
    """That all ranks have come; a condition of the simulated world."""

    def __init__(self, group: Group) -> None:
        self.waiters: list[Task] = []
        self._group = group
        self._there: set[int] = set()
        group.on_failure.append(lambda: group.world.changed(self))

    def come(self, rank: int, limit_s: float | None) -> tuple[int, ...]:
        """Be there, and block the host program until all are; who was not there within the limit."""
        self._there.add(rank)
        self._group.world.changed(self)
        if not self.ready():
            self._group.world.wait(self, limit_s)
        return self._missing() if self._group.failure is None else ()

    def ready(self) -> bool:
        return self._group.failure is not None or not self._missing()

    def _missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(len(self._group.devices)) if rank not in self._there)

    def __str__(self) -> str:
        ranks = ", ".join(f"rank {rank} ({self._group.devices[rank]})" for rank in self._missing())
        return f"{ranks} to come to the first operation or warm-up of {self._group}"
