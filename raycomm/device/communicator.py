"""What a communicator has to offer: it moves tensors between the devices of a fixed group of ranks, on streams of one's choice.

    link.warm_up(limit_s=30)
    sent = link.send(tensor, peer=1, stream=out)           # launched on `out`; the host goes on
    came = link.recv((4, 1024), torch.float16, peer=1, stream=into)
    compute.wait(came.event)                               # on the device
    came.event.synchronize(limit_s=5)                      # on the host

Order: the operations of one communicator run in the order in which its rank launched them, whatever their streams, and each
occupies its stream until the peer's other half has come. Two ranks that both send first on one stream, or on one communicator,
wait for each other for ever. So use one communicator per direction, each with a stream of its own.

Which stream is used: the one given with the call; else the one of the innermost `streams` block of this thread or task; else the
communicator's own, one for all its operations.

A communicator is used by one host thread at a time; `poll` and `abort` by any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol, runtime_checkable

from raycomm.device.base import Device, Event, OwnStream, Shape, Stream, Tensor
from raycomm.errors import CommunicatorError


@dataclass(frozen=True, slots=True)
class Received:
    """A receive under way: its buffer, which belongs to the caller, and the event after which it holds the value."""

    tensor: Tensor
    event: Event


class Use(Enum):
    """What a stream is used for."""

    SEND = auto()
    RECV = auto()
    COLLECTIVE = auto()


@runtime_checkable
class Communicator(Protocol):
    """One rank's end. `dtype` is a `torch.dtype`, `op` a `raycomm.ReduceOp` or its text."""

    @property
    def name(self) -> str:
        """The group, for messages; the same at all ranks."""

    @property
    def rank(self) -> int:
        """This end's number, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are; the peers are all others."""

    @property
    def device(self) -> Device:
        """Where the tensors lie."""

    def warm_up(self, limit_s: float) -> None:
        """Meet all others once, so that no later call blocks the host for set-up. Blocks; all ranks call it, in one order if
        there are several communicators.

        Raises:
            RankMissingError: somebody did not come within `limit_s` seconds; the communicator is closed.
        """

    def send(self, tensor: Tensor, peer: int, *, stream: OwnStream | None = None) -> Event:
        """Launch the send of `tensor`, whose contents are ready in the order of the stream. Does not block.

        The memory is kept until the send has ended, even if the caller drops `tensor`. Nobody may write to it before the event.

        Raises:
            WrongDeviceError: `tensor` is on another device.
            TensorMismatchError: it is not contiguous.
            PeerDiedError, CommunicatorClosedError: an earlier operation has failed, see `poll`.
        """

    def recv(
        self, shape: Shape, dtype: Any, peer: int, *, stream: OwnStream | None = None, into: Tensor | None = None
    ) -> Received:
        """Launch a receive, into `into` or a fresh buffer of the pool. Does not block. The buffer is undefined before the event.

        Raises:
            WrongDeviceError: `into` is on another device.
            TensorMismatchError: `into` has another shape or dtype, or is not contiguous.
            PeerDiedError, CommunicatorClosedError: see `poll`.
        """

    def allreduce(self, tensor: Tensor, op: str = "sum", *, stream: OwnStream | None = None) -> Received:
        """Launch: combine the tensors of all ranks, into a fresh buffer. Tensors of unequal shape or dtype end the collective, at
        all ranks where that is noticed, with `CollectiveError` at the event. Otherwise as `send`."""

    def allgather(self, tensor: Tensor, *, stream: OwnStream | None = None) -> Received:
        """Launch: the tensors of all ranks, one after the other along dimension 0."""

    def reducescatter(self, tensor: Tensor, op: str = "sum", *, stream: OwnStream | None = None) -> Received:
        """Launch: combine the tensors of all ranks; each gets its part along dimension 0, which `size` has to divide.

        Raises:
            TensorMismatchError: `size` does not divide dimension 0.
        """

    def broadcast(self, tensor: Tensor, root: int, *, stream: OwnStream | None = None) -> Received:
        """Launch: `tensor` of rank `root` goes into `tensor` of the others, which may hold anything; that is what is returned."""

    def poll(self) -> None:
        """Raise what has gone wrong asynchronously, if anything. Does not block.

        Raises:
            PeerDiedError: a rank is gone.
            CommunicatorClosedError: this communicator was aborted.
        """

    def abort(self, limit_s: float) -> None:
        """End all operations that have not ended, at this rank at once; the communicator is closed. Repeated calls do nothing.

        Blocks for `limit_s` seconds at most; what hangs longer is left behind in a thread of its own.
        """


# By communicator, so that blocks for different ones nest; by use within.
_chosen: ContextVar[dict[tuple[int, Use], Stream]] = ContextVar("raycomm.device.streams")


@contextlib.contextmanager
def streams(
    *communicators: Communicator, send: Stream | None = None, recv: Stream | None = None, collective: Stream | None = None
) -> Iterator[None]:
    """Inside the block, in this thread or task, these communicators use these streams where a call names none.

    An outer block's choice holds where this one makes none.

    Raises:
        CommunicatorError: no communicator, or no stream, was given.
    """
    given = {Use.SEND: send, Use.RECV: recv, Use.COLLECTIVE: collective}
    if not communicators or not any(stream is not None for stream in given.values()):
        raise CommunicatorError("streams() takes one or more communicators and at least one of send=, recv=, collective=")
    here = {(id(link), use): stream for link in communicators for use, stream in given.items() if stream is not None}
    token = _chosen.set({**_chosen.get({}), **here})
    try:
        yield
    finally:
        _chosen.reset(token)


def chosen_stream(communicator: object, use: Use, own: OwnStream) -> OwnStream:
    """The stream for a call that names none: that of the innermost `streams` block, else `own`."""
    return _chosen.get({}).get((id(communicator), use), own)
