"""What raycomm has to reach, and the judgement of a result against it.

Ratios are against Ray Compiled Graphs in the same run: how many times shorter the p50, or how many times higher the
executions per second. `must` is the line a release does not fall below, `aim` is where the work is heading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from microbench.rows import NATIVE, RAY_GRAPH, RAYCOMM, ROWS, Kind


@dataclass(frozen=True)
class Target:
    """`must` and `aim` in the unit the requirement names."""

    must: float
    aim: float


RATIOS: dict[str, Target] = {
    "echo_int": Target(20, 40),
    "echo_list1024": Target(4, 6),
    "echo_tensor_1x1": Target(70, 150),
    "echo_tensor_192KiB": Target(25, 50),
    "chain4_int": Target(12, 22),
    "chain4_tensor_1x1": Target(22, 45),
    "chain4_tensor_192KiB": Target(14, 25),
    "chain4_tensor_16MiB": Target(15, 25),
    "broadcast4_int": Target(10, 20),
    "broadcast4_tensor_192KiB": Target(15, 30),
    "throughput_chain4_int": Target(15, 40),
    "throughput_chain4_tensor_1x1": Target(50, 150),
}

# chain4_int's p50 over that of the floor's chain of five processes: at most this many times.
FLOOR = Target(must=4.0, aim=2.5)
FLOOR_ROW = "floor_chain5"
OVER_FLOOR_ROW = "chain4_int"

IDLE_ROW = "idle_cpu_percent"
IDLE_LIMIT_PERCENT = 1.0  # of one core, for the busiest process


@dataclass(frozen=True)
class Verdict:
    """One requirement and how it was met. `aim_met` is None where there is no aim beyond the must."""

    row: str
    requirement: str
    measured: str
    must_met: bool
    aim_met: bool | None = None
    ratio: float | None = None


def judge(rows: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Every requirement against the rows of one result; a row that is missing or failed meets nothing."""
    found = {(str(row["row"]), str(row["system"])): row for row in rows}
    verdicts = [_ratio(found, name, target) for name, target in RATIOS.items()]
    verdicts += [_tail(found, name) for name in RATIOS if ROWS[name].kind is Kind.LATENCY]
    verdicts += [_over_floor(found), _idle(found)]
    judged = {*RATIOS, FLOOR_ROW, IDLE_ROW}
    # Rows without a target still have to run.
    for (name, system), row in found.items():
        if name not in judged and system in (RAYCOMM, NATIVE) and "error" in row:
            verdicts.append(Verdict(name, f"{system} runs it", str(row["error"]), must_met=False))
    return verdicts


class _Unknown(Exception):
    """A figure that a requirement needs is not there; the text says which and why."""


def _figure(found: Mapping[tuple[str, str], Mapping[str, Any]], row: str, system: str, key: str) -> float:
    result = found.get((row, system))
    if result is None:
        raise _Unknown(f"{system} was not measured")
    value = result.get(key)
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    # A rival that failed in a late round leaves usable figures; a failure of ours is one, whatever else was measured.
    if "error" in result and (system in (RAYCOMM, NATIVE) or not known):
        raise _Unknown(f"{system} failed: {result['error']}")
    if not known:
        raise _Unknown(f"{system} has no {key}")
    assert isinstance(value, int | float)
    return float(value)


def _ratio(found: Mapping[tuple[str, str], Mapping[str, Any]], name: str, target: Target) -> Verdict:
    requirement = f"at least {target.must:g}x Ray Compiled Graphs (aim {target.aim:g}x)"
    try:
        if ROWS[name].kind is Kind.THROUGHPUT:
            ratio = _divide(_figure(found, name, RAYCOMM, "per_s"), _figure(found, name, RAY_GRAPH, "per_s"))
        else:
            ratio = _divide(_figure(found, name, RAY_GRAPH, "p50_us"), _figure(found, name, RAYCOMM, "p50_us"))
    except _Unknown as unknown:
        return Verdict(name, requirement, str(unknown), False, False)
    return Verdict(name, requirement, f"{ratio:.1f}x", ratio >= target.must, ratio >= target.aim, ratio)


def _tail(found: Mapping[tuple[str, str], Mapping[str, Any]], name: str) -> Verdict:
    requirement = "p99 below Ray Compiled Graphs' p50"
    try:
        ours, theirs = _figure(found, name, RAYCOMM, "p99_us"), _figure(found, name, RAY_GRAPH, "p50_us")
    except _Unknown as unknown:
        return Verdict(name, requirement, str(unknown), False)
    return Verdict(name, requirement, f"{ours:.1f} us against {theirs:.1f} us", ours < theirs)


def _over_floor(found: Mapping[tuple[str, str], Mapping[str, Any]]) -> Verdict:
    requirement = f"p50 within {FLOOR.must:g}x of {FLOOR_ROW} (aim {FLOOR.aim:g}x)"
    try:
        floor = _figure(found, FLOOR_ROW, NATIVE, "p50_us")
        times = _divide(_figure(found, OVER_FLOOR_ROW, RAYCOMM, "p50_us"), floor)
    except _Unknown as unknown:
        return Verdict(OVER_FLOOR_ROW, requirement, str(unknown), False, False)
    return Verdict(OVER_FLOOR_ROW, requirement, f"{times:.1f}x", times <= FLOOR.must, times <= FLOOR.aim)


def _idle(found: Mapping[tuple[str, str], Mapping[str, Any]]) -> Verdict:
    requirement = f"under {IDLE_LIMIT_PERCENT:g} % of a core in every process"
    try:
        percent = _figure(found, IDLE_ROW, RAYCOMM, "cpu_percent")
    except _Unknown as unknown:
        return Verdict(IDLE_ROW, requirement, str(unknown), False)
    return Verdict(IDLE_ROW, requirement, f"{percent:.2f} %", percent < IDLE_LIMIT_PERCENT)


def _divide(dividend: float, divisor: float) -> float:
    if divisor == 0:
        raise _Unknown("a figure of zero cannot be compared with")
    return dividend / divisor
