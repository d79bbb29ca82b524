"""A plan run by plain Python, with FIFO queues for channels and actors that take turns at random."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from raycomm.graph.model import CallNode, Const, Graph, InputValue, Operand
from raycomm.plan.actions import Collective, Compute, FromInput, Plan, Read, Register, Release, Write
from raycomm.plan.arguments import project, split_arguments

Arguments = tuple[Sequence[object], Mapping[str, object]]


def symbolic(node: int, element: int, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """What element `element` of call `node` is: a term that shows everything it was made from."""
    return (node, element, tuple(args), tuple(sorted(kwargs.items())))


def exchanged(kind: str, op: str | None, root: int | None, rank: int, element: int, given: Sequence[Sequence[object]]) -> object:
    """What a collective gives to a rank, from what each rank gives."""
    values = tuple(values[element] for values in given)
    return (str(kind), op and str(op), rank, values) if root is None else values[root]


def evaluate(graph: Graph, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    """The outputs of one execution, straight from the graph."""
    made: dict[tuple[int, int], object] = {}

    def value(operand: Operand) -> object:
        if isinstance(operand, Const):
            return graph.constants[operand.index]
        if isinstance(operand, InputValue):
            return project(operand.projection, args, kwargs)
        return made[operand.node, operand.element]

    def call(node: CallNode) -> None:
        if node.collective is not None:
            whole = graph.collectives[node.collective]
            ranks = [[value(operand) for operand in graph.nodes[member].args] for member in whole.ranks]
            rank = whole.ranks.index(node.id)
            for element in range(node.num_returns):
                made[node.id, element] = exchanged(whole.kind, whole.op, whole.root, rank, element, ranks)
            return
        given = [value(operand) for operand in node.args]
        named = {name: value(operand) for name, operand in node.kwargs}
        for element in range(node.num_returns):
            made[node.id, element] = symbolic(node.id, element, given, named)

    for node in graph.nodes:
        call(node)
    return [value(output) for output in graph.outputs]


def interpret(plan: Plan, constants: Sequence[object], executions: Sequence[Arguments], rng: random.Random) -> list[list[object]]:
    """The outputs of each execution. Everything is submitted at once, and actors advance one action at a time in random order.

    Raises:
        AssertionError: no actor can advance although work is left, or a value is left behind.
    """
    queues = {(channel.id, reader): deque[Any]() for channel in plan.channels for reader in channel.readers}

    def publish(channel: int, value: object) -> None:
        for reader in plan.channels[channel].readers:
            queues[channel, reader].append(value)

    for args, kwargs in executions:
        for item, value in zip(plan.inputs, split_arguments(plan, args, kwargs), strict=True):
            publish(item.channel, value)
    actors = [_Actor(plan, place, constants, queues, publish, len(executions)) for place in range(len(plan.actors))]
    active = [actor for actor in actors if not actor.finished()]
    while active:
        ready = [actor for actor in active if actor.can_step()]
        assert ready, "no actor can advance"
        rng.choice(ready).step()
        active = [actor for actor in active if not actor.finished()]
    results: list[list[object]] = []
    for args, kwargs in executions:
        taken = {channel: queues[channel, 0].popleft() for channel, reader in queues if reader == 0}
        results.append(
            [
                project(output.projection, args, kwargs) if isinstance(output, FromInput) else taken[output.channel]
                for output in plan.outputs
            ]
        )
    assert not any(queues.values()), "a value was left in a channel"
    return results


class _Actor:
    def __init__(self, plan: Plan, place: int, constants: Sequence[object], queues: Any, publish: Any, executions: int) -> None:
        self._plan = plan.actors[place]
        self._process = place + 1
        self._constants = constants
        self._queues = queues
        self._publish = publish
        self._left = executions
        self._next = 0
        self._half = 0  # how far the collective it stands at has come
        self._taken: list[Any] = []
        self._registers: dict[int, object] = {}

    def finished(self) -> bool:
        return self._left == 0

    def can_step(self) -> bool:
        action = self._plan.actions[self._next]
        if isinstance(action, Collective) and self._half % 2:  # never past its phases: the last half is even
            return all(self._queues[channel, self._process] for channel in self._others(action))
        return not isinstance(action, Read) or bool(self._queues[action.channel, self._process])

    def _others(self, action: Collective) -> list[int]:
        phase = (action.parts, action.slices)[self._half // 2]
        return [channel for rank, channel in enumerate(phase) if rank != action.rank]

    def _exchange(self, action: Collective) -> bool:
        """One half of one phase: publish, or read what all others have published. True at the end."""
        given = [self._registers[register] for register in action.args]
        phases = [phase for phase in (action.parts, action.slices) if phase]
        if self._half == 2 * len(phases):
            ranks = self._taken or [given]
            for element, register in enumerate(action.outputs):
                self._registers[register] = exchanged(action.kind, action.op, action.root, action.rank, element, ranks)
            self._half, self._taken = 0, []
            return True
        if self._half % 2 == 0:
            self._publish(phases[self._half // 2][action.rank], given)
        else:
            ranks = [self._queues[channel, self._process].popleft() for channel in self._others(action)]
            ranks.insert(action.rank, given)
            self._taken = ranks
        self._half += 1
        return False

    def step(self) -> None:
        action = self._plan.actions[self._next]
        if isinstance(action, Collective) and not self._exchange(action):
            return
        match action:
            case Read(channel, register):
                self._registers[register] = self._queues[channel, self._process].popleft()
            case Compute(node, _, args, kwargs, outputs, awaited):
                assert all(register in self._registers for register in awaited), "what a call waits for is not there"
                given = [self._value(argument) for argument in args]
                named = {name: self._value(argument) for name, argument in kwargs}
                for element, register in enumerate(outputs):
                    self._registers[register] = symbolic(node, element, given, named)
            case Write(channels, registers):
                for channel, register in zip(channels, registers, strict=True):
                    self._publish(channel, self._registers[register])
            case Release(registers):
                for register in registers:
                    del self._registers[register]
        self._next += 1
        if self._next == len(self._plan.actions):
            assert not self._registers, "a register was left full"
            self._next = 0
            self._left -= 1

    def _value(self, argument: object) -> object:
        if isinstance(argument, Register):
            return self._registers[argument.index]
        return self._constants[argument.index]  # type: ignore[attr-defined]
