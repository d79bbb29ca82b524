"""What a bench shows: the run while it runs, and tables."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import rich.progress
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from microbench.harness import Measurement, Result, Turn
from microbench.split import Comparison
from microbench.targets import Verdict

MEASURED_WIDTH = 48  # columns; an error's whole text was printed when it happened
TABLE_WIDTH = 120  # columns a table needs at the least
PLAIN_WIDTH = 140  # columns where the output is no terminal and has no width of its own


def make_console(stderr: bool = False) -> Console:
    """A console that does not fold its lines at 80 columns when it writes to a file or a pipe."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PLAIN_WIDTH)


def show(console: Console, table: Table) -> None:
    """Prints a table in full: on a narrow terminal its lines fold, since a figure cut short is a wrong figure."""
    width = console.width
    console.width = max(width, TABLE_WIDTH)
    console.print(table)
    console.width = width


class Steps:
    """Progress of a run of so many steps: a bar on a terminal, a line per step elsewhere. Use as a context manager."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        columns = (rich.progress.BarColumn(), rich.progress.MofNCompleteColumn(), rich.progress.TimeElapsedColumn())
        self._bar = rich.progress.Progress(
            *columns,
            rich.progress.TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=total)
        self._what = ""
        self._start = time.monotonic()

    def begin(self, what: str) -> None:
        """Show what is done now."""
        self._what = what
        self._bar.update(self._task, description=what)

    def end(self, came: str, *, failed: bool = False) -> None:
        """One step is over. On a terminal the bar says enough, since a table follows; a failure is told everywhere."""
        self._bar.update(self._task, advance=1)
        if failed or not self._console.is_terminal:
            text = f"{time.monotonic() - self._start:6.1f} s  {self._what}  {came}"
            self._console.print(text, markup=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()


class LiveProgress(Steps):
    """The steps of interleaved rounds. See `microbench.harness.Progress`."""

    def turn(self, number: int, rounds: int, turn: Turn) -> None:
        self.begin(f"round {number + 1}/{rounds}  {turn.topology}  {turn.system}")

    def measured(self, row: str, system: str, measurement: Measurement) -> None:
        self.end(f"{row}  {brief(measurement)}")

    def failed(self, row: str, system: str, error: str) -> None:
        self.end(f"{row}  failed: {error}", failed=True)


def brief(measurement: Mapping[str, Any]) -> str:
    """The figure that stands for a measurement, with its unit."""
    if "p50_us" in measurement:
        return f"p50 {number(measurement['p50_us'])} us"
    if "per_s" in measurement:
        return f"{number(measurement['per_s'])} per s"
    return f"{measurement['cpu_percent']:.2f} % cpu"


def number(value: float | None) -> str:
    """Three figures or so: nobody compares the ninth."""
    if value is None:
        return ""
    if value < 0:
        return f"-{number(-value)}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size_of_bytes(count: float) -> str:
    """A number of bytes, in the largest unit that leaves it whole."""
    for unit, width in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= width and count % width == 0:
            return f"{count / width:,g} {unit}"
    return f"{count:,g} B"


def results_table(results: Sequence[Result]) -> Table:
    """One line per row and system. Why one failed was printed when it did, and is in the JSON; why one was left out is here."""
    table = Table(title="medians over the rounds")
    table.add_column("row", no_wrap=True)
    table.add_column("system", no_wrap=True)
    for name in ("p50 us", "p99 us", "mean us", "per s", "cpu %", "count"):
        table.add_column(name, justify="right")
    for result in results:
        figures = [number(result.get(key)) for key in ("p50_us", "p99_us", "mean_us", "per_s", "cpu_percent")]
        count = "failed" if "error" in result else f"{result['count']:,}" if "count" in result else result.get("left_out", "")
        table.add_row(result["row"], result["system"], *figures, count)
    return table


def ratios_table(verdicts: Sequence[Verdict]) -> Table:
    """What was asked for and what was measured, one line per requirement."""
    table = Table(title="against the targets")
    for name in ("row", "requirement"):
        table.add_column(name)
    table.add_column("measured", overflow="ellipsis", no_wrap=True, max_width=MEASURED_WIDTH)
    table.add_column("")
    for verdict in verdicts:
        mark = "aim" if verdict.aim_met else "met" if verdict.must_met else "short"
        table.add_row(verdict.row, verdict.requirement, escape(verdict.measured), mark)
    return table


_NEGATIVE = (
    "A negative overhead says nothing of the graph: the two are measured apart, and are within the noise of each other, or "
    "(with simulated devices) do not go over the same transport."
)


def split_table(comparisons: Sequence[Comparison]) -> Table:
    """DAG time = bare send and receive + overhead, a line per row and system."""
    table = Table(title="split: DAG time = bare send and receive + overhead, us, p50", caption_justify="left")
    for name in ("row", "system"):
        table.add_column(name, no_wrap=True)
    for name in ("DAG", "= bare", "+ overhead", "Ray's overhead / raycomm's"):
        table.add_column(name, justify="right")
    for comparison in comparisons:
        ratio = "" if comparison.ratio is None else f"{comparison.ratio:.1f}x"
        for split, last in ((comparison.ours, ratio), (comparison.theirs, "")):
            if split is not None:
                figures = [_signed(figure) for figure in (split.dag_us, split.bare_us, split.overhead_us)]
                table.add_row(split.row, split.system, *figures, last or split.lacks)
                if split.overhead_us is not None and split.overhead_us < 0:
                    table.caption = _NEGATIVE
    return table


def _signed(value: float | None) -> str:
    return f"-{number(-value)}" if value is not None and value < 0 else number(value)
