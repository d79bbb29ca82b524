"""`python -m microbench.lifecycle`: what a graph costs outside of its calls, raycomm beside Ray Compiled Graphs.

Compile and teardown, an idle graph, the death of an actor, and what a hundred graphs leave behind, on a Ray cluster that the
bench starts on this machine. `microbench.lifecycle_rows` says what each row and each figure is.

Exit code 0: the run went through, whatever it measured. 2: bad input. 130: interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table

from microbench import console as display
from microbench.command import BenchRun, CsvPath, JsonPath, RoundCount, RowPattern, refusing
from microbench.harness import Effort, Measurement, Result, Rounds, steps
from microbench.lifecycle_rows import ACTORS, LIFECYCLE_ROWS, plan_turns
from microbench.process import BenchProcess
from microbench.rows import select

# `min_calls` graphs at least are compiled per row and round, and as many actors killed.
FULL = Effort(0.0, 1.0, 3, 50, native_calls=0, idle_s=10.0, idle_rounds=3, turn_limit_s=240.0)
QUICK = Effort(0.0, 0.2, 1, 10, native_calls=0, idle_s=3.0, idle_rounds=1, turn_limit_s=150.0)

SERVES = "microbench.lifecycle_session:LifecycleSession"
PLACE = f"chains over at most {ACTORS} actors of this machine, nodes round robin"
PROCESSES = ("driver", "actor")
GROWTHS = {"rss_kib": "RSS KiB", "shared_kib": "shared KiB", "descriptors": "descriptors", "threads": "threads"}


class Progress(display.LiveProgress):
    """Figures in milliseconds, and what a graph left behind."""

    def measured(self, row: str, system: str, measurement: Measurement) -> None:
        self.end(f"{row}  {brief(measurement)}")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer graphs, most rows in one round only: under two minutes.")] = False,
    rows: RowPattern = None,
    json: JsonPath = None,
    csv: CsvPath = None,
    rounds: RoundCount = 3,
) -> None:
    """Measures what a graph costs outside of its calls: compile, teardown, idling, a death, and what stays behind."""
    with refusing("--rows"):
        chosen = select(rows, LIFECYCLE_ROWS)
    effort = QUICK if quick else FULL
    fewer = {row.name: effort.idle_rounds for row in chosen if row.seldom}
    turns = plan_turns(chosen)
    with BenchRun("lifecycle", json, {"note": PLACE}, csv=csv) as run:
        run.console.print(PLACE, markup=False)
        with Progress(run.console, steps(turns, rounds, fewer)) as progress, BenchProcess(SERVES) as process:
            results = in_order(Rounds(process, effort, progress, fewer).run(turns, rounds))
        for table in tables(results):
            display.show(run.console, table)
        run.write(results)


def brief(measurement: Mapping[str, Any]) -> str:
    """The figure that stands for a measurement, with its unit."""
    if "p50_ms" in measurement:
        return f"p50 {display.number(measurement['p50_ms'])} ms"
    if "cpu_percent" in measurement:
        return f"{measurement['cpu_percent']:.2f} % cpu"
    return ", ".join(f"{process} {measurement[f'{process}_rss_kib_per_graph']:+.1f} KiB per graph" for process in PROCESSES)


def in_order(results: Sequence[Result]) -> list[Result]:
    """Row by row, so that the systems stand side by side."""
    places = {name: place for place, name in enumerate(LIFECYCLE_ROWS)}
    return sorted(results, key=lambda result: places[result["row"]])


def tables(results: Sequence[Result]) -> list[Table]:
    """Times and CPU, one line per row and system; then what graphs left behind, one line per process. Without empty ones."""
    times = Table(title="medians over the rounds")
    left = Table(title="left behind, per graph")
    for table, figures in (
        (times, ("p50 ms", "p99 ms", "with first result ms", "cpu %", "count")),
        (left, ("process", *GROWTHS.values(), "graphs")),
    ):
        for name in ("row", "system"):
            table.add_column(name, no_wrap=True)
        for name in figures:
            table.add_column(name, justify="right")
    for result in results:
        names = (result["row"], result["system"])
        count = "failed" if "error" in result else f"{result['count']:,}" if "count" in result else ""
        if "driver_rss_kib_per_graph" in result:
            for process in PROCESSES:
                grown = [f"{result[f'{process}_{key}_per_graph']:+.2f}" for key in GROWTHS]
                left.add_row(*names, process, *grown, count)
        else:
            shown = (display.number(result.get(key)) for key in ("p50_ms", "p99_ms", "ready_p50_ms", "cpu_percent"))
            times.add_row(*names, *shown, count)
    return [table for table in (times, left) if table.row_count]


if __name__ == "__main__":
    typer.run(main)
