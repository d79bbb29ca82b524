"""`graph.stats()`: counters of every edge, call and pool of a graph since it was compiled. All are kept in shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raycomm.channel import ShmArena
from raycomm.plan.actions import Collective, Compute, Plan


@dataclass(frozen=True, slots=True)
class ReaderStats:
    """One reader of an edge. `waits`: reads that found nothing; `waited_s`: seconds they waited in all."""

    process: str
    messages: int
    waits: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class EdgeStats:
    """One channel.

    Attributes:
        channel, value, writer: its number, what it carries, who writes it.
        messages, bytes: published so far; bytes of payloads and buffers.
        inline, in_blocks: messages that fitted their ring slot, and those that used blocks of shared memory.
        pickles: values that had to be pickled.
        failures: messages that carried a failure instead of a value.
        waits, waited_s: writes that had to wait for room or memory, and for how many seconds in all.
        readers: one per reading process.
    """

    channel: int
    value: str
    writer: str
    messages: int
    bytes: int
    inline: int
    in_blocks: int
    pickles: int
    failures: int
    waits: int
    waited_s: float
    readers: tuple[ReaderStats, ...]


@dataclass(frozen=True, slots=True)
class CallStats:
    """One call: how often it ran, for how many seconds in all, and the longest. Skipped calls count."""

    call: str
    calls: int
    total_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class PoolStats:
    """One process's blocks: bytes of memory taken, and bytes held by each process (labels)."""

    process: str
    committed_bytes: int
    held_by: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GraphStats:
    """All counters of a graph. `budget_used` of `budget_limit` bytes are taken from the system for blocks, by all processes."""

    graph: str
    edges: tuple[EdgeStats, ...]
    calls: tuple[CallStats, ...]
    pools: tuple[PoolStats, ...]
    budget_used: int
    budget_limit: int

    def __str__(self) -> str:
        lines = [f"graph {self.graph!r}: {self.budget_used} of {self.budget_limit} bytes of shared memory taken"]
        lines += [
            f"  {e.value}: {e.messages} messages, {e.bytes} bytes, {e.in_blocks} in blocks, {e.pickles} pickled, "
            f"{e.failures} failures, {e.waits} waits to write ({e.waited_s:.3f} s)"
            for e in self.edges
        ]
        lines += [f"  {c.call}: {c.calls} calls, {c.total_s:.3f} s, longest {c.longest_s:.3f} s" for c in self.calls]
        for pool in self.pools:
            held = ", ".join(f"{label} {size}" for label, size in pool.held_by.items()) or "nobody"
            lines.append(f"  blocks of {pool.process}: {pool.committed_bytes} bytes taken; held by {held}")
        return "\n".join(lines)


def graph_stats(plan: Plan, arena: ShmArena) -> GraphStats:
    """The counters of one graph, seen from its driver."""
    core = arena.core
    committed = {process.index: core.committed(process.index) for process in plan.processes}
    return GraphStats(
        graph=plan.name,
        edges=tuple(_edge(plan, arena, channel) for channel in range(len(plan.channels))),
        calls=tuple(_calls(plan, arena)),
        pools=tuple(
            PoolStats(
                process.label,
                committed[process.index],
                {_label(plan, holder): size for holder, size in core.held_blocks(process.index)[1].items()},
            )
            for process in plan.processes
        ),
        # Once it has ended nobody counts there any more what goes back to the system.
        budget_used=sum(committed.values()) if arena.closed[0] else core.budget_used,
        budget_limit=arena.limit_bytes,
    )


def _label(plan: Plan, process: int) -> str:
    return plan.processes[process].label if process < len(plan.processes) else f"process {process}"


def _edge(plan: Plan, arena: ShmArena, number: int) -> EdgeStats:
    channel = plan.channels[number]
    counters = arena.core.channel_counters(channel.writer, channel.id)
    readers = tuple(
        ReaderStats(_label(plan, process), messages, waits, waited)
        for process, (messages, waits, waited) in zip(channel.readers, counters["readers"], strict=True)
    )
    return EdgeStats(
        channel=channel.id,
        value=channel.value,
        writer=_label(plan, channel.writer),
        messages=counters["published"],
        bytes=counters["bytes"],
        inline=counters["published"] - counters["in_blocks"],
        in_blocks=counters["in_blocks"],
        pickles=counters["pickles"],
        failures=counters["failures"],
        waits=counters["write_waits"],
        waited_s=counters["write_waited_s"],
        readers=readers,
    )


def _calls(plan: Plan, arena: ShmArena) -> list[CallStats]:
    calls = []
    for actor in plan.actors:
        counters = arena.core.node_counters(actor.process.index)
        for action, (count, total, longest) in zip(actor.actions, counters, strict=False):
            if isinstance(action, (Compute, Collective)):
                calls.append(CallStats(f"{actor.process.label}.{action.method}#{action.node}", count, total, longest))
    return calls
