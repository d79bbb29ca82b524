"""Puts collectives on devices: after its exchange of what the tensors are, one operation of a group. Pure: plan to plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations

from raycomm.errors import CompileError
from raycomm.graph.model import Collective as GraphCollective
from raycomm.graph.model import Graph
from raycomm.graph.tensor_transport import TensorTransport
from raycomm.plan.actions import ActorPlan, Collective, Plan
from raycomm.plan.places import Missing, Place, backend_of, own_backend, problems
from raycomm.plan.transfer import Backend, Carrier, Group


def place_collectives(plan: Plan, graph: Graph, places: Mapping[int, Place]) -> Plan:
    """`plan`, which `lower` made of `graph`, with collectives on groups where that was asked for, or else is possible.

    Args:
        places: what each actor has, by the index of its process.

    Raises:
        CompileError: a collective asks for what an actor does not have; names it, the actor and what to do.
    """
    over: dict[tuple[int, ...], tuple[Carrier, str | None]] = {}
    for actor in plan.actors:
        for action in actor.actions:
            if isinstance(action, Collective) and action.parts and action.rank == 0:
                number = graph.nodes[action.node].collective
                assert number is not None
                found = _decide(plan, action, graph, graph.collectives[number], places)
                if found is not None:
                    over[action.parts] = found
    return on_groups(plan, over)


def _decide(
    plan: Plan, action: Collective, graph: Graph, whole: GraphCollective, places: Mapping[int, Place]
) -> tuple[Carrier, str | None] | None:
    wanted = whole.transport
    if wanted is TensorTransport.SHM:
        return None
    actors = [plan.channels[channel].writer for channel in action.parts]
    if whole.own is not None:
        found = own_backend(graph, whole.own, places, actors)
        if not isinstance(found, Missing):
            return found, None
        lacks = [found]
    else:
        lacks = list(problems(plan, places, wanted, actors, combinations(actors, 2)))
    if not lacks:
        backend = backend_of(places, wanted, actors[0])
        assert isinstance(backend, Backend)
        return backend, f"all its actors have devices that {backend} joins" if wanted is TensorTransport.AUTO else None
    if wanted is TensorTransport.AUTO:
        return None
    name = f"{plan.processes[actors[0]].label}.{action.kind}#{action.node}"
    what = ", and ".join(dict.fromkeys(lack.what for lack in lacks))
    remedy = "; ".join(dict.fromkeys(lack.remedy for lack in lacks))
    given = repr(str(wanted)) if whole.own is None else whole.own.name
    raise CompileError(
        f"communicator {given} of node {name}: {what}; {remedy}", node=name, argument="communicator", remedy=remedy
    )


def on_groups(plan: Plan, over: Mapping[tuple[int, ...], tuple[Carrier | None, str | None]]) -> Plan:
    """`plan` with these collectives, named by their parts, on groups: one for all of the same actors in one order of ranks.

    On a group nobody combines a slice for the others, so the channels for that go. Streams are given later.

    Args:
        over: what carries the group, and why there is one.

    Raises:
        CompileError: the plan has groups already.
    """
    if not over:
        return plan
    if plan.groups:
        remedy = "place all collectives in one call"
        raise CompileError(f"plan {plan.name!r}, {plan.groups[0]}: there are groups already; {remedy}", remedy=remedy)
    groups: dict[tuple[tuple[int, ...], Carrier | None], Group] = {}
    of: dict[tuple[int, ...], int] = {}
    gone: set[int] = set()
    for actor in plan.actors:
        for action in actor.actions:
            if not isinstance(action, Collective) or action.parts not in over:
                continue
            gone.update(action.slices)
            backend, because = over[action.parts]
            ranks = tuple(plan.channels[channel].writer for channel in action.parts)
            group = groups.setdefault((ranks, backend), Group(len(groups), ranks, backend, because))
            of[action.parts] = group.id
    # `lower` puts the channels of collectives last, so those of values keep their numbers.
    numbers = {channel.id: place for place, channel in enumerate(c for c in plan.channels if c.id not in gone)}

    def placed(actor: ActorPlan) -> ActorPlan:
        actions = []
        for action in actor.actions:
            if isinstance(action, Collective):
                group = of.get(action.parts)
                slices = () if group is not None else _renamed(action.slices, numbers)
                action = replace(action, parts=_renamed(action.parts, numbers), slices=slices, group=group)
            actions.append(action)
        return replace(actor, actions=tuple(actions))

    return replace(
        plan,
        channels=tuple(replace(channel, id=numbers[channel.id]) for channel in plan.channels if channel.id in numbers),
        actors=tuple(map(placed, plan.actors)),
        groups=tuple(groups.values()),
    )


def _renamed(channels: Iterable[int], numbers: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(numbers[channel] for channel in channels)
