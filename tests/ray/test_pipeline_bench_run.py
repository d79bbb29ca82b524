"""The pipeline bench as it is run: its own cluster, both systems, some latencies and a throughput."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from microbench.document import validate
from microbench.rows import RAY_GRAPH, RAYCOMM

ROWS = ["chain_1", "chain_2", "per_hop", "fan_2", "compute_1"]


def test_a_run_of_both_systems(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "microbench.pipeline", "--quick", "--rounds", "2", "--json", str(path)]
    command += ["--rows", "^(chain_[12]|fan_2|compute_1)$"]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stderr) == (0, "")
    assert "medians over the rounds" in run.stdout
    document = json.loads(path.read_text())
    assert document["bench"] == "pipeline"
    rows = validate(document)
    assert [row for row in rows if "error" in row] == []
    assert [(row["row"], row["system"]) for row in rows] == [(row, system) for row in ROWS for system in (RAYCOMM, RAY_GRAPH)]
    found = {(row["row"], row["system"]): row for row in rows}
    for system in (RAYCOMM, RAY_GRAPH):
        assert found["chain_2", system].items() >= {"hops": 2, "rounds": 2}.items()
        assert found["chain_2", system]["p99_us"] >= found["chain_2", system]["p50_us"] > 0
        assert found["fan_2", system]["fan_out"] == 2
        # No stage sleeps for less than it was asked to; four executions may be over when the clock starts.
        assert 0 < found["compute_1", system]["per_s"] < 1100
        assert found["compute_1", system]["stage_us"] >= 1000
    assert found["compute_1", RAYCOMM]["ideal_per_s"] == found["compute_1", RAY_GRAPH]["ideal_per_s"]
