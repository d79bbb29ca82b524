"""Graphs whose values move between devices, as people build them, and their plans."""

from __future__ import annotations

from typing import Any

from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allreduce
from raycomm.graph.model import Graph
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.plan.actions import Plan
from raycomm.plan.device_edges import place_on_device
from raycomm.plan.lowering import lower
from tests.unit.stub_actors import actor


def on_device(graph: Graph, name: str, *, sender_keeps: bool = False) -> Plan:
    """The plan of `graph` with every edge between actors on devices, its sends and receives without streams."""
    plan = lower(graph, name)
    exchanged = {channel.id for channel in plan.channels if channel.value.startswith(("part of", "slice of"))}
    edges = [
        channel.id for channel in plan.channels if channel.writer and channel.readers != (0,) and channel.id not in exchanged
    ]
    return place_on_device(plan, edges, sender_keeps=edges if sender_keeps else ())


def relay() -> Graph:
    """Each worker passes on what it makes of what it got."""
    value: Any = InputNode()
    for name in ("W1", "W2", "W3", "W4"):
        value = bind(actor(name).forward, value)
    return build(value)


def skip_connection() -> Graph:
    """The third stage also takes what the first made, and the driver sees it too."""
    a, b, c = actor("A"), actor("B"), actor("C")
    first = bind(a.forward, InputNode())
    second = bind(b.forward, first)
    later = bind(a.scale, first, 2)
    return build(MultiOutputNode([bind(c.join, second, first, later), first]))


def all_to_all() -> Graph:
    """Each worker makes a part for each other worker, twice in a row."""
    workers = [actor(f"W{index}") for index in range(3)]
    source = InputNode()
    values: list[Any] = [bind(worker.forward, source) for worker in workers]
    for _ in range(2):
        parts = [[bind(worker.scale, value, place) for place in range(3)] for worker, value in zip(workers, values, strict=True)]
        values = [bind(worker.join, *(part[place] for part in parts)) for place, worker in enumerate(workers)]
    return build(MultiOutputNode(values))


def tensor_parallel(transport: str | None = None) -> Graph:
    """Two stages of two ranks: each rank of the second takes the parts of both ranks of the first, which then sum theirs up.

    `transport`: a hint for all values from actor to actor.
    """

    def hinted(node: Any) -> Any:
        return node if transport is None else node.with_tensor_transport(transport)

    first = [actor("S0R0"), actor("S0R1")]
    second = [actor("S1R0"), actor("S1R1")]
    value: Any = InputNode()
    sums = allreduce([bind(rank.forward, value) for rank in first])
    crossed = [hinted(bind(rank.forward, total)) for rank, total in zip(first, sums, strict=True)]
    partial = [hinted(bind(rank.join, *crossed, hinted(sums[place]))) for place, rank in enumerate(second)]
    return build(MultiOutputNode([bind(second[0].join, *partial), partial[1]]))


def one_forward_one_backward(stages: int = 4, microbatches: int = 8) -> Graph:
    """The 1F1B pipeline: after its warm-up each stage alternates between one backward and one forward pass."""
    workers = [actor(f"S{stage}") for stage in range(stages)]
    batches = InputNode()
    todo: list[list[tuple[str, int]]] = []
    for stage in range(stages):
        warm_up = min(stages - stage, microbatches)
        order = [("forward", batch) for batch in range(warm_up)]
        for batch in range(microbatches):
            order.append(("backward", batch))
            if warm_up + batch < microbatches:
                order.append(("forward", warm_up + batch))
        todo.append(order)
    forward: dict[tuple[int, int], Any] = {}
    backward: dict[tuple[int, int], Any] = {}
    while any(todo):
        for stage, order in enumerate(todo):
            if not order:
                continue
            direction, batch = order[0]
            if direction == "forward" and (stage == 0 or (stage - 1, batch) in forward):
                source = batches[batch] if stage == 0 else forward[stage - 1, batch]
                forward[stage, batch] = bind(workers[stage].forward, source)
                del order[0]
            elif direction == "backward" and (stage == stages - 1 or (stage + 1, batch) in backward):
                gradient = () if stage == stages - 1 else (backward[stage + 1, batch],)
                backward[stage, batch] = bind(workers[stage].join, *gradient, forward[stage, batch])
                del order[0]
    return build(MultiOutputNode([backward[0, batch] for batch in range(microbatches)]))
