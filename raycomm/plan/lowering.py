"""`Graph` -> `Plan`. Pure.

Each actor's list follows the graph's order of calls, which is one order for all actors and puts every call after those it uses.
So the lists have no cycle of waits by construction (`verify` checks it anyway). Around each call: the channels it is the first
to need, the call, one write of all that leaves, and the release of what nobody needs any more. A collective is a call of each of
its actors, on channels of its own.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from raycomm.graph.channel_options import ChannelOptions
from raycomm.graph.model import (
    CallNode,
    CallValue,
    Const,
    Graph,
    InputValue,
    Key,
    Nothing,
    Operand,
    Position,
    Projection,
    ValueRef,
)
from raycomm.plan.actions import (
    Action,
    ActorPlan,
    Argument,
    Channel,
    Collective,
    Compute,
    Constant,
    FromChannel,
    FromInput,
    Input,
    Output,
    Plan,
    Process,
    Read,
    Register,
    Release,
    Signature,
    Write,
)
from raycomm.plan.placement import DRIVER, Placement, Transport, exchanges, place

# By collective of the graph, then by phase, then by rank: the channel on which that actor publishes.
_Exchanged: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]


def lower(graph: Graph, name: str) -> Plan:
    """The plan of `graph`, called `name` in messages."""
    channels: list[Channel] = []
    options = dict(graph.channel_options)
    for placement in _leaving(graph):
        given = options.get(placement.value, ChannelOptions())
        settings = (given.inline_bytes, given.slots, given.share_tensors, given.allow_pickle)
        text = value_text(graph, placement.value)
        channels.append(Channel(len(channels), text, placement.writer, placement.readers, *settings))
    channel_of = channels_of(graph)
    exchanged = _add_exchanges(graph, channels)
    processes = (Process(DRIVER, "driver"), *(Process(actor.index + 1, actor.label) for actor in graph.actors))
    inputs = tuple(Input(channel, value.projection) for value, channel in channel_of.items() if isinstance(value, InputValue))
    outputs: tuple[Output, ...] = tuple(
        FromInput(value.projection) if isinstance(value, InputValue) else FromChannel(channel_of[value])
        for value in graph.outputs
    )
    return Plan(
        name=name,
        processes=processes,
        channels=tuple(channels),
        actors=_actor_plans(graph, processes[1:], channel_of, exchanged),
        inputs=inputs,
        outputs=outputs,
        single_output=graph.single_output,
        signature=Signature(graph.input_arity, graph.input_keys),
    )


def channels_of(graph: Graph) -> dict[ValueRef, int]:
    """The channel of each value that leaves its process, in the plan that `lower` makes of `graph`."""
    return {placement.value: channel for channel, placement in enumerate(_leaving(graph))}


def _leaving(graph: Graph) -> list[Placement]:
    return [placement for placement in place(graph) if placement.transport is not Transport.REFERENCE]


def value_text(graph: Graph, value: ValueRef) -> str:
    """What messages call a value: ``input.key``, ``W1.forward#3``, ``W1.split#4[1]``."""
    if isinstance(value, InputValue):
        return _input_text(value.projection)
    node = graph.nodes[value.node]
    return _call_text(node) + (f"[{value.element}]" if node.num_returns > 1 else "")


def _call_text(node: CallNode) -> str:
    return f"{node.actor_label}.{node.method}#{node.id}"


def _input_text(projection: Projection) -> str:
    match projection:
        case Position(index):
            return f"input[{index}]"
        case Key(name):
            return f"input.{name}" if name.isidentifier() else f"input[{json.dumps(name)}]"
        case Nothing():
            return "begin"
        case _:
            return "input"


def _add_exchanges(graph: Graph, channels: list[Channel]) -> _Exchanged:
    """Append the channels of the graph's collectives."""
    exchanged = []
    for exchange in exchanges(graph):
        phases = []
        for phase in exchange.phases:
            first = len(channels)
            for node, process in zip(exchange.nodes, exchange.processes, strict=True):
                value = f"{phase} of {_call_text(graph.nodes[node])}"
                others = tuple(sorted(other for other in exchange.processes if other != process))
                channels.append(Channel(len(channels), value, process, others))
            phases.append(tuple(range(first, len(channels))))
        exchanged.append(tuple(phases))
    return tuple(exchanged)


def _actor_plans(
    graph: Graph, processes: tuple[Process, ...], channel_of: Mapping[ValueRef, int], exchanged: _Exchanged
) -> tuple[ActorPlan, ...]:
    calls: list[list[CallNode]] = [[] for _ in processes]
    for node in graph.nodes:
        calls[node.actor].append(node)
    plans = zip(processes, calls, strict=True)
    return tuple(_actor_plan(graph, process, nodes, channel_of, exchanged) for process, nodes in plans)


def _actor_plan(
    graph: Graph, process: Process, nodes: list[CallNode], channel_of: Mapping[ValueRef, int], exchanged: _Exchanged
) -> ActorPlan:
    last_use = {value: node.id for node in nodes for value in _values(node)}
    registers = _Registers()
    actions: list[Action] = []
    for node in nodes:
        used = _values(node)
        for value in used:
            if value not in registers.of:
                actions.append(Read(channel_of[value], registers.take(value)))
        made = tuple(CallValue(node.id, element) for element in range(node.num_returns))
        outputs = tuple(registers.take(value) for value in made)
        if node.collective is None:
            args = tuple(_argument(operand, registers.of) for operand in node.args)
            kwargs = tuple((name, _argument(operand, registers.of)) for name, operand in node.kwargs)
            # What it is given it also waits for; only the rest is worth a word.
            only = {*node.after}.difference(node.given)
            awaited = tuple(registers.of[value] for value in used if value in only)
            actions.append(Compute(node.id, node.method, args, kwargs, outputs, awaited))
        else:
            whole = graph.collectives[node.collective]
            rank = whole.ranks.index(node.id)
            sources = tuple(registers.of[value] for value in node.args if not isinstance(value, Const))
            parts, slices = (*exchanged[node.collective], (), ())[:2]
            actions.append(Collective(node.id, whole.kind, whole.op, whole.root, rank, sources, outputs, parts, slices))
        leaving = tuple(value for value in made if value in channel_of)
        if leaving:
            # Before anything local uses the value: others wait for it, this actor does not.
            actions.append(Write(tuple(channel_of[value] for value in leaving), tuple(registers.of[value] for value in leaving)))
        done = [value for value in used if last_use[value] == node.id]
        done += [value for value in made if value not in last_use]
        if done:
            actions.append(Release(tuple(sorted(registers.give_back(value) for value in done))))
    return ActorPlan(process, tuple(actions), registers.count)


@dataclass(slots=True)
class _Registers:
    """Registers in use by value; the lowest free number is used again first."""

    of: dict[ValueRef, int] = field(default_factory=dict)
    count: int = 0
    _free: list[int] = field(default_factory=list)

    def take(self, value: ValueRef) -> int:
        if self._free:
            number = heapq.heappop(self._free)
        else:
            number = self.count
            self.count += 1
        self.of[value] = number
        return number

    def give_back(self, value: ValueRef) -> int:
        number = self.of.pop(value)
        heapq.heappush(self._free, number)
        return number


def _values(node: CallNode) -> tuple[ValueRef, ...]:
    """The distinct values that a call uses, in order."""
    return tuple(dict.fromkeys(operand for operand in node.operands if not isinstance(operand, Const)))


def _argument(operand: Operand, registers: Mapping[ValueRef, int]) -> Argument:
    return Constant(operand.index) if isinstance(operand, Const) else Register(registers[operand])
