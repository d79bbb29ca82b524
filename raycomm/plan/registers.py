"""Registers of an actor's actions: which an action touches, and how passes that move actions keep the registers right.

A pass works on actions in which every value has a register of its own (`spread`), and `pack` gives numbers back to the lowest
free ones and releases every value after the last action that uses it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

from raycomm.plan.actions import (
    Action,
    ActorPlan,
    Argument,
    Collective,
    Compute,
    Process,
    Read,
    Register,
    Release,
    Write,
)
from raycomm.plan.transfer import Recv, Send


def given(action: Compute) -> tuple[int, ...]:
    """The registers among a call's arguments."""
    arguments = (*action.args, *(argument for _, argument in action.kwargs))
    return tuple(argument.index for argument in arguments if isinstance(argument, Register))


def filled_and_used(action: Action) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Registers that an action fills, and those it uses."""
    match action:
        case Read(_, register) | Recv(_, register):
            return (register,), ()
        case Compute(outputs=outputs, awaited=awaited):
            return outputs, (*given(action), *awaited)
        case Collective(args=sources, outputs=outputs):
            return outputs, sources
        case Send(_, register):
            return (), (register,)
        case Write(_, registers) | Release(registers):
            return (), registers


def spread(actor: ActorPlan) -> tuple[Action, ...]:
    """The actor's actions without its releases, each value in a register that no other value ever uses."""
    current: dict[int, int] = {}
    count = 0
    spread_actions: list[Action] = []
    for action in actor.actions:
        if isinstance(action, Release):
            continue
        filled, used = filled_and_used(action)
        names = {register: current[register] for register in used}
        fresh = {register: count + place for place, register in enumerate(filled)}
        count += len(filled)
        current.update(fresh)
        spread_actions.append(_renamed(action, names, fresh))
    return tuple(spread_actions)


def pack(process: Process, actions: Sequence[Action]) -> ActorPlan:
    """The plan of an actor whose spread actions these are: lowest free registers, and a release where a value is done with.

    What leaves the process goes before releases, for others wait for it.
    """
    last = {register: place for place, action in enumerate(actions) for both in filled_and_used(action) for register in both}
    number: dict[int, int] = {}
    free: list[int] = []
    count = 0
    done: list[int] = []
    packed: list[Action] = []

    def release() -> None:
        if done:
            packed.append(Release(tuple(sorted(done))))
            for register in done:
                heapq.heappush(free, register)
            done.clear()

    leaves = _leaving(actions)
    for place, action in enumerate(actions):
        if not leaves[place]:
            release()
        filled, used = filled_and_used(action)
        for register in filled:
            if not free:
                heapq.heappush(free, count)
                count += 1
            number[register] = heapq.heappop(free)
        packed.append(_renamed(action, number, number))
        done += [number[register] for register in dict.fromkeys((*used, *filled)) if last[register] == place]
    release()
    return ActorPlan(process, tuple(packed), count)


def _leaving(actions: Sequence[Action]) -> list[bool]:
    """By action: whether it sends or writes what the call before it made, or receives while some of that has yet to go."""
    leaves = [False] * len(actions)
    follows = False
    for place in reversed(range(len(actions))):
        action = actions[place]
        follows = isinstance(action, (Send, Write)) or (follows and isinstance(action, Recv))
        leaves[place] = follows
    return leaves


def _renamed(action: Action, used: dict[int, int], filled: dict[int, int]) -> Action:
    def several(registers: Iterable[int], names: dict[int, int]) -> tuple[int, ...]:
        return tuple(names[register] for register in registers)

    def argument(entry: Argument) -> Argument:
        return Register(used[entry.index]) if isinstance(entry, Register) else entry

    match action:
        case Read() | Recv():
            return replace(action, register=filled[action.register])
        case Compute():
            return replace(
                action,
                args=tuple(map(argument, action.args)),
                kwargs=tuple((name, argument(entry)) for name, entry in action.kwargs),
                outputs=several(action.outputs, filled),
                awaited=several(action.awaited, used),
            )
        case Collective():
            return replace(action, args=several(action.args, used), outputs=several(action.outputs, filled))
        case Send():
            return replace(action, register=used[action.register])
        case Write() | Release():
            return replace(action, registers=several(action.registers, used))
