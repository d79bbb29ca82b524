"""Decides how each value gets to those who use it, and says why. The only module that knows where processes are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from raycomm.graph.model import CallValue, Const, Graph, ValueRef

DRIVER = 0


class Transport(Enum):
    """How a value moves."""

    REFERENCE = "reference"
    SHARED_MEMORY = "shared memory"


@dataclass(frozen=True, slots=True)
class Placement:
    """How `value` gets from process `writer` to processes `readers`, ascending."""

    value: ValueRef
    writer: int
    readers: tuple[int, ...]
    transport: Transport
    reason: str


def place(graph: Graph) -> tuple[Placement, ...]:
    """The placements of every value that is used, inputs first, then calls in order; local before remote readers of one value."""
    readers: dict[ValueRef, set[int]] = {}
    for node in graph.nodes:
        for operand in node.operands:
            if not isinstance(operand, Const):
                readers.setdefault(operand, set()).add(node.actor + 1)
    for output in graph.outputs:
        readers.setdefault(output, set()).add(DRIVER)
    position = {projection: index for index, projection in enumerate(graph.inputs)}

    def rank(value: ValueRef) -> tuple[int, int, int]:
        return (1, value.node, value.element) if isinstance(value, CallValue) else (0, position[value.projection], 0)

    placements: list[Placement] = []
    for value in sorted(readers, key=rank):
        writer = graph.nodes[value.node].actor + 1 if isinstance(value, CallValue) else DRIVER
        if writer in readers[value]:
            reason = "made by the driver for itself" if writer == DRIVER else "made and used by the same actor"
            placements.append(Placement(value, writer, (writer,), Transport.REFERENCE, reason))
        others = tuple(sorted(readers[value] - {writer}))
        if others:
            placements.append(Placement(value, writer, others, Transport.SHARED_MEMORY, "different processes of one machine"))
    return tuple(placements)
