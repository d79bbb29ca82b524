"""What the actors of a graph have for moving tensors."""

from __future__ import annotations

from raycomm.graph import Graph
from raycomm.plan.devices import Missing, Place

_NO_GPU = Place.cpu(
    Missing("GPU edges are not available in this version", "use 'auto', 'shm' or 'gloo', and device 'default' or 'cpu'")
)


def places_of(graph: Graph) -> dict[int, Place]:
    """By index of the process. So far all are alike: CPU tensors can go over gloo, and GPUs are not asked for."""
    return {actor.index + 1: _NO_GPU for actor in graph.actors}
