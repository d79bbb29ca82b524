"""What the driver tells an actor at set-up, and what the actor answers. Plain data that pickles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raycomm import __version__
from raycomm.channel import Address, RingLayout
from raycomm.channel.shm import slots_for
from raycomm.options import Options
from raycomm.plan.actions import Channel, Plan
from raycomm.testing.faults import Fault

if TYPE_CHECKING:
    from raycomm.runtime.links import Meeting

DRIVER = 0
_CONTROL_INLINE = 4096


@dataclass(frozen=True, slots=True)
class Blueprint:
    """Everything one actor needs to take part in a graph."""

    plan: Plan
    process: int
    constants: tuple[Any, ...] = field(repr=False)
    options: Options
    driver: Address
    driver_node: str
    version: str = __version__
    layout: int = 0
    faults: tuple[Fault, ...] = ()
    meeting: Meeting | None = None  # where the ends of links meet, see `links.meeting_point`
    device: str | None = None  # the GPU that the actor has said it uses
    communicators: tuple[Any, ...] = field(default=(), repr=False)  # that the user brought, by number in the plan
    loop: Callable[..., Any] | None = None  # makes what runs the actions; None: `Loop`


@dataclass(frozen=True, slots=True)
class Prepared:
    """The actor's answer: where its arena lies, or why it cannot take part."""

    process: int
    node: str
    address: Address | None
    problem: str | None = None


# Besides the plan's channels a graph has control channels, read once each during set-up: one from the driver to all actors,
# which tells them each other's addresses, and one from each actor back, which says "ready" or what went wrong; before that, as a
# pair with AT, what it is at if that takes long. So set-up costs one Ray call per actor.
READY = "ready"
AT = "at"


def read_at(answer: object) -> str | None:
    """What an actor that is not ready yet says it is at; None: the answer says something else."""
    match answer:
        case (str(word), str(what)) if word == AT:
            return what
    return None


def address_channel(plan: Plan) -> int:
    """The channel on which the driver announces all addresses."""
    return len(plan.channels)


def report_channel(plan: Plan, process: int) -> int:
    """The channel on which `process` says that it is ready."""
    return len(plan.channels) + process


def rings_of(plan: Plan, process: int, options: Options) -> list[RingLayout]:
    """The rings in the arena of `process`: those of the channels it writes, and its control channels."""
    slots = slots_for(options.max_inflight)
    rings = [
        RingLayout(
            channel.id,
            # The driver never waits for room: it would not take results meanwhile, and those who make them might wait for that.
            # Nor does anyone wait for the driver to make room, since it takes results only when it is asked for them.
            max(slots if DRIVER in (process, *channel.readers) else 1, channel.slots or slots),
            channel.inline_bytes or options.inline_bytes,
            channel.readers,
            options.allow_pickle if channel.allow_pickle is None else channel.allow_pickle,
        )
        for channel in plan.channels
        if channel.writer == process
    ]
    if process == DRIVER:
        everyone = tuple(range(1, len(plan.processes)))
        rings.append(RingLayout(address_channel(plan), 2, _CONTROL_INLINE, everyone))
    else:
        rings.append(RingLayout(report_channel(plan, process), 2, _CONTROL_INLINE, (DRIVER,)))
    return rings


def ring_slots(plan: Plan, options: Options) -> dict[int, int]:
    """How many messages the ring of each channel holds."""
    return {ring.channel: ring.slots for process in plan.processes for ring in rings_of(plan, process.index, options)}


def shares_tensors(channel: Channel, options: Options) -> bool:
    """Whether the readers of `channel` see one copy of a large tensor."""
    return options.share_tensors if channel.share_tensors is None else channel.share_tensors


def peers_of(plan: Plan, process: int) -> set[int]:
    """The actors that share a channel with actor `process` (the driver is everyone's peer)."""
    peers: set[int] = set()
    for channel in plan.channels:
        ends = {channel.writer, *channel.readers}
        if process in ends:
            peers |= ends
    return peers - {process, DRIVER}
