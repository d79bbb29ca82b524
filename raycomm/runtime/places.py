"""What the actors of a graph have for moving tensors."""

from __future__ import annotations

from raycomm.graph import Graph
from raycomm.options import DeviceKind
from raycomm.plan.devices import Missing, Place

_NO_GPU = Place.cpu(
    Missing(
        "GPU edges are not available in this version",
        "use 'auto', 'shm' or 'gloo', and device 'default' or 'cpu', or try it with raycomm.compile(node, device='simulated')",
    )
)


def places_of(graph: Graph, device: DeviceKind) -> dict[int, Place]:
    """By index of the process. Real ones are so far all alike: CPU tensors can go over gloo, and GPUs are not asked for."""
    if device is DeviceKind.SIMULATED:
        return {actor.index + 1: Place.simulated(f"simulated device of {actor.label}") for actor in graph.actors}
    return {actor.index + 1: _NO_GPU for actor in graph.actors}
