"""Checks a plan before anything is started: it means one thing, and its actors cannot wait for each other in a cycle.

Plans from `lower` pass by construction; plans read from text, and later passes over plans, have to earn it. All checks are linear
in the number of actions. Channels count as unbounded here: an action waits for the one before it in its actor, and a read waits
for the write of its channel. A collective is a write and then reads.
"""

from __future__ import annotations

from collections import deque
from typing import NoReturn

from raycomm.errors import CompileError, DeadlockError
from raycomm.graph.model import CollectiveKind, Key, Nothing, Position, Whole
from raycomm.plan.actions import (
    Action,
    ActorPlan,
    Collective,
    Compute,
    Constant,
    FromChannel,
    FromInput,
    Plan,
    Read,
    Register,
    Release,
    Write,
)
from raycomm.plan.placement import DRIVER

_REMEDY = "use the plan that lower() makes of the graph"


def verify(plan: Plan) -> None:
    """Refuse a plan that is inconsistent or can only hang.

    Raises:
        DeadlockError: actions wait for each other; `cycle` lists them.
        CompileError: any other rule is broken; the message names process, action and channel.
    """
    _check_processes(plan)
    _check_channels(plan)
    nodes: set[int] = set()
    for actor in plan.actors:
        _check_registers(actor)
        _check_computes(actor, nodes)
    _check_collectives(plan)
    _check_endpoints(plan)
    _check_signature(plan)
    _check_waits(plan)


def _check_processes(plan: Plan) -> None:
    if [process.index for process in plan.processes] != list(range(len(plan.processes))) or not plan.processes:
        _refuse(plan.name, "processes are not numbered 0, 1, ... with the driver as 0")
    if len({process.label for process in plan.processes}) < len(plan.processes):
        _refuse(plan.name, "two processes have one label")
    if tuple(actor.process for actor in plan.actors) != plan.processes[1:]:
        _refuse(plan.name, "there is not exactly one list of actions for each process but the driver, in order")


def _check_channels(plan: Plan) -> None:
    if [channel.id for channel in plan.channels] != list(range(len(plan.channels))):
        _refuse(plan.name, "channels are not numbered 0, 1, ...")
    for channel in plan.channels:
        name = f"channel {channel.id} ({channel.value})"
        if not channel.readers or list(channel.readers) != sorted(set(channel.readers)):
            _refuse(name, "its readers are not a non-empty ascending list without repetition")
        if channel.writer in channel.readers:
            _refuse(name, "its writer is among its readers")
        if not all(0 <= process < len(plan.processes) for process in (channel.writer, *channel.readers)):
            _refuse(name, "it names a process that does not exist")


def _check_registers(actor: ActorPlan) -> None:
    """Each register is filled while empty, used while full, and empty at the end, so that no value outlives its execution."""
    full: set[int] = set()
    for place, action in enumerate(actor.actions):
        filled, used = _touched(action)
        for register in (*used, *filled):
            if not 0 <= register < actor.registers:
                _refuse_action(actor, action, f"register r{register} is outside the {actor.registers} of its actor")
        for register in used:
            if register not in full:
                _refuse_action(actor, action, f"register r{register} is used while empty")
        if isinstance(action, Release):
            if len(set(used)) < len(used):
                _refuse_action(actor, action, "a register is released twice")
            full.difference_update(used)
        for register in filled:
            if register in full:
                _refuse_action(actor, action, f"register r{register} is filled while full")
            full.add(register)
        if isinstance(action, Write):
            before = actor.actions[place - 1] if place else None
            if not isinstance(before, (Compute, Collective)) or not set(action.registers) <= set(before.outputs):
                _refuse_action(actor, action, "it does not stand right after the call whose values it writes")
            if len(action.channels) != len(action.registers):
                _refuse_action(actor, action, "it does not name one register per channel")
    if full:
        _refuse(
            f"actor {actor.process.label}",
            f"registers {', '.join(f'r{register}' for register in sorted(full))} are never released",
        )


def _touched(action: Action) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Registers that an action fills, and those it uses."""
    match action:
        case Read(_, register):
            return (register,), ()
        case Compute(outputs=outputs, awaited=awaited):
            return outputs, (*_given(action), *awaited)
        case Collective(args=given_registers, outputs=outputs):
            return outputs, given_registers
        case Write(_, registers) | Release(registers):
            return (), registers


def _given(action: Compute) -> tuple[int, ...]:
    """The registers among a call's arguments."""
    arguments = (*action.args, *(argument for _, argument in action.kwargs))
    return tuple(argument.index for argument in arguments if isinstance(argument, Register))


def _check_computes(actor: ActorPlan, nodes: set[int]) -> None:
    for action in actor.actions:
        if not isinstance(action, (Compute, Collective)):
            continue
        if action.node in nodes:
            _refuse_action(actor, action, f"call {action.node} stands in the plan twice")
        nodes.add(action.node)
        if not action.outputs:
            _refuse_action(actor, action, "a call has no register for what it returns")
        if isinstance(action, Compute) and any(isinstance(argument, Constant) and argument.index < 0 for argument in action.args):
            _refuse_action(actor, action, "a constant has a negative index")
        if isinstance(action, Compute) and len({*action.awaited} - {*_given(action)}) < len(action.awaited):
            _refuse_action(actor, action, "it waits for a register twice, or for one that it is given")


def _check_collectives(plan: Plan) -> None:
    """The actors of a collective mean the same one, and each has a rank of its own."""
    groups: dict[tuple[int, ...], list[tuple[ActorPlan, Collective]]] = {}
    for actor in plan.actors:
        for action in actor.actions:
            if isinstance(action, Collective):
                _check_collective(actor, action)
                if action.parts:
                    groups.setdefault(action.parts, []).append((actor, action))
    for parts, members in groups.items():
        actor, first = members[0]
        if sorted(action.rank for _, action in members) != list(range(len(parts))):
            _refuse_action(actor, first, f"its ranks are not those of {len(parts)} actors, each once")
        for other, action in members[1:]:
            if (action.kind, action.op, action.root, action.slices) != (first.kind, first.op, first.root, first.slices):
                _refuse_action(other, action, f"it differs from {_where(actor, first)}")
            if len(action.args) != len(first.args):
                _refuse_action(other, action, f"it exchanges another number of tensors than {_where(actor, first)}")


def _check_collective(actor: ActorPlan, action: Collective) -> None:
    world = max(1, len(action.parts))
    reduces = action.kind in (CollectiveKind.ALLREDUCE, CollectiveKind.REDUCESCATTER)
    if not 0 <= action.rank < world:
        _refuse_action(actor, action, f"rank {action.rank} is outside its {world} actors")
    if (action.op is not None) != reduces:
        _refuse_action(actor, action, f"{action.kind} {'needs an' if reduces else 'has no'} operation")
    if (action.root is not None) != (action.kind is CollectiveKind.BROADCAST) or not 0 <= (action.root or 0) < world:
        _refuse_action(actor, action, "a broadcast, and nothing else, has a root among its actors")
    if not action.args or len(action.args) != len(action.outputs):
        _refuse_action(actor, action, "it does not give one tensor for each that it takes")
    if len(action.args) > 1 and action.kind is not CollectiveKind.ALLREDUCE:
        _refuse_action(actor, action, f"{action.kind} takes one tensor")
    if len(action.parts) == 1 or (action.slices and len(action.slices) != len(action.parts)):
        _refuse_action(actor, action, "it does not name one channel for each of several actors")


def _check_endpoints(plan: Plan) -> None:
    """Each channel is written once, by its writer, and read once by each of its readers and by nobody else."""
    writers: list[list[int]] = [[] for _ in plan.channels]
    readers: list[list[int]] = [[] for _ in plan.channels]

    def at(endpoints: list[list[int]], channel: int, process: int, where: object) -> None:
        if not 0 <= channel < len(endpoints):
            _refuse(str(where), f"channel {channel} does not exist")
        endpoints[channel].append(process)

    for item in plan.inputs:
        at(writers, item.channel, DRIVER, item)
    for result in dict.fromkeys(output for output in plan.outputs if isinstance(output, FromChannel)):
        at(readers, result.channel, DRIVER, result)
    for actor in plan.actors:
        for action in actor.actions:
            if isinstance(action, Read):
                at(readers, action.channel, actor.process.index, action)
            elif isinstance(action, Write):
                for channel in action.channels:
                    at(writers, channel, actor.process.index, action)
            elif isinstance(action, Collective):
                for channel in action.written:
                    at(writers, channel, actor.process.index, action)
                for channel in action.read:
                    at(readers, channel, actor.process.index, action)
    for entry in plan.channels:
        name = f"channel {entry.id} ({entry.value})"
        if writers[entry.id] != [entry.writer]:
            _refuse(name, f"it is written by processes {writers[entry.id]} instead of once by {entry.writer}")
        if sorted(readers[entry.id]) != list(entry.readers):
            _refuse(name, f"it is read by processes {sorted(readers[entry.id])} instead of once by each of {list(entry.readers)}")


def _check_signature(plan: Plan) -> None:
    signature = plan.signature
    if signature.arity is None and signature.keys:
        _refuse(str(signature), "the whole input and keywords exclude each other")
    if not plan.outputs or (plan.single_output and len(plan.outputs) != 1):
        _refuse(plan.name, "the number of outputs does not fit what execute returns")
    projections = [item.projection for item in plan.inputs]
    if len(set(projections)) < len(projections):
        _refuse(plan.name, "a part of the input has two channels")
    for projection in (*projections, *(output.projection for output in plan.outputs if isinstance(output, FromInput))):
        match projection:
            case Whole():
                fits = signature.arity is None
            case Position(index):
                fits = signature.arity is not None and 0 <= index < signature.arity
            case Key(name):
                fits = name in signature.keys
            case Nothing():
                fits = True
        if not fits:
            _refuse(str(signature), f"it does not provide {projection}")


def _check_waits(plan: Plan) -> None:
    """Kahn's algorithm over all actions; what is left over waits for itself."""
    # A collective stands twice: as its write, and as its reads, which wait for the writes of the others. Its second phase begins
    # where the first has ended everywhere, and so waits for nothing that the first does not.
    places = [
        (actor, action)
        for actor in plan.actors
        for action in actor.actions
        for _ in range(2 if isinstance(action, Collective) and action.parts else 1)
    ]
    successors: list[list[int]] = [[] for _ in places]
    waiting = [0] * len(places)
    written: dict[int, int] = {}
    for index, (_, action) in enumerate(places):
        if isinstance(action, Write):
            written.update(dict.fromkeys(action.channels, index))
        elif isinstance(action, Collective):
            for channel in action.written:
                written.setdefault(channel, index)
    for index, (actor, action) in enumerate(places):
        if index and places[index - 1][0] is actor:
            successors[index - 1].append(index)
            waiting[index] += 1
        if isinstance(action, Read) and action.channel in written:  # Others are inputs, which wait for nothing.
            successors[written[action.channel]].append(index)
            waiting[index] += 1
        elif isinstance(action, Collective) and index and places[index - 1][1] is action:
            for channel in action.read:
                successors[written[channel]].append(index)
                waiting[index] += 1
    ready = deque(index for index, count in enumerate(waiting) if count == 0)
    left = set(range(len(places)))
    while ready:
        index = ready.popleft()
        left.discard(index)
        for then in successors[index]:
            waiting[then] -= 1
            if waiting[then] == 0:
                ready.append(then)
    if left:
        _raise_deadlock(plan, places, successors, left)


def _raise_deadlock(plan: Plan, places: list[tuple[ActorPlan, Action]], successors: list[list[int]], left: set[int]) -> NoReturn:
    predecessor = {then: index for index in left for then in successors[index] if then in left}
    trail: dict[int, None] = {}
    index = min(predecessor)
    while index not in trail:
        trail[index] = None
        index = predecessor[index]
    steps = list(trail)
    around = reversed(steps[steps.index(index) :])
    cycle = tuple(_where(*places[step]) for step in around)
    remedy = "change the order in which calls are bound on these actors"
    raise DeadlockError(
        f"plan {plan.name!r}: each of these waits for the one before it, in a circle: {' -> '.join(cycle)}; {remedy}",
        node=cycle[0],
        remedy=remedy,
        cycle=cycle,
    )


def _where(actor: ActorPlan, action: Action) -> str:
    return f"{actor.process.label}: {action}"


def _refuse_action(actor: ActorPlan, action: Action, problem: str) -> NoReturn:
    _refuse(_where(actor, action), problem)


def _refuse(where: str, problem: str) -> NoReturn:
    raise CompileError(f"inconsistent plan, at {where}: {problem}; {_REMEDY}", node=where, remedy=_REMEDY)
