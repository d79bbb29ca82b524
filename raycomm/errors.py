"""Every exception raycomm raises on purpose, in one tree.

    RaycommError
    ├── CompileError (ValueError)           the graph cannot be compiled; nothing was started
    │   └── DeadlockError                   no order of its actions without a cycle
    ├── ArgumentError (ValueError)          `execute` was called with the wrong arguments, or a call with no time limit
    ├── ChannelError
    │   ├── ChannelTimeoutError (TimeoutError)  a limit passed; graph and ref stay usable
    │   └── ChannelClosedError              use after teardown
    ├── ActorDiedError                      an actor, or its node, is gone
    ├── ExecutionCancelledError             `ref.cancel()` came before any actor began the execution
    ├── CommunicatorError                   about a communicator between devices
    │   ├── TensorMismatchError (ValueError)    dtype or shape is not what was agreed, or not what the buffer has
    │   ├── WrongDeviceError (ValueError)       a tensor lies on another device than the communicator's
    │   ├── TransferTimeoutError (TimeoutError) a limit passed
    │   │   └── RankMissingError                a rank did not come to set-up or warm-up
    │   ├── PeerDiedError                       a rank is gone
    │   └── CommunicatorClosedError             use after abort, here or by a peer
    ├── CollectiveError (ValueError)        tensors of a collective do not fit together; fails one execution
    ├── CapacityExceededError               too many unfetched results
    ├── SerializationError (TypeError)      a value cannot be sent, or a message is malformed
    └── SharedMemoryError (MemoryError)     no memory for a block

This module imports nothing but the standard library. `raycomm.runtime.ray_errors` derives, where Ray has the same error, a class
from ours and Ray's, so that existing `except` clauses keep working.

Every error carries what its message was made from as attributes and pickles with them: the constructor takes the attributes as
keywords, and `__reduce__` hands them back.
"""

from __future__ import annotations

from typing import Any, Self


class RaycommError(Exception):
    """Root of the tree.

    Args:
        message: the whole text, remedy included.
        **attributes: become attributes of the same name; they survive pickling.
    """

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        self._attributes = attributes
        for name, value in attributes.items():
            setattr(self, name, value)

    @property
    def attributes(self) -> dict[str, Any]:
        """What the message was made from, by name."""
        return dict(self._attributes)

    def fresh(self) -> Self:
        """The same again, without traceback and cause. What is kept and raised more than once must not keep the frames it came
        through: they would hold what was in them for as long as the error is kept."""
        return type(self)(str(self), **self._attributes)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        notes = getattr(self, "__notes__", None)
        return _rebuild, (type(self), str(self), self._attributes), {"__notes__": notes} if notes else None


def _rebuild(cls: type[RaycommError], message: str, attributes: dict[str, Any]) -> RaycommError:
    return cls(message, **attributes)


class CompileError(RaycommError, ValueError):
    """The graph is wrong. Raised before any actor is touched where the graph alone shows it.

    Attributes: `node` (text, or None), `argument` (text, or None), `remedy` (text).
    """

    node: str | None = None
    argument: str | None = None
    remedy: str | None = None


class DeadlockError(CompileError):
    """No order of the actions is free of a cycle. Attributes: `cycle` (tuple of action texts)."""

    cycle: tuple[str, ...] = ()


class ArgumentError(RaycommError, ValueError):
    """`execute` was called with a wrong count, a missing or a surplus keyword, or a call with what is not a time limit.

    Attributes: `expected`, `given` (texts).
    """

    expected: str | None = None
    given: str | None = None


class ChannelError(RaycommError):
    """Something about moving values. Attributes: `graph`, `channel` (texts, or None)."""

    graph: str | None = None
    channel: str | None = None


class ChannelTimeoutError(ChannelError, TimeoutError):
    """A limit passed. The graph and the ref stay usable.

    Attributes: `limit_s` (seconds), `execution` (index or None), `waits_for` (text: who waits for whom, and whether it lives).
    """

    limit_s: float | None = None
    execution: int | None = None
    waits_for: str | None = None


class ChannelClosedError(ChannelError):
    """The graph was torn down, or its loops have left. Attributes: `graph`, `reason`."""

    reason: str | None = None


class ActorDiedError(RaycommError):
    """An actor of the graph, or its node, died. Attributes: `graph`, `actor`, `actor_id` (hex or None), `pid`, `node`,
    `execution`."""

    graph: str | None = None
    actor: str | None = None
    actor_id: str | None = None
    pid: int | None = None
    node: str | None = None
    execution: int | None = None


class ExecutionCancelledError(RaycommError):
    """The execution was cancelled before any actor began it; no method ran. Attributes: `execution`."""

    execution: int | None = None


class CollectiveError(RaycommError, ValueError):
    """The tensors of a collective do not fit together, or its operation is not for them. Fails one execution, for all its actors.

    Attributes: `graph`, `collective` (texts), `execution`, `tensors` (one text per rank: the actor, and what it gave).
    """

    graph: str | None = None
    collective: str | None = None
    execution: int | None = None
    tensors: tuple[str, ...] = ()


class CommunicatorError(RaycommError):
    """Something about a communicator. Attributes: `communicator`, `host`, `device`, `node` (texts, or None: of this rank, and the
    node of the graph), `rank`, `peer` (or None)."""

    communicator: str | None = None
    rank: int | None = None
    peer: int | None = None
    host: str | None = None
    device: str | None = None
    node: str | None = None


class TensorMismatchError(CommunicatorError, ValueError):
    """A tensor has not the dtype or shape that was agreed. Attributes besides: `expected`, `given` (texts).

    Where a value breaks what its hint promises: `graph`, `channel` (texts), `execution`, too; it fails that execution.
    """

    expected: str | None = None
    given: str | None = None
    graph: str | None = None
    channel: str | None = None
    execution: int | None = None


class WrongDeviceError(CommunicatorError, ValueError):
    """A tensor lies on another device than the communicator uses; nothing was launched. Attributes besides: `expected`,
    `given`."""

    expected: str | None = None
    given: str | None = None


class TransferTimeoutError(CommunicatorError, TimeoutError):
    """A limit passed. Attributes besides: `limit_s` (seconds), `waits_for` (text)."""

    limit_s: float | None = None
    waits_for: str | None = None


class RankMissingError(TransferTimeoutError):
    """Ranks did not come to the set-up or warm-up within the limit. Attributes besides: `missing` (their numbers)."""

    missing: tuple[int, ...] = ()


class PeerDiedError(CommunicatorError):
    """A rank of the communicator is gone; `peer` is its number. What it sent last may be lost."""


class CommunicatorClosedError(CommunicatorError):
    """The communicator was aborted, by this rank or by another."""


class CapacityExceededError(RaycommError):
    """Too many results wait unfetched at the driver. Attributes: `graph`, `limit`, `count`."""

    graph: str | None = None
    limit: int | None = None
    count: int | None = None


class SerializationError(RaycommError, TypeError):
    """A value cannot be sent, or a message is malformed. Nothing was published; the graph stays usable.

    Attributes: `path` (text inside the value, such as ``value['a'][3].lock``), `type_name`, `channel`.
    """

    path: str | None = None
    type_name: str | None = None
    channel: str | None = None


class SharedMemoryError(RaycommError, MemoryError):
    """No memory for a block. Attributes: `graph`, `wanted_bytes`, `free_bytes`, `limit_bytes`, `holders` (text: who holds
    blocks)."""

    graph: str | None = None
    wanted_bytes: int | None = None
    free_bytes: int | None = None
    limit_bytes: int | None = None
    holders: str | None = None
