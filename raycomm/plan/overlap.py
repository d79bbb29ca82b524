"""Moves receives to where they overlap with calls, and lets sends run beside the next call. Pure: plan to plan."""

from __future__ import annotations

import heapq
from dataclasses import replace

from raycomm.plan.actions import Action, ActorPlan, Collective, Compute, Plan, Read, Write
from raycomm.plan.deadlock import check_deadlock, queue_of
from raycomm.plan.refusal import refuse_action
from raycomm.plan.registers import filled_and_used, pack, spread
from raycomm.plan.transfer import Recv, Send


def overlap(plan: Plan, *, hardware_queues: int | None = None) -> Plan:
    """`plan` with receives launched as soon as their control records are there, and sends `beside` the next call where they may.

    An actor's host waits at a receive for the control record, so a receive too early holds up calls that do not need it, and
    one too late leaves the link idle. When the record comes is not known here; it is estimated, by a schedule in which calls
    and transfers take one unit each, receives wait for nothing but their records, and all else happens as soon as it can. Each
    receive goes before the first action of its actor that this schedule puts after the send; where both come at one time, an
    actor's own sends go first, unless a stream, or a queue that several share, has both sends and receives, which then must be
    in one order everywhere. (Ray moves a receive above the call before it, whether or not the sender has anything by then.)

    The schedule is one order of everything, and in the new plan everything waits only for what is earlier in it. So the result
    has no circle of waits on the streams of `plan` and so many queues. No write and no send moves behind a later call of its
    actor: such a call may overwrite what was made before, and therefore waits, on the device, for the sends of it. Only a send
    on a channel that says `sender_keeps` runs beside it.

    Args:
        hardware_queues: see `check_deadlock`.

    Raises:
        DeadlockError: calls, sends and what they need wait for each other in a circle, wherever receives stand.
        CompileError: a send or a receive has no stream.
    """
    if not plan.links:
        return plan
    mixed = _mixes(plan, hardware_queues)
    beside = {channel.id for channel in plan.channels if channel.sender_keeps}
    lists = [
        [replace(action, beside=action.channel in beside) if isinstance(action, Send) else action for action in spread(actor)]
        for actor in plan.actors
    ]
    schedule = _Schedule(lists)
    if schedule.incomplete:
        # What is left waits for itself with even fewer waits than the plan has, so this raises.
        check_deadlock(plan, hardware_queues=hardware_queues)
    actors: list[ActorPlan] = []
    for place, (actor, actions) in enumerate(zip(plan.actors, lists, strict=True)):
        moves = any(isinstance(action, (Send, Recv)) for action in actions)
        actors.append(pack(actor.process, schedule.with_receives(place, actions, own_first=not mixed)) if moves else actor)
    return replace(plan, actors=tuple(actors))


def _mixes(plan: Plan, hardware_queues: int | None) -> bool:
    """Whether any queue has both sends and receives."""
    mixes = False
    for actor in plan.actors:
        of: dict[type[Action], set[int]] = {Send: set(), Recv: set()}
        for action in actor.actions:
            if isinstance(action, (Send, Recv)):
                if action.stream is None:
                    refuse_action(actor, action, "it has no stream; assign_streams() gives one")
                of[type(action)].add(queue_of(action.stream, hardware_queues))
        mixes |= bool(of[Send] & of[Recv])
    return mixes


class _Schedule:
    """When each action but the receives happens: an order of all of them, earliest first, calls after what takes no time."""

    def __init__(self, lists: list[list[Action]]) -> None:
        self._units: list[int] = []  # by step: how long its end is after its start
        self._successors: list[list[int]] = []
        self._of: dict[tuple[int, int], int] = {}  # place of an actor and of its action -> step
        self._sent: dict[int, int] = {}  # channel -> the step of its send
        self._transfer: dict[int, int] = {}  # channel -> the step of its transfer
        self._written: dict[int, int] = {}  # channel -> the step of its write
        exchange: dict[tuple[int, ...], int] = {}  # a collective is one step of all its actors
        for actor, actions in enumerate(lists):
            for place, action in enumerate(actions):
                if isinstance(action, Collective) and action.parts:
                    if action.parts not in exchange:
                        exchange[action.parts] = self._step(1)
                    self._of[actor, place] = exchange[action.parts]
                elif not isinstance(action, Recv):
                    self._of[actor, place] = step = self._step(int(isinstance(action, (Compute, Collective))))
                    if isinstance(action, Send):
                        self._sent[action.channel] = step
                        self._transfer[action.channel] = self._step(1)
                        self._arc(step, self._transfer[action.channel])
                    elif isinstance(action, Write):
                        self._written.update(dict.fromkeys(action.channels, step))
        for actor, actions in enumerate(lists):
            self._connect(actor, actions)
        self._start = [0] * len(self._units)
        self._rank = self._run()
        self.incomplete = len(self._rank) < len(self._units)

    def with_receives(self, actor: int, actions: list[Action], *, own_first: bool) -> list[Action]:
        """The actor's actions, each receive before the first that happens after its record was sent.

        `own_first`: at one time, what the actor does without taking time goes before its receives.
        """
        receives = [action for action in actions if isinstance(action, Recv)]
        receives.sort(key=lambda action: self._rank[self._sent[action.channel]], reverse=True)
        merged: list[Action] = []
        for place, action in enumerate(actions):
            if isinstance(action, Recv):
                continue
            step = self._of[actor, place]
            while receives and self._before(self._sent[receives[-1].channel], step, own_first):
                merged.append(receives.pop())
            merged.append(action)
        return merged + receives[::-1]

    def _before(self, send: int, step: int, own_first: bool) -> bool:
        if own_first and self._start[send] == self._start[step]:
            return self._units[step] > 0
        return self._rank[send] < self._rank[step]

    def _step(self, units: int) -> int:
        self._units.append(units)
        self._successors.append([])
        return len(self._units) - 1

    def _arc(self, first: int, then: int) -> None:
        self._successors[first].append(then)

    def _connect(self, actor: int, actions: list[Action]) -> None:
        before: int | None = None
        arriving: dict[int, int] = {}  # register -> the transfer that fills it
        on_link: dict[int, int] = {}  # link -> its last transfer
        sending: list[int] = []  # transfers that the next call waits for
        for place, action in enumerate(actions):
            if isinstance(action, Recv):
                if action.channel in self._transfer:
                    arriving[action.register] = self._transfer[action.channel]
                continue
            step = self._of[actor, place]
            if before is not None:
                self._arc(before, step)
            before = step
            if isinstance(action, Send):
                transfer = self._transfer[action.channel]
                if action.link in on_link:
                    self._arc(on_link[action.link], transfer)
                on_link[action.link] = transfer
                if not action.beside:
                    sending.append(transfer)
            elif isinstance(action, Read):
                if action.channel in self._written:
                    self._arc(self._written[action.channel], step)
            elif isinstance(action, (Compute, Collective)):
                _, used = filled_and_used(action)
                awaited = [arriving[register] for register in used if register in arriving]
                if isinstance(action, Compute):  # A collective overwrites nothing.
                    awaited += sending
                    sending.clear()
                for transfer in awaited:
                    self._arc(transfer, step)

    def _run(self) -> dict[int, int]:
        """Place of each step in the order."""
        waiting = [0] * len(self._units)
        for successors in self._successors:
            for then in successors:
                waiting[then] += 1
        ready = [(0, self._units[step], step) for step, count in enumerate(waiting) if count == 0]
        heapq.heapify(ready)
        rank: dict[int, int] = {}
        while ready:
            _, units, step = heapq.heappop(ready)
            rank[step] = len(rank)
            for then in self._successors[step]:
                self._start[then] = max(self._start[then], self._start[step] + units)
                waiting[then] -= 1
                if waiting[then] == 0:
                    heapq.heappush(ready, (self._start[then], self._units[then], then))
        return rank
