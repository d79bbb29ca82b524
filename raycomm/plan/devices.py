"""Hints of a graph -> sends, receives, links and streams in its plan. Pure: plan to plan.

    plan = on_devices(lower(graph, name), graph, places, policy=StreamPolicy.LINK)
    verify(plan)

What each actor has is an input, `places`, so that a plan for machines with GPUs can be made on one that has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NoReturn

from raycomm.errors import CompileError
from raycomm.graph.model import Graph
from raycomm.graph.tensor_hint import TensorDevice, TensorHint, TensorTransport
from raycomm.options import StreamPolicy
from raycomm.plan.actions import Channel, Plan
from raycomm.plan.device_edges import place_on_device
from raycomm.plan.lowering import channels_of, value_text
from raycomm.plan.overlap import overlap
from raycomm.plan.placement import DRIVER, Transport
from raycomm.plan.streams import DEFAULT_MAX_LINKS, assign_streams
from raycomm.plan.transfer import Backend, TensorEdge

_REMEDY = "use 'auto' or 'shm'"
_DRIVER = "the driver has no device"


@dataclass(frozen=True, slots=True)
class Missing:
    """Why an actor cannot take part: `what` continues "actor W1: ...", `remedy` is what to do about it."""

    what: str
    remedy: str


NO_GPU = Missing("it has no GPU", "create it with num_gpus=1 on a machine that has one, or use 'auto' or 'shm'")


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


_UNKNOWN = Place.without(Missing("nothing is known of its devices", _REMEDY))


def on_devices(
    plan: Plan,
    graph: Graph,
    places: Mapping[int, Place],
    *,
    policy: StreamPolicy = StreamPolicy.LINK,
    max_links: int = DEFAULT_MAX_LINKS,
    hardware_queues: int | None = None,
    early_receives: bool = True,
) -> Plan:
    """`plan`, which `lower` made of `graph`, with its values moving as the graph's hints ask: placed, with streams, overlapped.

    Only values from an actor's call to another actor can move between devices. "auto" does so where the writer and all these
    readers have a device of their own and one back end joins them, and the plan's text says why if not. What the driver reads
    stays on shared memory. A plan of a graph without hints is returned as it is. What `with_channel_options` says of
    `sender_keeps` and `streams` is heeded. The result is not verified.

    Args:
        places: what each actor has, by the index of its process; an actor that is left out has nothing.
        policy: see `assign_streams`, as `max_links`.
        hardware_queues: see `check_deadlock`; give it the same. Only early receives depend on it.
        early_receives: move receives to where they overlap with calls, see `overlap`.

    Raises:
        CompileError: a hint asks for what an actor does not have, or for a device where only the driver reads or writes; names
            the value, the actor and what to do.
    """
    placed = place_hinted(plan, graph, places)
    if not placed.links:
        return placed
    placed = assign_streams(placed, policy, max_links=max_links, given=_given_streams(placed, graph))
    return overlap(placed, hardware_queues=hardware_queues) if early_receives else placed


def place_hinted(plan: Plan, graph: Graph, places: Mapping[int, Place]) -> Plan:
    """The first of the passes of `on_devices`: which values move between devices. Sends and receives get no streams yet."""
    number = channels_of(graph)
    entries = list(plan.channels)
    over: dict[int, Backend] = {}
    for value, hint in graph.hints:
        channel = number.get(value)
        if channel is None:  # made and used by one actor only
            continue
        decision = _Decision(plan, entries[channel], hint, places)
        backend, because = decision.make()
        device = hint.device
        if backend is None:
            tensors = TensorEdge(hint.transport, device, because=because)
        else:
            over[channel] = backend
            tensors = TensorEdge(hint.transport, device, hint.static_shape, hint.direct_return, because)
        entries[channel] = replace(entries[channel], tensors=tensors)
    hinted = replace(plan, channels=tuple(entries))
    if not over:
        return hinted
    keeps = [number[value] for value, options in graph.channel_options if options.sender_keeps and number.get(value) in over]
    placed = place_on_device(hinted, over, sender_keeps=keeps, backends=over)
    known, added = placed.channels[: len(entries)], placed.channels[len(entries) :]
    return replace(placed, channels=known + tuple(map(_split_off, added)))


def _given_streams(placed: Plan, graph: Graph) -> dict[int, tuple[int, int]]:
    """By channel between devices, the streams that the user gave for its value. A value has a channel for each reader."""
    given = {value_text(graph, value): options.streams for value, options in graph.channel_options if options.streams is not None}
    between = [entry for entry in placed.channels if entry.transport is Transport.DEVICE]
    return {entry.id: given[entry.value] for entry in between if entry.value in given}


def _split_off(entry: Channel) -> Channel:
    """A channel that a value has for one more of its readers; for the driver it stays on shared memory."""
    if entry.readers != (DRIVER,) or entry.tensors is None:
        return entry
    return replace(entry, tensors=TensorEdge(entry.tensors.hint, entry.tensors.device, because=_DRIVER))


@dataclass(frozen=True, slots=True)
class _Decision:
    """How the value of one channel moves."""

    plan: Plan
    entry: Channel
    hint: TensorHint
    places: Mapping[int, Place]

    def make(self) -> tuple[Backend | None, str | None]:
        """The back end, None for shared memory; and where "auto" leaves it open, why."""
        wanted = self.hint.transport
        only_driver = self.entry.writer == DRIVER or self.entry.readers == (DRIVER,)
        if only_driver and (wanted in (TensorTransport.NCCL, TensorTransport.GLOO) or self._lands_at_the_driver):
            who = "comes from the driver" if self.entry.writer == DRIVER else "is read by the driver only"
            asked = "device" if self._lands_at_the_driver else "transport"
            self._refuse(f"this value {who}, and {_DRIVER}", _REMEDY, asked)
        if wanted is TensorTransport.AUTO:
            backend, because = self._choose(only_driver)
        else:
            backend, because = None if wanted is TensorTransport.SHM else self._demand(), None
        if self.hint.device is TensorDevice.GPU:
            self._check_readers()
        return backend, because

    @property
    def _lands_at_the_driver(self) -> bool:
        return self.hint.device is TensorDevice.GPU and self.entry.readers == (DRIVER,)

    def _choose(self, only_driver: bool) -> tuple[Backend | None, str]:
        if only_driver:
            return None, _DRIVER
        if self.hint.device is TensorDevice.CPU:
            return None, "device 'cpu' asks for host memory"
        if (problem := next(self._problems(), None)) is not None:
            return None, problem.what
        backend = self._backend(self._ends[0])
        assert isinstance(backend, Backend)
        return backend, f"all its actors have devices that {backend} joins"

    def _demand(self) -> Backend:
        problems = list(self._problems())
        if problems:
            what = ", and ".join(dict.fromkeys(problem.what for problem in problems))
            self._refuse(what, "; ".join(dict.fromkeys(problem.remedy for problem in problems)), "transport")
        backend = self._backend(self._ends[0])
        assert isinstance(backend, Backend)
        return backend

    @property
    def _ends(self) -> tuple[int, ...]:
        """The actors that take part."""
        return tuple(end for end in (self.entry.writer, *self.entry.readers) if end != DRIVER)

    def _place(self, end: int) -> Place:
        return self.places.get(end, _UNKNOWN)

    def _backend(self, end: int) -> Backend | Missing:
        place = self._place(end)
        return place.gloo if self.hint.transport is TensorTransport.GLOO else place.accelerator

    def _problems(self) -> Iterator[Missing]:
        """Why the value cannot move between devices: what single actors lack, or else what keeps its two ends apart."""
        lacking = False
        for end in self._ends:
            found = self._backend(end)
            if isinstance(found, Missing):
                lacking = True
                yield Missing(f"actor {self._label(end)}: {found.what}", found.remedy)
        if lacking:
            return
        for first, second in pairwise(self._ends):
            one, other = self._backend(first), self._backend(second)
            if one != other:
                pair = f"actor {self._label(first)} uses {one} and actor {self._label(second)} {other}"
                yield Missing(f"{pair}, which do not join", _REMEDY)
                return
        writer, *readers = self._ends
        for reader in readers:
            place = self._place(writer)
            if self._backend(writer) is Backend.NCCL and place.hardware == self._place(reader).hardware:
                pair = f"actors {self._label(writer)} and {self._label(reader)} share {place.device}"
                yield Missing(f"{pair}, where NCCL takes one rank", f"give each actor a GPU of its own, or {_REMEDY}")

    def _check_readers(self) -> None:
        """Device "gpu" means the reader's, so each actor that reads has one."""
        for reader in self.entry.readers:
            place = self._place(reader)
            if reader != DRIVER and place.device is None:
                lack = place.accelerator if isinstance(place.accelerator, Missing) else NO_GPU
                self._refuse(f"actor {self._label(reader)}: {lack.what}", lack.remedy, "device")

    def _label(self, end: int) -> str:
        return self.plan.processes[end].label

    def _refuse(self, problem: str, remedy: str, asked: str) -> NoReturn:
        given = str(self.hint.device if asked == "device" else self.hint.transport)
        name = self.entry.value
        raise CompileError(f"{asked} {given!r} of node {name}: {problem}; {remedy}", node=name, argument=asked, remedy=remedy)
