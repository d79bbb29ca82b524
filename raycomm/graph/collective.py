"""Collectives: nodes at which the tensors of several actors meet, and the functions that make them.

    grads = [bind(w.backward, batch) for w in workers]
    sums = allreduce(grads)                                  # one node per actor, in the order of `grads`
    out = MultiOutputNode([bind(w.step, s) for w, s in zip(workers, sums)])

The node of an actor belongs to that actor and is used like any value of its methods. All actors take part in every execution,
also where only some of the nodes are used. Results are new, writable, and the same bits for every actor, because tensors are
combined in order of rank, the order of `nodes`. Values are CPU tensors of torch or arrays of numpy, alike in kind, dtype and
shape on all actors; if they are not, that execution fails on all of them with a `CollectiveError`, and the graph goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from raycomm.errors import CompileError
from raycomm.graph.actor import ActorIdentity, actor_of_foreign_node, take_bind_index
from raycomm.graph.model import CollectiveKind, ReduceOp
from raycomm.graph.nodes import Node, ValueNode, is_own, numbering, register
from raycomm.graph.tensor_hint import TensorTransport
from raycomm.graph.views import CallView, ElementView, Exchange

# By name, what combines the tensors.
_TRANSPORTS = {
    "default": TensorTransport.AUTO,
    "auto": TensorTransport.AUTO,
    "shm": TensorTransport.SHM,
    "nccl": TensorTransport.NCCL,
    "accelerator": TensorTransport.NCCL,
    "gloo": TensorTransport.GLOO,
}


class CollectiveNode(Node):
    """One collective, with a call for each actor. It holds the calls; they do not hold it, so no cycle keeps a graph alive."""

    __slots__ = ("calls", "exchange")

    def __init__(self, exchange: Exchange, rows: Sequence[tuple[object, ...]]) -> None:
        super().__init__()
        self.exchange = exchange
        self.calls = tuple(
            CollectiveCall(exchange, actor, row) for actor, row in zip(exchange.actors, zip(*rows, strict=True), strict=True)
        )


class CollectiveCall(Node):
    """What one actor does in a collective."""

    __slots__ = ("_bind_index", "actor", "args", "exchange")

    def __init__(self, exchange: Exchange, actor: ActorIdentity, args: tuple[object, ...]) -> None:
        self.exchange = exchange
        self.actor = actor
        self.args = args
        with numbering:
            super().__init__()
            self._bind_index = take_bind_index(actor.handle)
            for producer in args:
                if is_own(producer):
                    register(producer, self, f"{actor.class_name}.{exchange.kind}")

    def view(self) -> CallView:
        """See `Node.view`."""
        return CallView(
            node=self,
            label=f"{self.actor.class_name}.{self.exchange.kind}",
            **self._users(),
            actor=self.actor,
            method=str(self.exchange.kind),
            args=self.args,
            kwargs=(),
            num_returns=len(self.args),
            bind_index=self._bind_index,
            created=self._created,
            exchange=self.exchange,
        )

    def __repr__(self) -> str:
        return f"CollectiveCall({self.actor.class_name}.{self.exchange.kind}, {self._created})"


class CollectiveOutputNode(ValueNode):
    """Tensor `index` that a collective gives to the actor of rank `rank`."""

    __slots__ = ("collective", "index", "rank")

    def __init__(self, collective: CollectiveNode, rank: int, index: int) -> None:
        super().__init__()
        self.collective = collective
        self.rank = rank
        self.index = index
        register(self.call, self, None)

    @property
    def call(self) -> CollectiveCall:
        """The call that makes it."""
        return self.collective.calls[self.rank]

    @property
    def made_by(self) -> ActorIdentity:
        """The actor that has it."""
        return self.call.actor

    def view(self) -> ElementView:
        """See `Node.view`."""
        return ElementView(**self._common(), call=self.call, index=self.index, related=self.collective.calls)

    def __repr__(self) -> str:
        element = f"[{self.index}]" if len(self.call.args) > 1 else ""
        return f"CollectiveOutputNode({self.made_by.class_name}.{self.collective.exchange.kind}{element}, {self._created})"


def allreduce(nodes: Sequence[Any], op: object = ReduceOp.SUM, communicator: object = None) -> list[Any]:
    """Every actor gets all actors' tensors, combined element by element.

    Args:
        nodes: one node per actor; or a list of such lists with the actors in one order, for several tensors per actor in one
            exchange (they need one dtype; shapes may differ from tensor to tensor).
        op: a `ReduceOp`, Ray's member of the same name, or the name.
        communicator: what combines the tensors. None, "default" or "auto": the GPUs they lie on where NCCL joins those of all
            actors, else shared memory, as also in an execution in which all of them lie in host memory. "shm": shared memory;
            Ray's CPU communicator is taken for that too. "nccl" or "accelerator": GPUs. "gloo": CPU tensors, over gloo.

    Returns:
        One node per actor in the same order; for a list of lists, one list per actor, with a node for each of its tensors.

    Raises:
        CompileError: no nodes, something that is no node of an actor, a node or actor twice, lists of other lengths or with the
            actors in another order, an unknown `op` or `communicator`.
    """
    nested = isinstance(nodes, (list, tuple)) and any(isinstance(row, (list, tuple)) for row in nodes)
    rows = list(nodes) if nested else [nodes]
    return _bind(CollectiveKind.ALLREDUCE, rows, communicator, op=_op(op), nested=nested)


def allgather(nodes: Sequence[Any], communicator: object = None) -> list[Any]:
    """Every actor gets all actors' tensors, concatenated along dimension 0 in the order of `nodes`.

    Arguments, results and errors as for `allreduce`.
    """
    return _bind(CollectiveKind.ALLGATHER, [nodes], communicator)


def reducescatter(nodes: Sequence[Any], op: object = ReduceOp.SUM, communicator: object = None) -> list[Any]:
    """The actor of rank i gets part i of all actors' tensors combined: dimension 0, which they must divide, cut into equal parts.

    Arguments, results and errors as for `allreduce`.
    """
    return _bind(CollectiveKind.REDUCESCATTER, [nodes], communicator, op=_op(op))


def broadcast(nodes: Sequence[Any], root: int = 0, communicator: object = None) -> list[Any]:
    """Every actor gets the tensor of the actor of rank `root`.

    What the other nodes hold is not looked at: they say which actors take part, and when. (One value for several actors needs no
    collective: bind its node to each of them.) Other arguments, results and errors as for `allreduce`.

    Raises:
        CompileError: also where `root` is no place in `nodes`.
    """
    given = len(nodes) if isinstance(nodes, (list, tuple)) else 0
    if given and (isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < given):
        _refuse("broadcast", f"root={root!r:.80} is no rank among {given} actors", "root", f"give a rank from 0 to {given - 1}")
    return _bind(CollectiveKind.BROADCAST, [nodes], communicator, root=root)


def op_of(value: object) -> ReduceOp | None:
    """The `ReduceOp` that `value` names: one of ours, an enum member of another library with the same name, or text."""
    name = value if isinstance(value, str) else getattr(value, "name", None)
    return ReduceOp.__members__.get(name.upper()) if isinstance(name, str) else None


def transport_of(communicator: object, actors: Sequence[ActorIdentity], call: str) -> TensorTransport:
    """What a collective is to be done by. Ray's CPU communicator stands for shared memory.

    Raises:
        CompileError: an unknown communicator, or one that joins other actors; names what it is, and the number of those.
    """
    if communicator is None:
        return TensorTransport.AUTO
    if isinstance(communicator, str) and communicator in _TRANSPORTS:
        return _TRANSPORTS[communicator]
    remedy = "leave it out (or say 'auto'), or use 'shm', 'nccl' (or 'accelerator') or 'gloo'"
    kind = type(communicator).__name__
    transport = getattr(communicator, "get_transport_name", None)
    members = getattr(communicator, "get_actor_handles", None)
    if isinstance(communicator, str) or not callable(transport) or not callable(members):
        shown = repr(communicator) if isinstance(communicator, str) else f"a value of type {kind}"
        _refuse(call, f"unknown communicator {shown:.80}", "communicator", remedy)
    if transport() != "cpu":
        problem = f"communicator {kind} uses {transport()!r}, and this version takes no such object of others for that"
        _refuse(call, problem, "communicator", remedy)
    theirs = {handle._actor_id.hex() for handle in members()}
    if theirs != {actor.key for actor in actors}:
        problem = f"the {len(theirs)} actors of its communicator {kind} are not the {len(actors)} actors of its nodes"
        _refuse(call, problem, "communicator", "make the communicator of the actors of the nodes, or leave it out")
    return TensorTransport.SHM


def _bind(
    kind: CollectiveKind,
    rows: list[Any],
    communicator: object,
    *,
    op: ReduceOp | None = None,
    root: int | None = None,
    nested: bool = False,
) -> list[Any]:
    actors: tuple[ActorIdentity, ...] = ()
    for number, row in enumerate(rows):
        where = f" in list {number}" if nested else ""
        found = _actors(str(kind), row, where)
        if number and len(found) != len(actors):
            problem = f"list 0 has {len(actors)} nodes and list {number} has {len(found)}"
            _refuse(str(kind), problem, "nodes", "give lists of one length, with one node per actor")
        keys = [[actor.key for actor in each] for each in (actors, found)]
        if number and keys[0] != keys[1]:
            what = "other actors than" if set(keys[0]) != set(keys[1]) else "the actors in another order than"
            _refuse(str(kind), f"list {number} has {what} list 0", "nodes", "list the same actors in the same order each time")
        actors = actors or found
    transport = transport_of(communicator, actors, str(kind))
    exchange = Exchange(key=object(), kind=kind, op=op, root=root, actors=actors, transport=transport)
    collective = CollectiveNode(exchange, [tuple(row) for row in rows])
    outputs = [[CollectiveOutputNode(collective, rank, index) for index in range(len(rows))] for rank in range(len(actors))]
    return [row[0] for row in outputs] if len(rows) == 1 else list(outputs)


def _actors(call: str, row: object, where: str) -> tuple[ActorIdentity, ...]:
    """The actors of a list of nodes, checked."""
    if not isinstance(row, (list, tuple)):
        _refuse(
            call, f"a value of type {type(row).__name__} instead of a list of nodes{where}", "nodes", "list one node per actor"
        )
    if not row:
        _refuse(call, f"no nodes{where}", "nodes", "list one node per actor")
    first: dict[str, int] = {}
    places: dict[int, int] = {}
    actors: list[ActorIdentity] = []
    for place, node in enumerate(row):
        here = f"place {place}{where}"
        actor = node.made_by if isinstance(node, ValueNode) else None if is_own(node) else actor_of_foreign_node(node)
        if actor is None:
            shown = repr(node) if is_own(node) else f"a value of type {type(node).__name__}"
            problem = f"{here} holds {shown:.120}, which is no value that an actor makes"
            _refuse(call, problem, "nodes", "list nodes that bind gave, one per actor")
        if id(node) in places:
            problem = f"places {places[id(node)]} and {place}{where} hold the same node of {actor.class_name}"
            _refuse(call, problem, "nodes", "list each node once")
        if actor.key in first:
            problem = f"places {first[actor.key]} and {place}{where} hold nodes of one actor, {actor.class_name}#{actor.key[:6]}"
            _refuse(call, problem, "nodes", "list one node per actor")
        places[id(node)] = first[actor.key] = place
        actors.append(actor)
    return tuple(actors)


def _op(value: object) -> ReduceOp:
    op = op_of(value)
    if op is None:
        known = ", ".join(ReduceOp.__members__)
        _refuse("collective", f"unknown operation {value!r:.80}", "op", f"use one of ReduceOp: {known}")
    return op


def _refuse(call: str, problem: str, argument: str, remedy: str) -> NoReturn:
    raise CompileError(f"{call}: {problem}; {remedy}", node=call, argument=argument, remedy=remedy)
