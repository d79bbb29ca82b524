"""Puts edges on devices: a write and its reads become sends and receives on links. Pure: plan to plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn, TypeAlias

from raycomm.errors import CompileError
from raycomm.plan.actions import Action, ActorPlan, Channel, Collective, Compute, FromChannel, Plan, Read, Write
from raycomm.plan.placement import DRIVER, Transport
from raycomm.plan.registers import pack, spread
from raycomm.plan.transfer import Carrier, Link, Recv, Send

# Place of the call that makes a value among all calls (the actors of a collective share one), the call, place of the value in
# what it writes, place of the reader.
_Order: TypeAlias = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Edge:
    """A device channel from a call to one actor, or several. `order`: its place among all transfers, the same at all actors."""

    channel: int
    link: int
    order: _Order


@dataclass(frozen=True, slots=True)
class _Edges:
    """What becomes of the channels of a plan.

    Attributes:
        position: place of each call among all.
        of: by channel, its edges: one per actor that reads it, or one for all.
        to: likewise, by channel and reader.
        to_driver: by channel, the channel that takes the same value to the driver.
        order: by device channel, the place of its transfer among all.
    """

    position: Mapping[int, int]
    of: dict[int, list[_Edge]] = field(default_factory=dict)
    to: dict[tuple[int, int], _Edge] = field(default_factory=dict)
    to_driver: dict[int, int] = field(default_factory=dict)
    order: dict[int, _Order] = field(default_factory=dict)

    def add(self, channel: int, readers: tuple[int, ...], edge: _Edge) -> None:
        self.of.setdefault(channel, []).append(edge)
        self.to.update({(channel, reader): edge for reader in readers})
        self.order[edge.channel] = edge.order


def place_on_device(
    plan: Plan,
    channels: Collection[int],
    *,
    sender_keeps: Collection[int] = (),
    broadcast: Collection[int] = (),
    backends: Mapping[int, Carrier] | None = None,
) -> Plan:
    """`plan` with the values of `channels` moving from device to device.

    A channel with several readers becomes one per reader, for each is a transfer of its own, unless it is to be broadcast; the
    first actor keeps its number, the others come at the end. What the driver reads stays on shared memory.

    A receive stands where the graph's order of calls puts the call that made the value, before the first call, or send, of its
    actor that comes later in that order. So all actors launch all transfers in one order, with the calls in between, and no
    policy and no order of links can make them wait in a circle. A receive right before its use, the order Ray has, can: the
    sender may wait for it in its next call, while the receiver waits for something that this call leads to.

    Args:
        channels: channels that calls write for other actors.
        sender_keeps: those of them whose sender never overwrites what it sends.
        broadcast: those of them whose value goes to all its actors in one operation, if there are several.
        backends: by channel, what carries it; two actors have a link for each that they use. None: the plan does not say.

    Raises:
        CompileError: a channel does not lead from an actor's call to another actor, or the plan has links already.
    """
    channels, sender_keeps, broadcast = frozenset(channels), frozenset(sender_keeps), frozenset(broadcast)
    _check(plan, channels, sender_keeps)
    entries = list(plan.channels)
    edges = _Edges(_positions(plan))
    links: dict[tuple[int, tuple[int, ...], Carrier | None], Link] = {}
    for actor in plan.actors:
        for node, order, channel in _written(actor, channels):
            entry = plan.channels[channel]
            readers = tuple(reader for reader in entry.readers if reader != DRIVER)
            for place, together in enumerate([readers] if channel in broadcast else [(reader,) for reader in readers]):
                number = channel if place == 0 else len(entries)
                changed = replace(
                    entry, id=number, readers=together, transport=Transport.DEVICE, sender_keeps=channel in sender_keeps
                )
                _put(entries, changed)
                over = backends.get(channel) if backends is not None else None
                ends = (entry.writer, together, over)
                link = links.setdefault(ends, Link(len(links), *ends))
                edges.add(channel, together, _Edge(number, link.id, (edges.position[node], node, order, place)))
            if DRIVER in entry.readers:
                edges.to_driver[channel] = len(entries)
                _put(entries, replace(entry, id=len(entries), readers=(DRIVER,)))
    outputs = tuple(
        FromChannel(edges.to_driver.get(output.channel, output.channel)) if isinstance(output, FromChannel) else output
        for output in plan.outputs
    )
    actors = tuple(_placed(actor, edges) for actor in plan.actors)
    return replace(plan, channels=tuple(entries), actors=actors, outputs=outputs, links=tuple(links.values()))


def _check(plan: Plan, channels: Collection[int], sender_keeps: Collection[int]) -> None:
    exchanged = {
        channel
        for actor in plan.actors
        for action in actor.actions
        if isinstance(action, Collective)
        for channel in (*action.parts, *action.slices)
    }
    if plan.links:
        _refuse(plan, str(plan.links[0]), "channels were placed before; place all of them in one call")
    for channel in channels:
        if not 0 <= channel < len(plan.channels):
            _refuse(plan, f"channel {channel}", "it does not exist")
        entry = plan.channels[channel]
        name = f"channel {channel} ({entry.value})"
        if channel in exchanged:
            _refuse(plan, name, "it belongs to a collective")
        if entry.writer == DRIVER or entry.readers == (DRIVER,):
            _refuse(plan, name, "the driver has no device")
    for channel in sender_keeps:
        if channel not in channels:
            _refuse(plan, f"channel {channel}", "sender_keeps is for channels between devices")


def _refuse(plan: Plan, name: str, problem: str) -> NoReturn:
    remedy = "place only channels from one actor's call to another actor"
    raise CompileError(f"plan {plan.name!r}, {name}: {problem}; {remedy}", node=name, remedy=remedy)


def _put(entries: list[Channel], entry: Channel) -> None:
    if entry.id == len(entries):
        entries.append(entry)
    else:
        entries[entry.id] = entry


def _positions(plan: Plan) -> dict[int, int]:
    """Place of each call in an order in which nothing waits for what comes later: the graph's, a collective being one call."""
    position: dict[int, int] = {}
    last: dict[tuple[int, ...], int] = {}
    collectives: list[Collective] = []
    for actor in plan.actors:
        for action in actor.actions:
            if isinstance(action, Collective) and action.parts:
                collectives.append(action)
                last[action.parts] = max(action.node, last.get(action.parts, 0))
            elif isinstance(action, (Compute, Collective)):
                position[action.node] = action.node
    position.update({action.node: last[action.parts] for action in collectives})
    return position


def _written(actor: ActorPlan, channels: Collection[int]) -> list[tuple[int, int, int]]:
    """The channels among `channels` that an actor writes: the call, the channel's place in what it writes, the channel."""
    found = []
    node = -1
    for action in actor.actions:
        if isinstance(action, (Compute, Collective)):
            node = action.node
        elif isinstance(action, Write):
            found += [(node, place, channel) for place, channel in enumerate(action.channels) if channel in channels]
    return found


def _placed(actor: ActorPlan, edges: _Edges) -> ActorPlan:
    process = actor.process.index
    receives: list[tuple[_Order, Recv]] = []
    actions: list[Action] = []
    touched = False
    for action in spread(actor):
        if isinstance(action, Read) and (edge := edges.to.get((action.channel, process))):
            receives.append((edge.order, Recv(edge.channel, action.register, edge.link)))
            touched = True
        elif isinstance(action, Write) and any(channel in edges.of for channel in action.channels):
            pairs = tuple(zip(action.channels, action.registers, strict=True))
            # Sends first: they only launch, and go on while the rest is copied.
            for channel, register in pairs:
                actions += [Send(edge.channel, register, edge.link) for edge in edges.of.get(channel, ())]
            stays = [pair for pair in pairs if pair[0] not in edges.of or pair[0] in edges.to_driver]
            if stays:
                written = tuple(edges.to_driver.get(channel, channel) for channel, _ in stays)
                actions.append(Write(written, tuple(register for _, register in stays)))
            touched = True
        else:
            actions.append(action)
    if not touched:
        return actor
    return pack(actor.process, _with_receives(actions, receives, edges))


def _with_receives(actions: list[Action], receives: list[tuple[_Order, Recv]], edges: _Edges) -> list[Action]:
    """`actions` with each receive before the first call, and what that call reads, or send that comes after it."""
    waiting = sorted(receives, key=lambda receive: receive[0], reverse=True)
    merged: list[Action] = []
    reads: list[Action] = []
    for action in actions:
        if isinstance(action, Read):
            reads.append(action)
            continue
        if isinstance(action, (Compute, Collective)):
            while waiting and waiting[-1][0][0] < edges.position[action.node]:
                merged.append(waiting.pop()[1])
            merged += reads
            reads.clear()
        elif isinstance(action, Send):
            # Only after a collective: other actors may send what they got from it before this one does.
            while waiting and waiting[-1][0] < edges.order[action.channel]:
                merged.append(waiting.pop()[1])
        merged.append(action)
    return [*merged, *reads, *(receive for _, receive in waiting[::-1])]
