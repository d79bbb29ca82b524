"""The graph as data: immutable, free of Ray's objects except for the opaque handles and constants it carries along.

A value has one of two origins: what the caller passes to `execute` (`InputValue`, by projection) or one element of what a call
returns (`CallValue`). Everything that refers to a value says so by origin, so two mentions of one value compare equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TypeAlias

from raycomm.graph.channel_options import ChannelOptions
from raycomm.graph.own_communicator import OwnCommunicator
from raycomm.graph.tensor_hint import TensorHint
from raycomm.graph.tensor_transport import TensorTransport


@dataclass(frozen=True, slots=True)
class Whole:
    """The one positional argument of `execute`."""


@dataclass(frozen=True, slots=True)
class Position:
    """Positional argument `index` of `execute`."""

    index: int


@dataclass(frozen=True, slots=True)
class Key:
    """Keyword argument `name` of `execute`."""

    name: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """No argument of `execute`: only that an execution has begun."""


Projection: TypeAlias = Whole | Position | Key | Nothing


@dataclass(frozen=True, slots=True)
class Const:
    """Operand: `Graph.constants[index]`, the same object in every execution."""

    index: int


@dataclass(frozen=True, slots=True)
class InputValue:
    """Value: part of the input of an execution."""

    projection: Projection


@dataclass(frozen=True, slots=True)
class CallValue:
    """Value: element `element` of what call `node` returns (0 where it returns one value)."""

    node: int
    element: int = 0


ValueRef: TypeAlias = InputValue | CallValue
Operand: TypeAlias = Const | InputValue | CallValue


@dataclass(frozen=True, slots=True)
class Actor:
    """An actor of the graph. `label` is unique in the graph; `key` identifies the actor, whichever handle object names it."""

    index: int
    label: str
    key: str
    handle: object = field(compare=False, repr=False)


class ReduceOp(StrEnum):
    """How a collective combines the tensors of its actors, element by element, in order of rank.

    SUM, PRODUCT: numbers, but not bool. AVG: the sum divided by the number of actors; floating point and complex numbers only.
    MIN, MAX: numbers that have an order, and bool; NaN wins. BAND, BOR, BXOR: integers and bool.
    """

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


class CollectiveKind(StrEnum):
    """What a collective does; the word is also the method name of its nodes."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    REDUCESCATTER = "reducescatter"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class Collective:
    """An exchange among actors. `ranks` are node ids in order of rank; `op` is for what reduces, `root` for a broadcast.

    `transport` is what combines the tensors: AUTO the devices they lie on, where those of all ranks can, else host memory.
    `own` is the communicator, where it is OWN.
    """

    kind: CollectiveKind
    op: ReduceOp | None
    root: int | None
    ranks: tuple[int, ...]
    transport: TensorTransport = TensorTransport.AUTO
    own: OwnCommunicator | None = None


@dataclass(frozen=True, slots=True)
class CallNode:
    """One method call per execution. `actor` indexes `Graph.actors`; `id` is the node's place in `Graph.nodes`.

    Where `collective` is not None the node is no method call but its actor's part in `Graph.collectives[collective]`.
    """

    id: int
    actor: int
    actor_label: str
    method: str
    args: tuple[Operand, ...]
    kwargs: tuple[tuple[str, Operand], ...]
    num_returns: int
    collective: int | None = None
    after: tuple[ValueRef, ...] = ()

    @property
    def given(self) -> tuple[Operand, ...]:
        """Positional operands, then keyword operands."""
        return self.args + tuple(operand for _, operand in self.kwargs)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """What the call is given, then what it only waits for."""
        return self.given + self.after


@dataclass(frozen=True, slots=True)
class Graph:
    """A checked graph.

    Attributes:
        nodes: calls in an order that respects data and, on each actor, the order in which they were bound.
        actors: in order of their first call.
        inputs: distinct projections that calls or outputs use, in order of first use.
        outputs: one value per result; a value may appear more than once.
        single_output: True where the root is one node, so `execute` gives one ref instead of a list.
        input_arity: how many positional arguments `execute` takes; None where the whole input is used.
        input_keys: keyword arguments of `execute`, sorted.
        constants: what `Const` operands refer to; kept out of comparison and repr, for they may be tensors.
        collectives: the ranks of each are consecutive in `nodes`.
        channel_options: of values that were given any.
        hints: of values that were given one, how their tensors should travel.
    """

    nodes: tuple[CallNode, ...]
    actors: tuple[Actor, ...]
    inputs: tuple[Projection, ...]
    outputs: tuple[ValueRef, ...]
    single_output: bool
    input_arity: int | None
    input_keys: tuple[str, ...]
    constants: tuple[object, ...] = field(compare=False, repr=False)
    collectives: tuple[Collective, ...] = ()
    channel_options: tuple[tuple[ValueRef, ChannelOptions], ...] = ()
    hints: tuple[tuple[ValueRef, TensorHint], ...] = ()

    @property
    def communicators(self) -> tuple[OwnCommunicator, ...]:
        """Those that the user brought, each once."""
        owns = [hint.own for _, hint in self.hints] + [whole.own for whole in self.collectives]
        return tuple(dict.fromkeys(own for own in owns if own is not None))

    @property
    def handles(self) -> Mapping[int, object]:
        """Actor index -> actor handle, as one of the nodes held it."""
        return MappingProxyType({actor.index: actor.handle for actor in self.actors})
