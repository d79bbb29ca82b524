"""`python -m microbench.accelerated_dag_gpu`: compiled actor graphs against Ray's own, row by row.

Each row is measured in at least three rounds that alternate between raycomm and Ray, in one run, on one machine; the
ratios are what counts. Exit code 0: the run went through, whatever it measured. 2: bad input. 130: interrupted.
"""

from __future__ import annotations

import enum
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from microbench import report
from microbench.harness import FULL, QUICK, Rounds, Turn
from microbench.process import BenchProcess
from microbench.rows import RAY_CALL, RAY_GRAPH, Kind, Row, Topology, select
from microbench.targets import RATIOS, judge

RIVALS = (RAY_GRAPH, RAY_CALL)


class Device(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"


class Rivals(enum.StrEnum):
    RAY = "ray"
    NONE = "none"


def plan_turns(rows: Sequence[Row], rivals: Rivals) -> list[Turn]:
    """Turns of one round: topology by topology, and in each one system after the other."""
    turns = []
    for topology in Topology:
        here = [row for row in rows if row.topology is topology]
        for system in dict.fromkeys(system for row in here for system in row.systems):
            if system not in RIVALS or rivals is Rivals.RAY:
                turns.append(Turn(system, topology, tuple(row.name for row in here if system in row.systems)))
    return turns


def gpu_present() -> bool:
    """Whether the driver shows an NVIDIA GPU; asked of the kernel, since importing torch for it takes seconds."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def refuse(text: str) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(text, file=sys.stderr)
    raise typer.Exit(2)


def main(
    device: Annotated[Device, typer.Option(help="auto: GPU rows where there is a GPU, else CPU rows.")] = Device.AUTO,
    quick: Annotated[bool, typer.Option("--quick", help="Short rounds: under 90 s in all.")] = False,
    rows: Annotated[str | None, typer.Option(help="Only rows this regular expression is found in.", metavar="REGEX")] = None,
    rivals: Annotated[Rivals, typer.Option(help="What to compare with.")] = Rivals.RAY,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file.", metavar="PATH")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; fewer than 3 are not worth comparing.")] = 3,
) -> None:
    """Measures compiled actor graphs: raycomm beside Ray Compiled Graphs, a plain actor call and the native floor."""
    if device is Device.GPU:
        refuse("--device gpu: this version has no GPU rows")
    try:
        chosen = select(rows)
    except ValueError as error:
        refuse(f"--rows: {error}")
    turns = plan_turns(chosen, rivals)
    if not turns:
        refuse(f"--rows: with --rivals none nothing is left of {', '.join(row.name for row in chosen)}")
    if json is not None:
        try:
            report.check_writable(json)
        except OSError as error:
            refuse(f"--json: cannot write {json}: {error.strerror}")

    console = report.make_console()
    machine = report.describe_machine()
    console.print(report.machine_line(machine), markup=False)
    if device is Device.AUTO and gpu_present():
        console.print("device: cpu (there is a GPU, but this version has no GPU rows)")
    else:
        console.print("device: cpu")

    effort = QUICK if quick else FULL
    once = frozenset(row.name for row in chosen if row.kind is Kind.IDLE)
    steps = sum(min(rounds, effort.idle_rounds) if row in once else rounds for turn in turns for row in turn.rows)
    # A plain SIGTERM would end this process and skip the clean-up of its children.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with report.LiveProgress(console, steps) as progress, BenchProcess("microbench.session:Session") as process:
            results = Rounds(process, effort, progress, once).run(turns, rounds)
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        raise typer.Exit(130) from None

    report.show(console, report.results_table(results))
    if rivals is Rivals.RAY:
        measured = {result["row"] for result in results}
        verdicts = [verdict for verdict in judge(results) if verdict.row in measured]
        if any(row in RATIOS for row in measured):
            report.show(console, report.ratios_table(verdicts))
    if json is not None:
        report.write_json(json, machine, results)
        console.print(f"written: {json}", markup=False)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    typer.run(main)
