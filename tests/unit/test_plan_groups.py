"""Collectives on groups in plans: text, rules, where they are placed, and two circles of waits that are easily overlooked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raycomm.errors import CompileError, DeadlockError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allgather, allreduce
from raycomm.graph.model import Graph
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.options import StreamPolicy
from raycomm.plan.actions import Collective, Plan
from raycomm.plan.device_collectives import on_groups
from raycomm.plan.device_edges import place_on_device
from raycomm.plan.devices import on_devices
from raycomm.plan.lowering import lower
from raycomm.plan.places import Missing, Place
from raycomm.plan.streams import assign_streams
from raycomm.plan.text import parse_plan
from raycomm.plan.transfer import Backend, Recv, Send
from raycomm.plan.verify import verify
from raycomm.testing.simulated import SimulatedHang, simulate
from tests.unit.stub_actors import actor

GPUS = {process: Place.gpu("cuda:0", f"GPU-{process}") for process in range(1, 6)}


def reduced(world: int, communicator: Any = None, tensors: int = 1) -> Graph:
    """Every actor makes tensors, all are combined, twice in one order of ranks and once in another, and go to the driver."""
    workers = [actor(f"W{index}") for index in range(world)]
    with InputNode() as x:
        rows = [[bind(worker.forward, x) for worker in workers] for _ in range(tensors)]
        first = allreduce(rows if tensors > 1 else rows[0], communicator=communicator)
        flat = [node for row in first for node in row] if tensors > 1 else first
        second = allgather([bind(worker.forward, node) for worker, node in zip(workers, flat, strict=False)], communicator)
        third = allgather([bind(worker.forward, x) for worker in workers[::-1]], communicator)
    return build(MultiOutputNode([*flat, *second, *third]))


def collectives(plan: Plan) -> list[Collective]:
    return [action for entry in plan.actors for action in entry.actions if isinstance(action, Collective)]


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("policy", list(StreamPolicy))
@pytest.mark.parametrize("tensors", [1, 2])
def test_they_are_placed_and_mean_the_same(world: int, policy: StreamPolicy, tensors: int) -> None:
    graph = reduced(world, tensors=tensors)
    plan = on_devices(lower(graph, "grouped"), graph, GPUS, policy=policy)
    verify(plan)
    assert parse_plan(plan.to_text()) == plan
    assert [group.over for group in plan.groups] == [Backend.NCCL] * 2  # one for each order of ranks
    assert {action.group for action in collectives(plan)} == {0, 1}
    assert not any(action.slices for action in collectives(plan))
    assert 'because "all its actors have devices that nccl joins"' in str(plan)
    assert simulate(plan, 3).results == simulate(lower(graph, "grouped"), 3).results


@pytest.mark.parametrize("communicator", ["shm", None, "nccl"])
def test_where_one_actor_has_no_gpu(communicator: str | None) -> None:
    graph = reduced(3, communicator)
    places = {**GPUS, 2: Place.cpu()}
    if communicator == "nccl":
        wanted = r"communicator 'nccl' of node W0\.allreduce#3: actor W1: it has no GPU; create it with num_gpus=1"
        with pytest.raises(CompileError, match=wanted) as caught:
            on_devices(lower(graph, "grouped"), graph, places)
        assert caught.value.argument == "communicator"
        return
    assert on_devices(lower(graph, "grouped"), graph, places) == lower(graph, "grouped")


def test_ranks_that_share_a_gpu_are_named() -> None:
    graph = reduced(3, "nccl")
    places = {**GPUS, 3: Place.gpu("cuda:0", "GPU-1")}
    with pytest.raises(CompileError, match="actors W0 and W2 share cuda:0, where NCCL takes one rank"):
        on_devices(lower(graph, "grouped"), graph, places)


def test_gloo_needs_no_gpu() -> None:
    graph = reduced(3, "gloo")
    plan = on_devices(lower(graph, "grouped"), graph, {process: Place.cpu() for process in (1, 2, 3)})
    assert {group.over for group in plan.groups} == {Backend.GLOO}
    missing = Place("cuda:0", "GPU", Backend.NCCL, Missing("its torch is built without gloo", "use 'shm'"))
    with pytest.raises(CompileError, match="actor W0: its torch is built without gloo"):
        on_devices(lower(graph, "grouped"), graph, {**GPUS, 1: missing})


def test_slices_of_others_stay() -> None:
    """Channels are numbered anew where those of a collective on a group go."""
    workers = [actor(f"W{index}") for index in range(4)]
    with InputNode() as x:
        made = [bind(worker.forward, x) for worker in workers]
        one, other = allreduce(made, communicator="nccl"), allreduce([bind(w.forward, x) for w in workers], communicator="shm")
    graph = build(MultiOutputNode([*one, *other]))
    plan = on_devices(lower(graph, "both"), graph, GPUS)
    verify(plan)
    assert [bool(action.slices) for action in collectives(plan)] == [False, True] * 4
    assert [channel.id for channel in plan.channels] == list(range(len(plan.channels)))
    assert simulate(plan, 2).results == simulate(lower(graph, "both"), 2).results


def changed(plan: Plan, place: int, **changes: Any) -> Plan:
    """With the collective of one actor changed."""
    entry = plan.actors[place]
    at = next(number for number, action in enumerate(entry.actions) if isinstance(action, Collective))
    actions = [*entry.actions[:at], replace(entry.actions[at], **changes), *entry.actions[at + 1 :]]  # type: ignore[type-var]
    return replace(plan, actors=(*plan.actors[:place], replace(entry, actions=tuple(actions)), *plan.actors[place + 1 :]))


@pytest.mark.parametrize(
    ("places", "change", "match"),
    [
        ((0, 1, 2), {"group": 7}, "group 7 does not exist"),
        ((0, 1, 2), {"group": 1}, "group 1 does not join its actors, in order of rank"),
        ((0, 1, 2), {"group": None}, "it has a stream, and no group"),
        ((1,), {"group": None, "stream": None}, "it differs from"),
        ((1,), {"stream": None}, "it has no stream"),
    ],
)
def test_rules(places: tuple[int, ...], change: dict[str, Any], match: str) -> None:
    graph = reduced(3)
    plan = on_devices(lower(graph, "grouped"), graph, GPUS)
    for place in places:
        plan = changed(plan, place, **change)
    with pytest.raises(CompileError, match=match):
        verify(plan)


@pytest.mark.parametrize("processes", [(1,), (1, 1), (0, 1), (1, 9)])
def test_groups_join_two_or_more_actors(processes: tuple[int, ...]) -> None:
    graph = reduced(3)
    plan = on_devices(lower(graph, "grouped"), graph, GPUS)
    with pytest.raises(CompileError, match="does not join two or more actors, each once"):
        verify(replace(plan, groups=(replace(plan.groups[0], processes=processes), plan.groups[1])))


def test_more_links_and_groups_than_queues_fall_back() -> None:
    graph = reduced(2)
    plan = on_devices(lower(graph, "grouped"), graph, GPUS, max_links=2)
    assert "streams 1 link\n" in str(plan)
    workers = [actor(f"W{index}") for index in range(2)]
    with InputNode() as x:
        value = bind(workers[1].forward, x).with_tensor_transport("nccl")
        both = allgather([bind(workers[0].forward, x), bind(workers[1].forward, x)])
        again = allgather([bind(workers[1].forward, x), bind(workers[0].forward, value)])
    graph = build(MultiOutputNode([*both, *again]))
    plan = on_devices(lower(graph, "grouped"), graph, GPUS, max_links=2)
    assert "streams 1 direction instead of link 3 links limit 2" in str(plan)
    verify(plan)


def hand_written(streams: dict[tuple[int, int], int], plan: Plan) -> Plan:
    """With the streams of (place of the actor, place among what it launches); each send goes on beside the next call."""

    def launched(place: int) -> Any:
        count = 0
        for action in plan.actors[place].actions:
            if isinstance(action, (Send, Recv, Collective)):
                action = replace(action, stream=streams.get((place, count), 9))
                count += 1
            yield replace(action, beside=True) if isinstance(action, Send) else action

    actors = [replace(entry, actions=tuple(launched(place))) for place, entry in enumerate(plan.actors)]
    return replace(plan, actors=tuple(actors))


def placed(root: Any) -> Plan:
    plan = lower(build(root), "by hand")
    met = dict.fromkeys(action.parts for action in collectives(plan))
    plan = on_groups(plan, dict.fromkeys(met, (None, None)))
    devices = [channel.id for channel in plan.channels if channel.readers != (0,) and channel.writer]
    devices = [channel for channel in devices if "part of" not in plan.channels[channel].value]
    return assign_streams(place_on_device(plan, devices, sender_keeps=devices))


def received_last(plan: Plan, label: str) -> Plan:
    """With an actor's first receive right before the call that uses it: before its last call."""
    place = next(place for place, entry in enumerate(plan.actors) if entry.process.label == label)
    entry = plan.actors[place]
    recv = next(action for action in entry.actions if isinstance(action, Recv))
    rest = [action for action in entry.actions if action is not recv]
    last = max(at for at, action in enumerate(rest) if hasattr(action, "method"))
    return replace(
        plan,
        actors=(
            *plan.actors[:place],
            replace(entry, actions=(*rest[:last], recv, *rest[last:])),
            *plan.actors[place + 1 :],
        ),
    )


def is_circle(plan: Plan) -> bool:
    """The verdict, which is what happens."""
    try:
        verify(plan)
    except DeadlockError:
        with pytest.raises(SimulatedHang):
            simulate(plan, 3)
        return True
    simulate(plan, 3)
    return False


@pytest.mark.parametrize("apart", [True, False])
def test_a_communicator_runs_its_collectives_in_order_whatever_their_streams(apart: bool) -> None:
    """B: send X and then T1 on one stream, T2 on another. A takes X only after it has used T2, which comes after T1. Nobody else
    waits for T1."""
    a, b = actor("A"), actor("B")
    with InputNode() as x:
        made = bind(b.forward, x)
        first = allreduce([bind(a.forward, x), bind(b.forward, x)])
        second = allreduce([bind(a.forward, x), bind(b.forward, x)])
        used = bind(a.forward, second[0])
        last = bind(a.join, made, used, first[0])
    plan = received_last(placed(MultiOutputNode([second[1], last])), "A")
    names = [entry.process.label for entry in plan.actors]
    streams = {(names.index("B"), 0): 1, (names.index("B"), 1): 2 if apart else 1, (names.index("B"), 2): 3}
    streams |= {(names.index("A"), place): place + 1 for place in range(3)}
    assert is_circle(hand_written(streams, plan)) is not apart


@pytest.mark.parametrize("apart", [True, False])
def test_what_a_collective_gives_is_sent_after_it(apart: bool) -> None:
    """B: send Y and then T on one stream. A sends what T gives to C, which takes Y only after it has used that."""
    a, b, c = actor("A"), actor("B"), actor("C")
    with InputNode() as x:
        made = bind(b.forward, x)
        both = allreduce([bind(a.forward, x), bind(b.forward, x)])
        used = bind(c.forward, both[0])
        last = bind(c.join, made, used)
    plan = received_last(placed(MultiOutputNode([both[1], last])), "C")
    names = [entry.process.label for entry in plan.actors]
    streams = {(names.index("B"), 0): 1, (names.index("B"), 1): 2 if apart else 1}
    streams |= {(names.index("A"), 0): 1, (names.index("A"), 1): 2, (names.index("C"), 0): 1, (names.index("C"), 1): 2}
    assert is_circle(hand_written(streams, plan)) is not apart
