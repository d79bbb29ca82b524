"""Streams of sends and receives, edges on devices, and what is refused of both."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raycomm.errors import CompileError, DeadlockError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allreduce
from raycomm.graph.model import Graph
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.options import StreamPolicy
from raycomm.plan.actions import Plan, Write
from raycomm.plan.device_edges import place_on_device
from raycomm.plan.lowering import lower
from raycomm.plan.overlap import overlap
from raycomm.plan.placement import Transport
from raycomm.plan.streams import DEFAULT_MAX_LINKS, assign_streams
from raycomm.plan.text import parse_plan
from raycomm.plan.transfer import DeviceStreams, Link, Recv, Send
from raycomm.plan.verify import verify
from tests.unit.sample_device_graphs import all_to_all, on_device, skip_connection, tensor_parallel
from tests.unit.stub_actors import actor


def star(leaves: int) -> Graph:
    """A hub with a link to each leaf and one back."""
    hub = actor("Hub")
    first = bind(hub.forward, InputNode())
    back = [bind(actor(f"Leaf{index}").forward, first) for index in range(leaves)]
    return build(bind(hub.join, *back))


def operations(plan: Plan, process: int) -> list[tuple[str, int, int, int | None]]:
    """What actor `process` sends and receives: the verb, channel, link and stream."""
    return [
        ("send" if isinstance(action, Send) else "recv", action.channel, action.link, action.stream)
        for action in plan.actors[process - 1].actions
        if isinstance(action, (Send, Recv))
    ]


def test_policies() -> None:
    placed = on_device(all_to_all(), "all to all")
    assert {stream for process in (1, 2, 3) for *_, stream in operations(placed, process)} == {None}
    linked = assign_streams(placed)
    for process in (1, 2, 3):
        by_link = {(link, stream) for _, _, link, stream in operations(linked, process)}
        assert sorted(stream or 0 for _, stream in by_link) == [1, 2, 3, 4]
        assert len({link for link, _ in by_link}) == 4
    directed = assign_streams(linked, StreamPolicy.DIRECTION)
    for process in (1, 2, 3):
        assert {(verb, stream) for verb, *_, stream in operations(directed, process)} == {("send", 1), ("recv", 2)}
    shared = assign_streams(directed, StreamPolicy.SHARED)
    for process in (1, 2, 3):
        assert {stream for *_, stream in operations(shared, process)} == {1}
    assert [str(entry) for entry in shared.streams] == ["streams 1 shared", "streams 2 shared", "streams 3 shared"]
    assert assign_streams(shared) == linked


def test_too_many_links_at_a_device_fall_back_to_directions_and_the_text_says_so() -> None:
    plan = assign_streams(on_device(star(4), "star"))
    assert {stream for *_, stream in operations(plan, 1)} == {1, 2}
    assert "streams 1 direction instead of link 8 links limit 6\nstreams 2 link\n" in plan.to_text()
    assert plan.streams[0] == DeviceStreams(1, StreamPolicy.DIRECTION, StreamPolicy.LINK, 8, DEFAULT_MAX_LINKS)
    assert parse_plan(plan.to_text()) == plan
    verify(plan)
    enough = assign_streams(plan, max_links=8)
    assert len({stream for *_, stream in operations(enough, 1)}) == 8
    assert enough.streams[0] == DeviceStreams(1, StreamPolicy.LINK)
    assert assign_streams(plan, StreamPolicy.SHARED).streams[0] == DeviceStreams(1, StreamPolicy.SHARED)


def test_given_streams_are_used_and_others_come_after_them() -> None:
    placed = on_device(skip_connection(), "skip connection")
    plan = assign_streams(placed, StreamPolicy.SHARED, given={1: (0, 7), 3: (5, 0)})
    assert operations(plan, 1) == [("send", 1, 0, 0), ("send", 5, 1, 6), ("send", 3, 1, 5)]
    assert operations(plan, 2) == [("recv", 1, 0, 7), ("send", 2, 2, 8)]
    assert {(channel, stream) for _, channel, _, stream in operations(plan, 3)} == {(5, 1), (2, 1), (3, 0)}
    assert [str(entry) for entry in plan.streams] == [
        "streams 1 shared given 1, 3",
        "streams 2 shared given 1",
        "streams 3 shared given 3",
    ]
    assert parse_plan(plan.to_text()) == plan
    verify(plan)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda plan: assign_streams(plan, max_links=1), "max_links is 1"),
        (lambda plan: assign_streams(plan, given={0: (1, 1)}), "channel 0, which is not between devices"),
        (lambda plan: assign_streams(plan, given={1: (-1, 1)}), "channel 1 is given stream -1"),
        (lambda plan: overlap(plan), "it has no stream"),
        (lambda plan: place_on_device(plan, []), "place all of them in one call"),
    ],
)
def test_passes_refuse(make: Callable[[Plan], Plan], message: str) -> None:
    with pytest.raises(CompileError, match=message) as caught:
        make(on_device(skip_connection(), "skip connection"))
    assert caught.value.remedy is not None
    assert caught.value.remedy in str(caught.value)


def test_channels_that_cannot_be_on_devices_are_refused() -> None:
    plan = lower(tensor_parallel(), "tensor parallel")
    of = {channel.value: channel.id for channel in plan.channels}
    for channel, problem in [
        (of["input"], "the driver has no device"),
        (of["S1R0.join#8"], "the driver has no device"),
        (of["part of S0R0.allreduce#2"], "it belongs to a collective"),
        (99, "it does not exist"),
    ]:
        with pytest.raises(CompileError, match=f"channel {channel}.*{problem}"):
            place_on_device(plan, [channel])
    with pytest.raises(CompileError, match="sender_keeps is for channels between devices"):
        place_on_device(plan, [], sender_keeps=[1])


def test_plans_without_edges_on_devices_stay_as_they_are() -> None:
    plan = lower(skip_connection(), "skip connection")
    for same in (place_on_device(plan, []), assign_streams(plan), overlap(plan)):
        assert same == plan


def test_one_edge_on_devices_leaves_the_others() -> None:
    plan = lower(skip_connection(), "skip connection")
    placed = assign_streams(place_on_device(plan, [2]))
    assert placed.links == (Link(0, 2, (3,)),)
    assert [channel.id for channel in placed.channels if channel.transport is Transport.DEVICE] == [2]
    assert placed.actors[0] == plan.actors[0]
    assert len(placed.channels) == len(plan.channels)
    verify(placed)


def test_what_the_driver_reads_stays_on_shared_memory() -> None:
    a, b = actor("A"), actor("B")
    first = bind(a.forward, InputNode())
    placed = place_on_device(lower(build(MultiOutputNode([first, bind(b.forward, first)])), "both"), [1])
    assert placed.channels[1].readers == (2,)
    assert (placed.channels[3].value, placed.channels[3].readers) == ("A.forward#0", (0,))
    assert [str(output) for output in placed.outputs] == ["output channel 3", "output channel 2"]
    assert Write((3,), (1,)) in placed.actors[0].actions


@pytest.mark.parametrize("policy", StreamPolicy)
def test_results_of_a_collective_cross_in_one_order(policy: StreamPolicy) -> None:
    """The actors of a collective go on together, so what they send of it has no order but the one the plan gives."""
    workers = [actor("A"), actor("B")]
    source = InputNode()
    sums = allreduce([bind(worker.forward, source) for worker in workers])
    crossed = [bind(worker.join, *sums) for worker in workers]
    plan = assign_streams(on_device(build(MultiOutputNode(crossed)), "crossed"), policy)
    assert [[verb for verb, *_ in operations(plan, process)] for process in (1, 2)] == [["send", "recv"], ["recv", "send"]]
    verify(plan)
    verify(overlap(plan))


GOOD = """\
plan "good"
signature whole
process 0 "driver"
process 1 "A"
process 2 "B"
channel 0 "input" 0 -> 1
channel 1 "A.f#0" 1 -> 2 transport device
channel 2 "B.f#2" 2 -> 1
channel 3 "A.f#3" 1 -> 0
channel 4 "A.f#0" 1 -> 2 transport device sender_keeps yes
link 0 1 -> 2
link 1 2 -> 1
link 2 1 -> 2
streams 1 link
streams 2 link
input whole -> channel 0
output channel 3
returns one
actor 1 registers 3
  r0 = read 0
  r1 = 0:f(r0)
  send 1 from r1 on link 0 stream 1
  send 4 from r1 on link 2 stream 2 beside
  release r0
  r0 = 1:f(r1)
  release r0
  r0 = read 2
  r2 = 3:f(r0)
  write 3 from r2
  release r0, r1, r2
actor 2 registers 3
  r0 = recv 1 on link 0 stream 1
  r1 = recv 4 on link 2 stream 2
  r2 = 2:f(r0, r1)
  write 2 from r2
  release r0, r1, r2
"""

BROKEN = [
    ("link 1 2", "link 3 2", "links are not numbered"),
    ("link 1 2 -> 1", "link 1 2 -> 0", "does not lead from one actor to others"),
    ("link 1 2 -> 1", "link 1 2 -> 2", "does not lead from one actor to others"),
    ("link 1 2 -> 1", "link 1 2 -> 9", "does not lead from one actor to others"),
    ('"B.f#2" 2 -> 1', '"B.f#2" 2 -> 1 sender_keeps yes', "sender_keeps is for a channel between devices"),
    ('"B.f#2" 2 -> 1', '"B.f#2" 2 -> 1 transport device', "it takes a send and a recv"),
    ('"input" 0 -> 1', '"input" 0 -> 1 transport device', "it takes a send and a recv"),
    ('"A.f#0" 1 -> 2 transport device\n', '"A.f#0" 1 -> 2\n', "channel 1 is not between devices"),
    ("streams 2 link", "streams 1 link", "described twice"),
    ("streams 2 link", "streams 0 link", "it is not about an actor"),
    ("recv 1 on link 0", "recv 1 on link 7", "link 7 does not exist"),
    ("recv 1 on link 0", "recv 1 on link 1", "link 1 does not lead where channel 1 does"),
    ("recv 1 on link 0", "recv 1 on link 2", "another link than A: send 1"),
    ("recv 1 on link 0 stream 1", "recv 1 on link 0", "it has no stream; assign_streams"),
    ("on link 0 stream 1\n  send", "on link 0\n  send", "it has no stream; assign_streams"),
    ("send 1 from r1 on link 0 stream 1", "send 1 from r1 on link 0 stream 1 beside", "may overwrite what it sends"),
    ("send 1 from r1", "send 1 from r0", "another call stands between it and the call whose value it sends"),
    ("send 1 from r1", "send 1 from r2", "r2 is used while empty"),
    ("  send 1 from r1 on link 0 stream 1\n", "", r"written by processes \[\]"),
    ("  r1 = recv 4 on link 2 stream 2\n", "", "r1 is used while empty"),
    ("r1 = recv 4", "r0 = recv 4", "filled while full"),
    ("send 1 from", "send 0 from", r"written by processes \[0, 1\]"),
]


@pytest.mark.parametrize(("text", "instead", "message"), BROKEN)
def test_verify_refuses_links_that_do_not_fit(text: str, instead: str, message: str) -> None:
    verify(parse_plan(GOOD))
    assert parse_plan(GOOD).to_text() == GOOD
    assert text in GOOD
    with pytest.raises(CompileError, match=message) as caught:
        verify(parse_plan(GOOD.replace(text, instead)))
    assert caught.value.node is not None
    assert caught.value.node in str(caught.value)
    assert not isinstance(caught.value, DeadlockError)


def test_a_send_behind_another_call_is_refused() -> None:
    """That call may overwrite what is sent."""
    send = "  send 1 from r1 on link 0 stream 1\n"
    late = GOOD.replace(send, "").replace("  r0 = 1:f(r1)\n", "  r0 = 1:f(r1)\n" + send)
    with pytest.raises(CompileError, match="another call stands between it and the call whose value it sends"):
        verify(parse_plan(late))


def test_receives_that_move_know_of_queues_that_streams_share() -> None:
    """Both send first, which streams of their own allow; where all streams share one queue, one of the two receives first."""
    a, b = actor("A"), actor("B")
    inp = InputNode()
    one, two = bind(a.forward, inp), bind(b.forward, inp)
    placed = assign_streams(on_device(build(MultiOutputNode([bind(a.join, two), bind(b.join, one)])), "both"))
    moved = overlap(placed)
    verify(moved)
    with pytest.raises(DeadlockError, match="recv"):
        verify(moved, hardware_queues=1)
    verify(overlap(placed, hardware_queues=1), hardware_queues=1)
    assert overlap(placed, hardware_queues=4) == moved
