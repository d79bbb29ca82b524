"""Comparing two documents of a bench: noise bands, failing and missing rows, what cannot be compared, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer import Typer
from typer.testing import CliRunner

from microbench import compare as command
from microbench.compare import Change, Figure, Verdict, compare, figure_with_band, machine_differences
from microbench.harness import Measurement, median_of_rounds

MACHINE = {"cpu": "EPYC", "cores": 2, "kernel": "6.18", "python": "3.11", "ray": "2.60.0", "date": "2026-11-30T10:00:00+00:00"}

amounts = st.floats(min_value=1e-3, max_value=1e9)
rounds_of = st.lists(amounts, min_size=2, max_size=7)
keys = st.sampled_from(["p50_us", "call_mean_us", "per_s", "cpu_percent"])


def row(name: str = "echo", system: str = "raycomm", **figures: Any) -> dict[str, Any]:
    return {"row": name, "system": system, **figures}


def of_rounds(key: str, values: list[float]) -> dict[str, Any]:
    measurements: list[Measurement] = [{key: value, "count": 1} for value in values]
    return row(**median_of_rounds(measurements))


def only_verdict(old: dict[str, Any], new: dict[str, Any]) -> Verdict:
    (change,) = compare([old], [new]).figures
    return change.verdict


# bands


@settings(deadline=None)
@given(keys, rounds_of, rounds_of)
def test_changed_means_that_every_round_of_one_is_beyond_every_round_of_the_other(
    key: str, old: list[float], new: list[float]
) -> None:
    verdict = only_verdict(of_rounds(key, old), of_rounds(key, new))
    higher, lower = min(new) > max(old), max(new) < min(old)
    assert (verdict is Verdict.UNCHANGED) == (not higher and not lower)
    if higher or lower:
        assert (verdict is Verdict.BETTER) == (higher == (key == "per_s"))


@settings(deadline=None)
@given(keys, rounds_of, rounds_of)
def test_the_other_way_round_is_the_opposite(key: str, old: list[float], new: list[float]) -> None:
    opposite = {Verdict.WORSE: Verdict.BETTER, Verdict.BETTER: Verdict.WORSE, Verdict.UNCHANGED: Verdict.UNCHANGED}
    forth = only_verdict(of_rounds(key, old), of_rounds(key, new))
    assert only_verdict(of_rounds(key, new), of_rounds(key, old)) is opposite[forth]


@settings(deadline=None)
@given(keys, rounds_of)
def test_nothing_changes_against_itself(key: str, values: list[float]) -> None:
    same = of_rounds(key, values)
    comparison = compare([same], [same])
    assert (comparison.changes, comparison.unchanged_rows, comparison.is_worse) == ([], 1, False)


@settings(deadline=None)
@given(keys, rounds_of, rounds_of, amounts)
def test_a_further_round_of_the_noise_changes_nothing_that_was_unchanged(
    key: str, old: list[float], new: list[float], further: float
) -> None:
    if only_verdict(of_rounds(key, old), of_rounds(key, new)) is Verdict.UNCHANGED:
        assert only_verdict(of_rounds(key, [*old, further]), of_rounds(key, new)) is Verdict.UNCHANGED


@settings(deadline=None)
@given(amounts, st.none() | amounts, st.none() | amounts, st.floats(min_value=0, max_value=100))
def test_a_figure_lies_in_its_band_whatever_the_document_says(
    value: float, low: float | None, high: float | None, tolerance: float
) -> None:
    band = figure_with_band(row(p50_us=value, p50_us_low=low, p50_us_high=high), "p50_us", tolerance)
    assert band is not None
    assert band.low <= band.value <= band.high
    assert band.measured_band == (low is not None and high is not None)


@settings(deadline=None)
@given(rounds_of, rounds_of)
def test_the_sign_of_the_change_is_that_of_the_verdict(old: list[float], new: list[float]) -> None:
    (change,) = compare([of_rounds("p50_us", old)], [of_rounds("p50_us", new)]).figures
    assert change.percent is not None
    if change.verdict is not Verdict.UNCHANGED:
        assert (change.percent > 0) == (change.verdict is Verdict.WORSE)


def test_bands_that_touch_overlap() -> None:
    assert Figure(1, 0, 2).overlaps(Figure(3, 2, 4))
    assert not Figure(1, 0, 2).overlaps(Figure(3, 2.001, 4))


def test_without_a_band_the_tolerance_is_taken() -> None:
    assert only_verdict(row(p50_us=100.0), row(p50_us=149.0)) is Verdict.UNCHANGED  # 120 and 119.2
    assert only_verdict(row(p50_us=100.0), row(p50_us=151.0)) is Verdict.WORSE
    (change,) = compare([row(p50_us=100.0)], [row(p50_us=149.0)], tolerance_percent=5).figures
    assert change.verdict is Verdict.WORSE


def test_from_zero_there_is_no_percentage() -> None:
    change = Change("idle", "raycomm", "cpu_percent", Figure(0, 0, 0), Figure(1, 1, 1))
    assert (change.percent, change.verdict) == (None, Verdict.WORSE)


@pytest.mark.parametrize("value", [None, "many", True, float("nan"), float("inf"), 10**400])
def test_what_is_no_figure_is_not_compared(value: Any) -> None:
    comparison = compare([row(p50_us=value)], [row(p50_us=1.0)])
    assert (comparison.figures, comparison.not_comparable) == ([], [("echo", "raycomm")])


def test_the_mean_stands_in_for_a_median_and_other_figures_with_bands_are_compared() -> None:
    def compared(**figures: float) -> list[str]:
        return [change.key for change in compare([row(**figures)], [row(**figures)]).figures]

    assert compared(p50_us=1, p99_us=2, mean_us=1, call_mean_us=1, std_us=1, count=9, rounds=3) == ["p50_us", "call_mean_us"]
    assert compared(mean_us=1, std_us=1) == ["mean_us"]
    assert compared(encode_p50_us=1, encode_mean_us=1, decode_per_s=1, bytes=9) == ["encode_p50_us", "decode_per_s"]
    assert compared(call_p50_us=1, call_mean_us=1, call_mean_us_low=1, call_mean_us_high=1) == ["call_mean_us"]
    assert compared(p50_ms=1, mean_ms=1, ready_p50_ms=1) == ["p50_ms", "ready_p50_ms"]
    assert compared(per_s=1, ideal_per_s=2, unpaced_us=1) == ["per_s", "unpaced_us"]
    assert compared(open_ms=1, open_ms_low=1, open_ms_high=1) == ["open_ms"]


# rows


def test_every_state_of_a_row_is_counted_once() -> None:
    fine, failed, left_out = {"p50_us": 1.0}, {"error": "hung"}, {"left_out": "needs a GPU"}
    states: dict[str, dict[str, Any] | None] = {"fine": fine, "failed": failed, "left_out": left_out, "absent": None}
    pairs = [(was, now) for was in states for now in states]
    old = [row(f"{was}-{now}", **figures) for was, now in pairs if (figures := states[was]) is not None]
    new = [row(f"{was}-{now}", **figures) for was, now in pairs if (figures := states[now]) is not None]
    comparison = compare(old, new)
    assert [change.row for change in comparison.figures] == ["fine-fine"]
    assert {name for name, _ in comparison.fail_now} == {"fine-failed", "left_out-failed", "absent-failed"}
    assert [name for name, _ in comparison.fail_still] == ["failed-failed"]
    assert [name for name, _ in comparison.fail_no_more] == ["failed-fine"]
    gone = {"fine-left_out", "fine-absent", "failed-left_out", "failed-absent"}
    assert {name for name, _ in comparison.only_old} == gone
    assert {name for name, _ in comparison.only_new} == {"left_out-fine", "absent-fine"}
    assert comparison.only_old["fine-left_out", "raycomm"] == "left out: needs a GPU"
    assert comparison.is_worse


def test_figures_of_a_row_that_failed_late_are_not_compared() -> None:
    comparison = compare([row(p50_us=1.0)], [row(p50_us=1.0, error="hung in round 3")])
    assert (comparison.figures, comparison.fail_now) == ([], {("echo", "raycomm"): "failed: hung in round 3"})


def test_two_rows_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="NEW has two rows 'echo' of 'raycomm'"):
        compare([row()], [row(), row()])


def test_machines_differ_in_all_but_the_date() -> None:
    other = {**MACHINE, "kernel": "6.19", "date": "2026-12-01", "gpu": ["H200"]}
    assert machine_differences(MACHINE, other) == ["kernel: 6.18 in OLD, 6.19 in NEW", 'gpu: not said in OLD, ["H200"] in NEW']
    assert machine_differences(MACHINE, MACHINE) == []


# the command


def document(path: Path, rows: list[dict[str, Any]], **parts: Any) -> Path:
    path.write_text(json.dumps({"schema": 1, "bench": "broadcast", "machine": MACHINE, "rows": rows, **parts}))
    return path


def invoke(*args: str | Path) -> tuple[int, str, str]:
    app = Typer()
    app.command()(command.main)
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.stderr


def test_what_the_command_shows(tmp_path: Path) -> None:
    old = [
        row("list_101", p50_us=10.0, p50_us_low=9.0, p50_us_high=11.0),
        row("list_1024", p50_us=10.0, p50_us_low=9.0, p50_us_high=11.0),
        row("rate", per_s=1000.0, per_s_low=990.0, per_s_high=1010.0),
        row("gone", p50_us=1.0),
        row("dies", p50_us=1.0),
    ]
    new = [
        row("list_101", p50_us=15.0, p50_us_low=14.0, p50_us_high=16.0),
        row("list_1024", p50_us=11.0, p50_us_low=10.0, p50_us_high=12.0),
        row("rate", per_s=2000.0, per_s_low=1990.0, per_s_high=2010.0),
        row("[red]new", p50_us=1.0),
        row("dies", error="[red]no answer within 60 s"),
    ]
    paths = document(tmp_path / "old.json", old), document(tmp_path / "new.json", new)
    code, out, err = invoke(*paths)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    (worse,) = (line for line in lines if "list_101" in line)
    for part in ("raycomm", "p50_us", "10.0", "15.0", "+50.0 %", "9.00 to 11.0", "14.0 to 16.0", "worse"):
        assert part in worse
    (better,) = (line for line in lines if "rate" in line)
    assert "+100.0 %" in better
    assert "better" in better
    assert "list_1024" not in out
    assert "fails now: dies (raycomm): [red]no answer within 60 s" in lines
    assert "only in OLD: gone (raycomm)" in lines
    assert "only in NEW: [red]new (raycomm)" in lines
    assert lines[-1] == "1 figures worse, 1 better, 1 rows unchanged, 1 only in OLD, 1 only in NEW, 1 fail now"


def test_nothing_worse_is_exit_code_zero_and_no_band_is_said(tmp_path: Path) -> None:
    paths = document(tmp_path / "old.json", [row(p50_us=10.0)]), document(tmp_path / "new.json", [row(p50_us=1.0)])
    code, out, _ = invoke(*paths)
    assert code == 0
    assert "OLD has no band for 1 of 1 figures: 20 % to either side is taken" in out
    assert "better" in out
    assert invoke(*reversed(paths))[0] == 1
    assert invoke(*reversed(paths), "--tolerance", "100")[0] == 0


def test_one_system_can_be_compared_alone(tmp_path: Path) -> None:
    old = document(tmp_path / "old.json", [row(p50_us=1.0), row(system="ray", p50_us=1.0)])
    new = document(tmp_path / "new.json", [row(p50_us=1.0), row(system="ray", p50_us=9.0)])
    assert invoke(old, new)[0] == 1
    assert invoke(old, new, "--system", "raycomm")[0] == 0
    code, _, err = invoke(old, new, "--system", "nobody")
    assert (code, err) == (2, "--system: no rows of 'nobody'; there are raycomm, ray\n")


def test_another_machine_is_a_warning(tmp_path: Path) -> None:
    rows = [row(p50_us=1.0)]
    old = document(tmp_path / "old.json", rows)
    new = document(tmp_path / "new.json", rows, machine={**MACHINE, "cores": 64, "python": "3.12"})
    code, out, _ = invoke(old, new)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("warning")] == [
        "warning: different machine: cores: 2 in OLD, 64 in NEW",
        "warning: different machine: python: 3.11 in OLD, 3.12 in NEW",
    ]
    assert "1 rows unchanged" in out


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("1" * 5000, "not JSON"),
        (json.dumps({"schema": 2, "bench": "broadcast", "machine": {}, "rows": []}), "schema 2; this version reads schema 1"),
        (json.dumps({"schema": 1, "bench": "broadcast", "machine": {}, "rows": []}), "no rows"),
        (json.dumps({"schema": 1, "bench": "broadcast", "machine": {}, "rows": [row(), row()]}), "two rows 'echo'"),
        (json.dumps({"schema": 1, "bench": "pipeline", "machine": {}, "rows": [row()]}), "different benches: "),
    ],
)
@pytest.mark.parametrize("bad_first", [True, False])
def test_bad_input_is_one_line_and_exit_code_two(tmp_path: Path, text: str | None, wanted: str, bad_first: bool) -> None:
    good, bad = document(tmp_path / "good.json", [row(p50_us=1.0)]), tmp_path / "bad.json"
    if text is not None:
        bad.write_text(text)
    code, out, err = invoke(*((bad, good) if bad_first else (good, bad)))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert wanted in err
