"""The tables of the pages: what is drawn from which results, what is left alone, and what --check finds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from microbench import tables
from microbench.console import number
from microbench.markdown import TABLES, head_of
from microbench.rows import NATIVE, RAY_CALL, RAY_GRAPH, RAYCOMM
from microbench.tables import MarkerError, redraw
from microbench.targets import RATIOS

ROOT = Path(__file__).parents[2]
DATE = "2026-11-30"

# Figures of a run whose tables were written by hand: (raycomm p50, p99, Ray p50, p99).
LATENCIES = {
    "echo_int": (1.93, 3.63, 53.41, 217),
    "echo_list1024": (24.94, 89.9, 122.4, 341),
    "echo_tensor_1x1": (3.945, 26.9, 564.1, 1424),
    "echo_tensor_192KiB": (23.7, 98.3, 743.3, 1774),
    "chain4_int": (23.76, 122.6, 527.1, 1382),
    "chain4_tensor_1x1": (40.54, 201.0, 2559.0, 6751),
    "chain4_tensor_192KiB": (156.7, 423.4, 4512.5, 10044),
    "chain4_tensor_16MiB": (5751.0, 9129.7, 247405.1, 301653),
    "broadcast4_int": (19.0, 96.0, 524.5, 1800),
    "broadcast4_tensor_192KiB": (131.3, 320.0, 3413.5, 9896),
}
RATES = {"throughput_chain4_int": (135_984, 3110), "throughput_chain4_tensor_1x1": (62_399, 330.8)}

BENCH = """\
| row | raycomm p50 | p99 | Ray p50 | p99 | ratio of p50 |
|---|---|---|---|---|---|
| `echo_int` | 1.93 | 3.63 | 53.4 | 217 | 27.7x |
| `echo_list1024` | 24.9 | 89.9 | 122 | 341 | 4.9x |
| `echo_tensor_1x1` | 3.94 | 26.9 | 564 | 1,424 | 143.0x |
| `echo_tensor_192KiB` | 23.7 | 98.3 | 743 | 1,774 | 31.4x |
| `chain4_int` | 23.8 | 123 | 527 | 1,382 | 22.2x |
| `chain4_tensor_1x1` | 40.5 | 201 | 2,559 | 6,751 | 63.1x |
| `chain4_tensor_192KiB` | 157 | 423 | 4,512 | 10,044 | 28.8x |
| `chain4_tensor_16MiB` | 5,751 | 9,130 | 247,405 | 301,653 | 43.0x |
| `broadcast4_int` | 19.0 | 96.0 | 524 | 1,800 | 27.6x |
| `broadcast4_tensor_192KiB` | 131 | 320 | 3,414 | 9,896 | 26.0x |

| row | raycomm | Ray | ratio |
|---|---|---|---|
| `throughput_chain4_int`, executions per second, 8 in flight | 135,984 | 3,110 | 43.7x |
| `throughput_chain4_tensor_1x1`, executions per second, 8 in flight | 62,399 | 331 | 188.6x |
| `idle_cpu_percent`, busiest process (a plain idle actor: 0.81) | 0.97 | 67.1 | |

`floor_pingpong` 0.62 us, `floor_chain5` 11.6 us, `channel_pingpong_8B` 1.13 us, `plain_actor_call` 819 us. \
2026-11-30, three rounds.
"""


def accelerated_dag() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, (p50, p99, ray_p50, ray_p99) in LATENCIES.items():
        rows.append({"row": name, "system": RAYCOMM, "p50_us": p50, "p99_us": p99, "rounds": 3})
        rows.append({"row": name, "system": RAY_GRAPH, "p50_us": ray_p50, "p99_us": ray_p99, "rounds": 3})
    for name, rates in RATES.items():
        rows += [{"row": name, "system": system, "per_s": rate} for system, rate in zip((RAYCOMM, RAY_GRAPH), rates, strict=True)]
    shares = {RAYCOMM: 0.97, RAY_GRAPH: 67.1, RAY_CALL: 0.81}
    rows += [{"row": "idle_cpu_percent", "system": system, "cpu_percent": share} for system, share in shares.items()]
    for name, system, p50 in (
        ("floor_pingpong", NATIVE, 0.62),
        ("floor_chain5", NATIVE, 11.6),
        ("channel_pingpong_8B", RAYCOMM, 1.13),
        ("plain_actor_call", RAY_CALL, 819.0),
    ):
        rows.append({"row": name, "system": system, "p50_us": p50})
    return rows


def document(bench: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"schema": 1, "bench": bench, "machine": {"date": f"{DATE}T10:00:00+00:00"}, "rows": rows}


def draw(name: str, rows: list[dict[str, Any]]) -> list[str]:
    return TABLES[name].draw(document(TABLES[name].bench, rows)).splitlines()


def replaced(rows: list[dict[str, Any]], row: str, system: str, **figures: Any) -> list[dict[str, Any]]:
    new = {"row": row, "system": system, **figures}
    return [new if (each["row"], each["system"]) == (row, system) else each for each in rows]


# raycomm beside Ray


def test_the_tables_of_the_page_are_in_their_written_form() -> None:
    assert TABLES["bench"].draw(document("accelerated_dag", accelerated_dag())) == BENCH


def test_the_table_of_the_readme_has_plain_names_and_whole_ratios() -> None:
    lines = draw("measured", accelerated_dag())
    assert lines[:3] == [
        "| round trip, us (p50) | raycomm | Ray Compiled Graphs | ratio |",
        "|---|---|---|---|",
        "| 1 actor, int | 1.93 | 53.4 | 28x |",
    ]
    assert lines[-1] == "| chain of 4, tensor (1,1), 8 in flight, per second | 62,399 | 331 | 189x |"
    assert len(lines) == 2 + len(RATIOS)


def test_the_table_of_targets_says_aim_met_and_short() -> None:
    lines = draw("target", replaced(accelerated_dag(), "echo_list1024", RAYCOMM, p50_us=99.0, p99_us=100.0))
    assert lines[:3] == [
        "| row | requirement | measured | |",
        "|---|---|---|---|",
        "| `echo_int` | at least 20x Ray Compiled Graphs (aim 40x) | 27.7x | met |",
    ]
    assert "| `echo_list1024` | at least 4x Ray Compiled Graphs (aim 6x) | 1.2x | short |" in lines
    assert "| `chain4_int` | at least 12x Ray Compiled Graphs (aim 22x) | 22.2x | aim |" in lines
    assert "| `echo_int` | p99 below Ray Compiled Graphs' p50 | 3.6 us against 53.4 us | met |" in lines
    assert lines[-1] == "| `idle_cpu_percent` | under 1 % of a core in every process | 0.97 % | met |"


def test_the_drawn_tables_have_the_heads_of_those_in_the_pages() -> None:
    for page, names in (("README.md", ["measured"]), ("docs/performance.md", ["bench", "target"])):
        text = (ROOT / page).read_text()
        for name in names:
            standing = text.split(f"<!-- {name} -->\n")[1].split("<!-- end -->")[0].splitlines()
            drawn = draw(name, accelerated_dag())
            heads = [[line for line in lines if line.startswith(("|--", "| row", "| round"))] for lines in (standing, drawn)]
            assert heads[0] == heads[1]


def test_failed_and_missing_rows_stay_in_the_table_with_the_reason() -> None:
    rows = replaced(accelerated_dag(), "echo_int", RAYCOMM, error="hung | for <!-- end -->\never")
    rows = [row for row in rows if row["row"] != "chain4_int"]
    lines = draw("bench", rows)
    assert "| `echo_int` | failed | failed | 53.4 | 217 | |" in lines
    assert "| `chain4_int` | not measured | not measured | not measured | not measured | |" in lines
    assert lines[-1] == "Not measured: raycomm: echo_int failed: hung \\| for &lt;!-- end --> ever."
    assert draw("measured", rows)[-1] == lines[-1]


# a column per system


def broadcast() -> list[dict[str, Any]]:
    return [
        {"row": "list_1024", "system": "raycomm:msgpack", "kind": "list", "size": 1024, "mean_us": 40.0, "unpaced_us": 9.0},
        {"row": "list_1024", "system": "vllm", "kind": "list", "size": 1024, "mean_us": 30.0, "unpaced_us": 10.0},
        {"row": "list_101", "system": "raycomm:msgpack", "kind": "list", "size": 101, "mean_us": 10.0, "rounds": 1},
        {"row": "list_101", "system": "vllm", "error": "hung"},
        {"row": "list_101", "system": "nccl", "left_out": "needs a GPU"},
        {"row": "tensor_4KiB", "system": "raycomm:msgpack", "kind": "tensor", "size": 4096, "mean_us": 20.0},
        {"row": "tensor_4KiB", "system": "vllm", "kind": "tensor", "size": 4096, "mean_us": 25.0},
        {"row": "tensor_4KiB", "system": "copy", "kind": "tensor", "size": 4096, "mean_us": 5.0},
    ]


def test_lists_by_size_whoever_is_ahead() -> None:
    assert draw("broadcast-lists", broadcast()) == [
        "| ints, us to the last reader (mean) | raycomm:msgpack | vllm |",
        "|---|---|---|",
        "| 101 | 10.0 | failed |",
        "| 1,024 | 40.0 | **30.0** |",
        "",
        "| ints, us a message, unpaced | raycomm:msgpack | vllm |",
        "|---|---|---|",
        "| 101 | | failed |",
        "| 1,024 | **9.00** | 10.0 |",
        "",
        f"{DATE}, one round.",
        "",
        "Not measured: vllm: list_101 failed: hung; nccl: list_101 left out: needs a GPU.",
    ]


def test_the_floor_is_shown_and_is_no_competitor() -> None:
    lines = draw("broadcast-tensors", broadcast())
    assert lines[0].endswith("| raycomm:msgpack | vllm | copy |")
    assert lines[2] == "| 4 KiB | **20.0** | 25.0 | 5.00 |"


def test_a_bench_without_rows_of_a_kind_says_so() -> None:
    lines = draw("broadcast-tensors", [row for row in broadcast() if row["row"].startswith("list")])
    assert lines[0] == f"No such rows were measured. {DATE}, one round."


def test_a_table_for_each_figure_of_a_bench() -> None:
    rows = [
        {"row": "int", "system": "raycomm", "encode_p50_us": 0.1, "decode_p50_us": 0.2, "encode_mean_us": 7.0, "bytes": 9},
        {"row": "int", "system": "msgspec", "encode_p50_us": 0.05, "decode_p50_us": 0.3, "encode_mean_us": 7.0, "bytes": 1024},
    ]
    lines = draw("serializer", rows)
    assert [line for line in lines if line.startswith("| row")] == [
        "| row, encode, us (p50) | raycomm | msgspec |",
        "| row, decode, us (p50) | raycomm | msgspec |",
        "| row, bytes | raycomm | msgspec |",
    ]
    assert [line for line in lines if line.startswith("| `int`")] == [
        "| `int` | 0.10 | **0.05** |",
        "| `int` | **0.20** | 0.30 |",
        "| `int` | **9** | 1,024 |",
    ]


def test_the_higher_rate_is_the_better_one_and_ideals_are_not_drawn() -> None:
    rows = [
        {"row": "inflight_8", "system": "raycomm", "in_flight": 8, "per_s": 200.0},
        {"row": "inflight_8", "system": "ray", "in_flight": 8, "per_s": 300.0, "ideal_per_s": 900.0},
        {"row": "chain_2", "system": "raycomm", "hops": 2, "p50_us": 5.0},
        {"row": "chain_2", "system": "ray", "hops": 2, "p50_us": 5.0},
    ]
    lines = draw("pipeline", rows)
    assert "| `inflight_8` | 200 | **300** |" in lines
    assert "| `chain_2` | 5.00 | 5.00 |" in lines  # as good as each other
    assert "900" not in "".join(lines)


def test_what_each_graph_left_behind_has_a_line_per_figure() -> None:
    rows = [
        {"row": "compile_4", "system": "raycomm", "p50_ms": 50.0},
        {"row": "growth", "system": "raycomm", "driver_rss_kib_per_graph": -0.5, "actor_threads_per_graph": 0.0},
        {"row": "growth", "system": "ray", "driver_rss_kib_per_graph": 12.0, "actor_threads_per_graph": 1.0},
    ]
    lines = draw("lifecycle", rows)
    assert "| `driver_rss_kib` | **-0.50** | 12.0 |" in lines
    assert "| `actor_threads` | **0.00** | 1.00 |" in lines
    assert "| row, ms (p50) | raycomm |" in lines


@pytest.mark.parametrize(("value", "text"), [(0.05, "0.05"), (-0.5, "-0.50"), (-1234.0, "-1,234"), (12.34, "12.3"), (None, "")])
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_means_spreads_and_counts_have_no_table() -> None:
    assert [key for key in ("mean_us", "std_us", "p99_us", "count", "rounds", "p50_us_low", "ideal_per_s") if head_of(key)] == []


# the pages


PAGE = "before\n<!-- soak -->\nkept\n<!-- end -->\n<!-- bench -->\nold\n<!-- end -->\nafter <!-- target -->\n"


def test_only_what_is_between_markers_changes() -> None:
    drawn, changed = redraw(PAGE, lambda name: "new\n")
    assert drawn == PAGE.replace("old\n", "new\n")
    assert changed == ["bench"]
    assert redraw(drawn, lambda name: "new\n") == (drawn, [])
    assert redraw(PAGE, lambda name: None) == (PAGE, [])


@pytest.mark.parametrize(
    ("page", "wanted"),
    [
        ("<!-- bench -->\nold\n", "<!-- bench --> has no <!-- end -->"),
        ("<!-- bench -->\nold\n<!-- target -->\n<!-- end -->\n", "<!-- bench --> has no <!-- end --> before <!-- target -->"),
    ],
)
def test_a_table_without_an_end(page: str, wanted: str) -> None:
    with pytest.raises(MarkerError, match=wanted):
        redraw(page, lambda name: "new\n")


def test_instructions_have_a_column_for_each_operation() -> None:
    rows = [
        {"row": "int", "system": "raycomm", "write_instructions": 1205.1, "read_instructions": 798.0},
        {"row": "list", "system": "raycomm", "error": "it died"},
    ]
    lines = draw("instructions", rows)
    assert lines[:2] == ["| instructions | write | read |", "|---|---|---|"]
    assert lines[2].startswith("| `int` | 1,205 | 798 |")
    assert "it died" in lines[-1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copies of the pages, with a marker for each table, and two results."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    for page in tables.PAGES:
        shutil.copy(ROOT / page, tmp_path / page)
    page = tmp_path / "docs" / "performance.md"
    standing = page.read_text() + (tmp_path / "README.md").read_text()
    new = [name for name in TABLES if f"<!-- {name} -->" not in standing]
    with page.open("a") as file:
        file.writelines(f"\n<!-- {name} -->\n<!-- end -->\n" for name in new)
    for bench, rows in (("accelerated_dag", accelerated_dag()), ("broadcast", broadcast())):
        (tmp_path / tables.RESULTS / f"{bench}.json").write_text(json.dumps(document(bench, rows)))
    return tmp_path


def invoke(*args: str | Path) -> tuple[int, str, str]:
    app = Typer()
    app.command()(tables.main)
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.stderr


def test_check_finds_what_drawing_mends(checkout: Path) -> None:
    before = {page: (checkout / page).read_text() for page in tables.PAGES}
    code, out, _ = invoke("--check", "--root", checkout)
    assert code == 1
    assert "docs/performance.md: broadcast-lists: not what the results give" in out
    assert {page: (checkout / page).read_text() for page in tables.PAGES} == before  # looked at only

    code, out, _ = invoke("--root", checkout)
    assert code == 0
    assert "docs/performance.md: broadcast-lists: drawn" in out
    assert BENCH in (checkout / "docs/performance.md").read_text()
    assert "| 1 actor, int | 1.93 | 53.4 | 28x |" in (checkout / "README.md").read_text()

    code, out, _ = invoke("--check", "--root", checkout)
    assert code == 0
    assert out.splitlines()[-1] == "the tables are what the results give"

    page = checkout / "README.md"
    page.write_text(page.read_text().replace("| 28x |", "| 82x |"))
    assert invoke("--check", "--root", checkout)[0] == 1


def test_a_missing_file_leaves_its_tables_alone_and_is_said(checkout: Path) -> None:
    (checkout / tables.RESULTS / "accelerated_dag.json").unlink()
    before = (checkout / "README.md").read_text()
    code, out, _ = invoke("--root", checkout)
    assert code == 0
    assert "no docs/results/accelerated_dag.json: left as they are: measured, bench, target" in out.splitlines()
    assert "no docs/results/serializer.json: left as they are: serializer" in out.splitlines()
    assert (checkout / "README.md").read_text() == before


def test_without_results_nothing_is_said_to_be_right(checkout: Path) -> None:
    shutil.rmtree(checkout / tables.RESULTS)
    code, out, _ = invoke("--check", "--root", checkout)
    assert code == 0
    assert all(line.startswith("no docs/results/") for line in out.splitlines())
    assert len(out.splitlines()) == len({table.bench for table in TABLES.values()})


def test_results_without_a_marker_are_said(checkout: Path) -> None:
    page = checkout / "docs/performance.md"
    page.write_text(page.read_text().replace("<!-- broadcast-lists -->", "").replace("<!-- broadcast-tensors -->", ""))
    assert "docs/results/broadcast.json: no page has its tables" in invoke("--root", checkout)[1].splitlines()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{", "not JSON"),
        (json.dumps({"schema": 2}), "schema 2; this version reads schema 1"),
        (json.dumps(document("broadcast", [])), "no rows"),
        (json.dumps(document("pipeline", broadcast())), "bench 'pipeline', not 'broadcast'"),
    ],
)
def test_bad_results_are_refused_and_nothing_is_written(checkout: Path, text: str, wanted: str) -> None:
    (checkout / tables.RESULTS / "broadcast.json").write_text(text)
    before = (checkout / "README.md").read_text()
    code, out, err = invoke("--root", checkout)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert wanted in err
    assert (checkout / "README.md").read_text() == before


def test_bad_pages_are_refused_and_nothing_is_written(checkout: Path) -> None:
    page, readme = checkout / "docs/performance.md", (checkout / "README.md").read_text()
    page.write_text(page.read_text() + "<!-- bench -->\n")
    code, out, err = invoke("--root", checkout)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "<!-- bench --> has no <!-- end -->" in err
    assert (checkout / "README.md").read_text() == readme
    page.unlink()
    code, _, err = invoke("--root", checkout)
    assert (code, err) == (2, f"{page}: No such file or directory\n")


def test_the_pages_show_the_results_that_are_kept() -> None:
    code, out, err = invoke("--check")
    assert (code, err) == (0, ""), out
