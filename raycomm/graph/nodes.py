"""Node classes that users write. `bind` (calls.py) and the collectives (collective.py) make those of calls.

    with InputNode() as inp:
        x = bind(w1.forward, inp[0], scale=inp.scale)
        left, right = bind(w2.split.options(num_returns=2), x)
    out = MultiOutputNode([left, right])

A node holds its arguments; of its consumers it only keeps weak references and labels, so dropping the last node of a graph frees
the graph at once, actor handles included. The label of a consumer outlives it: a call that was bound and dropped is reported when
the graph is compiled, instead of silently not being run.

Nodes stay in the process that made them. They pickle to a refusal, not to an error, because Ray's own `bind` pickles its
arguments to look for its nodes, which is how a raycomm node may be an argument there.
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Never, Self

from raycomm.errors import CompileError
from raycomm.graph.actor import ActorIdentity, take_bind_index
from raycomm.graph.channel_options import ChannelOptions
from raycomm.graph.containers import nested_nodes
from raycomm.graph.kinds import RESULTS_REMEDY, kind_of, looks_foreign, no_attribute, refuse_unpickling
from raycomm.graph.model import Key, Position, Projection
from raycomm.graph.views import AttributeView, CallView, ElementView, InputView, OutputsView, TransportHint, View

# Numbers nodes in order of creation. Identity only: nothing is looked up by it and nothing depends on where it starts.
_creation = itertools.count()

# Creation number, bind index and place among the consumers of an argument must agree, also when two threads bind.
numbering = threading.Lock()

# An InputNode has no length, so `list(inp)` would not end; zip(inp, actors) is common and stays far below.
_ITERATION_LIMIT = 4096


class Node:
    """Base of all nodes. Compares and hashes by identity; cannot leave its process."""

    __slots__ = ("__weakref__", "_consumers", "_created")

    def __init__(self) -> None:
        self._created = next(_creation)
        # Per consumer: a weak reference, its number, and the label to report when it is gone (None: its absence is no loss).
        self._consumers: list[tuple[weakref.ref[Node], int, str | None]] = []

    def __reduce__(self) -> tuple[object, ...]:
        return refuse_unpickling, (repr(self),)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(no_attribute(type(self), name), name=name, obj=self)

    def view(self) -> View:
        """The node as `build` sees it, now."""
        raise NotImplementedError

    def _users(self) -> dict[str, Any]:
        """Fields of the view that say who uses the node."""
        alive: list[object] = []
        dropped: list[tuple[int, str]] = []
        for reference, created, lost_label in self._consumers:
            consumer = reference()
            if consumer is not None:
                alive.append(consumer)
            elif lost_label is not None:
                dropped.append((created, lost_label))
        return {"consumers": tuple(alive), "dropped": tuple(dropped)}


class ValueNode(Node):
    """A node that stands for a value."""

    __slots__ = ("_hint", "_options")

    def __init__(self) -> None:
        super().__init__()
        self._hint: TransportHint | None = None
        self._options: ChannelOptions | None = None

    @property
    def made_by(self) -> ActorIdentity | None:
        """The actor whose call makes the value; None for what the driver passes in."""
        return None

    def with_channel_options(
        self,
        *,
        inline_bytes: int | None = None,
        slots: int | None = None,
        share_tensors: bool | None = None,
        allow_pickle: bool | None = None,
        sender_keeps: bool | None = None,
        streams: tuple[int, int] | None = None,
        **unknown: Never,
    ) -> Self:
        """Settings of the channel of this value; see `raycomm.with_channel_options`. Returns the node itself."""
        given = ChannelOptions.checked(
            repr(self),
            inline_bytes=inline_bytes,
            slots=slots,
            share_tensors=share_tensors,
            allow_pickle=allow_pickle,
            sender_keeps=sender_keeps,
            streams=streams,
            **unknown,
        )
        self._options = given.over(self._options)
        return self

    def with_tensor_transport(
        self,
        transport: object = "auto",
        device: str = "default",
        _static_shape: bool = False,
        _direct_return: bool = False,
    ) -> Self:
        """Record how tensors in this value should travel; returns the node itself.

        Args:
            transport: "auto", "shm", "nccl" (or "accelerator") or "gloo", see `raycomm.graph.tensor_transport`; or a communicator
                of your own, see `raycomm.graph.own_communicator`.
            device: "default", "cpu" or "gpu" (or "cuda"): where they lie at the reader.

        The names are checked when the graph is compiled. `_static_shape` and `_direct_return` are promises that transfers between
        devices make use of; shared memory needs neither.
        """
        self._hint = TransportHint(transport, device, _static_shape, _direct_return)
        return self

    def _common(self) -> dict[str, Any]:
        """Fields that the view of every kind of value has."""
        return {"node": self, "label": repr(self), "hint": self._hint, "options": self._options, **self._users()}


class InputNode(ValueNode):
    """The input of each execution: whole as `inp`, in parts as `inp[0]`, `inp["key"]` or `inp.key`.

    Only parts that are bound to a call count. Attributes that start with an underscore are not input keys, so that probes by
    debuggers, notebooks and copying make no parts; such a key is reached with `inp["_key"]`, as is one named like a method here.

    Raises:
        CompileError: it was given arguments.
    """

    __slots__ = ("_parts",)

    def __init__(self, *args: object, **kwargs: object) -> None:
        if args or kwargs:
            raise CompileError(
                f"InputNode takes no arguments, got {len(args) + len(kwargs)}; pass the values to execute(...) instead",
                node="InputNode",
                argument=next(iter(kwargs), "0"),
                remedy="pass the values to execute(...)",
            )
        super().__init__()
        self._parts: dict[int | str, InputAttributeNode] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        return None

    def __getitem__(self, key: int | str) -> InputAttributeNode:
        projection = projection_of(key, "InputNode")
        name = projection.name if isinstance(projection, Key) else projection.index
        if name not in self._parts:
            self._parts[name] = InputAttributeNode(self, name)
        return self._parts[name]

    def __getattr__(self, name: str) -> InputAttributeNode:
        if name.startswith("_"):
            raise AttributeError(f"InputNode has no attribute {name!r}; use inp[{name!r}] for an input key of that name")
        return self[name]

    def __iter__(self) -> Iterator[InputAttributeNode]:
        for index in range(_ITERATION_LIMIT):
            yield self[index]
        raise CompileError(
            "InputNode has no length, so iterating over it does not end; use inp[0], inp[1], ... or zip it with a list",
            node="InputNode",
            remedy="use inp[i], or zip it with a list",
        )

    def view(self) -> InputView:
        """See `Node.view`. Parts come first among its users: whether any of them is used shows when they are walked."""
        common = self._common()
        return InputView(**{**common, "consumers": (*self._parts.values(), *common["consumers"])})

    def __repr__(self) -> str:
        return f"InputNode({self._created})"


class InputAttributeNode(ValueNode):
    """One positional or keyword argument of `execute`; made by subscripting an `InputNode`."""

    __slots__ = ("key", "source")

    def __init__(self, source: InputNode, key: int | str) -> None:
        super().__init__()
        self.source = source
        self.key = key

    def view(self) -> AttributeView:
        """See `Node.view`."""
        return AttributeView(**self._common(), source=self.source, key=self.key)

    def __repr__(self) -> str:
        return f"{self.source!r}[{self.key!r}]"


class MethodNode(ValueNode):
    """One call of an actor method per execution; made by `bind`.

    Attributes: `actor` (the handle and who it names), `method`, `args`, `kwargs`, `num_returns`.
    """

    __slots__ = ("_after", "_bind_index", "actor", "args", "kwargs", "method", "num_returns")

    def __init__(
        self,
        actor: ActorIdentity,
        method: str,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        num_returns: int,
    ) -> None:
        producers: list[object] = []
        for argument in (*args, *kwargs.values()):
            # A node inside a container is an error when compiled, but only if this call is found from the rest of the graph.
            producers.extend([argument] if is_own(argument) else (node for node, _ in nested_nodes(argument, is_own)))
        self.actor = actor
        self.method = method
        self.args = args
        self.kwargs = kwargs
        self.num_returns = num_returns
        self._after: tuple[object, ...] = ()
        with numbering:
            super().__init__()
            self._bind_index = take_bind_index(actor.handle)
            for producer in producers:
                register(producer, self, f"{actor.class_name}.{method}")

    def after(self, *nodes: object) -> Self:
        """Run the call only once the values of `nodes` are there, without giving them to it; see `raycomm.after`."""
        for node in nodes:
            if is_own(node):
                register(node, self, f"{self.actor.class_name}.{self.method}")
        self._after += nodes
        return self

    @property
    def made_by(self) -> ActorIdentity:
        """The actor whose method is called."""
        return self.actor

    def view(self) -> CallView:
        """See `Node.view`."""
        return CallView(
            **{**self._common(), "label": f"{self.actor.class_name}.{self.method}"},
            actor=self.actor,
            method=self.method,
            args=self.args,
            kwargs=tuple(self.kwargs.items()),
            num_returns=self.num_returns,
            bind_index=self._bind_index,
            created=self._created,
            after=self._after,
        )

    def __repr__(self) -> str:
        return f"MethodNode({self.actor.class_name}.{self.method}, {self._created})"


class MethodOutputNode(ValueNode):
    """Element `index` of what `call` returns; `bind` makes one for each of several returns."""

    __slots__ = ("call", "index")

    def __init__(self, call: MethodNode, index: int) -> None:
        super().__init__()
        self.call = call
        self.index = index
        # No label: taking one of two returns is fine, and dropping both drops the call, which has its own label.
        register(call, self, None)

    @property
    def made_by(self) -> ActorIdentity:
        """The actor whose method is called."""
        return self.call.actor

    def view(self) -> ElementView:
        """See `Node.view`."""
        return ElementView(**self._common(), call=self.call, index=self.index)

    def __repr__(self) -> str:
        return f"{self.call!r}[{self.index}]"


class MultiOutputNode(Node):
    """The results of a graph, in order. Compile it; it is no value and cannot be an argument.

    Raises:
        CompileError: `nodes` is neither a list nor a tuple, or holds what is no node.
    """

    __slots__ = ("nodes",)

    def __init__(self, nodes: Sequence[object]) -> None:
        if not isinstance(nodes, (list, tuple)):
            remedy = "write MultiOutputNode([a, b])"
            text = f"MultiOutputNode takes a list or tuple of nodes, got a value of type {type(nodes).__name__}; {remedy}"
            raise CompileError(text, node="MultiOutputNode", argument="nodes", remedy=remedy)
        for place, node in enumerate(nodes):
            if not is_own(node) and not looks_foreign(node):
                raise CompileError(
                    f"MultiOutputNode: result {place} is {kind_of(node)}, not a node; {RESULTS_REMEDY}",
                    node="MultiOutputNode",
                    argument=str(place),
                    remedy=RESULTS_REMEDY,
                )
        super().__init__()
        # Not registered with its nodes: a list of results that is not compiled has no say in what is.
        self.nodes: tuple[object, ...] = tuple(nodes)

    def view(self) -> OutputsView:
        """See `Node.view`."""
        return OutputsView(node=self, label="MultiOutputNode", items=self.nodes)

    def __repr__(self) -> str:
        return f"MultiOutputNode({len(self.nodes)} results)"


def projection_of(key: object, label: str) -> Position | Key:
    """`key` of ``inp[key]`` as a projection.

    Raises:
        CompileError: neither text nor an integer of at least 0; a bool is no integer here.
    """
    if isinstance(key, str):
        return Key(key)
    if not isinstance(key, bool):
        try:
            index = operator.index(key)  # type: ignore[arg-type]
        except TypeError:
            index = -1
        if index >= 0:
            return Position(index)
    remedy = "use a position of at least 0, as in inp[0], or a name, as in inp['x']"
    raise CompileError(
        f"{label}: {key!r:.80} is no part of an input; {remedy}", node=label, argument=f"{key!r:.80}", remedy=remedy
    )


def is_own(value: object) -> bool:
    """Whether `value` is a raycomm node."""
    return isinstance(value, Node)


class OwnAdapter:
    """Reads raycomm's own nodes. Stateless."""

    def recognises(self, value: object) -> bool:
        """Whether `value` is a raycomm node."""
        return isinstance(value, Node)

    def describe(self, node: object) -> View:
        """The view of a raycomm node."""
        assert isinstance(node, Node)
        return node.view()


def register(producer: object, consumer: Node, lost_label: str | None) -> None:
    """Let `producer`, a raycomm node, know its consumer; `lost_label` is reported if that is gone when the graph is compiled."""
    assert isinstance(producer, Node)
    producer._consumers.append((weakref.ref(consumer), consumer._created, lost_label))


__all__ = [
    "InputAttributeNode",
    "InputNode",
    "MethodNode",
    "MethodOutputNode",
    "MultiOutputNode",
    "Node",
    "OwnAdapter",
    "Projection",
    "ValueNode",
    "is_own",
    "numbering",
    "projection_of",
    "register",
]
