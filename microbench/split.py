"""What a graph adds to the bare transfer: DAG time = bare NCCL time + overhead, per row and system, from a run's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from microbench.gpu_rows import GPU_ROWS, TORCH, GpuRow, Wiring
from microbench.rows import RAY_GRAPH, RAYCOMM

# What each system's graph is split against. Ray's against torch.distributed, as in Ray's own microbenchmark.
BARE = {RAYCOMM: RAYCOMM, RAY_GRAPH: TORCH}


@dataclass(frozen=True)
class Split:
    """One system's row. Microseconds, p50; a figure that is missing is None, and `lacks` says why."""

    row: str
    system: str
    dag_us: float | None
    bare_us: float | None
    lacks: str = ""

    @property
    def overhead_us(self) -> float | None:
        return None if self.dag_us is None or self.bare_us is None else self.dag_us - self.bare_us


@dataclass(frozen=True)
class Comparison:
    """raycomm's split and, where it was asked for, Ray's."""

    ours: Split
    theirs: Split | None

    @property
    def ratio(self) -> float | None:
        """Ray's overhead over raycomm's; None where one is missing, or not above zero and so within the noise."""
        ours, theirs = self.ours.overhead_us, self.theirs.overhead_us if self.theirs is not None else None
        return theirs / ours if ours is not None and theirs is not None and min(ours, theirs) > 0 else None


def split(results: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """A comparison for each row of a pair of which there are results, in the order of the rows."""
    found = {(str(result["row"]), str(result["system"])): result for result in results}
    comparisons = []
    for row in GPU_ROWS.values():
        if row.wiring is Wiring.PAIR and (row.name, RAYCOMM) in found:
            theirs = _split(found, row, RAY_GRAPH) if (row.name, RAY_GRAPH) in found else None
            comparisons.append(Comparison(_split(found, row, RAYCOMM), theirs))
    return comparisons


def _split(found: Mapping[tuple[str, str], Mapping[str, Any]], row: GpuRow, system: str) -> Split:
    bare = next(other for other in GPU_ROWS.values() if other.wiring is Wiring.BARE and other.shape_name == row.shape_name)
    dag_us, dag_lacks = _p50(found.get((row.name, system)))
    bare_us, bare_lacks = _p50(found.get((bare.name, BARE[system])))
    lacks = "; ".join(f"{what}: {why}" for what, why in (("DAG", dag_lacks), ("bare", bare_lacks)) if why)
    return Split(row.name, system, dag_us, bare_us, lacks)


def _p50(result: Mapping[str, Any] | None) -> tuple[float | None, str]:
    if result is None:
        return None, "not measured"
    value = result.get("p50_us")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value), ""
    return None, str(result.get("left_out", "failed"))
