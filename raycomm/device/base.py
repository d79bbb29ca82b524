"""What a device has to offer: streams, events, and memory from a pool. Three kinds of device implement it.

A *stream* is a queue of work on the device: what is launched on it runs in the order of launch, beside the host. An *event* is a
point in a stream. *Launching* puts work into a stream and does not wait for it; only methods named `synchronize` block, and
each takes a limit in seconds.

A tensor is whatever its back end uses: a `torch.Tensor` in memory of the device for CUDA and gloo, a handle for the simulated
one. It has `shape` and `dtype`; its memory returns to the pool when nobody refers to it any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

Tensor: TypeAlias = Any
Shape: TypeAlias = tuple[int, ...]
# What a back end is given are its own streams and events, and it need not take those of another one.
OwnStream: TypeAlias = Any
OwnEvent: TypeAlias = Any


@runtime_checkable
class Event(Protocol):
    """The end of everything that was in a stream when the event was made."""

    @property
    def complete(self) -> bool:
        """Whether it has been reached. Does not block."""

    def synchronize(self, limit_s: float | None = None) -> None:
        """Block the host until it is reached; None: without a limit.

        Raises:
            TransferTimeoutError: not reached within `limit_s` seconds; it may still be, later.
            PeerDiedError, CommunicatorClosedError, TensorMismatchError, CollectiveError: a transfer before it has failed.
        """


@runtime_checkable
class Stream(Protocol):
    """A queue of work. Used by one host thread at a time."""

    @property
    def name(self) -> str:
        """For messages; unique on its device."""

    def record(self) -> Event:
        """An event at the end of what was launched so far. Does not block."""

    def wait(self, event: OwnEvent) -> None:
        """What is launched from now on runs after `event`, also one of another stream of this device. Does not block the host."""

    def synchronize(self, limit_s: float | None = None) -> None:
        """Block the host until the stream is empty. Raises what `Event.synchronize` raises."""


@runtime_checkable
class Device(Protocol):
    """One device, as one process sees it."""

    @property
    def name(self) -> str:
        """For messages, such as ``cuda:0``."""

    def stream(self, name: str) -> Stream:
        """The stream of that name; made at the first call. Does not wait for other streams, nor they for it."""

    def current_stream(self) -> Stream | None:
        """The stream on which this thread's own code runs on the device now; None where that code runs on the host."""

    def allocate(self, shape: Shape, dtype: Any, stream: OwnStream) -> Tensor:
        """Memory from the pool, contiguous, with undefined contents, for use on `stream`. Does not block.

        The caller owns it. On another stream it is used after an event of `stream` only, and `record_stream` says so.
        """

    def record_stream(self, tensor: Tensor, stream: OwnStream) -> None:
        """Keep the memory of `tensor`, also when nobody refers to it any more, until what is in `stream` now has ended."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in memory of this device."""

    def to_device(self, host: Any, stream: OwnStream) -> Tensor:
        """A copy of a CPU `torch.Tensor`, filled by work on `stream`. `host` may be changed as soon as this returns."""

    def to_host(self, tensor: Tensor, stream: OwnStream, limit_s: float | None = None) -> Any:
        """A copy as CPU `torch.Tensor`, made after what is in `stream`. Blocks until it is there.

        Raises what `Event.synchronize` raises.
        """

    def synchronize(self, limit_s: float | None = None) -> None:
        """Block the host until all streams are empty. Raises what `Event.synchronize` raises."""


def shape_text(shape: Sequence[int], dtype: object) -> str:
    """A tensor in messages."""
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
