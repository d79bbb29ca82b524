"""What actors have for moving tensors between them, and what keeps them apart. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from raycomm.graph.model import Graph
from raycomm.graph.own_communicator import OwnCommunicator
from raycomm.graph.tensor_transport import TensorTransport
from raycomm.plan.actions import Plan
from raycomm.plan.transfer import Backend, Carrier, OwnBackend

REMEDY = "use 'auto' or 'shm'"


@dataclass(frozen=True, slots=True)
class Missing:
    """Why an actor cannot take part: `what` continues "actor W1: ...", `remedy` is what to do about it."""

    what: str
    remedy: str


NO_GPU = Missing(
    "it has no GPU",
    "create it with num_gpus=1 on a machine that has one, or use transport 'auto' or 'shm' and no device; to run the graph "
    "without GPUs: raycomm.compile(node, device='simulated')",
)


def no_cupy(cuda: int) -> Missing:
    """cupy cannot be imported there; `cuda` is the major version that it has to fit."""
    return Missing("cupy, which NCCL is used through, is not installed there", f"pip install cupy-cuda{cuda}x")


def no_nccl(cuda: int) -> Missing:
    """cupy is there and finds no NCCL; `cuda` as for `no_cupy`."""
    return Missing("cupy finds no NCCL there", f"pip install nvidia-nccl-cu{cuda}")


@dataclass(frozen=True, slots=True)
class Place:
    """What an actor has for tensors.

    Attributes:
        device: name of its GPU, or of what stands for one; None where it has none.
        hardware: tells pieces of hardware apart in the whole cluster: actors with one of it share a device. NCCL takes one rank
            per device, so they get no link over it.
        accelerator: what moves tensors from this device to another, or why nothing does.
        gloo: what moves CPU tensors between processes, or why nothing does.
    """

    device: str | None
    hardware: str
    accelerator: Backend | Missing
    gloo: Backend | Missing = Backend.GLOO

    @classmethod
    def gpu(cls, device: str, hardware: str) -> Place:
        """An actor with a GPU and all that NCCL needs."""
        return cls(device, hardware, Backend.NCCL)

    @classmethod
    def simulated(cls, device: str) -> Place:
        """An actor with a simulated device of its own, over which every kind of transport goes."""
        return cls(device, device, Backend.SIMULATED, Backend.SIMULATED)

    @classmethod
    def cpu(cls, missing: Missing = NO_GPU) -> Place:
        """An actor without a GPU, and why that is so."""
        return cls(None, "", missing)

    @classmethod
    def without(cls, missing: Missing) -> Place:
        """An actor with nothing but shared memory, and why that is so."""
        return cls(None, "", missing, missing)


UNKNOWN = Place.without(Missing("nothing is known of its devices", REMEDY))


def backend_of(places: Mapping[int, Place], transport: TensorTransport, process: int) -> Backend | Missing:
    """What an actor moves tensors by, if it is to do it over `transport`."""
    place = places.get(process, UNKNOWN)
    return place.gloo if transport is TensorTransport.GLOO else place.accelerator


def own_backend(graph: Graph, own: OwnCommunicator, places: Mapping[int, Place], processes: Iterable[int]) -> Carrier | Missing:
    """What stands in a plan for a communicator that the user brought, or why it cannot join `processes`.

    On simulated devices it is not used: they have their own.
    """
    members = own.members or ()
    process_of = {actor.key: actor.index + 1 for actor in graph.actors}
    ranks = tuple(process_of[key] for key in members if key in process_of)
    outside = [graph.actors[process - 1].label for process in processes if process not in ranks]
    if members and outside:
        what = f"actor {', '.join(outside)} is none of the {len(members)} actors of communicator {own.name}"
        return Missing(what, "make the communicator of all actors that use it")
    if len(ranks) < len(members):
        what = f"communicator {own.name} has {len(members)} actors and the graph {len(ranks)} of them; it would wait for the rest"
        return Missing(what, "make the communicator of actors of the graph only")
    if any(place.accelerator is Backend.SIMULATED for place in places.values()):
        return Backend.SIMULATED
    return OwnBackend(graph.communicators.index(own), own.name, ranks)


def problems(
    plan: Plan,
    places: Mapping[int, Place],
    transport: TensorTransport,
    processes: Sequence[int],
    pairs: Iterable[tuple[int, int]],
) -> Iterator[Missing]:
    """Why tensors cannot move between `processes`: what single actors lack, or else what keeps them apart.

    `pairs` are those that would be ranks of one communicator.
    """
    found = [backend_of(places, transport, process) for process in processes]
    labels = {process: plan.processes[process].label for process in processes}
    lacks = [(process, lack) for process, lack in zip(processes, found, strict=True) if isinstance(lack, Missing)]
    for process, lack in lacks:
        yield Missing(f"actor {labels[process]}: {lack.what}", lack.remedy)
    if lacks:
        return
    for (first, one), (second, other) in pairwise(zip(processes, found, strict=True)):
        if one != other:
            pair = f"actor {labels[first]} uses {one} and actor {labels[second]} {other}"
            yield Missing(f"{pair}, which do not join", REMEDY)
            return
    if found[0] is Backend.NCCL:
        for first, second in pairs:
            place = places[first]
            if place.hardware == places[second].hardware:
                pair = f"actors {labels[first]} and {labels[second]} share {place.device}"
                remedy = "give each actor a GPU of its own, set NCCL_MULTI_RANK_GPU_ENABLE=1 in all of them (NCCL 2.30 and newer)"
                yield Missing(f"{pair}, where NCCL takes one rank", f"{remedy}, or {REMEDY}")
