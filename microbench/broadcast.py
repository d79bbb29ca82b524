"""`python -m microbench.broadcast`: one writer, several readers, the same messages over every transport people compare.

Lists of N ints, N = 101, 202, ... 1010 and 2^10 ... 2^18, and CPU tensors from 4 B to 256 MiB, which a reader has received once
it has summed them. In a row the next message follows 2 ms after the last reader had the one before ("paced"):

- `mean_us`, `std_us`, `p50_us`, `p99_us`: from the writer's clock before the call to the last reader's clock after it;
- `call_mean_us`, ...: how long the caller was kept;
- `irregular_mean_us`, ...: the first again with 1 to 3 ms between messages, at random: no reader can know when to be awake;
- `unpaced_us`: microseconds a message as fast as it goes, the writer at most a few messages ahead of the slowest reader;
- `encoded_bytes`: what a message takes.

Systems take turns, round by round. One that hangs or fails gets a row that says so; one that is not installed, how to get it.
Exit code 0: the run went through, whatever it measured. 2: bad input. 130: interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from microbench.broadcast_session import FULL, QUICK
from microbench.command import BenchRun, CsvPath, JsonPath, RowPattern, refuse, refusing
from microbench.console import LiveProgress, number, show
from microbench.harness import Result, Rounds, Turn
from microbench.interpreters import Interpreters
from microbench.rows import select
from microbench.systems import SYSTEMS
from microbench.workloads import LISTS, SEED, TENSORS, WORKLOADS, Sort, Workload

QUICK_TENSORS_UP_TO = 16 << 20  # bytes
QUICK_LEAVES_OUT = ("zmq:pubsub:tcp", "zmq:pubsub:tcp:msgpack")


def plan(systems: Sequence[str], workloads: Sequence[Workload], readers: int) -> tuple[list[Turn], list[Result]]:
    """The turns of a round, and the rows of systems that cannot run here."""
    turns, left_out = [], []
    for name in systems:
        system = SYSTEMS[name]
        rows = tuple(workload.name for workload in workloads if workload.sort in system.sorts)
        lack = system.lacks(readers)
        if lack is None and rows:
            turns.append(Turn(name, f"{readers} readers", rows))
        elif lack is not None:
            left_out += [{"row": row, "system": name, "left_out": lack} for row in rows]
    return turns, left_out


def described(results: Sequence[Result], order: Sequence[str]) -> list[Result]:
    """Results row by row, systems in the order asked for, each with the sort and size of its messages."""
    places = {name: place for place, name in enumerate(WORKLOADS)}
    ordered = sorted(results, key=lambda result: (places[result["row"]], order.index(result["system"])))
    of = {name: {"kind": str(workload.sort), "size": workload.size} for name, workload in WORKLOADS.items()}
    return [{"row": result["row"], "system": result["system"], **of[result["row"]], **result} for result in ordered]


def table(results: Sequence[Result], sort: Sort) -> Table | None:
    """Mean to the last reader by size and system, the least of a row in bold."""
    here = [result for result in results if result["kind"] == sort]
    if not here:
        return None
    systems = list(dict.fromkeys(result["system"] for result in here))
    drawn = Table(title=f"{sort}: mean us to the last reader, paced / us a message, unpaced")
    drawn.add_column("row", no_wrap=True)
    for system in systems:
        drawn.add_column(system.replace(":", ":\n"), justify="right")
    for row in dict.fromkeys(result["row"] for result in here):
        of = {result["system"]: result for result in here if result["row"] == row}
        best = min((result["mean_us"] for name, result in of.items() if "mean_us" in result and name != "copy"), default=None)
        drawn.add_row(row, *(_cell(of.get(system, {}), best) for system in systems))
    return drawn


def _cell(result: Mapping[str, Any], best: float | None) -> str:
    if "mean_us" not in result:
        return "failed" if "error" in result else "-"
    text = f"{number(result['mean_us'])} / {number(result.get('unpaced_us'))}"
    return f"[bold]{text}[/bold]" if result["mean_us"] == best else text


def main(
    quick: Annotated[bool, typer.Option("--quick", help="One short round, fewer sizes: under 5 minutes.")] = False,
    readers: Annotated[int, typer.Option(min=1, max=16, help="Processes that read.")] = 4,
    rows: RowPattern = None,
    systems: Annotated[str | None, typer.Option(help="Only systems it is found in.", metavar="REGEX")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds; 3 unless --quick.")] = None,
    json: JsonPath = None,
    csv: CsvPath = None,
) -> None:
    """Measures a broadcast over raycomm's ring and over its rivals."""
    sizes = [*LISTS, *(workload for workload in TENSORS if not quick or workload.size <= QUICK_TENSORS_UP_TO)]
    with refusing("--rows"):
        workloads = select(rows, {workload.name: workload for workload in sizes})
    known = [name for name in SYSTEMS if not quick or systems is not None or name not in QUICK_LEAVES_OUT]
    with refusing("--systems"):
        chosen = select(systems, {name: name for name in known}, "system")
    effort, times = (QUICK, rounds or 1) if quick else (FULL, rounds or 3)
    turns, left_out = plan(chosen, workloads, readers)
    if not (turns or left_out):
        refuse(f"--rows: none of {', '.join(chosen)} sends {', '.join(workload.name for workload in workloads)}")
    facts = {
        "readers": readers,
        "pace_ms": effort.pace_s * 1e3,
        "messages": effort.messages,
        "warmups": effort.warmups,
        "rounds": times,
        "seed": SEED,
        "wait_policy": "raycomm, zmq, gloo: asleep, raycomm awake when a regular message is due; iceoryx2: polls; vllm: spins",
    }
    with BenchRun("broadcast", json, facts, csv=csv) as run:
        for name, lack in {result["system"]: result["left_out"] for result in left_out}.items():
            run.console.print(f"left out: {name}: {lack}", markup=False, soft_wrap=True)
        steps = times * sum(len(turn.rows) for turn in turns)
        with (
            LiveProgress(run.console, steps) as progress,
            Interpreters("microbench.broadcast_session:Session", lambda system: SYSTEMS[system].python) as processes,
        ):
            measured = Rounds(processes, effort, progress).run(turns, times)
        results = described([*measured, *left_out], chosen)
        for sort in Sort:
            if (drawn := table(results, sort)) is not None:
                show(run.console, drawn)
        run.write(results)


if __name__ == "__main__":
    typer.run(main)
