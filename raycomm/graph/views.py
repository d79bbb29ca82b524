"""What `build` sees of a node, whoever made it: raycomm's own nodes and those of an adapter become the same views.

A view is a snapshot taken while compiling. Views compare by identity, because bound constants may be tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from raycomm.graph.actor import ActorIdentity
from raycomm.graph.channel_options import ChannelOptions
from raycomm.graph.model import CollectiveKind, ReduceOp
from raycomm.graph.own_communicator import OwnCommunicator
from raycomm.graph.tensor_hint import TensorHint
from raycomm.graph.tensor_transport import TensorTransport


@dataclass(frozen=True, slots=True)
class TransportHint:
    """What `with_tensor_transport` recorded. `transport` and `device` are checked when the graph is compiled."""

    transport: object = "auto"
    device: object = "default"
    static_shape: bool = False
    direct_return: bool = False

    def checked(self, node: str) -> TensorHint:
        """The hint with its names read; `node` is for messages. See `TensorHint.checked`."""
        return TensorHint.checked(node, self.transport, self.device, self.static_shape, self.direct_return)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class View:
    """Common part of all views.

    Attributes:
        node: the node itself, for identity.
        label: names the node in messages where no actor label is known yet.
        hint: None where the user gave none.
        options: settings of the value's channel; None where the user gave none.
        consumers: nodes known to use this one, possibly repeated: those that are given it in order of creation, and between them
            those that only wait for it.
        dropped: number and label of each call that was bound to this node and no longer exists.
        related: nodes that belong to every graph that this one belongs to.
    """

    node: object
    label: str
    hint: TransportHint | None = None
    options: ChannelOptions | None = None
    consumers: tuple[object, ...] = ()
    dropped: tuple[tuple[int, str], ...] = ()
    related: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputView(View):
    """The input node, standing for the whole input where it is used as a value."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttributeView(View):
    """`source[key]`: `key` is what the user wrote, unchecked, because a key that nobody uses is no error."""

    source: object
    key: object


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """A collective. Its calls, one per actor, have one `key`, compared by identity; `actors` are in order of rank."""

    key: object
    kind: CollectiveKind
    op: ReduceOp | None
    root: int | None
    actors: tuple[ActorIdentity, ...]
    transport: TensorTransport = TensorTransport.AUTO
    own: OwnCommunicator | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallView(View):
    """A method call, or what one actor does in a collective.

    `bind_index` orders calls bound through the same handle object, `created` orders calls made by raycomm; None where unknown.
    `after` are nodes that the call waits for and is not given.
    """

    actor: ActorIdentity
    method: str
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    num_returns: int
    bind_index: int | None = None
    created: int | None = None
    exchange: Exchange | None = None
    after: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ElementView(View):
    """Element `index` of the call node `call`, which returns several values."""

    call: object
    index: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OutputsView(View):
    """The list of results of a graph."""

    items: tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RefusedView(View):
    """A node that no graph may contain, with the reason and what to do instead."""

    reason: str
    remedy: str


class Adapter(Protocol):
    """Reads one family of node classes."""

    def recognises(self, value: object) -> bool:
        """Whether `value` is a node of this family. Cheap, and touches no attribute of `value`."""
        ...

    def describe(self, node: object) -> View:
        """The view of a node that `recognises` accepted."""
        ...
