"""Whether the actions of a plan can wait for each other in a circle. Linear in their number.

The plan is a marked graph. Its nodes are the actions of all actors in the order in which each host passes them, and the transfers
of the links, a send and its receive being one, for neither end completes without the other. An arc says "waits for", in the same
execution or a number of executions earlier. Arcs within one execution:

- an action waits for the one before it in its actor;
- a read, and a receive before it launches, wait for the write or send of their channel. A collective is a write and then reads;
- a transfer waits until both its ends are launched, for what was launched before it on its stream at either end, and for the
  earlier transfers of its link, at either end: a communicator runs its operations in their order, whatever their streams;
- what is sent was made on the stream of computations, so its transfer waits for what was launched before on that; what goes
  through the host is copied on it, and the host waits, too;
- a call waits for the transfers that fill its registers, for what was launched before it on the stream of computations, and for
  the earlier sends of its actor that are not `beside` it. A method may look at its values, so its actor waits with it: a plan
  that passes does so whatever the methods do;
- a collective overwrites nothing: it waits for the transfers that fill its registers, then for what the other ranks publish.
  On a group it then launches one transfer of all ranks, which waits as those of links do; who uses the result waits for that,
  a write on the host and a send on the device, or on the host, too, where the link is of another device than the group.

An execution that fails, and a value that has nothing on a device, launch less than this and wait for less.

A channel with n slots makes a write wait for the read of n executions before, and each execution begins after the one before it.
A circle of waits is a deadlock exactly if it stays within one execution. So the only slots that matter here are none at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NoReturn, TypeVar

from raycomm.errors import DeadlockError
from raycomm.plan.actions import Action, ActorPlan, Collective, Compute, FromChannel, Plan, Read, Write
from raycomm.plan.refusal import where
from raycomm.plan.registers import filled_and_used
from raycomm.plan.transfer import COMPUTE_STREAM, Recv, Send, on_one_device

_Key = TypeVar("_Key")

_REMEDY = "change the order in which calls are bound on these actors"
_DEVICE_REMEDY = "give each link streams of its own (stream policy 'link'), or launch in one order at both ends"
_SLOTS_REMEDY = "give the channel at least one slot"


def check_deadlock(plan: Plan, *, slots: int = 1, hardware_queues: int | None = None) -> None:
    """Refuse a plan that can only hang. Stream policy and order of launch are what the plan says.

    Args:
        slots: how many messages a channel holds that does not say so itself.
        hardware_queues: how many queues a device has; streams whose numbers are equal modulo this share one, and then wait for
            each other as if they were one stream. None: each stream has a queue of its own.

    Raises:
        DeadlockError: actions wait for each other; `cycle` lists them, a transfer by both its ends.
    """
    waits = _Waits(plan, slots, hardware_queues)
    waiting = [0] * len(waits.names)
    for successors in waits.successors:
        for then in successors:
            waiting[then] += 1
    ready = deque(node for node, count in enumerate(waiting) if count == 0)
    left = set(range(len(waiting)))
    while ready:
        node = ready.popleft()
        left.discard(node)
        for then in waits.successors[node]:
            waiting[then] -= 1
            if waiting[then] == 0:
                ready.append(then)
    if left:
        _raise_deadlock(plan, waits, left)


def queue_of(stream: int, hardware_queues: int | None) -> int:
    """The queue of a stream, see `check_deadlock`."""
    return stream if hardware_queues is None else stream % hardware_queues


class _Waits:
    """The arcs within one execution, as a list of successors per node."""

    def __init__(self, plan: Plan, slots: int, hardware_queues: int | None) -> None:
        self._plan = plan
        self._hardware_queues = hardware_queues
        self.names: list[str] = []
        self.successors: list[list[int]] = []
        self.transfers: set[int] = set()
        self.unbuffered: set[int] = set()
        self._filled_by: dict[int, int] = {}  # channel -> the node that puts a message into it
        self._taken_by: list[tuple[int, int]] = []  # channel, and a node that takes its message
        self._transfer: dict[int, int] = {}  # channel -> its transfer
        ends: dict[int, list[str]] = {}
        for actor in plan.actors:
            for action in actor.actions:
                if isinstance(action, Send):
                    ends.setdefault(action.channel, []).insert(0, where(actor, action))
                elif isinstance(action, Recv):
                    ends.setdefault(action.channel, []).append(where(actor, action))
        for channel, texts in ends.items():
            self._transfer[channel] = self._node(" with ".join(texts))
        meetings: dict[tuple[int, ...], list[str]] = {}
        for actor in plan.actors:
            for action in actor.actions:
                if isinstance(action, Collective) and action.group is not None:
                    meetings.setdefault(action.parts, []).append(where(actor, action))
        self._meeting = {parts: self._node(" with ".join(texts)) for parts, texts in meetings.items()}
        self.transfers.update(self._transfer.values())
        self.transfers.update(self._meeting.values())
        for item in plan.inputs:
            self._filled_by[item.channel] = self._node(f"driver: {item}")
        for channel in dict.fromkeys(output.channel for output in plan.outputs if isinstance(output, FromChannel)):
            self._taken_by.append((channel, self._node(f"driver: {FromChannel(channel)}")))
        for actor in plan.actors:
            self._add_actor(actor)
        capacity = {channel.id: slots if channel.slots is None else channel.slots for channel in plan.channels}
        for channel, node in self._taken_by:
            if channel in self._filled_by:
                self._arc(self._filled_by[channel], node)
                if capacity.get(channel, slots) < 1:
                    self.unbuffered.update((node, self._filled_by[channel]))
                    self._arc(node, self._filled_by[channel])

    def _node(self, name: str) -> int:
        self.names.append(name)
        self.successors.append([])
        return len(self.names) - 1

    def _arc(self, first: int, then: int) -> None:
        self.successors[first].append(then)

    def _add_actor(self, actor: ActorPlan) -> None:
        before: int | None = None
        transfer_in: dict[int, int] = {}  # register -> the transfer that fills it
        in_queue: dict[int, int] = {}  # queue -> the transfer launched last
        on_link: dict[tuple[type[Action], int], int] = {}  # likewise, by end and link, or group
        sending: list[int] = []  # transfers that the next call waits for
        given_by: dict[int, Collective] = {}  # register -> the collective on a group that fills it
        for action in actor.actions:
            node = self._node(where(actor, action))
            if before is not None:
                self._arc(before, node)
            before = node
            filled, used = filled_and_used(action)
            computing = in_queue.get(COMPUTE_STREAM)
            if isinstance(action, (Send, Recv)):
                transfer = self._transfer[action.channel]
                self._arc(node, transfer)
                self._follow(in_queue, queue_of(action.stream or COMPUTE_STREAM, self._hardware_queues), transfer)
                self._follow(on_link, (type(action), action.link), transfer)
                if isinstance(action, Recv):
                    self._taken_by.append((action.channel, node))
                    transfer_in[action.register] = transfer
                else:
                    self._filled_by[action.channel] = node
                    if computing is not None:
                        self._arc(computing, transfer)
                    if action.register in transfer_in:  # what a collective gives
                        apart = action.register in given_by and not self._on_one_device(given_by[action.register], action)
                        self._arc(transfer_in[action.register], node if apart else transfer)
                    if not action.beside:
                        sending.append(transfer)
                continue
            if isinstance(action, (Compute, Collective, Write)):
                awaited = [transfer_in[register] for register in used if register in transfer_in]
                awaited += [computing] if computing is not None else []
                if isinstance(action, Compute):
                    awaited += sending
                    sending.clear()
                for transfer in dict.fromkeys(awaited):
                    self._arc(transfer, node)
            for register in filled:
                transfer_in.pop(register, None)
            if isinstance(action, Read):
                if computing is not None:
                    self._arc(computing, node)
                self._taken_by.append((action.channel, node))
            elif isinstance(action, Write):
                self._fill(action.channels, node)
            elif isinstance(action, Collective) and action.parts:
                # Two nodes: its writes, then its reads, which wait for the writes of the others. Its second phase begins
                # where the first has ended everywhere, and so waits for nothing that the first does not.
                self._fill(action.written, node)
                reads = self._node(where(actor, action))
                self._arc(node, reads)
                self._taken_by += [(channel, reads) for channel in action.read]
                before = reads
                if action.group is not None:
                    transfer = self._meeting[action.parts]
                    self._arc(reads, transfer)
                    if computing is not None:
                        self._arc(computing, transfer)
                    self._follow(in_queue, queue_of(action.stream or COMPUTE_STREAM, self._hardware_queues), transfer)
                    self._follow(on_link, (Collective, action.group), transfer)
                    transfer_in.update(dict.fromkeys(action.outputs, transfer))
                    given_by.update(dict.fromkeys(action.outputs, action))

    def _on_one_device(self, collective: Collective, send: Send) -> bool:
        assert collective.group is not None
        return on_one_device(self._plan.groups[collective.group].over, self._plan.links[send.link].over)

    def _fill(self, channels: Iterable[int], node: int) -> None:
        for channel in channels:
            self._filled_by[channel] = node

    def _follow(self, last: dict[_Key, int], key: _Key, transfer: int) -> None:
        if key in last:
            self._arc(last[key], transfer)
        last[key] = transfer


def _raise_deadlock(plan: Plan, waits: _Waits, left: set[int]) -> NoReturn:
    predecessor = {then: node for node in left for then in waits.successors[node] if then in left}
    trail: dict[int, None] = {}
    node = min(predecessor)
    while node not in trail:
        trail[node] = None
        node = predecessor[node]
    steps = list(trail)
    around = steps[steps.index(node) :][::-1]
    cycle = tuple(waits.names[step] for step in around)
    remedy = _REMEDY
    if waits.unbuffered.issuperset(around):
        remedy = _SLOTS_REMEDY
    elif waits.transfers.intersection(around):
        remedy = _DEVICE_REMEDY
    raise DeadlockError(
        f"plan {plan.name!r}: each of these waits for the one before it, in a circle: {' -> '.join(cycle)}; {remedy}",
        node=cycle[0],
        remedy=remedy,
        cycle=cycle,
    )
