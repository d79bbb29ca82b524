"""Rules for what moves between devices: links, their channels, their two ends."""

from __future__ import annotations

from raycomm.plan.actions import Action, ActorPlan, Collective, Compute, Plan, Read, Write
from raycomm.plan.placement import DRIVER, Transport
from raycomm.plan.refusal import refuse, refuse_action, where
from raycomm.plan.transfer import Carrier, Group, Link, OwnBackend, Recv, Send, in_one_order


def check_links(plan: Plan) -> None:
    """Refuse links and their operations where they do not fit together. The channels' ends are known to be right.

    Raises:
        CompileError: a rule is broken; the message names the action.
    """
    if [link.id for link in plan.links] != list(range(len(plan.links))):
        refuse(plan.name, "links are not numbered 0, 1, ...")
    for link in plan.links:
        ends = (link.writer, *link.readers)
        if len(set(ends)) < max(2, len(ends)) or not all(DRIVER < end < len(plan.processes) for end in ends):
            refuse(str(link), "it does not lead from one actor to others, each once")
    if [group.id for group in plan.groups] != list(range(len(plan.groups))):
        refuse(plan.name, "groups are not numbered 0, 1, ...")
    for group in plan.groups:
        known = all(DRIVER < process < len(plan.processes) for process in group.processes)
        if len(set(group.processes)) < max(2, len(group.processes)) or not known:
            refuse(str(group), "it does not join two or more actors, each once")
    _check_own(plan)
    for channel in plan.channels:
        if channel.sender_keeps and channel.transport is not Transport.DEVICE:
            refuse(f"channel {channel.id} ({channel.value})", "sender_keeps is for a channel between devices")
        edge = channel.tensors
        if edge is not None and (edge.static_shape or edge.direct_return) and channel.transport is not Transport.DEVICE:
            refuse(f"channel {channel.id} ({channel.value})", "static_shape and direct_return are for a channel between devices")
    if len({entry.process for entry in plan.streams}) < len(plan.streams):
        refuse(plan.name, "the streams of an actor are described twice")
    for entry in plan.streams:
        if not DRIVER < entry.process < len(plan.processes):
            refuse(str(entry), "it is not about an actor")
    sends: dict[int, tuple[ActorPlan, Send]] = {}
    for actor in plan.actors:
        _check_actor(plan, actor, sends)
    for actor in plan.actors:
        for action in actor.actions:
            if isinstance(action, Recv) and action.link != sends[action.channel][1].link:
                refuse_action(actor, action, f"it is on another link than {where(*sends[action.channel])}")


def _check_own(plan: Plan) -> None:
    """Communicators that the user brought: one by each number, and what is one communicator is used as one."""
    known: dict[int, OwnBackend] = {}
    parts: list[Link | Group] = [*plan.links, *plan.groups]
    for part in parts:
        own = part.over
        if not isinstance(own, OwnBackend):
            continue
        if known.setdefault(own.number, own) != own:
            refuse(str(part), f"communicator {own.number} is another one elsewhere")
        ends = (part.writer, *part.readers) if isinstance(part, Link) else part.processes
        if own.ranks and not set(own.ranks) >= set(ends):
            refuse(str(part), "not all its actors have a rank in its communicator")
        if own.ranks and len(ends) > 2 and isinstance(part, Link):
            refuse(str(part), "its communicator has no broadcast")
    for own in known.values():
        if own.ranks and len(set(own.ranks)) < max(2, len(own.ranks)):
            refuse(str(own), "it does not join two or more actors, each once")
    for actor in plan.actors:
        streams: dict[Carrier | None, int | None] = {}
        for action in actor.actions:
            over = _carrier(plan, action)
            if not in_one_order(over):
                continue
            assert isinstance(action, (Send, Recv, Collective))
            if streams.setdefault(over, action.stream) != action.stream:
                refuse_action(actor, action, f"it is on another stream than what went before it over {over}")


def _carrier(plan: Plan, action: Action) -> Carrier | None:
    if isinstance(action, (Send, Recv)) and 0 <= action.link < len(plan.links):
        return plan.links[action.link].over
    if isinstance(action, Collective) and action.group is not None and 0 <= action.group < len(plan.groups):
        return plan.groups[action.group].over
    return None


def _check_actor(plan: Plan, actor: ActorPlan, sends: dict[int, tuple[ActorPlan, Send]]) -> None:
    made: tuple[int, ...] = ()  # what the last call returned
    for action in actor.actions:
        for channel in _ordinary(action):
            if plan.channels[channel].transport is Transport.DEVICE:
                refuse_action(actor, action, f"channel {channel} is between devices: it takes a send and a recv")
        if isinstance(action, Collective):
            _check_group(plan, actor, action)
        if isinstance(action, (Compute, Collective)):
            made = action.outputs
        elif isinstance(action, (Send, Recv)):
            _check_operation(plan, actor, action)
            if isinstance(action, Send):
                if action.register not in made:
                    refuse_action(actor, action, "another call stands between it and the call whose value it sends")
                sends[action.channel] = (actor, action)


def _check_group(plan: Plan, actor: ActorPlan, action: Collective) -> None:
    if action.group is None:
        if action.stream is not None:
            refuse_action(actor, action, "it has a stream, and no group that would use it")
        return
    if not 0 <= action.group < len(plan.groups):
        refuse_action(actor, action, f"group {action.group} does not exist")
    processes = plan.groups[action.group].processes
    if tuple(plan.channels[channel].writer for channel in action.parts) != processes:
        refuse_action(actor, action, f"group {action.group} does not join its actors, in order of rank")
    if action.slices:
        refuse_action(actor, action, "on a group there are no slices")
    if action.stream is None:
        refuse_action(actor, action, "it has no stream; assign_streams() gives one")


def _check_operation(plan: Plan, actor: ActorPlan, action: Send | Recv) -> None:
    channel = plan.channels[action.channel]
    if channel.transport is not Transport.DEVICE:
        refuse_action(actor, action, f"channel {channel.id} is not between devices")
    if not 0 <= action.link < len(plan.links):
        refuse_action(actor, action, f"link {action.link} does not exist")
    link = plan.links[action.link]
    if (link.writer, link.readers) != (channel.writer, channel.readers):
        refuse_action(actor, action, f"link {link.id} does not lead where channel {channel.id} does")
    if action.stream is None:
        refuse_action(actor, action, "it has no stream; assign_streams() gives one")
    if isinstance(action, Send) and action.beside and not channel.sender_keeps:
        refuse_action(actor, action, f"the next call may overwrite what it sends: channel {channel.id} does not say sender_keeps")


def _ordinary(action: Action) -> tuple[int, ...]:
    """Channels that an action reads or writes the ordinary way."""
    match action:
        case Read(channel, _):
            return (channel,)
        case Write(channels, _):
            return channels
        case Collective():
            return (*action.written, *action.read)
        case _:
            return ()
