"""Assigns streams to sends and receives. Pure: plan to plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from raycomm.errors import CompileError
from raycomm.options import StreamPolicy
from raycomm.plan.actions import Action, ActorPlan, Collective, Plan
from raycomm.plan.transfer import COMPUTE_STREAM, DeviceStreams, Group, Link, Recv, Send, in_one_order

# Hardware queues of a device (CUDA_DEVICE_MAX_CONNECTIONS) less one for computations and one for copies to and from the host.
DEFAULT_MAX_LINKS = 6


def assign_streams(
    plan: Plan,
    policy: StreamPolicy = StreamPolicy.LINK,
    *,
    max_links: int = DEFAULT_MAX_LINKS,
    given: Mapping[int, tuple[int, int]] | None = None,
) -> Plan:
    """`plan` with a stream for every send and receive, instead of any it had.

    Streams that share a hardware queue wait for each other however they are named. So a device with more links than `max_links`
    gets the policy `direction` where `link` was asked for, and the plan says so. A group counts as a link; with `direction` all
    groups of a device share a third stream. What goes over one communicator of the user's, an object of Ray's, is on one stream.

    Args:
        max_links: how many links of one device can have work outstanding at once without sharing a queue; at least 2.
        given: by channel, the stream of its sender and the stream of its receiver; 0 is the one of computations. These are used
            as they are; numbers that the policy chooses come after those given for the same actor.

    Raises:
        CompileError: `given` names a channel that is not between devices, or a negative stream; `max_links` is below 2.
    """
    given = given or {}
    _check(plan, max_links, given)
    ends: dict[int, list[Link]] = {actor.process.index: [] for actor in plan.actors}
    groups: dict[int, list[Group]] = {actor.process.index: [] for actor in plan.actors}
    for link in plan.links:
        for process in (link.writer, *link.readers):
            ends[process].append(link)
    for group in plan.groups:
        for process in group.processes:
            groups[process].append(group)
    chosen: list[DeviceStreams] = []
    actors: list[ActorPlan] = []
    for actor in plan.actors:
        links, joined = ends[actor.process.index], groups[actor.process.index]
        if not (links or joined):
            actors.append(actor)
            continue
        entry = _choose(actor, policy, len(links) + len(joined), max_links, given)
        chosen.append(entry)
        actors.append(replace(actor, actions=tuple(_assigned(actor.actions, entry.policy, links, joined, given))))
    return replace(plan, actors=tuple(actors), streams=tuple(chosen))


def _check(plan: Plan, max_links: int, given: Mapping[int, tuple[int, int]]) -> None:
    if max_links < 2:
        raise CompileError(
            f"max_links is {max_links}, but an actor between two others has a link to each; pass at least 2",
            argument="max_links",
            remedy="pass at least 2",
        )
    sent = {action.channel: action for actor in plan.actors for action in actor.actions if isinstance(action, Send)}
    ordered = {link.id: link.over for link in plan.links if in_one_order(link.over)}
    for channel, streams in given.items():
        if channel in sent and sent[channel].link in ordered:
            raise CompileError(
                f"plan {plan.name!r}: streams are given for channel {channel} ({plan.channels[channel].value}), which goes over "
                f"{ordered[sent[channel].link]}, all of whose operations run in one order; leave them out",
                argument=str(channel),
                remedy="leave them out",
            )
        if channel not in sent:
            raise CompileError(
                f"plan {plan.name!r}: a stream is given for channel {channel}, which is not between devices; leave it out",
                argument=str(channel),
                remedy="leave it out",
            )
        if min(streams) < 0:
            raise CompileError(
                f"plan {plan.name!r}: channel {channel} is given stream {min(streams)}; number streams from 0",
                argument=str(channel),
                remedy="number streams from 0",
            )


def _choose(
    actor: ActorPlan, policy: StreamPolicy, links: int, limit: int, given: Mapping[int, tuple[int, int]]
) -> DeviceStreams:
    operations = [action for action in actor.actions if isinstance(action, (Send, Recv))]
    named = tuple(sorted(action.channel for action in operations if action.channel in given))
    joins = any(isinstance(action, Collective) and action.group is not None for action in actor.actions)
    if policy is StreamPolicy.LINK and links > limit and (joins or len(named) < len(operations)):
        return DeviceStreams(actor.process.index, StreamPolicy.DIRECTION, policy, links, limit, named)
    return DeviceStreams(actor.process.index, policy, given=named)


def _assigned(
    actions: tuple[Action, ...],
    policy: StreamPolicy,
    links: list[Link],
    groups: list[Group],
    given: Mapping[int, tuple[int, int]],
) -> Iterator[Action]:
    by_user = {
        action.channel: given[action.channel][isinstance(action, Recv)]
        for action in actions
        if isinstance(action, (Send, Recv)) and action.channel in given
    }
    numbers = _numbers(policy, links, groups, max(by_user.values(), default=COMPUTE_STREAM) + 1)
    for action in actions:
        if isinstance(action, (Send, Recv)):
            chosen = numbers[Link, action.link][isinstance(action, Recv)]
            yield replace(action, stream=by_user.get(action.channel, chosen))
        elif isinstance(action, Collective) and action.group is not None:
            yield replace(action, stream=numbers[Group, action.group][0])
        else:
            yield action


def _numbers(
    policy: StreamPolicy, links: list[Link], groups: list[Group], first: int
) -> dict[tuple[type[Link | Group], int], tuple[int, int]]:
    """For each link and group of an actor, the stream that it sends on and the one that it receives on."""
    parts: list[Link | Group] = [*links, *groups]
    match policy:
        case StreamPolicy.LINK:
            chosen = {part: (first + place, first + place) for place, part in enumerate(parts)}
            after = first + len(parts)
        case StreamPolicy.DIRECTION:
            chosen = {part: (first, first + 1) if isinstance(part, Link) else (first + 2, first + 2) for part in parts}
            after = first + 3
        case StreamPolicy.SHARED:
            return {(type(part), part.id): (first, first) for part in parts}
    # What is one communicator for all its links and groups has one order, and one stream, whatever the policy.
    own = list(dict.fromkeys(part.over for part in parts if in_one_order(part.over)))
    chosen |= {part: (after + own.index(part.over),) * 2 for part in parts if part.over in own}
    return {(type(part), part.id): streams for part, streams in chosen.items()}
