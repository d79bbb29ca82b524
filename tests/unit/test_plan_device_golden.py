"""Edges on devices: golden plans, with receives in the graph's order and overlapped, and what they compute.

The texts are in `plans/`; `python -m tests.unit.test_plan_device_golden` writes them anew, for review by eye.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raycomm.graph.model import Graph
from raycomm.options import StreamPolicy
from raycomm.plan.actions import Compute, Plan
from raycomm.plan.devices import on_devices
from raycomm.plan.lowering import lower
from raycomm.plan.overlap import overlap
from raycomm.plan.places import Place
from raycomm.plan.streams import assign_streams
from raycomm.plan.text import parse_plan
from raycomm.plan.transfer import Recv, Send
from raycomm.plan.verify import verify
from raycomm.testing.simulated import Delays, simulate
from tests.unit.sample_device_graphs import (
    all_to_all,
    on_device,
    one_forward_one_backward,
    relay,
    skip_connection,
    tensor_parallel,
)
from tests.unit.sample_graphs import diamond

PLANS = Path(__file__).parent / "plans"

GRAPHS: dict[str, Callable[[], Graph]] = {
    "chain": relay,
    "diamond": diamond,
    "skip connection": skip_connection,
    "all to all": all_to_all,
    "tensor parallel": tensor_parallel,
    "1F1B": one_forward_one_backward,
}
CONSTANTS = (0, 1, 2, 3, 4, 5)


def variants(name: str) -> dict[str, Plan]:
    """By file name: the plan of a graph as placed on devices, and overlapped with sends beside the next call."""
    word = name.replace(" ", "_")
    placed = assign_streams(on_device(GRAPHS[name](), name))
    keeps = assign_streams(on_device(GRAPHS[name](), name, sender_keeps=True))
    return {f"{word}.plan": placed, f"{word}_overlapped.plan": overlap(keeps)}


def on_gpus() -> Plan:
    """As `compile` places it where all actors have GPUs: with a group for the collective, and a broadcast to two readers."""
    graph = tensor_parallel("nccl")
    plan = lower(graph, "tensor parallel on GPUs")
    return on_devices(plan, graph, {process.index: Place.gpu("cuda:0", f"GPU-{process.index}") for process in plan.processes[1:]})


@pytest.mark.parametrize("name", GRAPHS)
def test_golden_file(name: str) -> None:
    for file, plan in variants(name).items():
        text = (PLANS / file).read_text()
        assert plan.to_text() == text, file
        assert parse_plan(text) == plan
        verify(plan)


def test_golden_file_on_gpus() -> None:
    plan, text = on_gpus(), (PLANS / "tensor_parallel_on_gpus.plan").read_text()
    assert plan.to_text() == text
    assert parse_plan(text) == plan
    verify(plan)
    graph = tensor_parallel("nccl")
    assert simulate(plan, 3).results == simulate(lower(graph, "on the host"), 3).results


@pytest.mark.parametrize("policy", StreamPolicy)
@pytest.mark.parametrize("name", GRAPHS)
def test_devices_give_what_shared_memory_gives(name: str, policy: StreamPolicy) -> None:
    graph = GRAPHS[name]()
    expected = simulate(lower(graph, name), 3, constants=CONSTANTS).results
    for keeps in (False, True):
        placed = assign_streams(on_device(graph, name, sender_keeps=keeps), policy)
        for plan in (placed, overlap(placed)):
            verify(plan)
            assert simulate(plan, 3, constants=CONSTANTS).results == expected


@pytest.mark.parametrize("name", GRAPHS)
def test_passes_keep_calls_and_what_they_send(name: str) -> None:
    """No pass reorders calls, and nothing is sent or written behind a later call of its actor."""
    before = on_device(GRAPHS[name](), name, sender_keeps=True)
    after = overlap(assign_streams(before, StreamPolicy.SHARED))
    assert after.channels == before.channels
    for left, right in zip(before.actors, after.actors, strict=True):
        assert groups(left.actions) == groups(right.actions)
    sends = [action for actor in after.actors for action in actor.actions if isinstance(action, Send)]
    assert sends
    assert all(send.beside for send in sends)


def groups(actions: tuple[object, ...]) -> list[tuple[object, ...]]:
    """By call: its node and the channels it sends on or writes to."""
    found: list[tuple[object, ...]] = []
    for action in actions:
        if isinstance(action, Compute):
            found.append((action.node,))
        elif isinstance(action, Send):
            found[-1] += ("send", action.channel)
        elif type(action).__name__ == "Write":
            found[-1] += ("write", *action.channels)  # type: ignore[attr-defined]
    return found


def test_overlap_starts_receives_of_a_pipeline_earlier() -> None:
    """In the steady state of 1F1B a stage launches the next receive before the call that comes first."""
    plan = overlap(assign_streams(on_device(one_forward_one_backward(), "1F1B", sender_keeps=True)))
    stage = plan.actors[1].actions
    early = 0
    for place, action in enumerate(stage):
        if isinstance(action, Recv):
            call = next(other for other in stage[place:] if isinstance(other, Compute))
            early += action.register not in {getattr(argument, "index", None) for argument in call.args}
    assert early >= 8


UNIT = Delays(host=(0.0, 0.0), compute=(1.0, 1.0), transfer=(1.0, 1.0))


@pytest.mark.parametrize(
    ("name", "placed", "overlapped", "beside"),
    [
        ("chain", 7, 7, 7),  # four calls, three transfers, nothing to do beside them
        ("diamond", 5, 5, 5),
        ("skip connection", 5, 5, 5),
        ("all to all", 18, 13, 10),  # ten: each worker makes nine calls in a row and waits once
        ("tensor parallel", 6, 6, 6),
        ("1F1B", 49, 41, 38),
    ],
)
def test_time_of_an_execution_in_units(name: str, placed: int, overlapped: int, beside: int) -> None:
    """Calls and transfers take one unit. Without sender_keeps a call waits for the sends before it, which takes a unit each."""
    times = []
    for keeps in (False, True):
        plan = assign_streams(on_device(GRAPHS[name](), name, sender_keeps=keeps))
        times += [simulate(each, 1, constants=CONSTANTS, delays=UNIT).time for each in (plan, overlap(plan))]
    assert times == [placed, overlapped, placed, beside]


if __name__ == "__main__":
    PLANS.mkdir(exist_ok=True)
    for graph_name in GRAPHS:
        for file_name, written in variants(graph_name).items():
            (PLANS / file_name).write_text(written.to_text())
    (PLANS / "tensor_parallel_on_gpus.plan").write_text(on_gpus().to_text())
