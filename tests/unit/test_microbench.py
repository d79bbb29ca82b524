"""The bench's own logic, without Ray: statistics, rows, targets, result documents, command lines."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from microbench import accelerated_dag_gpu, check, console, document
from microbench.accelerated_dag_gpu import plan_turns
from microbench.command import Rivals
from microbench.document import SchemaError, validate
from microbench.harness import (
    QUICK,
    Effort,
    Measurement,
    highest_cpu_percent,
    latency,
    median_of_rounds,
    percentile,
    time_calls,
    time_throughput,
)
from microbench.rows import NATIVE, RAY_CALL, RAY_GRAPH, RAYCOMM, ROWS, Kind, Topology, same, select
from microbench.targets import RATIOS, judge

BRIEF = Effort(0.0, 0.0, 4, 100, 10, idle_s=0.0, idle_rounds=1, turn_limit_s=30.0)


# statistics


@pytest.mark.parametrize(
    ("values", "percent", "wanted"),
    [
        ([7], 50, 7),
        ([7], 99, 7),
        ([1, 2, 3, 4], 50, 2),
        ([1, 2, 3, 4], 99, 4),
        (list(range(1, 101)), 99, 99),
        (list(range(1, 101)), 100, 100),
        (list(range(1, 1001)), 99, 990),
        ([1, 2], 0, 1),
    ],
)
def test_percentile_is_the_nearest_rank(values: list[int], percent: float, wanted: int) -> None:
    assert percentile(values, percent) == wanted


def test_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="no samples"):
        percentile([], 50)


def test_latency_turns_nanoseconds_into_microseconds() -> None:
    std = pytest.approx(12.5**0.5)
    assert latency([3000, 1000, 2000, 10_000]) == {"p50_us": 2.5, "p99_us": 10.0, "mean_us": 4.0, "std_us": std, "count": 4}


def test_one_bad_round_does_not_move_the_median() -> None:
    rounds: list[Measurement] = [{"p50_us": value, "count": 10} for value in (5.0, 900.0, 6.0)]
    band = {"p50_us_low": 5.0, "p50_us_high": 900.0}
    assert median_of_rounds(rounds) == {"p50_us": 6.0, **band, "count": 30, "rounds": 3}


def test_time_calls_makes_the_least_number_of_calls() -> None:
    samples, last = time_calls(lambda value: value + 1, 1, BRIEF)
    assert len(samples) == BRIEF.min_calls
    assert last == 2
    assert min(samples) >= 0


def test_time_calls_stops_at_the_most_calls() -> None:
    samples, _ = time_calls(lambda value: value, 1, Effort(0, 60, 1, 7, 10, 0, 1, 30))
    assert len(samples) == 7


def test_throughput_keeps_as_many_in_flight_as_asked() -> None:
    outstanding: set[int] = set()
    seen: list[int] = []
    numbers = itertools.count()

    def submit(value: str) -> tuple[int, str]:
        number = next(numbers)
        outstanding.add(number)
        return number, value

    def fetch(ticket: tuple[int, str]) -> str:
        seen.append(len(outstanding))
        outstanding.remove(ticket[0])
        return ticket[1]

    measurement, last = time_throughput(submit, fetch, "value", 8, BRIEF)
    assert measurement["count"] == 8
    assert measurement["per_s"] > 0
    assert seen[:8] == [8] * 8
    assert seen[-8:] == list(range(8, 0, -1))  # drained, nothing left behind
    assert not outstanding
    assert last == "value"


def test_cpu_percent_takes_the_busiest_process() -> None:
    assert highest_cpu_percent([os.getpid(), os.getppid()], 0.05) >= 0


# rows


def test_payloads_are_what_their_names_say() -> None:
    torch = pytest.importorskip("torch")
    values = {name: row.payload() for name, row in ROWS.items()}
    assert values["echo_list1024"] == list(range(1024))
    assert (values["echo_tensor_1x1"].shape, values["echo_tensor_1x1"].dtype) == ((1, 1), torch.float32)
    for name in ("echo_tensor_192KiB", "chain4_tensor_192KiB", "broadcast4_tensor_192KiB"):
        assert (values[name].shape, values[name].dtype, values[name].nbytes) == ((4, 24576), torch.float16, 192 << 10)
    assert (values["chain4_tensor_16MiB"].dtype, values["chain4_tensor_16MiB"].nbytes) == (torch.uint8, 16 << 20)
    assert all(same(row.payload(), values[name]) for name, row in ROWS.items())  # a payload is the same each time


def test_a_changed_value_is_noticed() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, 2)
    changed = tensor.clone()
    changed[1, 1] = 2
    assert same([tensor, tensor], [tensor.clone(), tensor])
    for got, wanted in [
        (changed, tensor),
        (tensor.half(), tensor),
        (tensor.view(4), tensor),
        ([tensor], [tensor, tensor]),
        ([tensor, changed], [tensor, tensor]),
        ([1, 2], [1, 3]),
        (True, 1),
        (None, tensor),
    ]:
        assert not same(got, wanted)


def test_expected_of_a_broadcast_is_one_value_per_actor() -> None:
    assert ROWS["broadcast4_int"].expected(1) == [1, 1, 1, 1]
    assert ROWS["chain4_int"].expected(1) == 1


def test_rows_are_selected_by_regular_expression() -> None:
    assert [row.name for row in select("^echo_(int$|list)", ROWS)] == ["echo_int", "echo_list1024"]
    assert len(select(None, ROWS)) == len(ROWS)
    with pytest.raises(ValueError, match="no row matches 'nothing'"):
        select("nothing", ROWS)
    with pytest.raises(ValueError, match="not a regular expression"):
        select("(", ROWS)


def test_turns_alternate_between_the_systems_within_a_topology() -> None:
    turns = plan_turns(select(None, ROWS), Rivals.RAY)
    assert [turn.system for turn in turns if turn.topology == Topology.ECHO] == [RAYCOMM, RAY_GRAPH, RAY_CALL]
    assert {row for turn in turns for row in turn.rows} == set(ROWS)
    alone = plan_turns(select(None, ROWS), Rivals.NONE)
    assert {turn.system for turn in alone} == {RAYCOMM, NATIVE}
    assert plan_turns(select("plain_actor_call", ROWS), Rivals.NONE) == []


# targets


def passing() -> list[dict[str, Any]]:
    """A fabricated result that reaches every aim."""
    rows: list[dict[str, Any]] = []
    for name, target in RATIOS.items():
        if ROWS[name].kind is Kind.THROUGHPUT:
            rows.append({"row": name, "system": RAYCOMM, "per_s": 1000.0 * target.aim, "count": 10})
            rows.append({"row": name, "system": RAY_GRAPH, "per_s": 1000.0, "count": 10})
        else:
            rows.append({"row": name, "system": RAYCOMM, "p50_us": 10.0, "p99_us": 11.0, "mean_us": 10.0, "count": 10})
            rows.append(
                {"row": name, "system": RAY_GRAPH, "p50_us": 10.0 * target.aim, "p99_us": 1e6, "mean_us": 1e5, "count": 10}
            )
    rows.append({"row": "floor_chain5", "system": NATIVE, "p50_us": 5.0, "p99_us": 6.0, "mean_us": 5.0, "count": 10})
    rows.append({"row": "idle_cpu_percent", "system": RAYCOMM, "cpu_percent": 0.4})
    return rows


def find(rows: list[dict[str, Any]], row: str, system: str) -> dict[str, Any]:
    return next(each for each in rows if (each["row"], each["system"]) == (row, system))


def short(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{verdict.row}: {verdict.measured}" for verdict in judge(rows) if not verdict.must_met]


def test_a_result_at_its_aims_falls_short_of_nothing() -> None:
    assert short(passing()) == []
    assert all(verdict.aim_met is not False for verdict in judge(passing()))


def test_between_must_and_aim() -> None:
    rows = passing()
    find(rows, "echo_int", RAY_GRAPH)["p50_us"] = 10.0 * RATIOS["echo_int"].must
    assert short(rows) == []
    assert [verdict.row for verdict in judge(rows) if verdict.aim_met is False] == ["echo_int"]


@pytest.mark.parametrize(
    ("row", "system", "change", "wanted"),
    [
        ("echo_int", RAY_GRAPH, {"p50_us": 199.0}, ["echo_int: 19.9x"]),
        ("throughput_chain4_int", RAYCOMM, {"per_s": 14_000.0}, ["throughput_chain4_int: 14.0x"]),
        ("echo_int", RAYCOMM, {"p99_us": 400.0}, ["echo_int: 400.0 us against 400.0 us"]),
        ("floor_chain5", NATIVE, {"p50_us": 2.0}, ["chain4_int: 5.0x"]),
        ("idle_cpu_percent", RAYCOMM, {"cpu_percent": 1.0}, ["idle_cpu_percent: 1.00 %"]),
        ("idle_cpu_percent", RAYCOMM, {"cpu_percent": float("nan")}, ["idle_cpu_percent: raycomm has no cpu_percent"]),
        ("throughput_chain4_int", RAYCOMM, {"per_s": "many"}, ["throughput_chain4_int: raycomm has no per_s"]),
        ("throughput_chain4_int", RAY_GRAPH, {"per_s": 0.0}, ["throughput_chain4_int: a figure of zero cannot be compared with"]),
        ("throughput_chain4_int", RAYCOMM, {"error": "hung"}, ["throughput_chain4_int: raycomm failed: hung"]),
    ],
)
def test_one_row_short(row: str, system: str, change: dict[str, Any], wanted: list[str]) -> None:
    rows = passing()
    find(rows, row, system).update(change)
    assert short(rows) == wanted


@pytest.mark.parametrize("system", [RAYCOMM, RAY_GRAPH])
@pytest.mark.parametrize("row", sorted(RATIOS))
def test_a_missing_row_is_short(row: str, system: str) -> None:
    rows = passing()
    rows.remove(find(rows, row, system))
    assert f"{row}: {system} was not measured" in short(rows)


@pytest.mark.parametrize(("row", "system"), [("floor_chain5", NATIVE), ("idle_cpu_percent", RAYCOMM)])
def test_a_missing_absolute_row_is_short(row: str, system: str) -> None:
    rows = passing()
    rows.remove(find(rows, row, system))
    assert len(short(rows)) == 1


def test_an_empty_result_meets_nothing() -> None:
    assert len(short([])) == len(judge([])) == 2 * len(RATIOS)  # two throughput rows have no p99, two lines are absolute


def test_a_rival_that_failed_in_a_late_round_is_still_compared_with() -> None:
    rows = passing()
    find(rows, "echo_int", RAY_GRAPH)["error"] = "hung in round 3"
    assert short(rows) == []
    del find(rows, "echo_int", RAY_GRAPH)["p50_us"]
    assert short(rows) == ["echo_int: ray_compiled_graph failed: hung in round 3"] * 2


def test_a_failed_row_without_a_target_is_short() -> None:
    rows = [*passing(), {"row": "channel_pingpong_8B", "system": RAYCOMM, "error": "died"}]
    assert short(rows) == ["channel_pingpong_8B: died"]
    rows[-1] = {"row": "plain_actor_call", "system": RAY_CALL, "error": "died"}
    assert short(rows) == []


# documents and command lines


def invoke(main: Any, *args: str) -> tuple[int, str, str]:
    app = Typer()
    app.command()(main)
    result = CliRunner().invoke(app, list(args))
    return result.exit_code, result.stdout, result.stderr


def test_check_passes_what_the_writer_wrote(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    document.write_json(path, "x", document.describe_machine(), passing())
    written = json.loads(path.read_text())
    assert list(written) == ["schema", "bench", "machine", "rows"]
    assert (written["schema"], written["bench"]) == (1, "x")
    assert {"cpu", "cores", "kernel", "python", "ray", "torch", "raycomm", "date"} <= set(written["machine"])
    code, out, _ = invoke(check.main, str(path))
    assert (code, out.count("\n")) == (0, 1)


def test_check_names_what_is_short(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    document.write_json(path, "x", {}, [row for row in passing() if row["row"] != "chain4_tensor_16MiB"])
    code, out, _ = invoke(check.main, str(path))
    assert code == 1
    assert out.startswith("short: chain4_tensor_16MiB: at least 15x")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ("\x80", "not JSON"),
        ("[]", "not an object"),
        ('{"schema": 2, "machine": {}, "rows": []}', "schema 2"),
        ('{"schema": true, "machine": {}, "rows": []}', "schema True"),
        ('{"machine": {}, "rows": []}', "schema None"),
        ('{"schema": 1, "rows": []}', "machine"),
        ('{"schema": 1, "machine": {}}', "'rows'"),
        ('{"schema": 1, "machine": {}, "rows": [{"row": "echo_int"}]}', "rows[0]"),
    ],
)
def test_check_refuses_what_it_cannot_read(tmp_path: Path, text: str | None, wanted: str) -> None:
    path = tmp_path / "result.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    code, out, err = invoke(check.main, str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert wanted in err


def test_validate_returns_the_rows() -> None:
    assert validate({"schema": 1, "machine": {}, "rows": passing()}) == passing()
    with pytest.raises(SchemaError):
        validate(None)


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--rows", "nothing"], "no row matches 'nothing'"),
        (["--rows", "["], "not a regular expression"),
        (["--rows", "plain", "--rivals", "none"], "nothing is left of plain_actor_call"),
        (["--json", "/nowhere/result.json"], "cannot write /nowhere/result.json: No such file or directory"),
        (["--json", "/"], "cannot write /: Is a directory"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(args: list[str], wanted: str) -> None:
    code, out, err = invoke(accelerated_dag_gpu.main, "--device", "cpu", *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert wanted in err


def test_checking_a_path_leaves_no_trace(tmp_path: Path) -> None:
    document.check_writable(tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()
    (tmp_path / "old.json").write_text("kept")
    document.check_writable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "kept"


def test_tables_show_failures_and_figures() -> None:
    terminal = Console(width=80)
    rows = [*passing(), {"row": "channel_pingpong_8B", "system": RAYCOMM, "error": "[red]hung"}]
    with terminal.capture() as capture:
        console.show(terminal, console.results_table(rows))
        console.show(terminal, console.ratios_table(judge(rows)))
    shown = capture.get()
    assert "[red]hung" in shown
    assert "40.0x" in shown
    assert "failed" in shown
    assert "throughput_chain4_tensor_1x1" in shown  # nothing is cut off
    assert "1,000,000" in shown


def test_the_page_of_figures_has_every_row_and_its_target() -> None:
    page = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    figures = page.split("<!-- bench -->")[1].split("<!-- end -->")[0]
    targets = page.split("<!-- target -->")[1].split("<!-- end -->")[0]
    assert [name for name in (*RATIOS, "idle_cpu_percent", "plain_actor_call") if f"`{name}`" not in figures] == []
    for name, target in RATIOS.items():
        assert f"| `{name}` | at least {target.must:g}x Ray Compiled Graphs (aim {target.aim:g}x) |" in targets
    assert "## When to use it, and when not" in (Path(__file__).parents[2] / "README.md").read_text()


def test_quick_is_shorter_in_every_way() -> None:
    assert QUICK.measure_s < 1
    assert QUICK.turn_limit_s <= 60
