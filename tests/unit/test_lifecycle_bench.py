"""The lifecycle bench's own logic, without Ray: rows, turns, footprints, hanging teardowns, tables, bad input."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from microbench import console, lifecycle, lifecycle_session
from microbench.document import validate
from microbench.footprint import Footprint
from microbench.harness import Effort, Result
from microbench.lifecycle_rows import (
    LIFECYCLE_ROWS,
    RAY_ACTORS,
    RAY_GRAPH,
    RAYCOMM,
    growth,
    in_milliseconds,
    plan_turns,
)
from microbench.lifecycle_session import LifecycleSession, _compiled
from microbench.rows import select
from microbench.session import WrongResult

BRIEF = Effort(0.0, 0.0, 2, 3, 0, idle_s=0.0, idle_rounds=1, turn_limit_s=30.0)
NOTHING = Footprint(0, 0, 0, 0)


# rows and turns


def test_the_sizes_are_measured_by_both_systems() -> None:
    for nodes in (1, 4, 16, 64):
        for name in (f"compile_{nodes}", f"teardown_{nodes}"):
            assert (LIFECYCLE_ROWS[name].nodes, LIFECYCLE_ROWS[name].systems) == (nodes, (RAYCOMM, RAY_GRAPH))


def test_turns_alternate_between_the_systems() -> None:
    turns = plan_turns(select(None, LIFECYCLE_ROWS))
    assert [(turn.system, turn.topology) for turn in turns] == [
        (RAYCOMM, "graphs"), (RAY_GRAPH, "graphs"), (RAY_ACTORS, "graphs"), (RAYCOMM, "deaths"), (RAY_GRAPH, "deaths"),
        (RAYCOMM, "growth"), (RAY_GRAPH, "growth"),
    ]  # fmt: skip
    assert {row for turn in turns for row in turn.rows} == set(LIFECYCLE_ROWS)
    assert turns[0].rows[0] == "new_actors_4"  # while the turn's actors are new
    assert turns[2].rows == ("idle_cpu_percent",)


def test_a_selection_has_its_turns_only() -> None:
    turns = plan_turns(select("death_idle", LIFECYCLE_ROWS))
    assert [(turn.system, turn.rows) for turn in turns] == [(RAYCOMM, ("death_idle",)), (RAY_GRAPH, ("death_idle",))]


def test_a_quick_run_measures_compile_and_teardown_in_every_round() -> None:
    often = {name for name, row in LIFECYCLE_ROWS.items() if not row.seldom}
    assert often == {name for name in LIFECYCLE_ROWS if name.startswith(("compile_", "teardown_"))}


# figures


def test_milliseconds() -> None:
    figures = in_milliseconds([1_000_000, 3_000_000])
    assert figures == {"p50_ms": 2.0, "p99_ms": 3.0, "mean_ms": 2.0, "std_ms": 1.0, "count": 2}


def test_growth_is_per_graph() -> None:
    after = Footprint(rss_kib=400, shared_kib=-100, descriptors=50, threads=0)
    assert growth("actor", NOTHING, after, 100) == {
        "actor_rss_kib_per_graph": 4.0,
        "actor_shared_kib_per_graph": -1.0,
        "actor_descriptors_per_graph": 0.5,
        "actor_threads_per_graph": 0.0,
    }


def test_a_footprint_sees_descriptors_threads_and_shared_memory() -> None:
    pid = os.getpid()
    over = threading.Event()
    threads = [threading.Thread(target=over.wait, args=(30,)) for _ in range(3)]
    before = Footprint.of(pid)
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
    shared = mmap.mmap(-1, 8 << 20)
    shared.write(b"x" * len(shared))
    for thread in threads:
        thread.start()
    after = Footprint.of(pid)
    over.set()
    for thread in threads:
        thread.join()
    for file in files:
        os.close(file)
    shared.close()
    assert after.descriptors - before.descriptors == 5
    assert after.threads - before.threads == 3
    assert after.shared_kib - before.shared_kib >= 8 << 10
    assert after.rss_kib >= after.shared_kib


def test_a_process_that_has_ended_has_no_footprint() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    with pytest.raises(ProcessLookupError, match=f"process {child.pid} has ended"):
        Footprint.of(child.pid)
    child.wait()
    with pytest.raises(OSError):
        Footprint.of(child.pid)


# the session, on graphs that are none


class Graph:
    """Answers, until its actor is dead."""

    def __init__(self, over: threading.Event | None = None, answers: Any = None) -> None:
        self._over = over
        self._answers = answers
        self._value: Any = None

    def execute(self, value: Any) -> Graph:
        self._value = value
        return self

    def get(self, timeout: float) -> Any:
        if isinstance(self._answers, Exception):
            raise self._answers
        return self._value if self._answers is None else self._answers

    def teardown(self) -> None:
        if self._over is not None:
            self._over.wait(30)


class Pretended(LifecycleSession):
    """Makes these graphs one after the other; no cluster, no actors."""

    died = LookupError
    leaves_memory = False

    def __init__(self, *graphs: Graph) -> None:
        super().__init__()
        self._graphs = iter(graphs)
        self._actors = [self]
        self._system = self
        self.starts = 0

    def prepare(self, methods: Any) -> Any:
        return lambda: next(self._graphs)

    echo = echo_or_hold = None

    def _start(self, count: int) -> None:
        self._actors = [self] * count
        self._had_graphs = False
        self.starts += 1


def test_compile_and_teardown_share_their_graphs() -> None:
    session = Pretended(*(Graph() for _ in range(3)))  # one to warm up, two timed
    assert session.measure("compile_4", BRIEF)["count"] == BRIEF.min_calls
    assert session.measure("teardown_4", BRIEF)["count"] == BRIEF.min_calls
    with pytest.raises(StopIteration):  # no graphs are left, and those figures were handed out
        session.measure("teardown_4", BRIEF)


def test_no_more_graphs_than_at_most() -> None:
    session = Pretended(*(Graph() for _ in range(9)))
    assert session.measure("compile_1", replace(BRIEF, measure_s=60.0))["count"] == BRIEF.max_calls


def test_a_teardown_that_hangs_costs_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle_session, "TEARDOWN_LIMIT_S", 0.05)
    over = threading.Event()
    session = Pretended(Graph(), Graph(over), Graph(), Graph(), Graph())
    assert session.measure("compile_4", BRIEF)["count"] == 1
    assert session.starts == 1  # new actors for the rows that follow
    with pytest.raises(TimeoutError, match=r"a teardown had not returned after \d+ s"):
        session.measure("teardown_4", BRIEF)
    assert session.measure("compile_16", BRIEF)["count"] == BRIEF.min_calls
    with pytest.raises(TimeoutError, match="a teardown hangs"):  # so the process is killed
        session.close(True)
    (thread,) = session._hanging
    over.set()
    thread.join(30)
    session.close(True)


def test_a_graph_that_never_tore_down_in_time_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle_session, "TEARDOWN_LIMIT_S", 0.05)
    over = threading.Event()
    session = Pretended(Graph(over))
    assert session.measure("compile_1", BRIEF)["count"] == 1
    over.set()
    session._hanging[0].join(30)


def test_an_error_of_a_teardown_is_the_rows() -> None:
    graph = Graph()
    graph.teardown = lambda: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        Pretended(graph).measure("teardown_1", BRIEF)


def test_a_wrong_result_is_noticed() -> None:
    with pytest.raises(WrongResult, match="a graph returned 'other' where 4 was sent"):
        Pretended(Graph(answers="other")).measure("compile_4", BRIEF)


def test_compile_and_first_result_come_together() -> None:
    class Slow(Graph):
        def get(self, timeout: float) -> Any:
            time.sleep(0.02)
            return super().get(timeout)

    cycle = Pretended(Slow())._cycle(1)
    assert cycle.ready_ns >= cycle.compile_ns + 20_000_000
    assert _compiled([cycle])["ready_p50_ms"] == cycle.ready_ns / 1e6


@pytest.mark.parametrize(
    ("error", "wanted"),
    [(KeyError("dead"), None), (ValueError("odd"), "the driver was told ValueError, not LookupError: odd")],
)
def test_a_death_has_to_be_named(monkeypatch: pytest.MonkeyPatch, error: Exception, wanted: str | None) -> None:
    monkeypatch.setattr(lifecycle_session, "_settle", lambda: None)
    session = Pretended()
    session._graph = Graph(answers=error)
    with subprocess.Popen(["sleep", "60"]) as child:
        session._pids = [child.pid]
        if wanted is None:
            assert session._kill_idle() > 0
        else:
            with pytest.raises(WrongResult, match=wanted):
                session._kill_idle()
    assert child.returncode == -9


# tables and command line


def shown(results: list[Result]) -> str:
    terminal = Console(width=80)
    with terminal.capture() as capture:
        for table in lifecycle.tables(results):
            console.show(terminal, table)
    return capture.get()


def test_tables() -> None:
    left = growth("driver", NOTHING, Footprint(1234, 0, 200, 0), 100) | growth("actor", NOTHING, Footprint(-100, 0, 0, 0), 100)
    growing: Result = {"row": "growth_100_graphs", "system": RAYCOMM, **left, "count": 300}
    results: list[Result] = [
        growing,
        {"row": "compile_64", "system": RAYCOMM, **in_milliseconds([28_000_000] * 1000), "ready_p50_ms": 31.25},
        {"row": "teardown_64", "system": RAY_GRAPH, "error": "[red]hung"},
        {"row": "idle_cpu_percent", "system": RAY_ACTORS, "cpu_percent": 0.51},
    ]
    assert [result["row"] for result in lifecycle.in_order(results)] == [
        "compile_64", "teardown_64", "idle_cpu_percent", "growth_100_graphs",
    ]  # fmt: skip
    text = shown(results)
    for words in ("28.0", "31.2", "1,000", "failed", "0.51", "+12.34", "-1.00", "+2.00", "ray:compiled_graph"):
        assert words in text
    assert "left behind" not in shown(results[1:])
    assert "medians over the rounds" not in shown([growing])
    assert shown([{**growing, "error": "later"}]).count("failed") == 2  # beside the figures of the rounds before


def test_every_measurement_has_a_brief() -> None:
    left = growth("driver", NOTHING, Footprint(100, 0, 0, 0), 100) | growth("actor", NOTHING, NOTHING, 100)
    assert lifecycle.brief(left) == "driver +1.0 KiB per graph, actor +0.0 KiB per graph"
    assert lifecycle.brief(in_milliseconds([1_500_000])) == "p50 1.50 ms"
    assert lifecycle.brief({"cpu_percent": 0.5}) == "0.50 % cpu"


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--rows", "nothing"], "--rows: no row matches 'nothing'"),
        (["--rows", "["], "--rows: not a regular expression"),
        (["--json", "/nowhere/result.json"], "--json: cannot write /nowhere/result.json: No such file or directory"),
        (["--json", "/"], "--json: cannot write /: Is a directory"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(args: list[str], wanted: str) -> None:
    app = Typer()
    app.command()(lifecycle.main)
    result = CliRunner().invoke(app, args)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert wanted in result.stderr


SERVED = """
class Served:
    def open(self, system, group):
        self.system = system

    def measure(self, row, effort):
        if (row, self.system) == ("teardown_1", "ray:compiled_graph"):
            raise TimeoutError("a teardown had not returned after 10 s")
        return {"p50_ms": 2.0, "p99_ms": 3.0, "ready_p50_ms": 2.5, "count": effort.min_calls}

    def close(self, discard):
        if discard:
            raise TimeoutError("a teardown hangs")

    def shutdown(self):
        pass
"""


def test_a_run_goes_on_after_a_teardown_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "served_lifecycle.py").write_text(SERVED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "result.json"
    code = "import typer, microbench.lifecycle as bench\nbench.SERVES = 'served_lifecycle:Served'\ntyper.run(bench.main)"
    command = [sys.executable, "-c", code, "--quick", "--rows", "_1$|death", "--json", str(path)]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    assert "round 3/3  graphs  ray:compiled_graph  compile_1  p50 2.00 ms" in run.stdout
    assert "round 1/3  graphs  ray:compiled_graph  teardown_1  failed: TimeoutError: a teardown had not returned" in run.stdout
    assert "round 2/3  graphs  ray:compiled_graph  teardown_1" not in run.stdout
    assert "nodes round robin" in run.stdout
    document = json.loads(path.read_text())
    assert document["bench"] == "lifecycle"
    rows = {(row["row"], row["system"]): row for row in validate(document)}
    assert list(rows) == [
        (row, system) for row in ("compile_1", "teardown_1", "death_idle", "death_in_call") for system in (RAYCOMM, RAY_GRAPH)
    ]
    assert [name for name, row in rows.items() if "error" in row] == [("teardown_1", RAY_GRAPH)]
    assert (rows["compile_1", RAY_GRAPH]["rounds"], rows["death_idle", RAYCOMM]["rounds"]) == (3, 1)
    assert (rows["compile_1", RAYCOMM]["p50_ms_low"], rows["compile_1", RAYCOMM]["ready_p50_ms"]) == (2.0, 2.5)


def test_the_module_says_what_every_row_is() -> None:
    text = (Path(lifecycle.__file__).parent / "lifecycle_rows.py").read_text().split('"""')[1]
    for name in LIFECYCLE_ROWS:
        stem = name.rsplit("_", 1)[0] if name.startswith(("compile_", "teardown_")) else name
        assert f"`{stem}" in text
