"""The verdict on a plan is what really happens: random graphs, streams, slots and orders of actions, on simulated devices."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from raycomm.errors import DeadlockError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allreduce
from raycomm.graph.model import Graph
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.options import StreamPolicy
from raycomm.plan.actions import Action, ActorPlan, Collective, Compute, Plan, Read, Write
from raycomm.plan.device_collectives import on_groups
from raycomm.plan.device_edges import place_on_device
from raycomm.plan.lowering import lower
from raycomm.plan.overlap import overlap
from raycomm.plan.registers import filled_and_used, pack, spread
from raycomm.plan.streams import assign_streams
from raycomm.plan.text import parse_plan
from raycomm.plan.transfer import Recv, Send
from raycomm.plan.verify import verify
from raycomm.testing.simulated import SimulatedHang, simulate
from tests.unit.sample_device_graphs import on_device
from tests.unit.stub_actors import actor

CONSTANTS = tuple(range(8))
SEEDS_PER_TEST = 500


def random_graph(rng: random.Random, collectives: float = 0.08) -> Graph:
    """Up to a dozen calls on two to four actors, each taking what a few of the calls before it made."""
    workers = [actor(f"W{index}") for index in range(rng.randint(2, 4))]
    source = InputNode()
    made: list[Any] = [bind(worker.forward, source) for worker in workers if rng.random() < 0.7] or [
        bind(workers[0].forward, source)
    ]
    for _ in range(rng.randint(1, 8)):
        if rng.random() < collectives:
            made += allreduce([bind(worker.forward, rng.choice(made)) for worker in rng.sample(workers, len(workers))])
            continue
        if rng.random() < 0.1:
            made += bind(rng.choice(workers).split, rng.choice(made))
            continue
        given = rng.sample(made, min(len(made), rng.randint(1, 3)))
        made.append(bind(rng.choice(workers).join, *given))
    return build(MultiOutputNode(made))


def random_plan(rng: random.Random, exchanged: bool = False) -> tuple[Graph, Plan]:
    """The plan of a random graph, some edges on devices with streams of all kinds; free of circles of waits as it is.

    `exchanged`: also edges from collectives on the host, whose results are there: the check counts transfers that never run.
    """
    grouped = rng.random() < 0.5
    graph = random_graph(rng, 0.3 if grouped else 0.08)
    plan = lower(graph, "random")
    if grouped:
        met = {action.parts for entry in plan.actors for action in entry.actions if isinstance(action, Collective)}
        plan = on_groups(plan, {parts: (None, None) for parts in sorted(met) if rng.random() < 0.8})
    on_group = {action.node for entry in plan.actors for action in entry.actions if getattr(action, "group", None) is not None}
    share = rng.choice((0.6, 1.0))
    devices = [
        channel.id
        for channel in plan.channels
        if channel.writer
        and channel.readers != (0,)
        and not channel.value.startswith(("part of", "slice of"))
        and (exchanged or "allreduce" not in channel.value or int(channel.value.rpartition("#")[2]) in on_group)
        and rng.random() < share
    ]
    keeps = [channel for channel in devices if rng.random() < 0.5]
    plan = place_on_device(plan, devices, sender_keeps=keeps, broadcast=[channel for channel in devices if rng.random() < 0.5])
    given = {}
    if rng.random() < 0.3:
        sends = [action.channel for entry in plan.actors for action in entry.actions if isinstance(action, Send)]
        share = rng.choice((0.5, 1.0))
        given = {channel: (rng.choice((0, 0, 1, 2)), rng.choice((0, 0, 1, 2))) for channel in sends if rng.random() < share}
    plan = assign_streams(plan, rng.choice(list(StreamPolicy)), max_links=rng.choice((2, 6)), given=given)
    return graph, overlap(plan) if rng.random() < 0.5 else plan


def permuted(rng: random.Random, plan: Plan, moves: int) -> Plan:
    """`plan` with a few actions of each actor at other places, as somebody could have written it by hand."""
    actors: list[ActorPlan] = []
    for entry in plan.actors:
        actions = list(spread(entry))
        for _ in range(moves):
            changed = list(actions)
            changed.insert(rng.randrange(len(actions)), changed.pop(rng.randrange(len(actions))))
            if is_consistent(changed):
                actions = changed
        actors.append(pack(entry.process, actions) if actions != list(spread(entry)) else entry)
    return replace(plan, actors=tuple(actors))


def is_consistent(actions: list[Action]) -> bool:
    """Whether every value is made before it is used, and leaves before the next call, a write with nothing read in between."""
    full: set[int] = set()
    made: tuple[int, ...] = ()
    right_behind = False
    for action in actions:
        filled, used = filled_and_used(action)
        if not full.issuperset(used):
            return False
        full.update(filled)
        if isinstance(action, (Compute, Collective)):
            made, right_behind = action.outputs, True
        elif isinstance(action, Send) and action.register not in made:
            return False
        elif isinstance(action, Write):
            if not right_behind or not set(action.registers) <= set(made):
                return False
            right_behind = False
        elif isinstance(action, Read):
            right_behind = False
    return True


def verdict(plan: Plan, slots: int, queues: int | None) -> DeadlockError | None:
    try:
        verify(plan, slots=slots, hardware_queues=queues)
    except DeadlockError as error:
        return error
    return None


def hang(plan: Plan, slots: int, queues: int | None, seed: int) -> SimulatedHang | None:
    try:
        simulate(plan, 3, constants=CONSTANTS, slots=slots, hardware_queues=queues, seed=seed)
    except SimulatedHang as error:
        return error
    return None


@pytest.mark.parametrize("block", range(6))
def test_verdict_is_what_happens(block: int) -> None:
    seen = {True: 0, False: 0}
    for seed in range(block * SEEDS_PER_TEST, (block + 1) * SEEDS_PER_TEST):
        rng = random.Random(seed)
        _, plan = random_plan(rng)
        plan = permuted(rng, plan, rng.choice((0, 1, 2, 4, 8)))
        if rng.random() < 0.1:
            channels = list(plan.channels)
            place = rng.randrange(len(channels))
            channels[place] = replace(channels[place], slots=rng.randint(0, 2))
            plan = replace(plan, channels=tuple(channels))
        slots, queues = rng.choice((1, 1, 2, 3)), rng.choice((None, None, None, 1, 2, 3, 8))
        expected, happened = verdict(plan, slots, queues), hang(plan, slots, queues, seed)
        assert (expected is None) == (happened is None), f"seed {seed}: verdict {expected}, but {happened}\n{plan}"
        seen[expected is None] += 1
    assert min(seen.values()) > SEEDS_PER_TEST / 20, seen


def test_plans_of_the_passes_never_deadlock_and_compute_the_same() -> None:
    for seed in range(SEEDS_PER_TEST):
        rng = random.Random(seed)
        graph, plan = random_plan(rng, exchanged=True)
        assert parse_plan(plan.to_text()) == plan
        verify(plan)
        expected = simulate(lower(graph, "random"), 3, constants=CONSTANTS).results
        assert simulate(plan, 3, constants=CONSTANTS, slots=1, seed=seed).results == expected, f"seed {seed}\n{plan}"


def test_registers_given_anew_are_those_of_lowering() -> None:
    """Passes take registers apart and give them again, so an actor that a pass leaves alone keeps its text."""
    for seed in range(SEEDS_PER_TEST):
        for entry in lower(random_graph(random.Random(seed)), "random").actors:
            assert pack(entry.process, spread(entry)) == entry, f"seed {seed}"


def test_links_within_the_limit_never_share_a_queue() -> None:
    """With two queues more than links, for computations and copies, the queues of the device cannot make a plan hang."""
    fell_back = 0
    for seed in range(SEEDS_PER_TEST):
        rng = random.Random(seed)
        limit = rng.randint(2, 6)
        graph = random_graph(rng, collectives=0.0)
        plan = assign_streams(on_device(graph, "random", sender_keeps=rng.random() < 0.5), max_links=limit)
        plan = overlap(plan) if rng.random() < 0.5 else plan
        fell_back += any(entry.instead_of for entry in plan.streams)
        verify(plan, hardware_queues=limit + 2)
        simulate(plan, 2, constants=CONSTANTS, hardware_queues=limit + 2, seed=seed)
    assert fell_back > SEEDS_PER_TEST / 10


def grouped_plan(rng: random.Random) -> Plan:
    """Values to other actors and collectives on groups, few of which need each other: what makes them wait is how they share
    streams, and the order of launch."""
    workers = [actor(f"W{index}") for index in range(rng.randint(2, 3))]
    source = InputNode()
    made: list[Any] = []
    sent: list[tuple[Any, Any]] = []  # what one actor makes, and who uses it in the end
    for _ in range(rng.randint(2, 5)):
        if rng.random() < 0.5:
            ranks = rng.sample(workers, len(workers))
            reduced = allreduce([bind(worker.forward, source) for worker in ranks])
            made += reduced
            if rng.random() < 0.5:
                sent.append((reduced[0], ranks[1]))
        else:
            first, second = rng.sample(workers, 2)
            sent.append((bind(first.forward, source), second))
    made += [bind(reader.join, value) for value, reader in sent]
    if rng.random() < 0.5:
        made.append(bind(rng.choice(workers).join, rng.choice(made)))
    plan = lower(build(MultiOutputNode(made)), "grouped")
    met = {action.parts for entry in plan.actors for action in entry.actions if isinstance(action, Collective)}
    plan = on_groups(plan, dict.fromkeys(sorted(met), (None, None)))
    devices = [
        channel.id for channel in plan.channels if channel.writer and channel.readers != (0,) and "part of" not in channel.value
    ]
    keeps = rng.random() < 0.8
    plan = assign_streams(place_on_device(plan, devices, sender_keeps=devices if keeps else ()), rng.choice(list(StreamPolicy)))

    by_hand = rng.random() < 0.5

    def changed(action: Action) -> Action:
        if by_hand and (isinstance(action, (Send, Recv)) or (isinstance(action, Collective) and action.group is not None)):
            action = replace(action, stream=rng.randint(1, 3))
        return replace(action, beside=keeps) if isinstance(action, Send) else action

    actors = [replace(entry, actions=tuple(map(changed, entry.actions))) for entry in plan.actors]
    return replace(plan, actors=tuple(actors))


def received_later(rng: random.Random, plan: Plan) -> Plan:
    """`plan` with some receives launched later, as far as their values can wait."""
    actors: list[ActorPlan] = []
    for entry in plan.actors:
        actions = list(spread(entry))
        for action in [action for action in actions if isinstance(action, Recv) and rng.random() < 0.7]:
            place = actions.index(action)
            later = [*actions[:place], *actions[place + 1 :]]
            for target in range(len(actions) - 1, place, -1):
                if is_consistent(changed := [*later[:target], action, *later[target:]]):
                    actions = changed
                    break
        actors.append(pack(entry.process, actions))
    return replace(plan, actors=tuple(actors))


@pytest.mark.parametrize("block", range(2))
def test_verdict_on_groups_is_what_happens(block: int) -> None:
    seen = {True: 0, False: 0}
    by_group = 0
    for seed in range(block * SEEDS_PER_TEST, (block + 1) * SEEDS_PER_TEST):
        rng = random.Random(seed)
        plan = received_later(rng, grouped_plan(rng))
        queues = rng.choice((None, None, 1, 2, 3))
        expected, happened = verdict(plan, 1, queues), hang(plan, 1, queues, seed)
        assert (expected is None) == (happened is None), f"seed {seed}: verdict {expected}, but {happened}\n{plan}"
        seen[expected is None] += 1
        by_group += expected is not None and any("on group" in step and " with " in step for step in expected.cycle)
    assert min(seen.values()) > SEEDS_PER_TEST / 20, seen
    assert by_group > SEEDS_PER_TEST / 20
