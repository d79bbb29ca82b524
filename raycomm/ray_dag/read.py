"""Reads nodes of `ray.dag`, so that graphs written with Ray's own `bind` compile, alone or mixed with raycomm's nodes.

    graph = build(root, ADAPTER)

Ray's nodes do not know the raycomm nodes that use them, nor the other way round. So a call of one family bound to a node of the
other is found by walking up from the results, not by walking down: if it leads to no result, it is not reported but not run.
"""

from __future__ import annotations

from typing import Any, Final

from ray.dag import (
    ClassMethodNode,
    ClassNode,
    CollectiveOutputNode,
    DAGNode,
    FunctionNode,
    InputAttributeNode,
    InputNode,
    MultiOutputNode,
)
from ray.experimental.channel.auto_transport_type import AutoTransportType
from ray.experimental.channel.torch_tensor_type import TorchTensorType
from ray.experimental.util.types import AllGatherOp, AllReduceOp, ReduceScatterOp

from raycomm.graph.actor import read_actor
from raycomm.graph.channel_options import FOREIGN_AFTER, FOREIGN_OPTIONS
from raycomm.graph.collective import communicator_of, op_of
from raycomm.graph.model import CollectiveKind
from raycomm.graph.views import (
    Adapter,
    AttributeView,
    CallView,
    ElementView,
    Exchange,
    InputView,
    OutputsView,
    RefusedView,
    TransportHint,
    View,
)

_KINDS = {
    AllReduceOp: CollectiveKind.ALLREDUCE,
    AllGatherOp: CollectiveKind.ALLGATHER,
    ReduceScatterOp: CollectiveKind.REDUCESCATTER,
}
_CREATE = "create the actor first with Cls.remote(...) and bind its handle's methods"


class RayDagAdapter:
    """Adapter for `ray.dag` nodes.

    Args:
        communicator: for collectives that name none.

    Reads fields, not properties or `getattr` with a guess: an unknown attribute of Ray's InputNode makes a new input part.
    """

    def __init__(self, communicator: Any = None) -> None:
        self._communicator = communicator

    def recognises(self, value: object) -> bool:
        """Whether `value` is a node of `ray.dag`."""
        return isinstance(value, DAGNode)

    def describe(self, node: object) -> View:
        """The view of a `ray.dag` node; of kinds that cannot be compiled, a view that says so."""
        assert isinstance(node, DAGNode)
        common = _Common(node)
        if isinstance(node, CollectiveOutputNode) and not node._is_class_method_output:
            return _collective(node, common, self._communicator)
        if isinstance(node, ClassMethodNode):
            return _method(node, common)
        if isinstance(node, InputNode):
            return InputView(label=common.numbered("InputNode"), **common.fields)
        if isinstance(node, InputAttributeNode):
            label = f"{_Common(node._dag_input_node).numbered('InputNode')}[{node._key!r}]"
            return AttributeView(label=label, source=node._dag_input_node, key=node._key, **common.fields)
        if isinstance(node, MultiOutputNode):
            return OutputsView(node=node, label="MultiOutputNode", items=tuple(node._bound_args))
        if isinstance(node, FunctionNode):
            name = getattr(node._body, "__name__", "function")
            remedy = "make it a method, or bind handle.__ray_call__ to function(actor, ...) and its arguments"
            return common.refused(f"{name}()", "only actor methods can be nodes, and this is a remote function", remedy)
        if isinstance(node, ClassNode):
            name = getattr(node._body, "__name__", "class")
            return common.refused(f"{name}.bind()", "only methods of created actors can be nodes", _CREATE)
        return common.refused(type(node).__name__, "only actor methods can be nodes", _CREATE)


ADAPTER: Final[Adapter] = RayDagAdapter()


class _Common:
    """What every view has, read once."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.fields: dict[str, Any] = {
            "node": node,
            "hint": _hint(node._type_hint),
            "options": vars(node).get(FOREIGN_OPTIONS),
            "consumers": tuple(node._downstream_nodes),
        }

    def numbered(self, name: str) -> str:
        return f"ray.dag {name}({self._node._stable_uuid[:6]})"

    def refused(self, label: str, reason: str, remedy: str) -> RefusedView:
        return RefusedView(label=label, reason=reason, remedy=remedy, **self.fields)


def _method(node: Any, common: _Common) -> View:
    if node._is_class_method_output:
        output = node._class_method_output
        label = f"{output.class_method_call._method_name}[{output.output_idx}]"
        return ElementView(label=label, call=output.class_method_call, index=output.output_idx, **common.fields)
    parent = node._parent_class_node
    # A class node answers any attribute it is asked for by looking at the user's class, so its type decides.
    actor = None if isinstance(parent, DAGNode) else read_actor(parent)
    if actor is None:
        name = getattr(getattr(parent, "_body", None), "__name__", "actor")
        return common.refused(f"{name}.{node._method_name}", "its actor has not been created", _CREATE)
    return CallView(
        label=f"{actor.class_name}.{node._method_name}",
        actor=actor,
        method=node._method_name,
        args=tuple(node._bound_args),
        kwargs=tuple(node._bound_kwargs.items()),
        num_returns=node.num_returns,
        bind_index=node._bind_index,
        after=vars(node).get(FOREIGN_AFTER, ()),
        **common.fields,
    )


def _collective(node: Any, common: _Common, default: Any) -> View:
    """What one actor does in a collective. Ray's own default and its words for it mean an accelerator; here they mean one where
    all actors have it, and else the memory that they share."""
    collective = node._collective_op
    kind, reduces = _KINDS[type(collective._op)], getattr(collective._op, "reduceOp", None)
    op = None if reduces is None else op_of(reduces)
    actors = tuple(filter(None, map(read_actor, collective._actor_handles)))
    actor = read_actor(node._parent_class_node)
    assert actor is not None
    given = collective._type_hint.get_custom_communicator()
    transport, own = communicator_of(default if given is None else given, actors, kind, op)
    return CallView(
        label=f"{actor.class_name}.{kind}",
        actor=actor,
        method=str(kind),
        args=tuple(node._bound_args),
        kwargs=(),
        num_returns=len(node._bound_args),
        bind_index=node._bind_index,
        exchange=Exchange(key=collective, kind=kind, op=op, root=None, actors=actors, transport=transport, own=own),
        **common.fields,
    )


def _hint(type_hint: Any) -> TransportHint | None:
    """Ray's channel type as the hint it was made from; "nccl" and "accelerator" are one there."""
    if isinstance(type_hint, AutoTransportType):
        return TransportHint("auto", type_hint.device.value, type_hint._static_shape, type_hint._direct_return)
    if isinstance(type_hint, TorchTensorType):
        promises = bool(type_hint.static_shape), bool(type_hint.direct_return)
        if type_hint._communicator is not None:
            return TransportHint(type_hint._communicator, type_hint.device.value, *promises)
        # Its "auto" is what with_tensor_transport("shm") makes: through host memory.
        transport = "accelerator" if type_hint.transport == TorchTensorType.ACCELERATOR else "shm"
        return TransportHint(transport, type_hint.device.value, *promises)
    return None
