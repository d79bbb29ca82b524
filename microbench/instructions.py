"""`python -m microbench.instructions`: how many instructions raycomm's write, read, encode and decode take.

Counted by valgrind's callgrind, and so the same on a busy machine as on a quiet one. A count is not a time: a streaming store is
one instruction, and so is an atomic exchange. But it shows what a change adds to the hot path where the clock shows only noise.
What exactly is counted, and how: `microbench.counted`.

`--check` compares with the baseline, `docs/results/instructions.json`, and fails where an operation takes over 2 % more
instructions, in other memory layouts as well. Counts depend on the kind of processor, the C library, the compiler, valgrind, and
the builds of Python, nanobind, numpy and torch. The baseline carries these facts; where one differs, `--check` names it, compares
nothing, and passes. Where valgrind is missing it prints "skipped: ..." and passes.

A change that is worth its instructions, or saves some, moves the baseline: run `--move-baseline` where `--check` compares, and
commit the file with the change. On another machine it makes that machine's facts the ones that the baseline is good for.

Exit code 0: counted; with `--check`: nothing takes more, or nothing could be compared. 1: with `--check`, an operation takes more
instructions than the baseline allows, or could not be counted; with `--move-baseline`, one could not be counted, and the baseline
stays. 2: bad input, or no valgrind. 130: interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from microbench import console as display
from microbench import document
from microbench.callgrind import LAYOUTS, REMEDY, CountingFailed, Counts, count, facts, find_valgrind
from microbench.command import BenchRun, JsonPath, refuse
from microbench.counted import VALUES, Group, Operation
from microbench.harness import Result
from microbench.rows import RAYCOMM

BASELINE = Path(__file__).resolve().parents[1] / "docs" / "results" / "instructions.json"
TOLERANCE_PERCENT = 2.0
QUICK_GROUPS = (Group.BUILTINS,)
NOT_QUICK = "not in a quick run"
FACTS = "counted with"  # in the document's "machine"


@dataclass(frozen=True)
class Change:
    """One operation on one value, before and now, in instructions a call."""

    value: str
    operation: Operation
    before: float
    now: float

    @property
    def percent(self) -> float:
        return (self.now / self.before - 1) * 100

    def __str__(self) -> str:
        return f"{self.operation} {self.value}: {self.before:,.0f} -> {self.now:,.0f} instructions ({self.percent:+.1f} %)"


@dataclass(frozen=True)
class Comparison:
    """A run's operations beside the baseline's, by what came of each.

    Attributes:
        failed: rows that could not be counted, with the reason.
        unknown: rows that the baseline lacks.
    """

    more: list[Change] = field(default_factory=list)
    fewer: list[Change] = field(default_factory=list)
    within: list[Change] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def add(self, change: Change) -> None:
        """Sort it in by the tolerance."""
        if change.percent > TOLERANCE_PERCENT:
            self.more.append(change)
        elif change.percent < -TOLERANCE_PERCENT:
            self.fewer.append(change)
        else:
            self.within.append(change)


def key(operation: Operation) -> str:
    """The operation's figure in a row."""
    return f"{operation}_instructions"


def to_rows(counts: Counts) -> list[Result]:
    """A row per value, with a figure per operation."""
    return [
        {"row": value, "system": RAYCOMM, **{key(operation): round(by[operation], 1) for operation in Operation}}
        for value, by in counts.items()
    ]


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The facts that differ between here and the baseline, a text for each; counts are comparable only where there are none."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [
        f"{name}: {ours.get(name, 'unknown')} here, {theirs.get(name, 'unknown')} there"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def compare(rows: Sequence[Result], baseline: Sequence[Result]) -> Comparison:
    """Rows against the baseline's rows of the same name. Rows that were left out count for nothing."""
    before = {row["row"]: row for row in baseline}
    found = Comparison()
    for row in rows:
        name = row["row"]
        if "error" in row:
            found.failed.append(f"{name}: {row['error']}")
        elif "left_out" not in row and name not in before:
            found.unknown.append(name)
        elif "left_out" not in row:
            for operation in Operation:
                found.add(Change(name, operation, float(before[name][key(operation)]), float(row[key(operation)])))
    return found


def read_baseline(path: Path) -> tuple[dict[str, str], list[Result]]:
    """The facts and rows of a baseline.

    Raises:
        SchemaError: there is none in that file.
    """
    found = document.read(path)
    known, rows = found["machine"].get(FACTS), found["rows"]
    if not isinstance(known, dict):
        raise document.SchemaError(f"its machine has no {FACTS!r}")
    for row in rows:
        for operation in Operation:
            figure = row.get(key(operation))
            if not isinstance(figure, int | float) or not figure > 0:
                raise document.SchemaError(f"row {row['row']!r} has no {key(operation)}")
    return known, rows


def count_all(valgrind: str, run: BenchRun, groups: Sequence[Group]) -> list[Result]:
    """The rows of all groups; one whose process failed has an "error" in each, and those not asked for are left out."""
    rows: list[Result] = []
    with display.Steps(run.console, len(groups)) as steps:
        for group in Group:
            if group not in groups:
                rows += [{"row": value, "system": RAYCOMM, "left_out": NOT_QUICK} for value in VALUES[group]]
                continue
            steps.begin(f"counting {group}")
            try:
                rows += to_rows(count(valgrind, group))
                steps.end(f"{len(VALUES[group])} values")
            except CountingFailed as error:
                rows += [{"row": value, "system": RAYCOMM, "error": str(error)} for value in VALUES[group]]
                steps.end(f"failed: {error}", failed=True)
    return rows


def count_again(valgrind: str, rows: Sequence[Result], baseline: Sequence[Result]) -> list[Result]:
    """The rows, where one shows more than the baseline allows counted in other layouts, too: the least of all is what counts.

    A layout can cost a short call more than the tolerance; a change to the call costs it in every layout.
    """
    more = {change.value for change in compare(rows, baseline).more}
    again: Counts = {}
    for group in Group:
        if more & set(VALUES[group]):
            try:
                again |= count(valgrind, group, range(LAYOUTS, 3 * LAYOUTS))
            except CountingFailed as error:
                print(f"not counted again: {error}")
    fresh = {row["row"]: row for row in to_rows(again)}
    return [
        row
        if row["row"] not in more & set(fresh)
        else row | {key(operation): min(row[key(operation)], fresh[row["row"]][key(operation)]) for operation in Operation}
        for row in rows
    ]


def table(rows: Sequence[Result]) -> Table:
    """One line per value."""
    shown = Table(title="instructions of one call")
    shown.add_column("value", no_wrap=True)
    for operation in Operation:
        shown.add_column(operation, justify="right")
    for row in rows:
        figures = [f"{row[key(operation)]:,.0f}" if key(operation) in row else "" for operation in Operation]
        shown.add_row(row["row"], *figures if any(figures) else ("failed" if "error" in row else row["left_out"],))
    return shown


def report(rows: Sequence[Result], baseline: Sequence[Result]) -> bool:
    """Print the comparison, the worst last; whether the check is passed."""
    found = compare(rows, baseline)
    for name in found.unknown:
        print(f"new: {name} is not in the baseline; --move-baseline takes it in")
    for change in found.fewer:
        print(f"fewer: {change}; --move-baseline keeps it so")
    for text in found.failed:
        print(f"not counted: {text}")
    for change in found.more:
        print(f"more: {change}")
    print(
        f"{len(found.within)} operations within {TOLERANCE_PERCENT:.0f} % of the baseline, "
        f"{len(found.more)} with more instructions, {len(found.fewer)} with fewer"
    )
    return not found.more and not found.failed


def main(
    json: JsonPath = None,
    check: Annotated[bool, typer.Option("--check", help="Compare with the baseline; exit 1 if an operation got slower.")] = False,
    move_baseline: Annotated[bool, typer.Option("--move-baseline", help="Make this run's counts the baseline.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Without arrays and tensors: seconds in place of a minute.")] = False,
) -> None:
    """Counts instructions under valgrind: the same on a busy machine as on a quiet one."""
    if move_baseline and (check or quick):
        refuse("--move-baseline takes a whole run, and nothing to compare with: leave out --check and --quick")
    known: dict[str, str] = {}
    before: list[Result] = []
    if check:
        try:
            known, before = read_baseline(BASELINE)
        except document.SchemaError as error:
            refuse(f"{BASELINE}: {error}; --move-baseline writes a new one")
    valgrind = find_valgrind()
    if valgrind is None:
        if not check:
            refuse(REMEDY)
        print(f"skipped: instructions were not counted, nothing was compared: {REMEDY}")
        return
    here = facts(valgrind)
    differences = differing(here, known) if check else []
    if differences:
        print(f"not comparable: the baseline was counted elsewhere, nothing was compared: {'; '.join(differences)}")
        if json is None:
            return
    with BenchRun("instructions", json, {FACTS: here}) as run:
        rows = count_all(valgrind, run, QUICK_GROUPS if quick else [*Group])
        if check and not differences:
            rows = count_again(valgrind, rows, before)
        display.show(run.console, table(rows))
        run.write(rows)
        passed = report(rows, before) if check and not differences else True
        if move_baseline:
            failed = [row["row"] for row in rows if "error" in row]
            if failed:
                print(f"the baseline was not moved: {', '.join(failed)} could not be counted")
                raise typer.Exit(1)
            document.write_json(BASELINE, "instructions", run.machine, rows)
            print(f"the baseline was moved: {BASELINE}")
    if not passed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
