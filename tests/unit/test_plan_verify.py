"""What `verify` refuses: each case breaks one rule of a plan that passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from raycomm.errors import CompileError, DeadlockError
from raycomm.plan.actions import Action, Compute, Constant, Plan, Read, Register, Release, Signature, Write
from raycomm.plan.text import parse_plan
from raycomm.plan.verify import verify

PASSES = """\
plan "diamond"
signature 1 b
process 0 "driver"
process 1 "W1"
process 2 "W2"
process 3 "W3"
channel 0 "input[0]" 0 -> 1
channel 1 "input.b" 0 -> 3
channel 2 "W1.forward#0" 1 -> 2, 3
channel 3 "W2.scale#1" 2 -> 1
channel 4 "W3.scale#2" 3 -> 1
channel 5 "W1.join#3" 1 -> 0
input position 0 -> channel 0
input key "b" -> channel 1
output channel 5
returns one
actor 1 registers 4
  r0 = read 0
  r1 = 0:forward(r0)
  write 2 from r1
  release r0
  r0 = read 3
  r2 = read 4
  r3 = 3:join(r0, r2, local=r1)
  write 5 from r3
  release r0, r1, r2, r3
actor 2 registers 2
  r0 = read 2
  r1 = 1:scale(r0, c0)
  write 3 from r1
  release r0, r1
actor 3 registers 3
  r0 = read 2
  r1 = read 1
  r2 = 2:scale(r0, offset=r1)
  write 4 from r2
  release r0, r1, r2
"""


def swap_actions(plan: Plan, place: int, first: int, second: int) -> Plan:
    """`plan` with two actions of actor `place` exchanged."""
    entry = plan.actors[place]
    actions = list(entry.actions)
    actions[first], actions[second] = actions[second], actions[first]
    return change_actor(plan, place, actions=tuple(actions))


def change_actor(plan: Plan, place: int, **changes: Any) -> Plan:
    actors = list(plan.actors)
    actors[place] = replace(actors[place], **changes)
    return replace(plan, actors=tuple(actors))


def change_channel(plan: Plan, index: int, **changes: Any) -> Plan:
    channels = list(plan.channels)
    channels[index] = replace(channels[index], **changes)
    return replace(plan, channels=tuple(channels))


def without(plan: Plan, place: int, index: int) -> Plan:
    actions = plan.actors[place].actions
    return change_actor(plan, place, actions=actions[:index] + actions[index + 1 :])


def extended(plan: Plan, place: int, *actions: Action) -> Plan:
    return change_actor(plan, place, actions=plan.actors[place].actions + actions)


BROKEN: list[tuple[str, Callable[[Plan], Plan], str]] = [
    ("process order", lambda p: replace(p, processes=p.processes[::-1]), "not numbered"),
    ("labels", lambda p: replace(p, processes=(p.processes[0], *(replace(q, label="x") for q in p.processes[1:]))), "one label"),
    ("lost actor", lambda p: replace(p, actors=p.actors[:-1]), "exactly one list of actions"),
    ("channel order", lambda p: replace(p, channels=p.channels[::-1]), "channels are not numbered"),
    ("no reader", lambda p: change_channel(p, 0, readers=()), "non-empty ascending"),
    ("reader twice", lambda p: change_channel(p, 2, readers=(2, 2)), "non-empty ascending"),
    ("reader order", lambda p: change_channel(p, 2, readers=(3, 2)), "non-empty ascending"),
    ("reads itself", lambda p: change_channel(p, 0, writer=1), "its writer is among"),
    ("unknown reader", lambda p: change_channel(p, 0, readers=(1, 9)), "does not exist"),
    ("missing reader", lambda p: change_channel(p, 2, readers=(2,)), r"read by processes \[2, 3\]"),
    ("surplus reader", lambda p: change_channel(p, 5, readers=(0, 2)), r"read by processes \[0\]"),
    ("wrong writer", lambda p: change_channel(p, 5, writer=2), "instead of once by 2"),
    ("read lost", lambda p: without(p, 1, 0), "used while empty"),
    ("write lost", lambda p: without(p, 0, 2), r"written by processes \[\]"),
    ("release lost", lambda p: without(p, 1, 3), "never released"),
    ("early release lost", lambda p: without(p, 0, 3), "filled while full"),
    ("release first", lambda p: swap_actions(p, 1, 1, 3), "used while empty"),
    ("write late", lambda p: swap_actions(p, 0, 2, 3), "right after the call"),
    ("write unpaired", lambda p: extended(without(p, 1, 3), 1, Write((3, 4), (1,))), "right after the call"),
    ("released twice", lambda p: extended(without(p, 1, 3), 1, Release((0, 1, 1))), "released twice"),
    ("few registers", lambda p: change_actor(p, 0, registers=3), "outside the 3"),
    ("call twice", lambda p: extended(p, 1, Read(2, 0), Compute(1, "f", (Register(0),), (), (1,)), Release((0, 1))), "twice"),
    ("read twice", lambda p: extended(p, 1, Read(2, 0), Release((0,))), r"read by processes \[2, 2, 3\]"),
    ("unknown channel", lambda p: extended(p, 1, Read(17, 0), Release((0,))), "channel 17 does not exist"),
    ("no output register", lambda p: extended(p, 1, Compute(9, "f", (), (), ())), "no register for what it returns"),
    ("input lost", lambda p: replace(p, inputs=p.inputs[1:]), r"written by processes \[\]"),
    ("output lost", lambda p: replace(p, outputs=()), "read by processes"),
    ("output surplus", lambda p: replace(p, outputs=p.outputs * 2), "number of outputs"),
    ("whole and keys", lambda p: replace(p, signature=Signature(None, ("b",))), "exclude"),
    ("arity", lambda p: replace(p, signature=Signature(0, ("b",))), "does not provide Position"),
    ("keys", lambda p: replace(p, signature=Signature(1, ())), "does not provide Key"),
    ("waits for nothing", lambda p: with_awaited(p, 0, 1, (2,)), "r2 is used while empty"),
    ("waits for no register", lambda p: with_awaited(p, 0, 1, (9,)), "outside the 4"),
    ("waits twice", lambda p: with_awaited(without_argument(p, 2, 2), 2, 2, (1, 1)), "waits for a register twice"),
    ("waits for an argument", lambda p: with_awaited(p, 0, 6, (1,)), "or for one that it is given"),
    ("negative constant", lambda p: with_second_argument(p, "scale(r0, c0)", Constant(-1)), "negative index"),
]


def with_awaited(plan: Plan, place: int, index: int, awaited: tuple[int, ...]) -> Plan:
    return change_compute(plan, place, index, awaited=awaited)


def without_argument(plan: Plan, place: int, index: int) -> Plan:
    return change_compute(plan, place, index, kwargs=())


def change_compute(plan: Plan, place: int, index: int, **changes: Any) -> Plan:
    actions = list(plan.actors[place].actions)
    action = actions[index]
    assert isinstance(action, Compute)
    actions[index] = replace(action, **changes)
    return change_actor(plan, place, actions=tuple(actions))


def test_verify_passes_a_call_that_only_waits() -> None:
    verify(with_awaited(without_argument(parse_plan(PASSES), 2, 2), 2, 2, (1,)))


def with_second_argument(plan: Plan, call: str, constant: Constant) -> Plan:
    """`plan` with the second argument of the one call whose text ends in `call` exchanged."""
    for actor_index, entry in enumerate(plan.actors):
        for index, action in enumerate(entry.actions):
            if isinstance(action, Compute) and str(action).endswith(call):
                changed = replace(action, args=(action.args[0], constant))
                return change_actor(plan, actor_index, actions=(*entry.actions[:index], changed, *entry.actions[index + 1 :]))
    raise AssertionError(call)


@pytest.mark.parametrize(("breaks", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_verify_refuses(breaks: Callable[[Plan], Plan], message: str) -> None:
    plan = parse_plan(PASSES)
    verify(plan)
    with pytest.raises(CompileError, match=message) as caught:
        verify(breaks(plan))
    error = caught.value
    assert error.node is not None
    assert error.node in str(error)
    assert error.remedy is not None
    assert error.remedy in str(error)
    assert not isinstance(error, DeadlockError)


SUMMED = """\
plan "summed"
signature whole
process 0 "driver"
process 1 "A"
process 2 "B"
channel 0 "input" 0 -> 1, 2
channel 1 "A.allreduce#2" 1 -> 0
channel 2 "part of A.allreduce#2" 1 -> 2
channel 3 "part of B.allreduce#3" 2 -> 1
channel 4 "slice of A.allreduce#2" 1 -> 2
channel 5 "slice of B.allreduce#3" 2 -> 1
input whole -> channel 0
output channel 1
returns one
actor 1 registers 2
  r0 = read 0
  r1 = 0:f(r0)
  release r0
  r0 = collective 2 allreduce sum rank 0 from r1 parts 2, 3 slices 4, 5
  write 1 from r0
  release r0, r1
actor 2 registers 2
  r0 = read 0
  r1 = 1:f(r0)
  release r0
  r0 = collective 3 allreduce sum rank 1 from r1 parts 2, 3 slices 4, 5
  release r0, r1
"""

MISMATCHED = [
    ("rank 1 from r1", "rank 0 from r1", "its ranks are not those of 2 actors"),
    ("rank 1 from r1", "rank 2 from r1", "rank 2 is outside its 2 actors"),
    ("collective 3 allreduce sum", "collective 3 allreduce max", "it differs from A: r0 = collective 2"),
    ("collective 3 allreduce sum rank 1", "collective 3 broadcast root 0 rank 1", "it differs from A"),
    ("collective 3 allreduce sum", "collective 3 allreduce", "allreduce needs an operation"),
    ("collective 3 allreduce sum", "collective 3 allgather sum", "allgather has no operation"),
    ("collective 3 allreduce sum rank", "collective 3 broadcast rank", "has a root among its actors"),
    ("collective 3 allreduce sum rank", "collective 3 broadcast root 2 rank", "has a root among its actors"),
    (
        "r0 = collective 3 allreduce sum rank 1 from r1 ",
        "r0 = collective 3 allreduce sum rank 1 from r1, r1 ",
        "one tensor for each",
    ),
    ("rank 1 from r1 parts 2, 3 slices 4, 5", "rank 1 from r1 parts 2, 3 slices 4", "one channel for each of several"),
    ("rank 1 from r1 parts 2, 3 slices 4, 5", "rank 1 from r1 parts 2, 3", "it differs from A"),
    ("rank 1 from r1 parts 2, 3 slices 4, 5", "rank 0 from r1 parts 2", "one channel for each of several"),
    ("parts 2, 3 slices 4, 5\n  release", "parts 3, 2 slices 4, 5\n  release", "ranks are not those of 2 actors"),
    ('channel 3 "part of B.allreduce#3" 2 -> 1', 'channel 3 "part of B.allreduce#3" 1 -> 2', "instead of once by 1"),
    ("collective 3 ", "collective 1 ", "call 1 stands in the plan twice"),
    ("rank 1 from r1", "rank 1 from r0", "used while empty"),
]


@pytest.mark.parametrize(("text", "instead", "message"), MISMATCHED)
def test_verify_refuses_collectives_that_do_not_fit(text: str, instead: str, message: str) -> None:
    verify(parse_plan(SUMMED))
    assert text in SUMMED
    with pytest.raises(CompileError, match=message) as caught:
        verify(parse_plan(SUMMED.replace(text, instead)))
    assert caught.value.node is not None
    assert caught.value.node in str(caught.value)


OPPOSITE = """\
plan "opposite"
signature whole
process 0 "driver"
process 1 "A"
process 2 "B"
channel 0 "input" 0 -> 1, 2
channel 1 "A.allreduce#2" 1 -> 0
channel 2 "part of A" 1 -> 2
channel 3 "part of B" 2 -> 1
channel 4 "other part of A" 1 -> 2
channel 5 "other part of B" 2 -> 1
input whole -> channel 0
output channel 1
returns one
actor 1 registers 2
  r0 = read 0
  r1 = 0:f(r0)
  release r0
  r0 = collective 2 allreduce sum rank 0 from r1 parts 2, 3
  write 1 from r0
  release r0
  r0 = collective 4 allgather rank 0 from r1 parts 4, 5
  release r0, r1
actor 2 registers 2
  r0 = read 0
  r1 = 1:f(r0)
  release r0
  r0 = collective 5 allgather rank 1 from r1 parts 4, 5
  release r0
  r0 = collective 3 allreduce sum rank 1 from r1 parts 2, 3
  release r0, r1
"""


def test_collectives_in_opposite_orders_are_a_deadlock() -> None:
    with pytest.raises(DeadlockError, match="plan 'opposite': each of these waits") as caught:
        verify(parse_plan(OPPOSITE))
    cycle = caught.value.cycle
    assert {step.split(" rank")[0] for step in cycle if "collective" in step} == {
        "A: r0 = collective 2 allreduce sum",
        "A: r0 = collective 4 allgather",
        "B: r0 = collective 5 allgather",
        "B: r0 = collective 3 allreduce sum",
    }


CROSSED = """\
plan "crossed"
signature whole
process 0 "driver"
process 1 "A"
process 2 "B"
channel 0 "A.f#0" 1 -> 2
channel 1 "B.f#1" 2 -> 0, 1
output channel 1
returns one
actor 1 registers 2
  r0 = read 1
  r1 = 0:f(r0)
  write 0 from r1
  release r0, r1
actor 2 registers 2
  r0 = read 0
  r1 = 1:f(r0)
  write 1 from r1
  release r0, r1
"""


def test_verify_names_the_cycle_action_by_action() -> None:
    with pytest.raises(DeadlockError, match="plan 'crossed': each of these waits") as caught:
        verify(parse_plan(CROSSED))
    cycle = caught.value.cycle
    start = cycle.index("A: r0 = read 1")
    assert cycle[start:] + cycle[:start] == (
        "A: r0 = read 1",
        "A: r1 = 0:f(r0)",
        "A: write 0 from r1",
        "B: r0 = read 0",
        "B: r1 = 1:f(r0)",
        "B: write 1 from r1",
    )
    assert caught.value.remedy in str(caught.value)
