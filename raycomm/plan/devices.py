"""Hints of a graph -> sends, receives, links and streams in its plan. Pure: plan to plan.

    plan = on_devices(lower(graph, name), graph, places, policy=StreamPolicy.LINK)
    verify(plan)

What each actor has is an input, `places`, so that a plan for machines with GPUs can be made on one that has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NoReturn

from raycomm.errors import CompileError
from raycomm.graph.model import Graph
from raycomm.graph.tensor_hint import TensorHint
from raycomm.graph.tensor_transport import TensorDevice, TensorTransport
from raycomm.options import StreamPolicy
from raycomm.plan.actions import Channel, Plan
from raycomm.plan.device_collectives import place_collectives
from raycomm.plan.device_edges import place_on_device
from raycomm.plan.lowering import channels_of, value_text
from raycomm.plan.overlap import overlap
from raycomm.plan.placement import DRIVER, Transport
from raycomm.plan.places import NO_GPU, REMEDY, UNKNOWN, Missing, Place, backend_of, own_backend, problems
from raycomm.plan.streams import DEFAULT_MAX_LINKS, assign_streams
from raycomm.plan.transfer import Backend, Carrier, OwnBackend, TensorEdge

_DRIVER = "the driver has no device"


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

    Collectives go to a group of their actors where what was asked for, or what all of them have, is one. Only values from an
    actor's call to another actor can move between devices. "auto" does so where the writer and all these
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
    placed = place_hinted(place_collectives(plan, graph, places), graph, places)
    if not (placed.links or placed.groups):
        return placed
    placed = assign_streams(placed, policy, max_links=max_links, given=_given_streams(placed, graph))
    return overlap(placed, hardware_queues=hardware_queues) if early_receives else placed


def place_hinted(plan: Plan, graph: Graph, places: Mapping[int, Place]) -> Plan:
    """The first of the passes of `on_devices`: which values move between devices. Sends and receives get no streams yet."""
    number = channels_of(graph)
    entries = list(plan.channels)
    over: dict[int, Carrier] = {}
    for value, hint in graph.hints:
        channel = number.get(value)
        if channel is None:  # made and used by one actor only
            continue
        decision = _Decision(plan, graph, entries[channel], hint, places)
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
    apart = [channel for channel in over if _all_apart(plan.channels[channel], over[channel], places)]
    placed = place_on_device(hinted, over, sender_keeps=keeps, broadcast=apart, backends=over)
    known, added = placed.channels[: len(entries)], placed.channels[len(entries) :]
    return replace(placed, channels=known + tuple(map(_split_off, added)))


def _all_apart(entry: Channel, over: Carrier, places: Mapping[int, Place]) -> bool:
    """Whether all actors of a channel can be ranks of one communicator, so that its value can be broadcast."""
    if isinstance(over, OwnBackend):
        return not over.ranks  # Ray's interface has no broadcast
    hardware = [places[end].hardware for end in (entry.writer, *entry.readers) if end != DRIVER]
    return over is not Backend.NCCL or len(set(hardware)) == len(hardware)


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
    graph: Graph
    entry: Channel
    hint: TensorHint
    places: Mapping[int, Place]

    def make(self) -> tuple[Carrier | None, str | None]:
        """The back end, None for shared memory; and where "auto" leaves it open, why."""
        wanted = self.hint.transport
        only_driver = self.entry.writer == DRIVER or self.entry.readers == (DRIVER,)
        if only_driver and (wanted not in (TensorTransport.AUTO, TensorTransport.SHM) or self._lands_at_the_driver):
            who = "comes from the driver" if self.entry.writer == DRIVER else "is read by the driver only"
            asked = "device" if self._lands_at_the_driver else "transport"
            self._refuse(f"this value {who}, and {_DRIVER}", REMEDY, asked)
        backend: Carrier | None = None
        because: str | None = None
        if wanted is TensorTransport.AUTO:
            backend, because = self._choose(only_driver)
        elif wanted is not TensorTransport.SHM:
            backend = self._demand()
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

    def _demand(self) -> Carrier:
        if self.hint.own is not None:
            found = own_backend(self.graph, self.hint.own, self.places, self._ends)
            if isinstance(found, Missing):
                self._refuse(found.what, found.remedy, "transport")
            return found
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
        return self.places.get(end, UNKNOWN)

    def _backend(self, end: int) -> Backend | Missing:
        return backend_of(self.places, self.hint.transport, end)

    def _problems(self) -> Iterator[Missing]:
        """Why the value cannot move between devices."""
        writer, *readers = self._ends
        return problems(self.plan, self.places, self.hint.transport, self._ends, [(writer, reader) for reader in readers])

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
        own, name = self.hint.own, self.entry.value
        given = repr(str(self.hint.device if asked == "device" else self.hint.transport))
        if own is not None and asked == "transport":
            given = own.name
        raise CompileError(f"{asked} {given} of node {name}: {problem}; {remedy}", node=name, argument=asked, remedy=remedy)
