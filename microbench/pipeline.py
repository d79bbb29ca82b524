"""`python -m microbench.pipeline`: how graphs scale, raycomm beside Ray Compiled Graphs, on a Ray cluster on this machine.

- `inflight_N`, `inflight_N_tensor`: executions per second of a chain of four actors with N in flight, of an integer and of a
  float16 tensor of 192 KiB.
- `chain_N`: latency of one execution through N actors, one after the other; `per_hop`: what one actor more adds.
- `fan_N`: latency of one execution with N actors side by side, all given the input, all outputs fetched.
- `compute_T`: executions per second of a chain of four with four in flight, each stage taking T ms, and the most that this stage
  time allows. The stages sleep. Four stages that compute cannot run at once on fewer than four cores, and such a row would show
  the number of cores; stages that sleep need none, as those whose work is done by a GPU, and show what overlap the graph gives.
  Their time is what a sleep takes on this machine when nothing else runs ("stage_us"): a little longer than was asked for.

With more actors than cores a rival whose idle actors spin shares the cores among them, and its figures say so.

Exit code 0: the run went through, whatever it measured. 2: bad input. 130: interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.table import Table

from microbench import console as display
from microbench.command import BenchRun, CsvPath, JsonPath, Rivals, RivalsOption, RoundCount, RowPattern, refusing
from microbench.console import number
from microbench.harness import FULL, QUICK, Effort, Result, Rounds
from microbench.pipeline_rows import choose, complete, plan_turns
from microbench.process import BenchProcess
from microbench.rows import RAY_GRAPH, RAYCOMM

SERVES = "microbench.pipeline_session:PipelineSession"
TURN_LIMIT_S = 100.0


def effort_of(quick: bool) -> Effort:
    """Shorter than that of other benches, since there are more rows. A turn may have to start 16 actors."""
    return replace(QUICK, turn_limit_s=TURN_LIMIT_S) if quick else replace(FULL, measure_s=1.5, turn_limit_s=TURN_LIMIT_S)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Short rounds: under 3 minutes.")] = False,
    rows: RowPattern = None,
    rivals: RivalsOption = Rivals.RAY,
    json: JsonPath = None,
    csv: CsvPath = None,
    rounds: RoundCount = 3,
) -> None:
    """Measures how graphs scale with executions in flight, length, width and work: raycomm beside Ray Compiled Graphs."""
    with refusing("--rows"):
        chosen = choose(rows)
    systems = (RAYCOMM, RAY_GRAPH) if rivals is Rivals.RAY else (RAYCOMM,)
    with BenchRun("pipeline", json, csv=csv) as run:
        progress = display.LiveProgress(run.console, len(chosen) * len(systems) * rounds)
        with progress, BenchProcess(SERVES) as process:
            measured = Rounds(process, effort_of(quick), progress).run(plan_turns(chosen, systems), rounds)
        results = complete(measured)
        display.show(run.console, table(results))
        run.write(results)


def table(results: Sequence[Result]) -> Table:
    """One line per row and system. Why one failed was printed when it did, and is in the JSON."""
    shown = Table(title="medians over the rounds", caption="of ideal: share of what the stage time alone allows")
    for name in ("row", "system"):
        shown.add_column(name, no_wrap=True)
    for name in ("p50 us", "p99 us", "mean us", "per s", "of ideal", "count", "against Ray"):
        shown.add_column(name, justify="right")
    found = {(result["row"], result["system"]): result for result in results}
    for result in results:
        figures = [number(result.get(key)) for key in ("p50_us", "p99_us", "mean_us", "per_s")]
        share = f"{100 * result['per_s'] / result['ideal_per_s']:.0f} %" if {"per_s", "ideal_per_s"} <= result.keys() else ""
        count = "failed" if "error" in result else f"{result['count']:,}" if "count" in result else ""
        times = times_ray(result, found.get((result["row"], RAY_GRAPH), {})) if result["system"] == RAYCOMM else None
        shown.add_row(result["row"], result["system"], *figures, share, count, "" if times is None else f"{times:.1f}x")
    return shown


def times_ray(ours: Result, theirs: Result) -> float | None:
    """How many times shorter our latency is, or higher our throughput; None where one is missing, or a slope not above zero."""
    if "per_s" in ours and "per_s" in theirs:
        return float(ours["per_s"] / theirs["per_s"]) if theirs["per_s"] > 0 else None
    if "p50_us" in ours and "p50_us" in theirs:
        return float(theirs["p50_us"] / ours["p50_us"]) if min(ours["p50_us"], theirs["p50_us"]) > 0 else None
    return None


if __name__ == "__main__":
    typer.run(main)
