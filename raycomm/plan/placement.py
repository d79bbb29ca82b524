"""Decides how each value gets to those who use it, and says why. The only module that knows where processes are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from raycomm.graph.model import CallValue, CollectiveKind, Const, Graph, ValueRef

DRIVER = 0

# From so many actors on it pays that each combines a part of large tensors for all and sends the result on: two trips instead of
# one, but two tensors' worth of reading instead of one per other actor.
SHARED_WORK_FROM = 4


class Transport(Enum):
    """How a value moves. DEVICE: from device to device over a link, announced by a record in shared memory."""

    REFERENCE = "reference"
    SHARED_MEMORY = "shared memory"
    DEVICE = "device"


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


@dataclass(frozen=True, slots=True)
class Exchange:
    """The channels of a collective: in each phase one from each of `processes` (by rank, for `nodes`) to all others."""

    nodes: tuple[int, ...]
    processes: tuple[int, ...]
    phases: tuple[str, ...]


def exchanges(graph: Graph) -> tuple[Exchange, ...]:
    """What each collective of the graph needs, in their order. An actor alone needs no channel."""
    found = []
    for collective in graph.collectives:
        count = len(collective.ranks)
        phases: tuple[str, ...] = () if count == 1 else ("part",)
        if collective.kind is CollectiveKind.ALLREDUCE and count >= SHARED_WORK_FROM:
            phases = ("part", "slice")
        processes = tuple(graph.nodes[node].actor + 1 for node in collective.ranks)
        found.append(Exchange(collective.ranks, processes, phases))
    return tuple(found)
