"""`python -m microbench.compare OLD NEW`: which figures of a bench changed between two of its result documents.

Each figure has a noise band, the lowest and the highest of the rounds. A figure has changed when the bands of the two documents
do not overlap. One without a band (a single round) gets `--tolerance` per cent to either side of it instead, which is said.

Exit code 0: no figure is worse and no row fails that did not. 1: one is, or does. 2: bad input, or two documents that cannot be
compared: another schema or another bench. Another machine is a warning, as the figures may still say something.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from microbench import console as display
from microbench.command import read_or_refuse, refuse
from microbench.document import figure, trouble
from microbench.harness import BANDS, Result

TOLERANCE_PERCENT = 20.0
COMPARED = (*BANDS, "unpaced_us", "p50_ms", "mean_ms")  # ends of keys: encode_p50_us as well
HIGHER_IS_BETTER = "per_s"  # and encode_per_s
NOT_OF_THE_MACHINE = frozenset({"date", "note"})

Name = tuple[str, str]  # row, system


class Verdict(enum.StrEnum):
    """What became of a figure."""

    WORSE = "worse"
    BETTER = "better"
    UNCHANGED = "unchanged"


class State(enum.Enum):
    """What a document says of a row."""

    MEASURED = enum.auto()
    FAILED = enum.auto()
    ABSENT = enum.auto()  # not in the document, or left out since the machine could not run it


@dataclass(frozen=True)
class Figure:
    """A median with its noise band, which the median lies in."""

    value: float
    low: float
    high: float
    measured_band: bool = True

    def overlaps(self, other: Figure) -> bool:
        """Whether the bands share a value; a common end is one."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Change:
    """One figure of one row, in both documents."""

    row: str
    system: str
    key: str
    old: Figure
    new: Figure

    @property
    def verdict(self) -> Verdict:
        if self.old.overlaps(self.new):
            return Verdict.UNCHANGED
        rose = self.new.value > self.old.value
        return Verdict.BETTER if rose == self.key.endswith(HIGHER_IS_BETTER) else Verdict.WORSE

    @property
    def percent(self) -> float | None:
        """The change in per cent of the old figure; None from zero."""
        return None if self.old.value == 0 else 100 * (self.new.value - self.old.value) / abs(self.old.value)


@dataclass
class Comparison:
    """What two documents of one bench say of each other."""

    figures: list[Change] = field(default_factory=list)
    only_old: dict[Name, str] = field(default_factory=dict)  # with the reason, where the other says one
    only_new: dict[Name, str] = field(default_factory=dict)
    fail_now: dict[Name, str] = field(default_factory=dict)
    fail_still: list[Name] = field(default_factory=list)
    fail_no_more: list[Name] = field(default_factory=list)
    not_comparable: list[Name] = field(default_factory=list)  # measured in both, without a figure that both have

    @property
    def changes(self) -> list[Change]:
        return [change for change in self.figures if change.verdict is not Verdict.UNCHANGED]

    @property
    def unchanged_rows(self) -> int:
        """Rows none of whose figures changed."""
        changed = {(change.row, change.system) for change in self.changes}
        return len({(change.row, change.system) for change in self.figures} - changed)

    @property
    def is_worse(self) -> bool:
        return bool(self.fail_now) or any(change.verdict is Verdict.WORSE for change in self.figures)

    def counts(self) -> str:
        """How many rows there are of each kind, in a line."""
        verdicts = Counter(change.verdict for change in self.changes)
        counts = {
            "figures worse": verdicts[Verdict.WORSE],
            "better": verdicts[Verdict.BETTER],
            "rows unchanged": self.unchanged_rows,
            "only in OLD": len(self.only_old),
            "only in NEW": len(self.only_new),
            "fail now": len(self.fail_now),
            "fail in both": len(self.fail_still),
            "fail no more": len(self.fail_no_more),
            "without a common figure": len(self.not_comparable),
        }
        optional = ("fail in both", "fail no more", "without a common figure")
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count or what not in optional)


def figure_with_band(row: Mapping[str, Any], key: str, tolerance_percent: float = TOLERANCE_PERCENT) -> Figure | None:
    """A row's figure with the rounds' band, or with the tolerance where the row has no band; None without the figure.

    Args:
        row: of a result document.
        key: the figure's.
        tolerance_percent: of the figure, to either side.
    """
    value = figure(row, key)
    if value is None:
        return None
    low, high = figure(row, f"{key}_low"), figure(row, f"{key}_high")
    if low is None or high is None:
        margin = abs(value) * tolerance_percent / 100
        return Figure(value, value - margin, value + margin, measured_band=False)
    return Figure(value, min(low, high, value), max(low, high, value))


def compare(old: Sequence[Result], new: Sequence[Result], tolerance_percent: float = TOLERANCE_PERCENT) -> Comparison:
    """The rows of two documents, name by name.

    Raises:
        ValueError: a document has two rows of one name and system.
    """
    before, after = _by_name(old, "OLD"), _by_name(new, "NEW")
    comparison = Comparison()
    for name in dict.fromkeys((*before, *after)):
        was, now = before.get(name), after.get(name)
        match _state(was), _state(now):
            case State.MEASURED, State.MEASURED:
                assert was is not None
                assert now is not None
                changes = _changes(name, was, now, tolerance_percent)
                comparison.figures += changes
                if not changes:
                    comparison.not_comparable.append(name)
            case State.FAILED, State.FAILED:
                comparison.fail_still.append(name)
            case _, State.FAILED:
                assert now is not None
                comparison.fail_now[name] = trouble(now)
            case State.FAILED, State.MEASURED:
                comparison.fail_no_more.append(name)
            case State.ABSENT, State.MEASURED:
                comparison.only_new[name] = trouble(was or {})
            case ((State.MEASURED | State.FAILED), State.ABSENT):
                comparison.only_old[name] = trouble(now or {})
    return comparison


def _by_name(rows: Sequence[Result], which: str) -> dict[Name, Result]:
    found: dict[Name, Result] = {}
    for row in rows:
        name = (row["row"], row["system"])
        if name in found:
            raise ValueError(f"{which} has two rows {name[0]!r} of {name[1]!r}")
        found[name] = row
    return found


def _state(row: Result | None) -> State:
    if row is None or ("left_out" in row and "error" not in row):
        return State.ABSENT
    return State.FAILED if "error" in row else State.MEASURED


def _changes(name: Name, old: Result, new: Result, tolerance_percent: float) -> list[Change]:
    changes = []
    for key in _keys(old, new):
        was, now = (figure_with_band(row, key, tolerance_percent) for row in (old, new))
        if was is not None and now is not None:
            changes.append(Change(*name, key, was, now))
    return changes


def _keys(old: Result, new: Result) -> list[str]:
    """The figures to compare: all that are measured times, rates and shares of a core, except those that a better one stands for.

    Of mean and median of the same thing the median is taken, which one slow call moves less; the mean where it alone has a band.
    """
    keys = [key for key in old if key in new and (key.endswith(COMPARED) or f"{key}_low" in old or f"{key}_low" in new)]
    keys = [key for key in keys if not key.startswith("ideal_")]  # is not measured
    both = [key for key in keys if key.endswith(("mean_us", "mean_ms")) and _median(key) in keys]
    only_mean = {mean for mean in both if f"{mean}_low" in new and f"{_median(mean)}_low" not in new}
    left_to_the_other = {_median(mean) if mean in only_mean else mean for mean in both}
    return [key for key in keys if key not in left_to_the_other]


def _median(mean: str) -> str:
    return f"{mean[: -len('mean_us')]}p50{mean[-len('_us') :]}"


def machine_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What the documents say differently of their machines, a line each."""
    return [
        f"{key}: {_plain(old.get(key))} in OLD, {_plain(new.get(key))} in NEW"
        for key in dict.fromkeys((*old, *new))
        if key not in NOT_OF_THE_MACHINE and old.get(key) != new.get(key)
    ]


def _plain(value: Any) -> str:
    return "not said" if value is None else value if isinstance(value, str) else json.dumps(value)


def changes_table(changes: Sequence[Change]) -> Table:
    """One line per figure that changed."""
    table = Table(title="changed")
    for name in ("row", "system", "figure"):
        table.add_column(name, no_wrap=True)
    for name in ("old", "new", "change", "old band", "new band"):
        table.add_column(name, justify="right")
    table.add_column("")
    for change in changes:
        percent = "from 0" if change.percent is None else f"{change.percent:+,.1f} %"
        medians = [display.number(figure.value) for figure in (change.old, change.new)]
        bands = [f"{display.number(figure.low)} to {display.number(figure.high)}" for figure in (change.old, change.new)]
        names = [escape(name) for name in (change.row, change.system, change.key)]
        table.add_row(*names, *medians, percent, *bands, change.verdict)
    return table


def _without_bands(comparison: Comparison, tolerance_percent: float) -> list[str]:
    lines = []
    for which in ("old", "new"):
        bare = sum(not getattr(change, which).measured_band for change in comparison.figures)
        if bare:
            share = f"{bare} of {len(comparison.figures)} figures"
            lines.append(f"{which.upper()} has no band for {share}: {tolerance_percent:g} % to either side is taken")
    return lines


def main(
    old: Annotated[Path, typer.Argument(help="A file written by a bench's --json.", metavar="OLD")],
    new: Annotated[Path, typer.Argument(help="A later one of the same bench.", metavar="NEW")],
    tolerance: Annotated[
        float, typer.Option(min=0, max=100, help="Noise of a figure without a band, in per cent.", metavar="PERCENT")
    ] = TOLERANCE_PERCENT,
    system: Annotated[str | None, typer.Option(help="Only this system's rows, raycomm's for instance.", metavar="NAME")] = None,
) -> None:
    """Lists the figures that changed by more than the noise; exits 1 if one is worse or a row fails that did not."""
    before, after = read_or_refuse(old), read_or_refuse(new)
    if before.get("bench") != after.get("bench"):
        refuse(f"different benches: {_plain(before.get('bench'))} in OLD, {_plain(after.get('bench'))} in NEW")
    was, now = ([row for row in found["rows"] if system in (None, row["system"])] for found in (before, after))
    if not was and not now:
        names = dict.fromkeys(row["system"] for found in (before, after) for row in found["rows"])
        refuse(f"--system: no rows of {system!r}; there are {', '.join(names)}")
    try:
        comparison = compare(was, now, tolerance)
    except ValueError as error:
        refuse(str(error))
    console = display.make_console()
    for line in machine_differences(before["machine"], after["machine"]):
        console.print(f"warning: different machine: {line}", markup=False, soft_wrap=True)
    for line in _without_bands(comparison, tolerance):
        console.print(line, markup=False, soft_wrap=True)
    if comparison.changes:
        display.show(console, changes_table(comparison.changes))
    for what, names_with_reasons in (
        ("fails now", comparison.fail_now),
        ("only in OLD", comparison.only_old),
        ("only in NEW", comparison.only_new),
    ):
        for (row, of), reason in names_with_reasons.items():
            line = f"{what}: {row} ({of})" + (f": {reason.removeprefix('failed: ')}" if reason else "")
            console.print(line, markup=False, soft_wrap=True)
    console.print(comparison.counts(), markup=False, soft_wrap=True)
    raise typer.Exit(1 if comparison.is_worse else 0)


if __name__ == "__main__":
    typer.run(main)
