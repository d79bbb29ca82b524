"""Two ranks that both send first: hangs where sends and receives share a stream, runs where each link has its own.

    python -m dags.exchange --policy link
    python -m dags.exchange --policy shared                 # refused before it runs, with the circle of waits
    python -m dags.exchange --policy shared --no-verify     # what would happen: both ranks hang
    python -m dags.exchange --policy link --device gloo     # between processes; or cuda, where there is a GPU

Each rank makes a tensor, sends it to the other, receives the other's, and adds the two. The lists of actions are written by hand,
since `raycomm.compile` would order them so that nothing can hang whatever the policy.

By default they run on simulated devices, under a virtual clock. With ``--device gloo`` or ``cuda`` each rank is a process with
tensors of a million float32 in host or GPU memory, which the links move; every element of every result is checked. With one GPU
both ranks use it, which needs NCCL 2.30 or newer.

Exit status: 0 right, 1 a deadlock found before it ran, 2 a hang seen, 3 a wrong value, 4 a rank that cannot take part or has died
(no GPU, for example).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Any

import typer

from raycomm.errors import DeadlockError
from raycomm.options import StreamPolicy
from raycomm.plan.actions import Plan
from raycomm.plan.streams import assign_streams
from raycomm.plan.text import parse_plan
from raycomm.plan.transfer import Backend
from raycomm.plan.verify import verify
from raycomm.testing.simulated import SimulatedHang, simulate

PLAN = """\
plan "exchange"
signature whole
process 0 "driver"
process 1 "rank0"
process 2 "rank1"
channel 0 "input" 0 -> 1, 2
channel 1 "rank0.make#0" 1 -> 2 transport device
channel 2 "rank1.make#1" 2 -> 1 transport device
channel 3 "rank0.add#2" 1 -> 0
channel 4 "rank1.add#3" 2 -> 0
link 0 1 -> 2
link 1 2 -> 1
input whole -> channel 0
output channel 3
output channel 4
returns list
actor 1 registers 4
  r0 = read 0
  r1 = 0:make(r0)
  send 1 from r1 on link 0
  r2 = recv 2 on link 1
  r3 = 2:add(r1, r2)
  write 3 from r3
  release r0, r1, r2, r3
actor 2 registers 4
  r0 = read 0
  r1 = 1:make(r0)
  send 2 from r1 on link 1
  r2 = recv 1 on link 0
  r3 = 3:add(r1, r2)
  write 4 from r3
  release r0, r1, r2, r3
"""

NAMES = ("rank0.make", "rank1.make", "rank0.add", "rank1.add")
DEADLOCK = 1
HANG = 2
WRONG = 3
FAILED = 4


class DeviceChoice(StrEnum):
    """Where the ranks' tensors lie. SIMULATED: nowhere, under a virtual clock. GLOO: in host memory of two processes. CUDA: on
    GPUs, moved by NCCL."""

    SIMULATED = "simulated"
    GLOO = "gloo"
    CUDA = "cuda"


_OVER = {DeviceChoice.SIMULATED: None, DeviceChoice.GLOO: Backend.GLOO, DeviceChoice.CUDA: Backend.NCCL}


def plan_of(device: DeviceChoice) -> Plan:
    """The plan, with what carries its links."""
    plan = parse_plan(PLAN)
    return replace(plan, links=tuple(replace(link, over=_OVER[device]) for link in plan.links))


def text_of(term: Any) -> str:
    """A value of the simulation, which is what it was computed from: (call, place among its results, arguments, keywords), or a
    name."""
    if not isinstance(term, tuple) or not isinstance(term[0], int):
        return str(term[0] if isinstance(term, tuple) else term)
    return f"{NAMES[term[0]]}({', '.join(map(text_of, term[2]))})"


def expected(execution: int) -> list[str]:
    """What the two ranks have to give."""
    mine, other = (f"{NAMES[rank]}(input 0 of {execution})" for rank in (0, 1))
    return [f"rank0.add({mine}, {other})", f"rank1.add({other}, {mine})"]


def main(
    policy: Annotated[StreamPolicy, typer.Option(help="Which operations of a device share a stream.")] = StreamPolicy.LINK,
    device: Annotated[DeviceChoice, typer.Option(help="Where the tensors lie.")] = DeviceChoice.SIMULATED,
    executions: Annotated[int, typer.Option(min=1, help="How often the plan runs.")] = 3,
    limit: Annotated[float, typer.Option(min=0.1, help="Seconds until an execution counts as hanging; not simulated.")] = 10.0,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Run it even if it can only hang.")] = False,
) -> None:
    """Exchange two tensors between two ranks that both send first.

    Exits with 1 for a deadlock found, 2 for a hang seen, 3 for a wrong value, 4 for a rank that cannot take part or has died.
    """
    plan = assign_streams(plan_of(device), policy)
    if device is DeviceChoice.CUDA:
        _check_gpus(plan)
    print(plan)
    if not no_verify:
        try:
            verify(plan)
        except DeadlockError as error:
            raise _told(f"DeadlockError: {error}", DEADLOCK) from None
    if device is DeviceChoice.SIMULATED:
        _simulate(plan, executions)
    else:
        _run(plan, executions, limit)


def _check_gpus(plan: Plan) -> None:
    from dags.exchange_driver import ExchangeFailed, gpus_of

    try:
        gpus_of(plan)
    except ExchangeFailed as failed:
        raise _told(f"failed: {failed}", FAILED) from None


def _simulate(plan: Plan, executions: int) -> None:
    try:
        outcome = simulate(plan, executions)
    except SimulatedHang as hang:
        raise _told(f"hang: {hang}", HANG) from None
    for number, results in enumerate(outcome.results):
        texts = list(map(text_of, results))
        if texts != expected(number):
            right = "; ".join(expected(number))
            raise _told(f"wrong: execution {number} gave {'; '.join(texts)} and should have given {right}", WRONG)
        print(f"execution {number}: right at both ranks: {'; '.join(texts)}")


def _run(plan: Plan, executions: int, limit_s: float) -> None:
    from dags.exchange_driver import ExchangeFailed, ExchangeHangs, Ranks, WrongValue
    from dags.exchange_ranks import COUNT

    try:
        with Ranks(plan) as ranks:
            for number in range(executions):
                ranks.exchange(number, limit_s)
                print(f"execution {number}: all {COUNT} elements are right at both ranks", flush=True)
    except ExchangeHangs as hang:
        raise _told(f"hang: {hang}", HANG) from None
    except WrongValue as wrong:
        raise _told(f"wrong: {wrong}", WRONG) from None
    except ExchangeFailed as failed:
        raise _told(f"failed: {failed}", FAILED) from None


def _told(text: str, status: int) -> typer.Exit:
    print(text, file=sys.stderr)
    return typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
