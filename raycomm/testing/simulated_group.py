"""A simulated communicator, which behaves as NCCL's do.

The operations of one rank run in the order of their launch, whatever streams they are on: each begins when it stands at the head
of its stream and is the oldest of its rank. A send and its receive are one operation: it begins when both can, and both end
together. A collective likewise with all ranks. Whoever waits occupies his stream meanwhile.

What NCCL leaves undefined is an error here: two ends that disagree about shape or dtype, collectives that differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from raycomm.device.base import shape_text
from raycomm.errors import CollectiveError, CommunicatorClosedError, PeerDiedError, RaycommError, TensorMismatchError
from raycomm.testing.simulated_device import Device, Stream, Tensor
from raycomm.testing.simulated_memory import Access, Hazard, Poison, computed
from raycomm.testing.simulated_operations import Event, Operation
from raycomm.testing.simulated_order import join
from raycomm.testing.simulated_terms import combine
from raycomm.testing.simulated_world import World


class Part(Operation):
    """One rank's part in an exchange."""

    __slots__ = ("_access", "_met", "exchange", "group", "rank", "reads", "tensor", "writes")

    def __init__(
        self, name: str, stream: Stream, group: Group, rank: int, reads: Sequence[Tensor], writes: Sequence[Tensor]
    ) -> None:
        super().__init__(name, stream)
        self.group = group
        self.rank = rank
        self.reads = tuple(tensor.piece for tensor in reads)  # Not the tensors: whoever launches has to keep them.
        self.writes = tuple(tensor.piece for tensor in writes)
        self.exchange: Exchange | None = None
        self._met: list[Part] | None = None
        self._access = Access(str(self), stream.device.faults)

    def partners(self) -> list[Part] | None:
        """The parts of the others, by rank and with this one, if all can begin."""
        raise NotImplementedError

    def problem(self, parts: list[Part]) -> RaycommError | None:
        """Why the parts do not fit together."""
        raise NotImplementedError

    def results(self, contents: list[list[Any]]) -> list[Any]:
        """What this part writes, from what each part has read."""
        raise NotImplementedError

    @property
    def can_begin(self) -> bool:
        """Whether only the others are missing."""
        return self.stream.queue.at_head(self) and self.group.oldest(self.rank) is self

    def ready(self) -> bool:
        self._met = [] if self.group.failure is not None else self.partners()
        return self._met is not None

    def begin(self) -> None:
        parts = self._met
        if not parts:
            self.fail(self.group.failure)
            return
        for part in parts:
            if part is not self:
                part.start()
        problem = self.problem(parts)
        if problem is not None:
            for part in parts:
                part.fail(problem)
        else:
            Exchange(parts).begin()

    def fail(self, failure: Exception | None) -> None:
        for tensor in self.writes:
            tensor.block.put(Poison(Hazard.DERIVED, f"{self} failed"))
            tensor.block.writer = None
        self.over(failure)

    def over(self, failure: Exception | None = None) -> None:
        self.group.leave(self)
        super().over(failure)
        self.group.advance(self.rank)

    def start_access(self) -> None:
        self._access.begin(self.reads, self.writes, self.stream.world.now, self.moment)

    def taken(self) -> list[Any]:
        return self._access.taken(self.stream.world.now)

    def finish(self, contents: list[list[Any]]) -> None:
        if self.writes:
            everything = [content for given in contents for content in given]
            poisoned = any(isinstance(content, Poison) for content in everything)
            try:
                results = [None] * len(self.writes) if poisoned else self.results(contents)
            except (TypeError, ValueError, RuntimeError) as error:  # The operation is not for these tensors.
                self.fail(CollectiveError(f"{self}: {error}", collective=str(self.group)))
                return
            self._access.end([computed(result, everything) for result in results], self.stream.world.now)
        self.over()

    def order(self) -> str | None:
        """What it waits for on its own side, if that is not the others."""
        oldest = self.group.oldest(self.rank)
        return None if oldest is None or oldest is self else f"{oldest}, which is older on {self.group}"


class Transfer(Part):
    """A send or a receive."""

    __slots__ = ("_kind", "_peer", "_tag")

    def __init__(self, kind: str, stream: Stream, group: Group, rank: int, peer: int, tensor: Tensor, tag: object) -> None:
        way = "to" if kind == "send" else "from"
        label = "" if tag is None else f" of {tag}"
        reads, writes = ((tensor,), ()) if kind == "send" else ((), (tensor,))
        super().__init__(f"{kind}{label} {way} {group.devices[peer]} on {group}", stream, group, rank, reads, writes)
        self._kind = kind
        self._peer = peer
        self._tag = tag

    def partners(self) -> list[Part] | None:
        other = self.group.oldest(self._peer)
        if not self.can_begin or not isinstance(other, Transfer) or not other.can_begin or not other.stream.device.alive:
            return None
        fits = other._peer == self.rank and other._kind != self._kind and other._tag == self._tag
        return [self, other] if fits else None

    def problem(self, parts: list[Part]) -> RaycommError | None:
        send, recv = sorted(parts, key=lambda part: bool(part.writes))
        given, wanted = send.reads[0], recv.writes[0]
        if (given.shape, given.dtype) == (wanted.shape, wanted.dtype):
            return None
        sent, expected = (shape_text(tensor.shape, tensor.dtype) for tensor in (given, wanted))
        text = (
            f"on {self.group} rank {send.rank} ({send.stream.device}) sends {sent}, "
            f"but rank {recv.rank} ({recv.stream.device}) receives {expected}"
        )
        names = {"communicator": self.group.name, "rank": send.rank, "peer": recv.rank, "device": str(send.stream.device)}
        return TensorMismatchError(text, expected=expected, given=sent, **names)

    def results(self, contents: list[list[Any]]) -> list[Any]:
        return [content for given in contents for content in given]

    def waits_for(self) -> str:
        wanted = "receive" if self._kind == "send" else "send"
        label = "" if self._tag is None else f" {self._tag}"
        return self.order() or f"{self.group.devices[self._peer]} to {wanted}{label} on {self.group}"


class Meeting(Part):
    """A rank's part in a collective."""

    __slots__ = ("_is", "_what")

    def __init__(
        self,
        what: tuple[str, str | None, int | None, object],
        stream: Stream,
        group: Group,
        rank: int,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
    ) -> None:
        super().__init__(f"{what[0]} on {group}", stream, group, rank, reads, writes)
        self._what = what
        self._is = next((tensor.shape, tensor.dtype) for tensor in self.reads or self.writes)

    def partners(self) -> list[Part] | None:
        parts = [self.group.oldest(rank) for rank in range(len(self.group.devices))]
        there = [part for part in parts if isinstance(part, Meeting) and part.can_begin and part.stream.device.alive]
        return list(there) if len(there) == len(parts) else None

    def problem(self, parts: list[Part]) -> RaycommError | None:
        met = [part for part in parts if isinstance(part, Meeting)]
        if len({(part._what, part._is) for part in met}) == 1:
            return None
        lines = tuple(f"rank {part.rank}: {part.name}, {shape_text(*part._is)}" for part in met)
        return CollectiveError(
            f"the parts in a collective on {self.group} do not fit together: {'; '.join(lines)}", tensors=lines
        )

    def results(self, contents: list[list[Any]]) -> list[Any]:
        kind, op, root, _ = self._what
        if root is not None:
            return contents[root]
        return [combine(kind, op, root, self.rank, [given[0] for given in contents])]

    def waits_for(self) -> str:
        missing = [
            str(device)
            for rank, device in enumerate(self.group.devices)
            if not isinstance(self.group.oldest(rank), Meeting) or not self.group.oldest(rank).can_begin  # type: ignore[union-attr]
        ]
        return self.order() or f"{', '.join(missing)} to take part on {self.group}"


class Exchange:
    """Parts that have met: they begin and end together."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._open = True

    def begin(self) -> None:
        world = self._parts[0].stream.world
        for part in self._parts:
            part.exchange = self
            part.start_access()
        world.after(world.draw("transfer"), self._finish)

    def _finish(self) -> None:
        if self._open and all(part.stream.device.alive for part in self._parts):
            self._open = False
            contents = [part.taken() for part in self._parts]
            for part in self._parts[1:]:
                join(self._parts[0].moment.clock, part.moment.clock)
            for part in self._parts[1:]:
                join(part.moment.clock, self._parts[0].moment.clock)
            for part in self._parts:
                part.finish(contents)

    def fail(self, failure: Exception) -> None:
        """A rank of it is gone: the others end now."""
        if self._open:
            self._open = False
            for part in self._parts:
                if part.stream.device.alive:
                    part.fail(failure)


class Group:
    """A communicator over `devices`, whose ranks are their places.

    Attributes:
        failure: what everything launched ends with, once a rank has died or the communicator was aborted.
        on_failure: called then.
    """

    def __init__(self, world: World, name: str, devices: Sequence[Device]) -> None:
        self.world = world
        self.name = name
        self.devices = tuple(devices)
        self.failure: RaycommError | None = None
        self.on_failure: list[Callable[[], None]] = []
        self._order: list[deque[Part]] = [deque() for _ in devices]
        for rank, device in enumerate(self.devices):
            device.on_death.append(partial(self._noticed_later, rank))

    def post_send(self, rank: int, peer: int, tensor: Tensor, stream: Stream, tag: object = None) -> Event:
        """Launch the send of `tensor` to rank `peer`. Does not wait. The sender keeps the tensor until the event."""
        return self._launch(Transfer("send", stream, self, rank, peer, tensor, tag), tensor)

    def post_recv(self, rank: int, peer: int, tensor: Tensor, stream: Stream, tag: object = None) -> Event:
        """Launch a receive from rank `peer` into `tensor`. Does not wait."""
        return self._launch(Transfer("recv", stream, self, rank, peer, tensor, tag), tensor)

    def post_collective(self, kind: str, rank: int, tensor: Tensor, out: Tensor, stream: Stream, op: str | None = None) -> Event:
        """Launch this rank's part in a collective of all ranks. Does not wait."""
        return self._launch(Meeting((kind, op, None, None), stream, self, rank, (tensor,), (out,)), tensor, out)

    def post_broadcast(self, rank: int, root: int, tensor: Tensor, stream: Stream, tag: object = None) -> Event:
        """Launch this rank's part in a send from rank `root` to all others, from `tensor` or into it. Does not wait."""
        reads, writes = ((tensor,), ()) if rank == root else ((), (tensor,))
        return self._launch(Meeting(("broadcast", None, root, tag), stream, self, rank, reads, writes), tensor)

    def fail(self, failure: RaycommError) -> None:
        """End all operations of ranks that live, those that have begun included, with `failure`; and all that come."""
        self.failure = self.failure or failure
        for call in self.on_failure:
            call()
        begun = {id(part.exchange): part.exchange for order in self._order for part in order if part.exchange is not None}
        for exchange in begun.values():
            exchange.fail(failure)
        for rank in range(len(self.devices)):
            self.advance(rank)

    def abort(self, rank: int) -> None:
        """`rank` gives the communicator up."""
        who = f"rank {rank} ({self.devices[rank]})"
        self.fail(CommunicatorClosedError(f"{self.name} was aborted by {who}", communicator=self.name, rank=rank))

    def oldest(self, rank: int) -> Part | None:
        """The operation of a rank that was launched first among those that have not ended."""
        return self._order[rank][0] if self._order[rank] else None

    def leave(self, part: Part) -> None:
        self._order[part.rank].remove(part)

    def advance(self, rank: int) -> None:
        """Begin the oldest operation of a rank, if it can."""
        part = self.oldest(rank)
        if part is not None and self.devices[rank].alive:
            part.stream.queue.advance()

    def _launch(self, part: Part, *tensors: Tensor) -> Event:
        for tensor in tensors:
            part.stream.device.check(tensor, part)
        if part.stream.device.alive:
            self._order[part.rank].append(part)
        return part.stream.launch(part)

    def _noticed_later(self, rank: int) -> None:
        self.world.after(self.world.draw("notice"), lambda: self._died(rank))

    def _died(self, rank: int) -> None:
        who = f"rank {rank} ({self.devices[rank]})"
        self.fail(PeerDiedError(f"{who} of {self.name} died", communicator=self.name, peer=rank, device=str(self.devices[rank])))

    def __str__(self) -> str:
        return self.name
