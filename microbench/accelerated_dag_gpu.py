"""`python -m microbench.accelerated_dag_gpu`: compiled actor graphs against Ray's own, row by row.

Each row is measured in at least three rounds that alternate between raycomm and Ray, in one run, on one machine; the
ratios are what counts. Exit code 0: the run went through, whatever it measured. 2: bad input. 130: interrupted.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from microbench import console as display
from microbench.command import BenchRun, CsvPath, JsonPath, Rivals, RivalsOption, RoundCount, RowPattern, refuse, refusing
from microbench.gpu_found import look_for_gpus
from microbench.gpu_rows import GPU_ROWS, TORCH, GpuRow, Gpus, plan_gpu_turns
from microbench.harness import FULL, QUICK, Effort, Result, Rounds, Turn, steps
from microbench.process import BenchProcess
from microbench.rows import RAY_CALL, RAY_GRAPH, ROWS, Kind, Row, Topology, select
from microbench.split import split
from microbench.targets import RATIOS, judge

RIVALS = (RAY_GRAPH, RAY_CALL, TORCH)
NOTHING_OF_GPUS = "no GPU takes part: tensors lie in host memory, and these figures say nothing about GPUs"


class Device(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    GPU = "gpu"
    SIMULATED = "simulated"


@dataclass(frozen=True)
class Part:
    """Rows that one bench process measures, one part after the other.

    Attributes:
        serves: what runs in the process.
        once: rows that are measured in fewer rounds: a quick run's in one only.
        left_out: results of rows that this machine cannot run.
    """

    serves: str
    turns: list[Turn]
    once: frozenset[str] = frozenset()
    left_out: list[Result] = field(default_factory=list)

    def fewer(self, effort: Effort) -> dict[str, int]:
        """In how many rounds at most they are measured. See `Rounds`."""
        return dict.fromkeys(self.once, effort.idle_rounds)


def plan_turns(rows: Sequence[Row], rivals: Rivals) -> list[Turn]:
    """Turns of one round: topology by topology, and in each one system after the other."""
    turns = []
    for topology in Topology:
        here = [row for row in rows if row.topology is topology]
        for system in dict.fromkeys(system for row in here for system in row.systems):
            if system not in RIVALS or rivals is Rivals.RAY:
                turns.append(Turn(system, topology, tuple(row.name for row in here if system in row.systems)))
    return turns


def plan_parts(rows: Sequence[Row | GpuRow], rivals: Rivals, device: Device, gpus: Gpus | None) -> list[Part]:
    """What there is to run, without parts that have nothing."""
    here = [row for row in rows if isinstance(row, Row)]
    parts = [
        Part("microbench.session:Session", plan_turns(here, rivals), frozenset(row.name for row in here if row.kind is Kind.IDLE))
    ]
    serves = "microbench.gpu_session:Simulated" if device is Device.SIMULATED else "microbench.gpu_session:OnGpus"
    turns, left_out = plan_gpu_turns(
        [row for row in rows if isinstance(row, GpuRow)], RIVALS if rivals is Rivals.RAY else (), gpus
    )
    parts.append(Part(serves, turns, left_out=left_out))
    return [part for part in parts if part.turns or part.left_out]


def rows_of(device: Device, gpus: Gpus | str | None) -> dict[str, Row | GpuRow]:
    """The rows that a device has, by name. `gpus`: what was found, or why there is none."""
    on_gpus = device is Device.SIMULATED or isinstance(gpus, Gpus)
    return {**(ROWS if device in (Device.AUTO, Device.CPU) else {}), **(GPU_ROWS if on_gpus else {})}


def describe_device(device: Device, rows: Sequence[Row | GpuRow], found: Gpus | str | None) -> tuple[dict[str, Any], str]:
    """What the rows run on: for the JSON document, and in a line."""
    if device is Device.SIMULATED:
        return {"device": "simulated", "note": NOTHING_OF_GPUS}, f"simulated; {NOTHING_OF_GPUS}"
    if isinstance(found, Gpus) and any(isinstance(row, GpuRow) for row in rows):
        name = "gpu" if all(isinstance(row, GpuRow) for row in rows) else "cpu and gpu"
        return {"device": name, "gpu": found.describe()}, f"{name}; GPU rows on {found}"
    return {"device": "cpu"}, f"cpu ({found})" if isinstance(found, str) else "cpu"


def main(
    device: Annotated[
        Device, typer.Option(help="auto: CPU rows, then GPU rows where there is a GPU. simulated: GPU rows without one.")
    ] = Device.AUTO,
    quick: Annotated[bool, typer.Option("--quick", help="Short rounds: under 90 s for the CPU rows.")] = False,
    rows: RowPattern = None,
    rivals: RivalsOption = Rivals.RAY,
    json: JsonPath = None,
    csv: CsvPath = None,
    rounds: RoundCount = 3,
) -> None:
    """Measures compiled actor graphs: raycomm beside Ray Compiled Graphs, a plain actor call and the native floor."""
    found = look_for_gpus() if device in (Device.AUTO, Device.GPU) else None
    if device is Device.GPU and isinstance(found, str):
        refuse(f"--device gpu: {found}")
    with refusing("--rows", hint=found if isinstance(found, str) else ""):
        chosen = select(rows, rows_of(device, found))
    gpus = found if isinstance(found, Gpus) else None
    parts = plan_parts(chosen, rivals, device, gpus)
    if not parts:
        refuse(f"--rows: with --rivals none nothing is left of {', '.join(row.name for row in chosen)}")
    effort = QUICK if quick else FULL
    facts, line = describe_device(device, chosen, found)
    results: list[Result] = []
    with BenchRun("accelerated_dag", json, facts, csv=csv) as run:
        run.console.print(f"device: {line}", markup=False, soft_wrap=True)
        total = sum(steps(part.turns, rounds, part.fewer(effort)) for part in parts)
        with display.LiveProgress(run.console, total) as progress:
            for part in parts:
                with BenchProcess(part.serves) as process:
                    measured = Rounds(process, effort, progress, part.fewer(effort)).run(part.turns, rounds)
                results += _in_order([*measured, *part.left_out])
        display.show(run.console, display.results_table(results))
        if comparisons := split(results):
            display.show(run.console, display.split_table(comparisons))
        if rivals is Rivals.RAY:
            names = {result["row"] for result in results}
            verdicts = [verdict for verdict in judge(results) if verdict.row in names]
            if any(row in RATIOS for row in names):
                display.show(run.console, display.ratios_table(verdicts))
        run.write(results)


def _in_order(results: Sequence[Result]) -> list[Result]:
    """Those of GPU rows by row, measured or left out; the others as they are."""
    places = {name: place for place, name in enumerate(GPU_ROWS)}
    return sorted(results, key=lambda result: places.get(result["row"], -1))


if __name__ == "__main__":
    typer.run(main)
