"""Hints of a graph in its plan: what goes from device to device, over what, why not, and what is refused.

`python -m tests.unit.test_plan_devices` writes the golden file anew, for review by eye.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycomm.errors import CompileError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allreduce
from raycomm.graph.model import Graph
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.options import StreamPolicy
from raycomm.plan.actions import Plan
from raycomm.plan.devices import on_devices
from raycomm.plan.lowering import lower
from raycomm.plan.overlap import overlap
from raycomm.plan.placement import Transport
from raycomm.plan.places import NO_GPU, Missing, Place, no_cupy, no_nccl
from raycomm.plan.text import parse_plan
from raycomm.plan.transfer import Backend, Send
from raycomm.plan.verify import verify
from raycomm.testing.simulated import simulate
from tests.unit.stub_actors import actor

ON_GPUS = {index: Place.gpu(f"cuda:{index - 1}", f"host/{index - 1}") for index in range(1, 9)}
NO_CUPY = Place("cuda:0", "host/0", no_cupy(13))


def planned(graph: Graph, places: dict[int, Place], **options: Any) -> Plan:
    """The plan, which is verified and has a text that reads back."""
    plan = on_devices(lower(graph, "hinted"), graph, places, **options)
    verify(plan)
    assert parse_plan(plan.to_text()) == plan
    return plan


def lines(plan: Plan, *kinds: str) -> list[str]:
    return [line.strip() for line in plan.to_text().splitlines() if line.split()[0] in kinds]


def pair(transport: object = "auto", device: str = "default", **promises: bool) -> Graph:
    """W1 makes a value for W2, with a hint."""
    value = bind(actor("W1").forward, InputNode()).with_tensor_transport(transport, device, **promises)
    return build(bind(actor("W2").forward, value))


@pytest.mark.parametrize("transport", ["nccl", "accelerator"])
def test_a_value_goes_from_gpu_to_gpu(transport: str) -> None:
    plan = planned(pair(transport, _static_shape=True, _direct_return=True), ON_GPUS)
    assert lines(plan, "channel", "link", "streams", "send") == [
        'channel 0 "input" 0 -> 1',
        'channel 1 "W1.forward#0" 1 -> 2 transport device hint nccl static_shape yes direct_return yes',
        'channel 2 "W2.forward#1" 2 -> 0',
        "link 0 1 -> 2 over nccl",
        "streams 1 link",
        "streams 2 link",
        "send 1 from r1 on link 0 stream 1",
    ]


def test_a_plan_without_hints_is_the_one_that_lower_makes() -> None:
    graph = build(bind(actor("W2").forward, bind(actor("W1").forward, InputNode())))
    plan = lower(graph, "plain")
    assert on_devices(plan, graph, ON_GPUS) == plan == on_devices(plan, graph, {})


LAPTOP = Place.cpu()
AUTO = [
    ({}, "default", "transport device hint auto because", "all its actors have devices that nccl joins"),
    ({2: LAPTOP}, "default", "hint auto because", "actor W2: it has no GPU"),
    ({1: NO_CUPY}, "default", "hint auto because", "actor W1: cupy, which NCCL is used through, is not installed there"),
    ({1: Place("cuda:0", "0", no_nccl(12))}, "default", "hint auto because", "actor W1: cupy finds no NCCL there"),
    (
        {2: Place.gpu("cuda:0", "host/0")},
        "default",
        "hint auto because",
        "actors W1 and W2 share cuda:0, where NCCL takes one rank",
    ),
    ({}, "cpu", "hint auto device cpu because", "device 'cpu' asks for host memory"),
    ({}, "cuda", "transport device hint auto device gpu because", "all its actors have devices that nccl joins"),
    (
        {2: Place.simulated("simulated:1")},
        "default",
        "hint auto because",
        "actor W1 uses nccl and actor W2 simulated, which do not join",
    ),
]


@pytest.mark.parametrize(("places", "device", "words", "because"), AUTO)
def test_auto_says_what_it_picked_and_why(places: dict[int, Place], device: str, words: str, because: str) -> None:
    plan = planned(pair("auto", device, _static_shape=True), ON_GPUS | places)
    words = words.replace("because", "static_shape yes because") if "transport device" in words else words
    assert lines(plan, "channel")[1] == f'channel 1 "W1.forward#0" 1 -> 2 {words} "{because}"'
    assert bool(plan.links) == ("transport device" in words)


def test_nothing_known_is_nothing_there() -> None:
    plan = planned(pair("auto"), {})
    assert lines(plan, "channel")[1].endswith('because "actor W1: nothing is known of its devices"')


def test_what_the_driver_reads_stays_on_shared_memory() -> None:
    for transport in ("nccl", "auto"):
        first = bind(actor("W1").forward, InputNode()).with_tensor_transport(transport, _static_shape=True)
        plan = planned(build(MultiOutputNode([bind(actor("W2").forward, first), first])), ON_GPUS)
        reason = ' because "all its actors have devices that nccl joins"' if transport == "auto" else ""
        assert lines(plan, "channel") == [
            'channel 0 "input" 0 -> 1',
            f'channel 1 "W1.forward#0" 1 -> 2 transport device hint {transport} static_shape yes{reason}',
            'channel 2 "W2.forward#1" 2 -> 0',
            f'channel 3 "W1.forward#0" 1 -> 0 hint {transport} because "the driver has no device"',
        ]
    last = bind(actor("W2").forward, bind(actor("W1").forward, InputNode().with_tensor_transport())).with_tensor_transport()
    plan = planned(build(last), ON_GPUS)
    assert [line.partition(" hint ")[2] for line in lines(plan, "channel")] == [
        'auto because "the driver has no device"',
        "",
        'auto because "the driver has no device"',
    ]


def test_several_readers_get_a_value_in_one_operation() -> None:
    value = bind(actor("W1").forward, InputNode()).with_tensor_transport("nccl")
    readers = [bind(actor(name).forward, value) for name in ("W2", "W3")]
    last = bind(actor("W1").join, *readers, value)
    plan = planned(build(last), ON_GPUS)
    assert [str(link) for link in plan.links] == ["link 0 1 -> 2, 3 over nccl"]
    assert sum(entry.transport is Transport.DEVICE for entry in plan.channels) == 1
    # Readers that share a device cannot be ranks of one communicator, so each has a transfer of its own.
    shared = planned(build(last), ON_GPUS | {3: Place.gpu("cuda:0", ON_GPUS[2].hardware)})
    assert [str(link) for link in shared.links] == ["link 0 1 -> 2 over nccl", "link 1 1 -> 3 over nccl"]
    assert sum(entry.transport is Transport.DEVICE for entry in shared.channels) == 2
    # One reader on the CPU keeps the value of all on shared memory.
    places = ON_GPUS | {3: LAPTOP}
    with pytest.raises(CompileError, match="actor W3: it has no GPU"):
        planned(build(last), places)
    value.with_tensor_transport("auto")
    assert planned(build(last), places).links == ()


def test_back_ends_have_links_of_their_own() -> None:
    """CPU tensors over gloo beside GPU tensors over NCCL, between the same two actors."""
    one, two = bind(actor("W1").split, InputNode())
    one.with_tensor_transport("nccl")
    two.with_tensor_transport("gloo", "cpu")
    plan = planned(build(bind(actor("W2").join, one, two)), ON_GPUS)
    assert [str(link) for link in plan.links] == ["link 0 1 -> 2 over nccl", "link 1 1 -> 2 over gloo"]
    assert len({action.stream for action in plan.actors[0].actions if isinstance(action, Send)}) == 2


def test_gloo_needs_no_gpu() -> None:
    plan = planned(pair("gloo"), {1: LAPTOP, 2: LAPTOP})
    assert plan.links[0].over is Backend.GLOO
    assert lines(plan, "channel")[1].endswith("transport device hint gloo")


def test_simulated_devices_carry_everything() -> None:
    places = {1: Place.simulated("simulated:0"), 2: Place.simulated("simulated:1")}
    for transport in ("nccl", "auto", "gloo"):
        plan = planned(pair(transport), places)
        assert plan.links[0].over is Backend.SIMULATED
        assert len(simulate(plan, 3).results) == 3


def test_a_hint_where_nothing_leaves_the_actor_asks_for_nothing() -> None:
    w = actor("W1")
    graph = build(bind(w.forward, bind(w.forward, InputNode()).with_tensor_transport("nccl", "cuda")))
    assert planned(graph, {}) == lower(graph, "hinted")


def test_results_of_collectives_move_too() -> None:
    w1, w2, w3 = actor("W1"), actor("W2"), actor("W3")
    inp = InputNode()
    one, two = allreduce([bind(w1.forward, inp), bind(w2.forward, inp)])
    one.with_tensor_transport("nccl")
    plan = planned(build(bind(w3.join, one, two)), ON_GPUS)
    assert [str(link) for link in plan.links] == ["link 0 1 -> 3 over nccl"]
    assert simulate(plan, 2).results


def refused(graph: Graph, places: dict[int, Place], *, node: str, says: str, remedy: str, argument: str = "transport") -> None:
    with pytest.raises(CompileError, match=re.escape(says)) as caught:
        planned(graph, places)
    error = caught.value
    assert (error.node, error.argument) == (node, argument)
    assert remedy in str(error.remedy)
    assert str(error).endswith(str(error.remedy))
    assert f"of node {node}: " in str(error)


def test_nccl_says_what_is_missing_and_where() -> None:
    name = "W1.forward#0"
    refused(
        pair("nccl"),
        ON_GPUS | {2: LAPTOP},
        node=name,
        says="transport 'nccl' of node W1.forward#0: actor W2: it has no GPU",
        remedy="num_gpus=1",
    )
    refused(
        pair("nccl"),
        ON_GPUS | {1: NO_CUPY},
        node=name,
        says="actor W1: cupy, which NCCL is used",
        remedy="pip install cupy-cuda13x",
    )
    without = Place("cuda:1", "host/1", no_nccl(12))
    refused(
        pair("nccl"),
        ON_GPUS | {2: without},
        node=name,
        says="actor W2: cupy finds no NCCL",
        remedy="pip install nvidia-nccl-cu12",
    )
    both = {1: NO_CUPY, 2: LAPTOP}
    refused(
        pair("nccl"), both, node=name, says="there, and actor W2: it has no GPU; pip install cupy-cuda13x; ", remedy="num_gpus=1"
    )
    refused(pair("accelerator"), {}, node=name, says="actor W1: nothing is known of its devices", remedy="use 'auto' or 'shm'")
    shared = ON_GPUS | {2: Place.gpu("cuda:0", "host/0")}
    refused(pair("nccl"), shared, node=name, says="actors W1 and W2 share cuda:0", remedy="NCCL_MULTI_RANK_GPU_ENABLE=1")
    mixed = ON_GPUS | {1: Place.simulated("simulated:0")}
    refused(pair("nccl"), mixed, node=name, says="actor W1 uses simulated and actor W2 nccl", remedy="use 'auto' or 'shm'")


def test_gloo_says_what_is_missing_and_where() -> None:
    places = {1: LAPTOP, 2: Place.without(Missing("torch is not installed there", "pip install torch"))}
    refused(pair("gloo"), places, node="W1.forward#0", says="actor W2: torch is not", remedy="pip install torch")


@pytest.mark.parametrize("transport", ["nccl", "gloo"])
def test_the_driver_takes_no_part(transport: str) -> None:
    last = bind(actor("W1").forward, InputNode())
    last.with_tensor_transport(transport)
    says = f"transport '{transport}' of node W1.forward#0: this value is read by the driver only, and the driver has no device"
    refused(build(last), ON_GPUS, node="W1.forward#0", says=says, remedy="use 'auto' or 'shm'")
    whole = InputNode().with_tensor_transport(transport)
    graph = build(bind(actor("W1").forward, whole.key))
    refused(graph, ON_GPUS, node="input.key", says="comes from the driver", remedy="use 'auto' or 'shm'")


@pytest.mark.parametrize("transport", ["shm", "auto"])
def test_a_gpu_at_the_reader_must_be_there(transport: str) -> None:
    refused(
        pair(transport, "gpu"),
        {1: LAPTOP, 2: LAPTOP},
        node="W1.forward#0",
        argument="device",
        remedy=NO_GPU.remedy,
        says="device 'gpu' of node W1.forward#0: actor W2: it has no GPU",
    )
    last = bind(actor("W1").forward, InputNode())
    refused(
        build(last.with_tensor_transport(transport, "cuda")),
        ON_GPUS,
        node="W1.forward#0",
        argument="device",
        remedy="'shm'",
        says="device 'gpu' of node W1.forward#0: this value is read by the driver only",
    )
    plan = planned(pair(transport, "gpu"), {1: LAPTOP, 2: NO_CUPY})  # from the CPU to the reader's GPU, through shared memory
    assert "hint " + transport + " device gpu" in lines(plan, "channel")[1]
    assert plan.links == ()
    graph = build(bind(actor("W1").forward, InputNode().with_tensor_transport(transport, "gpu")))
    assert " device gpu" in lines(planned(graph, ON_GPUS), "channel")[0]


def test_streams_follow_the_policy_and_its_limit() -> None:
    hub = actor("Hub")
    first = bind(hub.forward, InputNode()).with_tensor_transport("nccl")
    leaves = [bind(actor(f"L{index}").forward, first).with_tensor_transport("nccl") for index in range(4)]
    graph = build(bind(hub.join, *leaves))
    assert lines(planned(graph, ON_GPUS), "link")[0] == "link 0 1 -> 2, 3, 4, 5 over nccl"
    for policy in StreamPolicy:
        plan = planned(graph, ON_GPUS, policy=policy, max_links=8)
        assert {entry.policy for entry in plan.streams} == {policy}
    assert "streams 1 direction instead of link 5 links limit 4" in lines(planned(graph, ON_GPUS, max_links=4), "streams")
    in_order = planned(graph, ON_GPUS, early_receives=False)
    assert overlap(in_order) == planned(graph, ON_GPUS)


def test_options_of_an_edge_reach_its_transfers() -> None:
    """`sender_keeps` and `streams` hold for all readers of the value, and only where it moves between devices."""
    a, b, c = actor("A"), actor("B"), actor("C")
    first = bind(a.forward, InputNode()).with_tensor_transport("nccl")
    first.with_channel_options(sender_keeps=True, streams=(5, 0))
    second = bind(a.forward, first).with_channel_options(sender_keeps=True, streams=(1, 1))
    last = MultiOutputNode([bind(b.join, first, second), bind(c.forward, first), first])
    plan = planned(build(last), ON_GPUS)
    assert lines(plan, "channel", "streams", "send") == [
        'channel 0 "input" 0 -> 1',
        'channel 1 "A.forward#0" 1 -> 2, 3 transport device sender_keeps yes hint nccl',
        'channel 2 "A.forward#1" 1 -> 2',
        'channel 3 "B.join#2" 2 -> 0',
        'channel 4 "C.forward#3" 3 -> 0',
        'channel 5 "A.forward#0" 1 -> 0 hint nccl because "the driver has no device"',
        "streams 1 link given 1",
        "streams 2 link given 1",
        "streams 3 link given 1",
        "send 1 from r1 on link 0 stream 5 beside",
    ]


@st.composite
def hinted_graphs(draw: st.DrawFn) -> Graph:
    """Calls of a few actors on what the driver and earlier calls gave. Each has a hint, or none; results have none that devices
    are needed for, since only the driver reads them."""
    workers = [actor(f"W{index}") for index in range(draw(st.integers(2, 4)))]
    values: list[Any] = [InputNode()]
    used: set[int] = set()
    for _ in range(draw(st.integers(2, 10))):
        places = draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3, unique=True))
        used.update(places)
        values.append(bind(draw(st.sampled_from(workers)).join, *(values[place] for place in places)))
    for place, value in enumerate(values):
        at_the_driver = place == 0 or place not in used
        hint = draw(st.sampled_from([None, "auto", "shm"] if at_the_driver else [None, "auto", "shm", "nccl", "gloo"]))
        if hint is not None:
            value.with_channel_options(
                sender_keeps=draw(st.booleans()), streams=draw(st.sampled_from([None, (0, 0), (1, 2), (3, 3)]))
            )
            value.with_tensor_transport(hint, draw(st.sampled_from(["default", "cpu"])) if hint in ("auto", "shm") else "default")
    return build(MultiOutputNode([value for place, value in enumerate(values) if place and place not in used]))


@settings(max_examples=150, deadline=None)
@given(hinted_graphs(), st.sampled_from(StreamPolicy), st.booleans(), st.integers(2, 6), st.sampled_from([None, 1, 2, 3]))
def test_hints_change_how_values_move_and_nothing_else(
    graph: Graph, policy: StreamPolicy, early_receives: bool, max_links: int, hardware_queues: int | None
) -> None:
    plain = lower(graph, "hinted")
    options = {"max_links": max_links, "hardware_queues": hardware_queues, "early_receives": early_receives}
    plan = planned(graph, ON_GPUS, policy=policy, **options)
    verify(plan, hardware_queues=hardware_queues)  # one order of everything: no policy and no queues make a circle
    assert simulate(plan, 2).results == simulate(plain, 2).results
    for entry in plan.channels:
        hint = None if entry.tensors is None else entry.tensors.hint
        if hint in ("nccl", "gloo"):
            assert entry.transport is Transport.DEVICE
        if hint in ("shm", None):
            assert entry.transport is Transport.SHARED_MEMORY
        if hint == "auto":
            assert entry.tensors is not None
            assert entry.tensors.because


def mixed() -> Graph:
    """A and B have a GPU, C has none, and the driver looks on."""
    a, b, c = actor("A"), actor("B"), actor("C")
    first = bind(a.forward, InputNode().with_tensor_transport("shm", "cuda")).with_tensor_transport("nccl", _static_shape=True)
    second = bind(b.forward, first).with_tensor_transport("auto", "cpu")
    own, crossed = bind(a.split, first)
    crossed.with_tensor_transport("gloo", _direct_return=True)
    own.with_tensor_transport("auto")
    back = bind(b.scale, own).with_tensor_transport("auto")
    return build(MultiOutputNode([bind(c.join, second, crossed), bind(a.join, back, own), first]))


MIXED = {1: Place.gpu("cuda:0", "host/0"), 2: Place.gpu("cuda:1", "host/1"), 3: LAPTOP}
GOLDEN = Path(__file__).parent / "plans" / "mixed_hints.plan"


def test_golden_file() -> None:
    plan = planned(mixed(), MIXED)
    assert plan.to_text() == GOLDEN.read_text()
    assert simulate(plan, 2, constants=(1,)).results == simulate(lower(mixed(), "plain"), 2, constants=(1,)).results


def test_promises_are_for_channels_between_devices() -> None:
    text = planned(pair("shm"), ON_GPUS).to_text()
    with pytest.raises(CompileError, match="static_shape and direct_return are for a channel between devices"):
        verify(parse_plan(text.replace("hint shm", "hint shm static_shape yes")))


if __name__ == "__main__":
    GOLDEN.write_text(planned(mixed(), MIXED).to_text())
