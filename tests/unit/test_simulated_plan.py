"""Plans on simulated devices: right values, hangs, duties that are left out, failures, deaths."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dags.exchange import PLAN
from raycomm.errors import ActorDiedError, PeerDiedError
from raycomm.graph.model import Graph
from raycomm.options import StreamPolicy
from raycomm.plan.actions import Plan
from raycomm.plan.device_edges import place_on_device
from raycomm.plan.lowering import lower
from raycomm.plan.overlap import overlap
from raycomm.plan.streams import assign_streams
from raycomm.plan.text import parse_plan
from raycomm.testing.simulated import (
    Delays,
    Event,
    Hazard,
    PlanRun,
    Results,
    SimulatedHang,
    SimulatedMemoryError,
    Stream,
    Tensor,
    simulate,
)
from raycomm.testing.simulated_actor import Failed
from tests.unit.interpret import Arguments, evaluate
from tests.unit.sample_graphs import chain, collectives, diamond, fan_out, two_returns

WHOLE: list[Arguments] = [((f"x{number}",), {}) for number in range(6)]


def exchange(policy: StreamPolicy = StreamPolicy.LINK) -> Plan:
    """Two ranks that both send first."""
    return assign_streams(parse_plan(PLAN), policy)


def on_devices(graph: Graph, policy: StreamPolicy = StreamPolicy.LINK, keeps: bool = False) -> Plan:
    """The plan of `graph` with every edge between two actors on their devices."""
    plan = lower(graph, "devices")
    inputs = {item.channel for item in plan.inputs}
    met = {channel for actor in plan.actors for action in actor.actions for channel in getattr(action, "parts", ())}
    met |= {channel for actor in plan.actors for action in actor.actions for channel in getattr(action, "slices", ())}
    between = [c.id for c in plan.channels if c.id not in inputs | met and any(reader > 0 for reader in c.readers)]
    return overlap(assign_streams(place_on_device(plan, between, sender_keeps=between if keeps else ()), policy))


def made(node: int, *args: object) -> tuple[object, ...]:
    return (node, 0, args, ())


def test_the_exchange_completes_under_a_stream_per_link() -> None:
    for seed in range(200):
        outcome = simulate(exchange(), WHOLE, seed=seed, results=list(Results)[seed % 2])
        assert outcome.transfers == 2 * len(WHOLE)
        for ((value,), _), (left, right) in zip(WHOLE, outcome.results, strict=True):
            assert left == made(2, made(0, value), made(1, value))
            assert right == made(3, made(1, value), made(0, value))


def test_the_exchange_under_one_stream_hangs_and_names_both_heads() -> None:
    for seed in range(50):
        with pytest.raises(SimulatedHang) as caught:
            simulate(exchange(StreamPolicy.SHARED), WHOLE, seed=seed)
        heads = caught.value.heads
        for rank, channel, other in ((0, 1, 1), (1, 2, 0)):
            sends = f"stream 1 of rank{rank}: send of channel {channel} to rank{other} on link {rank}"
            assert f"{sends} waits for rank{other} to receive channel {channel} on link {rank}, 1 behind it" in heads
        assert "rank0: waits for the end of 2:add on stream 0 of rank0" in heads


def test_one_hardware_queue_is_one_stream() -> None:
    """With two, stream 2 shares the queue of stream 0: the receive stands there before the call that needs it, so it still goes
    through. With one queue everything is one stream."""
    simulate(exchange(StreamPolicy.DIRECTION), WHOLE, hardware_queues=2)
    with pytest.raises(SimulatedHang):
        simulate(exchange(StreamPolicy.DIRECTION), WHOLE, hardware_queues=1)


@pytest.mark.parametrize("policy", StreamPolicy)
@pytest.mark.parametrize("example", [chain, diamond, fan_out, two_returns, collectives])
def test_graphs_on_devices_give_what_they_mean(example: Callable[[], Graph], policy: StreamPolicy) -> None:
    graph = example()
    plan = on_devices(graph, policy)
    width = 1 if plan.signature.arity is None else plan.signature.arity
    executions: list[Arguments] = [
        ([f"{place} of {number}" for place in range(width)], {key: (key, number) for key in plan.signature.keys})
        for number in range(5)
    ]
    expected = [evaluate(graph, *execution) for execution in executions]
    for seed in range(30):
        for results in Results:
            outcome = simulate(plan, executions, constants=graph.constants, seed=seed, slots=1 + seed % 3, results=results)
            assert outcome.results == expected
    assert outcome.transfers or plan.links == ()


class NoReceiveWait(PlanRun):
    """Leaves out: a computation waits for what it is given."""

    def wait_for_receive(self, compute: Stream, value: Event) -> None:
        pass


class NoSendWait(PlanRun):
    """Leaves out: a computation waits until earlier results were sent."""

    def wait_for_send(self, compute: Stream, sent: Event) -> None:
        pass


class NoKeeping(PlanRun):
    """Leaves out: memory is kept until what uses it has ended."""

    def keep_for(self, tensor: Tensor, stream: Stream) -> None:
        pass


class NeitherSendWaitNorKeeping(NoSendWait, NoKeeping):
    pass


@pytest.mark.parametrize(
    ("run", "results", "hazard"),
    [
        (NoReceiveWait, Results.FRESH, Hazard.EARLY_READ),
        (NoSendWait, Results.KEPT, Hazard.OVERWRITE),
        (NoKeeping, Results.FRESH, Hazard.EARLY_FREE),
        (NeitherSendWaitNorKeeping, Results.FRESH, Hazard.EARLY_FREE),
    ],
)
def test_a_duty_left_out_is_noticed_whatever_the_delays(run: type[PlanRun], results: Results, hazard: Hazard) -> None:
    fast = Delays(host=(5.0, 6.0), compute=(0.0, 0.5), transfer=(0.0, 0.5))
    slow = Delays(host=(0.0, 0.1), compute=(0.0, 0.5), transfer=(1.0, 4.0))
    for seed in range(30):
        for delays in (fast, slow, None):
            with pytest.raises(SimulatedMemoryError) as caught:
                simulate(on_devices(chain()), WHOLE, seed=seed, delays=delays, results=results, run=run)
            assert hazard in {fault.hazard for fault in caught.value.faults}
            assert str(caught.value.faults[0]) in str(caught.value)


def test_an_own_buffer_that_the_sender_promised_to_keep_and_overwrites_is_torn() -> None:
    slow = Delays(host=(0.0, 0.1), compute=(0.0, 0.5), transfer=(1.0, 4.0))
    plan = on_devices(chain(), keeps=True)
    simulate(plan, WHOLE, delays=slow, results=Results.FRESH)
    with pytest.raises(SimulatedMemoryError, match="overwrite"):
        simulate(plan, WHOLE, delays=slow, results=Results.KEPT)


def test_a_failing_call_fails_its_execution_alone() -> None:
    graph = chain()
    node = graph.nodes[0].id
    for seed in range(30):
        outcome = simulate(on_devices(graph), WHOLE, seed=seed, failing=frozenset({(node, 2)}))
        expected = [evaluate(graph, *execution) for execution in WHOLE]
        assert [result for place, result in enumerate(outcome.results) if place != 2] == expected[:2] + expected[3:]
        assert outcome.results[2] == [Failed(node)]
        full = simulate(on_devices(graph), WHOLE, seed=seed).transfers
        assert outcome.transfers < full


def test_a_death_at_any_time_ends_all_waits() -> None:
    told = 0
    for seed in range(200):
        alone = simulate(exchange(), WHOLE, seed=seed)
        died = alone.time * (seed + 0.5) / 200
        try:
            outcome = simulate(exchange(), WHOLE, seed=seed, deaths={1 + seed % 2: died})
        except (ActorDiedError, PeerDiedError) as error:
            assert "died" in str(error)
            told += 1
        else:
            assert outcome.results == alone.results  # It had done its work.
            assert died > 0.5 * alone.time
    assert told > 150


def test_no_slots_is_a_hang_with_the_channel_named() -> None:
    with pytest.raises(SimulatedHang, match=r"waits for room in channel 0 \(input\)"):
        simulate(exchange(), WHOLE, slots=0)
