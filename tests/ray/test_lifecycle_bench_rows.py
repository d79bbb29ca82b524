"""The lifecycle bench as it is run: its own cluster, both systems, rows of each kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from microbench.document import validate
from microbench.lifecycle_rows import RAY_GRAPH, RAYCOMM

FIGURES = ("rss_kib", "shared_kib", "descriptors", "threads")


def test_a_run_of_both_systems(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "microbench.lifecycle", "--quick", "--rounds", "1", "--json", str(path)]
    command += ["--rows", "^(compile_4|teardown_4|death_in_call|growth_.*)$"]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr) == (0, "")
    assert "left behind, per graph" in run.stdout
    document = json.loads(path.read_text())
    assert document["bench"] == "lifecycle"
    rows = {(row["row"], row["system"]): row for row in validate(document)}
    ours = ["compile_4", "teardown_4", "death_in_call", "growth_100_graphs"]
    assert list(rows) == [(row, system) for row in ours for system in (RAYCOMM, RAY_GRAPH)]
    # Ray's rows may fail where Ray does; what is asked of raycomm, the typed error of a death included, may not.
    assert [row for (_, system), row in rows.items() if system == RAYCOMM and "error" in row] == []
    assert rows["compile_4", RAYCOMM]["ready_p50_ms"] > rows["compile_4", RAYCOMM]["p50_ms"] > 0
    assert rows["teardown_4", RAYCOMM]["count"] == rows["compile_4", RAYCOMM]["count"]
    assert rows["death_in_call", RAYCOMM]["p50_ms"] > 0
    left = rows["growth_100_graphs", RAYCOMM]
    for process in ("driver", "actor"):
        assert {f"{process}_{figure}_per_graph" for figure in FIGURES} <= set(left)
        assert left[f"{process}_descriptors_per_graph"] < 1
        assert left[f"{process}_threads_per_graph"] < 1
