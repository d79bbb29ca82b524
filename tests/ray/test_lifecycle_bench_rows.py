"""The rows of the lifecycle bench on real actors, in a bench process with a cluster of its own."""

from __future__ import annotations

import pytest

from microbench.harness import Effort
from microbench.lifecycle_rows import RAY_GRAPH, RAYCOMM
from microbench.process import BenchProcess

BRIEF = Effort(0.0, 0.0, 1, 2, 0, idle_s=0.1, idle_rounds=1, turn_limit_s=90.0)
LIMIT_S = 100.0
FIGURES = ("rss_kib", "shared_kib", "descriptors", "threads")


@pytest.mark.timeout(300)  # it starts a cluster and some actors, which takes its time on a busy machine
def test_rows_of_both_systems() -> None:
    with BenchProcess("tests.ray.brief_lifecycle:Brief") as process:
        process.ask("open", RAYCOMM, "graphs", limit_s=LIMIT_S)
        for name, count in (("new_actors_4", 1), ("compile_64", BRIEF.min_calls)):
            compiled = process.ask("measure", name, BRIEF, limit_s=LIMIT_S)
            assert compiled["count"] == count
            assert compiled["ready_p50_ms"] > compiled["p50_ms"] > 0
        assert process.ask("measure", "teardown_64", BRIEF, limit_s=LIMIT_S)["p50_ms"] > 0
        assert process.ask("measure", "idle_cpu_percent", BRIEF, limit_s=LIMIT_S)["cpu_percent"] >= 0
        process.ask("close", False, limit_s=LIMIT_S)

        process.ask("open", RAYCOMM, "growth", limit_s=LIMIT_S)
        left = process.ask("measure", "growth_100_graphs", BRIEF, limit_s=LIMIT_S)
        for name in ("driver", "actor"):
            assert {f"{name}_{figure}_per_graph" for figure in FIGURES} <= set(left)
            assert left[f"{name}_descriptors_per_graph"] < 0.5
            assert left[f"{name}_threads_per_graph"] < 0.5
        process.ask("close", False, limit_s=LIMIT_S)

        process.ask("open", RAYCOMM, "deaths", limit_s=LIMIT_S)
        for name in ("death_in_call", "death_idle"):  # an error of another type than `ActorDiedError` fails the request
            assert process.ask("measure", name, BRIEF, limit_s=LIMIT_S)["p50_ms"] > 0
        process.ask("close", False, limit_s=LIMIT_S)

        process.ask("open", RAY_GRAPH, "growth", limit_s=LIMIT_S)
        assert process.ask("measure", "compile_1", BRIEF, limit_s=LIMIT_S)["p50_ms"] > 0
        process.ask("close", False, limit_s=LIMIT_S)
