"""Checks a plan before anything is started: it means one thing, and its actors cannot wait for each other in a circle.

Plans from `lower` pass by construction; plans read from text, and later passes over plans, have to earn it. All checks are linear
in the number of actions.
"""

from __future__ import annotations

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
    Release,
    Write,
)
from raycomm.plan.deadlock import check_deadlock
from raycomm.plan.links import check_links
from raycomm.plan.placement import DRIVER
from raycomm.plan.refusal import refuse, refuse_action, where
from raycomm.plan.registers import filled_and_used, given
from raycomm.plan.transfer import Recv, Send


def verify(plan: Plan, *, slots: int = 1, hardware_queues: int | None = None) -> None:
    """Refuse a plan that is inconsistent or can only hang.

    Args:
        slots: how many messages a channel holds that does not say so itself; it only matters whether there are any.
        hardware_queues: see `check_deadlock`.

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
    check_links(plan)
    _check_signature(plan)
    check_deadlock(plan, slots=slots, hardware_queues=hardware_queues)


def _check_processes(plan: Plan) -> None:
    if [process.index for process in plan.processes] != list(range(len(plan.processes))) or not plan.processes:
        refuse(plan.name, "processes are not numbered 0, 1, ... with the driver as 0")
    if len({process.label for process in plan.processes}) < len(plan.processes):
        refuse(plan.name, "two processes have one label")
    if tuple(actor.process for actor in plan.actors) != plan.processes[1:]:
        refuse(plan.name, "there is not exactly one list of actions for each process but the driver, in order")


def _check_channels(plan: Plan) -> None:
    if [channel.id for channel in plan.channels] != list(range(len(plan.channels))):
        refuse(plan.name, "channels are not numbered 0, 1, ...")
    for channel in plan.channels:
        name = f"channel {channel.id} ({channel.value})"
        if not channel.readers or list(channel.readers) != sorted(set(channel.readers)):
            refuse(name, "its readers are not a non-empty ascending list without repetition")
        if channel.writer in channel.readers:
            refuse(name, "its writer is among its readers")
        if not all(0 <= process < len(plan.processes) for process in (channel.writer, *channel.readers)):
            refuse(name, "it names a process that does not exist")


def _check_registers(actor: ActorPlan) -> None:
    """Each register is filled while empty, used while full, and empty at the end, so that no value outlives its execution."""
    full: set[int] = set()
    before: Action | None = None  # sends and receives may stand between a call and its write
    for action in actor.actions:
        filled, used = filled_and_used(action)
        for register in (*used, *filled):
            if not 0 <= register < actor.registers:
                refuse_action(actor, action, f"register r{register} is outside the {actor.registers} of its actor")
        for register in used:
            if register not in full:
                refuse_action(actor, action, f"register r{register} is used while empty")
        if isinstance(action, Release):
            if len(set(used)) < len(used):
                refuse_action(actor, action, "a register is released twice")
            full.difference_update(used)
        for register in filled:
            if register in full:
                refuse_action(actor, action, f"register r{register} is filled while full")
            full.add(register)
        if isinstance(action, Write):
            if not isinstance(before, (Compute, Collective)) or not set(action.registers) <= set(before.outputs):
                refuse_action(actor, action, "it does not stand right after the call whose values it writes")
            if len(action.channels) != len(action.registers):
                refuse_action(actor, action, "it does not name one register per channel")
        if not isinstance(action, (Send, Recv)):
            before = action
    if full:
        refuse(
            f"actor {actor.process.label}",
            f"registers {', '.join(f'r{register}' for register in sorted(full))} are never released",
        )


def _check_computes(actor: ActorPlan, nodes: set[int]) -> None:
    for action in actor.actions:
        if not isinstance(action, (Compute, Collective)):
            continue
        if action.node in nodes:
            refuse_action(actor, action, f"call {action.node} stands in the plan twice")
        nodes.add(action.node)
        if not action.outputs:
            refuse_action(actor, action, "a call has no register for what it returns")
        if isinstance(action, Compute) and any(isinstance(argument, Constant) and argument.index < 0 for argument in action.args):
            refuse_action(actor, action, "a constant has a negative index")
        if isinstance(action, Compute) and len({*action.awaited} - {*given(action)}) < len(action.awaited):
            refuse_action(actor, action, "it waits for a register twice, or for one that it is given")


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
            refuse_action(actor, first, f"its ranks are not those of {len(parts)} actors, each once")
        for other, action in members[1:]:
            if _meant(action) != _meant(first):
                refuse_action(other, action, f"it differs from {where(actor, first)}")
            if len(action.args) != len(first.args):
                refuse_action(other, action, f"it exchanges another number of tensors than {where(actor, first)}")


def _meant(action: Collective) -> tuple[object, ...]:
    """What all ranks of a collective have to agree about."""
    return action.kind, action.op, action.root, action.slices, action.group


def _check_collective(actor: ActorPlan, action: Collective) -> None:
    world = max(1, len(action.parts))
    reduces = action.kind in (CollectiveKind.ALLREDUCE, CollectiveKind.REDUCESCATTER)
    if not 0 <= action.rank < world:
        refuse_action(actor, action, f"rank {action.rank} is outside its {world} actors")
    if (action.op is not None) != reduces:
        refuse_action(actor, action, f"{action.kind} {'needs an' if reduces else 'has no'} operation")
    if (action.root is not None) != (action.kind is CollectiveKind.BROADCAST) or not 0 <= (action.root or 0) < world:
        refuse_action(actor, action, "a broadcast, and nothing else, has a root among its actors")
    if not action.args or len(action.args) != len(action.outputs):
        refuse_action(actor, action, "it does not give one tensor for each that it takes")
    if len(action.args) > 1 and action.kind is not CollectiveKind.ALLREDUCE:
        refuse_action(actor, action, f"{action.kind} takes one tensor")
    if len(action.parts) == 1 or (action.slices and len(action.slices) != len(action.parts)):
        refuse_action(actor, action, "it does not name one channel for each of several actors")


def _check_endpoints(plan: Plan) -> None:
    """Each channel is written once, by its writer, and read once by each of its readers and by nobody else."""
    writers: list[list[int]] = [[] for _ in plan.channels]
    readers: list[list[int]] = [[] for _ in plan.channels]

    def at(endpoints: list[list[int]], channel: int, process: int, where: object) -> None:
        if not 0 <= channel < len(endpoints):
            refuse(str(where), f"channel {channel} does not exist")
        endpoints[channel].append(process)

    for item in plan.inputs:
        at(writers, item.channel, DRIVER, item)
    for result in dict.fromkeys(output for output in plan.outputs if isinstance(output, FromChannel)):
        at(readers, result.channel, DRIVER, result)
    for actor in plan.actors:
        for action in actor.actions:
            if isinstance(action, (Read, Recv)):
                at(readers, action.channel, actor.process.index, action)
            elif isinstance(action, Write):
                for channel in action.channels:
                    at(writers, channel, actor.process.index, action)
            elif isinstance(action, Send):
                at(writers, action.channel, actor.process.index, action)
            elif isinstance(action, Collective):
                for channel in action.written:
                    at(writers, channel, actor.process.index, action)
                for channel in action.read:
                    at(readers, channel, actor.process.index, action)
    for entry in plan.channels:
        name = f"channel {entry.id} ({entry.value})"
        if writers[entry.id] != [entry.writer]:
            refuse(name, f"it is written by processes {writers[entry.id]} instead of once by {entry.writer}")
        if sorted(readers[entry.id]) != list(entry.readers):
            refuse(name, f"it is read by processes {sorted(readers[entry.id])} instead of once by each of {list(entry.readers)}")


def _check_signature(plan: Plan) -> None:
    signature = plan.signature
    if signature.arity is None and signature.keys:
        refuse(str(signature), "the whole input and keywords exclude each other")
    if not plan.outputs or (plan.single_output and len(plan.outputs) != 1):
        refuse(plan.name, "the number of outputs does not fit what execute returns")
    projections = [item.projection for item in plan.inputs]
    if len(set(projections)) < len(projections):
        refuse(plan.name, "a part of the input has two channels")
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
            refuse(str(signature), f"it does not provide {projection}")
