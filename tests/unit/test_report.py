"""Drawing of result documents: the figures and what they show, the page, notebooks, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from typer import Typer
from typer.testing import CliRunner

from microbench import report
from microbench.console import size_of_bytes
from microbench.document import SchemaError
from microbench.plots import COLOURS, OTHER_COLOUR, Plot, family, value_of
from microbench.report import make_section, plots, render

ROOT = Path(__file__).parents[2]
CELL_LIMIT_S = 100
PNG = b"\x89PNG\r\n\x1a\n"
MACHINE = {"cpu": "EPYC $9$", "cores": 2, "kernel": "6.18", "date": "2026-11-30T10:00:00+00:00", "readers": 4}
MACHINE_LINE = "EPYC $9$, 2 cores, Linux 6.18; python ?, ray ?, torch ?, raycomm ?; 2026-11-30T10:00:00+00:00"


def band(key: str, value: float) -> dict[str, float]:
    return {key: value, f"{key}_low": 0.9 * value, f"{key}_high": 1.2 * value}


def broadcast() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for kind, sizes in (("list", (101, 1024)), ("tensor", (4096, 1 << 20))):
        for size in sizes:
            facts = {"row": f"{kind}_{size}", "kind": kind, "size": size}
            rows.append({**facts, "system": "raycomm:msgpack", **band("mean_us", size / 10), "unpaced_us": 1.0})
            rows.append({**facts, "system": "zmq:pubsub", **band("mean_us", size / 5)})
            rows.append({"row": facts["row"], "system": "vllm", "error": "hung $x_1$ <b>\nafter 60 s"})
            rows.append({**facts, "system": "nccl", "left_out": "needs a GPU"})
    return rows


def pipeline() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for system, times in (("raycomm", 1), ("ray_compiled_graph", 9)):
        for count in (1, 8):
            rows.append({"row": f"inflight_{count}", "system": system, "in_flight": count, "per_s": 900.0 * count / times})
            rows.append({"row": f"inflight_{count}_tensor", "system": system, "in_flight": count, "per_s": 90.0 * count / times})
            rows.append({"row": f"chain_{count}", "system": system, "hops": count, "p50_us": 5.0 * count * times})
            rows.append({"row": f"fan_{count}", "system": system, "fan_out": count, "p50_us": 5.0 * count * times})
        for work in (0.0, 1.0):
            rate = {"per_s": 900.0 / times} | ({"ideal_per_s": 1000.0} if work else {})
            rows.append({"row": f"compute_{work:g}", "system": system, "compute_ms": work, **rate})
        rows.append({"row": "per_hop", "system": system, "p50_us": -1.0})
    return rows


def accelerated_dag() -> list[dict[str, Any]]:
    return [
        {"row": "echo_int", "system": "raycomm", "p50_us": 1.0, "p99_us": 2.0},
        {"row": "echo_int", "system": "ray_compiled_graph", "p50_us": 50.0, "p99_us": 99.0},
        {"row": "chain4_int", "system": "raycomm", "p50_us": 100.0, "p99_us": 200.0},
        {"row": "chain4_int", "system": "ray_compiled_graph", "p50_us": 50.0, "p99_us": 99.0},
        {"row": "broadcast4_int", "system": "raycomm", "error": "hung"},
        {"row": "broadcast4_int", "system": "ray_compiled_graph", "p50_us": 50.0, "p99_us": 99.0},
    ]


ROWS = {"broadcast": broadcast, "pipeline": pipeline, "accelerated_dag": accelerated_dag}


def document(bench: str, rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"schema": 1, "bench": bench, "machine": MACHINE, "rows": ROWS[bench]() if rows is None else rows}


def named(bench: str, name: str) -> Plot:
    (found,) = (plot for plot in plots(document(bench)) if plot.name == name)
    return found


def caption(plot: Plot) -> str:
    return str(plot.get_supxlabel()).replace("\\$", "$")


# figures


def test_a_broadcast_has_latency_against_size_on_logarithmic_axes() -> None:
    assert [plot.name for plot in plots(document("broadcast"))] == [
        "latency-list",
        "unpaced-list",
        "latency-tensor",
        "unpaced-tensor",
    ]
    (axes,) = named("broadcast", "latency-list").axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert axes.get_xlabel() == "elements of the list"
    assert axes.get_ylabel().endswith("(us)")
    lines = {str(line.get_label()): line for line in axes.lines}
    assert list(lines) == ["raycomm:msgpack", "zmq:pubsub"]
    assert [list(values) for values in lines["zmq:pubsub"].get_data()] == [[101, 1024], [20.2, 204.8]]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == list(lines)
    assert len(axes.collections) == 2  # the rounds' bands


def test_systems_differ_in_colour_or_dashes_and_marker() -> None:
    systems = ["raycomm:msgpack", "raycomm:pickle", "zmq:pubsub", "zmq:pubsub:tcp", "gloo", "something", "another"]
    rows = [
        {"row": f"list_{size}", "system": system, "kind": "list", "size": size, "mean_us": 5.0}
        for system in systems
        for size in (1, 2)
    ]
    (plot,) = plots(document("broadcast", rows))
    lines = plot.axes[0].lines
    assert len({line.get_marker() for line in lines}) == len(systems)
    ours = [line for line in lines if str(line.get_label()).startswith("raycomm")]
    assert [line.get_color() for line in ours] == [COLOURS["raycomm"]] * 2
    assert ours[0].get_linestyle() != ours[1].get_linestyle()
    assert len({line.get_color() for line in lines}) == 4
    assert lines[-1].get_color() == OTHER_COLOUR
    assert [family(name) for name in ("zmq:pubsub:tcp", "ray_compiled_graph", "raycomm")] == ["zmq", "ray", "raycomm"]


def test_every_figure_says_machine_date_and_what_is_missing() -> None:
    for plot in plots(document("broadcast")):
        lines = caption(plot).splitlines()
        assert lines[0] == MACHINE_LINE
        assert lines[1:] == ["vllm: 2 rows failed: hung $x_1$ <b> after 60 s", "nccl: 2 rows left out: needs a GPU"]


def test_ratios_have_a_bar_each_and_one_that_is_missing_is_named() -> None:
    (plot,) = plots(document("accelerated_dag"))
    (axes,) = plot.axes
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == ["echo_int", "chain4_int", "broadcast4_int"]
    assert [bar.get_x() + bar.get_width() for bar in axes.patches] == pytest.approx([50.0, 0.5])  # type: ignore[attr-defined]
    assert axes.get_xlim()[0] < 0.5
    assert [text.get_text() for text in axes.texts] == ["50.0x", "0.5x", "no ratio"]
    assert "broadcast4_int: raycomm failed: hung" in caption(plot)


def test_the_pipeline_has_a_figure_for_each_way_to_grow() -> None:
    names = [plot.name for plot in plots(document("pipeline"))]
    assert names == ["in-flight", "in-flight-tensor", "chain", "fan-out", "compute"]
    (axes,) = named("pipeline", "in-flight-tensor").axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[90.0, 720.0], [10.0, 80.0]]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("executions in flight", "executions per second")
    (axes,) = named("pipeline", "compute").axes
    assert [str(line.get_label()) for line in axes.lines] == ["raycomm", "ray_compiled_graph", "ideal"]
    assert axes.get_xscale() == "symlog"  # no work is on it
    assert [value_of(row) for row in ("inflight_8", "inflight_8_tensor", "per_hop")] == ["", "tensor", ""]


@pytest.mark.parametrize("bench", sorted(ROWS))
def test_figures_are_pictures(bench: str) -> None:
    assert plots(document(bench))[0].png().startswith(PNG)


def test_figures_that_cannot_be_drawn_are_left_to_the_table() -> None:
    no_means: list[dict[str, Any]] = [{"mean_us": value} for value in (None, 0.0, -1.0, 10**400)]
    figures = [*no_means, {"size": "big", "mean_us": 1.0}, {}]
    for each in figures:
        assert plots(document("broadcast", [{"row": "list_101", "system": "x", "kind": "list", "size": 101, **each}])) == []
    assert plots(document("accelerated_dag", [{"row": "echo_int", "system": "raycomm", "p50_us": 1.0}])) == []
    assert plots({"schema": 1, "bench": "unknown", "machine": {}, "rows": broadcast()}) == []
    with pytest.raises(SchemaError, match="schema 2"):
        plots({"schema": 2})


def test_one_point_is_drawn() -> None:
    (plot,) = plots(document("broadcast", [{"row": "list_1", "system": "x", "kind": "list", "size": 1, "mean_us": 3.0}]))
    assert plot.png().startswith(PNG)


def test_matplotlib_comes_with_the_first_figure_and_pyplot_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "broadcast.json"
    path.write_text(json.dumps(document("broadcast")))
    code = (
        "import sys\n"
        "from microbench.report import plots\n"
        "print('matplotlib' in sys.modules, 'jinja2' in sys.modules)\n"
        f"print(len([plot.png() for plot in plots({str(path)!r})]))\n"
        "print('matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.stdout.split() == ["False", "False", "4", "True", "False"], done.stderr


def test_a_notebook_displays_the_figures(tmp_path: Path) -> None:
    path = tmp_path / "broadcast.json"
    path.write_text(json.dumps(document("broadcast")))
    sources = ["from microbench.report import plots", f"plots({str(path)!r})", f"plots({str(path)!r})[0]"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])  # type: ignore[no-untyped-call]
    client = NotebookClient(notebook, timeout=CELL_LIMIT_S, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    client.execute()
    pictures = [sum("image/png" in output.get("data", {}) for output in cell.outputs) for cell in notebook.cells]
    assert pictures == [0, 4, 1]


@pytest.mark.parametrize(
    ("count", "text"), [(4, "4 B"), (1000, "1,000 B"), (4096, "4 KiB"), (1536, "1,536 B"), (1 << 20, "1 MiB"), (3 << 30, "3 GiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size_of_bytes(count) == text


# the page


class Page(HTMLParser):
    """What a reader of the page meets: tags, pictures and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(*documents: dict[str, Any]) -> Page:
    return Page(render([make_section(each, f"result-{place}", "result.json") for place, each in enumerate(documents)]))


def test_the_page_needs_nothing_else() -> None:
    page = page_of(document("accelerated_dag"), document("pipeline"))
    assert page.tags.count("img") == 6
    assert [source for source in page.sources if not source.startswith(("data:image/png;base64,", "#result-"))] == []
    assert "script" not in page.tags
    assert "link" not in page.tags


def test_the_page_has_machine_figures_bands_and_reasons() -> None:
    text = page_of(document("broadcast")).text
    assert MACHINE_LINE in text
    assert "readers: 4" in text
    assert "204.8" not in text
    assert "205" in text
    assert "9.09 to 12.1" in text
    assert "failed: hung $x_1$ <b> after 60 s" in text
    assert text.count("left out: needs a GPU") == 4
    assert "Failed or left out: 8 of 16 rows" in text


def test_benches_without_figures_have_tables() -> None:
    rows = [{"row": "int", "system": "raycomm", "encode_p50_us": 0.0512, "bytes": 1234, "note": ["a", None], "exact": True}]
    page = page_of({"schema": 1, "bench": "serializer", "machine": {}, "rows": rows})
    assert "img" not in page.tags
    for cell in ("encode_p50_us", "0.05", "1,234", '["a", null]', "true"):
        assert cell in page.text
    assert "why not" not in page.text


def test_names_are_text_not_markup() -> None:
    evil = "<script>alert(1)</script>\"'&"
    rows = [{"row": evil, "system": evil, evil: 1.0}, {"row": "x", "system": "y", "error": evil}]
    page = page_of({"schema": 1, "bench": evil, "machine": {"cpu": evil, evil: evil}, "rows": rows})
    assert "script" not in page.tags
    assert page.text.count(evil) >= 6


# the command


def invoke(*args: str | Path) -> tuple[int, str, str]:
    app = Typer()
    app.command()(report.main)
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_writes_the_page_and_the_figures_beside_it(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "result.json", tmp_path / "b" / "result.json"]
    for path, bench in zip(paths, ("accelerated_dag", "broadcast"), strict=True):
        path.parent.mkdir()
        path.write_text(json.dumps(document(bench)))
    out = tmp_path / "deep" / "out"
    code, printed, err = invoke(*paths, "--out", out)
    assert (code, err) == (0, "")
    assert printed == f"written: {out}/report.html and 5 figures beside it\n"
    assert sorted(path.name for path in out.iterdir()) == [
        "report.html",
        "result-2-latency-list.png",
        "result-2-latency-tensor.png",
        "result-2-unpaced-list.png",
        "result-2-unpaced-tensor.png",
        "result-ratios.png",
    ]
    assert all(path.read_bytes().startswith(PNG) for path in out.glob("*.png"))
    html = (out / "report.html").read_text()
    assert set(re.findall(r"result-[\w-]+\.png", html)) == {path.name for path in out.glob("*.png")}
    assert invoke(*paths, "--out", out)[0] == 0  # again, over what is there


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ('{"schema": 2}', "schema 2; this version reads schema 1"),
        ('{"schema": 1, "machine": {}, "rows": []}', "no rows"),
    ],
)
def test_bad_documents_are_refused_and_nothing_is_written(tmp_path: Path, text: str | None, wanted: str) -> None:
    good, bad, out = tmp_path / "good.json", tmp_path / "bad.json", tmp_path / "out"
    good.write_text(json.dumps(document("broadcast")))
    if text is not None:
        bad.write_text(text)
    code, printed, err = invoke(good, bad, "--out", out)
    assert (code, printed, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{bad}: ")
    assert wanted in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("out", "wanted"), [("file", "File exists"), ("file/below", "Not a directory"), ("full", "Is a directory")]
)
def test_where_nothing_can_be_written(tmp_path: Path, out: str, wanted: str) -> None:
    good = tmp_path / "good.json"
    good.write_text(json.dumps(document("broadcast")))
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "full" / "report.html").mkdir(parents=True)
    code, printed, err = invoke(good, "--out", tmp_path / out)
    assert (code, printed, err) == (2, "", f"--out: cannot write in {tmp_path / out}: {wanted}\n")
