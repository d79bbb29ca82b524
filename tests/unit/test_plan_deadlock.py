"""Which plans deadlock: small ones whose verdicts were worked out by hand, and how the circle is told."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from raycomm.errors import DeadlockError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.options import StreamPolicy
from raycomm.plan.actions import Plan
from raycomm.plan.deadlock import check_deadlock
from raycomm.plan.overlap import overlap
from raycomm.plan.streams import assign_streams
from raycomm.plan.text import parse_plan
from raycomm.plan.verify import verify
from raycomm.testing.simulated import SimulatedHang, simulate
from tests.unit.sample_device_graphs import on_device
from tests.unit.stub_actors import actor

# Both ranks send first, then receive: what a user writes.
EXCHANGE = """\
plan "exchange"
signature whole
process 0 "driver"
process 1 "A"
process 2 "B"
channel 0 "A's part" 1 -> 2 transport device
channel 1 "B's part" 2 -> 1 transport device
channel 2 "A's sum" 1 -> 0
channel 3 "B's sum" 2 -> 0
link 0 1 -> 2
link 1 2 -> 1
output channel 2
output channel 3
returns list
actor 1 registers 3
  r0 = 0:make()
  send 0 from r0 on link 0
  r1 = recv 1 on link 1
  r2 = 1:add(r0, r1)
  write 2 from r2
  release r0, r1, r2
actor 2 registers 3
  r0 = 2:make()
  send 1 from r0 on link 1
  r1 = recv 0 on link 0
  r2 = 3:add(r0, r1)
  write 3 from r2
  release r0, r1, r2
"""

# Two values on one link, received in the other order.
SWAPPED = """\
plan "swapped"
signature whole
process 0 "driver"
process 1 "A"
process 2 "B"
channel 0 "first" 1 -> 2 transport device
channel 1 "second" 1 -> 2 transport device
channel 2 "sum" 2 -> 0
link 0 1 -> 2
output channel 2
returns one
actor 1 registers 2
  r0, r1 = 0:make()
  send 0 from r0 on link 0
  send 1 from r1 on link 0
  release r0, r1
actor 2 registers 3
  r0 = recv 1 on link 0
  r1 = recv 0 on link 0
  r2 = 1:add(r0, r1)
  write 2 from r2
  release r0, r1, r2
"""

# A makes x for B, then y for C, which makes z of it for B. B takes z, works on it, and only then takes x.
LATE = """\
plan "late"
signature whole
process 0 "driver"
process 1 "A"
process 2 "B"
process 3 "C"
channel 0 "x" 1 -> 2 transport device
channel 1 "y" 1 -> 3 transport device
channel 2 "z" 3 -> 2 transport device
channel 3 "sum" 2 -> 0
link 0 1 -> 2
link 1 1 -> 3
link 2 3 -> 2
output channel 3
returns one
actor 1 registers 1
  r0 = 0:make()
  send 0 from r0 on link 0
  release r0
  r0 = 1:make()
  send 1 from r0 on link 1
  release r0
actor 2 registers 3
  r0 = recv 2 on link 2
  r1 = 3:work(r0)
  release r0
  r0 = recv 0 on link 0
  r2 = 4:add(r0, r1)
  write 3 from r2
  release r0, r1, r2
actor 3 registers 2
  r0 = recv 1 on link 1
  r1 = 2:work(r0)
  send 2 from r1 on link 2
  release r0, r1
"""


def with_streams(text: str, policy: StreamPolicy = StreamPolicy.LINK, given: dict[int, tuple[int, int]] | None = None) -> Plan:
    return assign_streams(parse_plan(text), policy, given=given)


def sender_keeps(text: str) -> str:
    """`text` in which A promises to keep x, so that its next call runs beside the send."""
    text = text.replace('"x" 1 -> 2 transport device', '"x" 1 -> 2 transport device sender_keeps yes')
    return text.replace("send 0 from r0 on link 0", "send 0 from r0 on link 0 beside")


def receive_first(text: str) -> str:
    """The exchange in which B receives before it sends."""
    send, receive = "  send 1 from r0 on link 1\n", "  r1 = recv 0 on link 0\n"
    return text.replace(send + receive, receive + send)


def both_receive_first(text: str) -> str:
    send, receive = "  send 0 from r0 on link 0\n", "  r1 = recv 1 on link 1\n"
    return receive_first(text).replace(send + receive, receive + send)


def no_slots(plan: Plan, channel: int) -> Plan:
    channels = list(plan.channels)
    channels[channel] = replace(channels[channel], slots=0)
    return replace(plan, channels=tuple(channels))


# Name, plan, whether it runs. The reason is what a hand finds by writing down who waits for whom.
VERDICTS: list[tuple[str, Plan, bool]] = [
    # Each stream has its send before its receive: transfer 0 before 1 at A, 1 before 0 at B.
    ("exchange, one stream", with_streams(EXCHANGE, StreamPolicy.SHARED), False),
    # Sends and receives never wait for each other.
    ("exchange, a stream per direction", with_streams(EXCHANGE, StreamPolicy.DIRECTION), True),
    ("exchange, a stream per link", with_streams(EXCHANGE), True),
    # Both streams begin with transfer 0.
    ("exchange, B receives first, one stream", with_streams(receive_first(EXCHANGE), StreamPolicy.SHARED), True),
    # Each waits for a control record that the other writes only after its own receive; no stream can help.
    ("exchange, both receive first", with_streams(both_receive_first(EXCHANGE)), False),
    # A's stream is shared by hand, but at B the two are free of each other: A's send comes first, B's receive can run.
    ("exchange, one stream at A only", with_streams(EXCHANGE, given={0: (1, 1), 1: (2, 1)}), True),
    # A's send is on the stream of computations, B's receive too: the calls after them wait for the transfers anyway.
    ("exchange, on the stream of computations", with_streams(EXCHANGE, given={0: (0, 0), 1: (0, 0)}), False),
    # A communicator runs its operations in order of launch, however many streams they have.
    ("two values on a link, swapped", with_streams(SWAPPED, given={0: (1, 1), 1: (2, 2)}), False),
    # A's second call waits for its send of x, which B takes only after z, which needs that call.
    ("taken late", with_streams(LATE), False),
    # The same, but the call runs beside the send.
    ("taken late, but kept", with_streams(sender_keeps(LATE)), True),
    # Beside, but on the stream of computations, and so before the call after all.
    ("taken late, kept, on the stream of computations", with_streams(sender_keeps(LATE), given={0: (0, 1)}), False),
    # A control record that no slot holds is never written.
    ("no slots", no_slots(with_streams(EXCHANGE), 0), False),
]


@pytest.mark.parametrize(("plan", "runs"), [case[1:] for case in VERDICTS], ids=[case[0] for case in VERDICTS])
def test_verdict(plan: Plan, runs: bool) -> None:
    assert parse_plan(plan.to_text()) == plan
    if runs:
        verify(plan)
        simulate(plan, 3)
    else:
        with pytest.raises(DeadlockError) as caught:
            verify(plan)
        assert caught.value.node == caught.value.cycle[0]
        assert caught.value.remedy in str(caught.value)
        with pytest.raises(SimulatedHang):
            simulate(plan, 3)


def test_circle_of_the_exchange_is_told_by_both_ends_of_its_transfers() -> None:
    with pytest.raises(DeadlockError, match="plan 'exchange': each of these waits for the one before it") as caught:
        verify(with_streams(EXCHANGE, StreamPolicy.SHARED))
    assert sorted(caught.value.cycle) == [
        "A: send 0 from r0 on link 0 stream 1 with B: r1 = recv 0 on link 0 stream 1",
        "B: send 1 from r0 on link 1 stream 1 with A: r1 = recv 1 on link 1 stream 1",
    ]
    assert "stream policy 'link'" in str(caught.value)


def test_circle_is_told_action_by_action() -> None:
    with pytest.raises(DeadlockError) as caught:
        verify(with_streams(LATE))
    cycle = caught.value.cycle
    start = cycle.index("A: r0 = 1:make()")
    assert cycle[start:] + cycle[:start] == (
        "A: r0 = 1:make()",
        "A: send 1 from r0 on link 1 stream 2",
        "C: r0 = recv 1 on link 1 stream 1",
        "C: r1 = 2:work(r0)",
        "C: send 2 from r1 on link 2 stream 2",
        "B: r0 = recv 2 on link 2 stream 2",
        "B: r1 = 3:work(r0)",
        "B: release r0",
        "B: r0 = recv 0 on link 0 stream 1",
        "A: send 0 from r0 on link 0 stream 1 with B: r0 = recv 0 on link 0 stream 1",
    )


def test_overlap_puts_late_receives_where_they_belong() -> None:
    """The passes take sends and calls as given, so a plan that only receives at wrong places is mended."""
    for text in (SWAPPED, LATE, both_receive_first(EXCHANGE)):
        for policy in StreamPolicy:
            mended = overlap(with_streams(text, policy))
            verify(mended)
            simulate(mended, 3)


@pytest.mark.parametrize(("slots", "runs"), [(0, False), (1, True), (64, True)])
def test_slots_of_channels_that_name_none(slots: int, runs: bool) -> None:
    plan = with_streams(EXCHANGE)
    if runs:
        check_deadlock(plan, slots=slots)
    else:
        with pytest.raises(DeadlockError, match="give the channel at least one slot"):
            check_deadlock(plan, slots=slots)


@pytest.mark.parametrize("queues", [1, 2, 3, 4])
def test_streams_that_share_a_queue_are_one_stream(queues: int) -> None:
    """The exchange needs two queues at each rank; with the two streams 1 and 2, every number of queues but one has them."""
    plan = with_streams(EXCHANGE)
    if queues > 1:
        verify(plan, hardware_queues=queues)
        simulate(plan, 3, hardware_queues=queues)
    else:
        with pytest.raises(DeadlockError):
            verify(plan, hardware_queues=queues)
        with pytest.raises(SimulatedHang):
            simulate(plan, 3, hardware_queues=queues)


def large_plan(nodes: int, actors: int) -> Plan:
    rng = random.Random(0)
    workers = [actor(f"W{index}") for index in range(actors)]
    source = InputNode()
    made = [bind(worker.forward, source) for worker in workers]
    while len(made) < nodes:
        made.append(bind(rng.choice(workers).join, *rng.sample(made[-30:], 3)))
    return overlap(assign_streams(on_device(build(MultiOutputNode(made)), "large"), max_links=64))


def test_three_hundred_calls_on_ten_actors_are_checked_in_no_time() -> None:
    plan = large_plan(300, 10)
    begin = time.perf_counter()
    verify(plan)
    assert time.perf_counter() - begin < 1.0


def test_effort_grows_with_the_number_of_actions() -> None:
    """Ten times the calls take about ten times as long; a square law would take a hundred times."""
    small, large = large_plan(150, 10), large_plan(1500, 10)

    def effort(plan: Plan) -> float:
        times = []
        for _ in range(3):
            begin = time.process_time()
            check_deadlock(plan)
            times.append(time.process_time() - begin)
        return min(times)

    assert effort(large) < 40 * effort(small)
