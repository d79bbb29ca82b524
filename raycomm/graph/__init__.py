"""Nodes that users write, and the checked graph made of them. Imports neither Ray nor torch."""

from raycomm.graph.build import build
from raycomm.graph.model import (
    Actor,
    CallNode,
    CallValue,
    Const,
    Graph,
    InputValue,
    Key,
    Operand,
    Position,
    Projection,
    ValueRef,
    Whole,
)
from raycomm.graph.nodes import InputAttributeNode, InputNode, MethodNode, MethodOutputNode, MultiOutputNode, bind
from raycomm.graph.views import Adapter

__all__ = [
    "Actor",
    "Adapter",
    "CallNode",
    "CallValue",
    "Const",
    "Graph",
    "InputAttributeNode",
    "InputNode",
    "InputValue",
    "Key",
    "MethodNode",
    "MethodOutputNode",
    "MultiOutputNode",
    "Operand",
    "Position",
    "Projection",
    "ValueRef",
    "Whole",
    "bind",
    "build",
]
