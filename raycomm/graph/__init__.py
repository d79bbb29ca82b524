"""Nodes that users write, and the checked graph made of them. Imports neither Ray nor torch."""

from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.channel_options import ChannelOptions
from raycomm.graph.collective import allgather, allreduce, broadcast, reducescatter
from raycomm.graph.edges import after, with_channel_options
from raycomm.graph.model import (
    Actor,
    CallNode,
    CallValue,
    Collective,
    CollectiveKind,
    Const,
    Graph,
    InputValue,
    Key,
    Nothing,
    Operand,
    Position,
    Projection,
    ReduceOp,
    ValueRef,
    Whole,
)
from raycomm.graph.nodes import (
    InputAttributeNode,
    InputNode,
    MethodNode,
    MethodOutputNode,
    MultiOutputNode,
)
from raycomm.graph.own_communicator import OwnCommunicator
from raycomm.graph.tensor_hint import TensorHint
from raycomm.graph.tensor_transport import TensorDevice, TensorTransport
from raycomm.graph.views import Adapter

__all__ = [
    "Actor",
    "Adapter",
    "CallNode",
    "CallValue",
    "ChannelOptions",
    "Collective",
    "CollectiveKind",
    "Const",
    "Graph",
    "InputAttributeNode",
    "InputNode",
    "InputValue",
    "Key",
    "MethodNode",
    "MethodOutputNode",
    "MultiOutputNode",
    "Nothing",
    "Operand",
    "OwnCommunicator",
    "Position",
    "Projection",
    "ReduceOp",
    "TensorDevice",
    "TensorHint",
    "TensorTransport",
    "ValueRef",
    "Whole",
    "after",
    "allgather",
    "allreduce",
    "bind",
    "broadcast",
    "build",
    "reducescatter",
    "with_channel_options",
]
