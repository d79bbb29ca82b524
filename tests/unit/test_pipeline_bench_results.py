"""What the pipeline bench makes of its results, without a cluster: the line through the chains, the table; and bad input."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from microbench import console, pipeline
from microbench.harness import Result
from microbench.pipeline import table, times_ray
from microbench.pipeline_rows import LENGTHS, PER_HOP, ROWS, complete, per_hop
from microbench.rows import RAY_GRAPH, RAYCOMM


def chain(length: int, system: str = RAYCOMM, **figures: Any) -> Result:
    return {"row": f"chain_{length}", "system": system, "hops": length} | figures


def test_the_line_through_the_chains() -> None:
    line = per_hop([chain(length, p50_us=3.0 + 5.0 * length) for length in LENGTHS])
    assert line is not None
    assert (line["row"], line["system"]) == (PER_HOP, RAYCOMM)
    assert (line["p50_us"], line["intercept_us"]) == (pytest.approx(5.0), pytest.approx(3.0))
    assert line["residual_us"] == pytest.approx(0.0)
    assert line["fit"] == "least-squares slope of p50_us over chains of 1, 2, 4, 8, 16 actors"


def test_the_line_goes_through_what_was_measured() -> None:
    line = per_hop([chain(1, p50_us=2.0), chain(2, error="hung"), chain(4, p50_us=8.0), chain(8, p50_us=14.0)])
    assert line is not None
    assert line["fit"].endswith("chains of 1, 4, 8 actors")
    assert line["residual_us"] == pytest.approx(21 / 37)
    assert per_hop([chain(1, p50_us=2.0)]) is None
    assert per_hop([]) is None
    failed = per_hop([chain(1, p50_us=2.0), chain(2, error="hung")])
    assert failed == {"row": PER_HOP, "system": RAYCOMM, "error": "fewer than two lengths of chain were measured"}


def results() -> list[Result]:
    rows: list[Result] = []
    for system, times in ((RAYCOMM, 1.0), (RAY_GRAPH, 10.0)):
        rows += [{"row": f"chain_{n}", "system": system, "p50_us": times * n, "count": 9} for n in LENGTHS]
        rows.append({"row": "compute_10", "system": system, "per_s": 80.0 / times, "ideal_per_s": 100.0, "count": 9})
    rows.append({"row": "fan_2", "system": RAYCOMM, "p50_us": 4.0, "count": 9})
    return [*rows, {"row": "fan_2", "system": RAY_GRAPH, "error": "[red]hung"}]


def test_results_come_row_by_row_with_what_sets_them_apart() -> None:
    completed = complete(results())
    assert [(each["row"], each["system"]) for each in completed] == [
        (row, system) for row in ("chain_1", "chain_2", "chain_4", "chain_8", "chain_16", PER_HOP, "fan_2", "compute_10")
        for system in (RAYCOMM, RAY_GRAPH)
    ]  # fmt: skip
    assert completed[-3] == {"row": "fan_2", "system": RAY_GRAPH, "fan_out": 2, "error": "[red]hung"}
    assert completed[-1]["compute_ms"] == 10.0
    assert [each["p50_us"] for each in completed if each["row"] == PER_HOP] == [pytest.approx(1.0), pytest.approx(10.0)]
    assert complete([]) == []


def test_the_table_shows_ratios_shares_and_failures() -> None:
    terminal = Console(width=80)
    with terminal.capture() as capture:
        console.show(terminal, table(complete(results())))
    cells = {
        (cell[0], cell[1]): cell[2:]
        for line in capture.get().splitlines()
        if len(cell := [text.strip() for text in line.strip("│").split("│")]) == 9
    }
    assert cells["chain_16", RAYCOMM] == ["16.0", "", "", "", "", "9", "10.0x"]
    assert cells["chain_16", RAY_GRAPH][-1] == ""
    assert cells[PER_HOP, RAYCOMM][-1] == "10.0x"
    assert cells["fan_2", RAY_GRAPH][-2:] == ["failed", ""]
    assert cells["fan_2", RAYCOMM][-1] == ""
    assert cells["compute_10", RAYCOMM] == ["", "", "", "80.0", "80 %", "9", "10.0x"]


def test_a_slope_of_the_noise_is_not_compared_with() -> None:
    assert times_ray({"p50_us": 2.0}, {"p50_us": 3.0}) == 1.5
    assert times_ray({"p50_us": 2.0}, {"p50_us": -3.0}) is None
    assert times_ray({"p50_us": 0.0}, {"p50_us": 3.0}) is None
    assert times_ray({"per_s": 6.0}, {"per_s": 3.0}) == 2.0
    assert times_ray({"per_s": 6.0}, {"per_s": 0.0}) is None
    assert times_ray({"per_s": 6.0}, {}) is None


# command line


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--rows", "nothing"], "no row matches 'nothing'; rows: inflight_1, "),
        (["--rows", "["], "--rows: not a regular expression"),
        (["--json", "/nowhere/result.json"], "cannot write /nowhere/result.json: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(args: list[str], wanted: str) -> None:
    app = Typer()
    app.command()(pipeline.main)
    result = CliRunner().invoke(app, args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert wanted in result.stderr


@pytest.mark.parametrize("args", [["--rounds", "0"], ["--rivals", "torch"], ["--fast"]])
def test_options_that_are_none_are_refused(args: list[str]) -> None:
    app = Typer()
    app.command()(pipeline.main)
    assert CliRunner().invoke(app, args).exit_code == 2


def test_quick_is_quicker() -> None:
    quick, full = pipeline.effort_of(True), pipeline.effort_of(False)
    quick_s, full_s = [6 * len(ROWS) * (effort.warmup_s + effort.measure_s) for effort in (quick, full)]
    assert quick_s < 60 < full_s < 300  # of three minutes, and of ten; the rest starts actors and compiles graphs
