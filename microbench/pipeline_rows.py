"""The rows of the pipeline bench: how a graph scales with executions in flight, length, width, and work per stage.

A row is a graph (its `Shape`), the values that go through it, and how many executions are in flight. `per_hop` is no measurement
of its own: it is the slope of a line through the chain rows.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from microbench.harness import Result, Turn
from microbench.rows import RAY_GRAPH, RAYCOMM, integer, select, tensor_192kib

PER_HOP = "per_hop"
STAGES = 4  # of the chains whose throughput is measured
IN_FLIGHT = (1, 2, 4, 10)  # 10 is what both systems allow by default
LENGTHS = (1, 2, 4, 8, 16)
COMPUTE_MS = (0.0, 0.1, 1.0, 10.0)


class Family(enum.StrEnum):
    """Rows that differ in one number, and that are measured in one turn."""

    IN_FLIGHT = "inflight"
    CHAIN = "chain"
    FAN_OUT = "fan"
    COMPUTE = "compute"


class Wiring(enum.Enum):
    """How the actors of a graph are connected."""

    CHAIN = enum.auto()  # driver -> one actor after the other -> driver
    FAN_OUT = enum.auto()  # driver -> all actors side by side -> driver, an output of each


class Method(enum.StrEnum):
    """What an actor does with a value; the name of its method."""

    ECHO = "echo"  # gives it back
    PAUSE = "pause"  # sleeps so many seconds, then gives it back


@dataclass(frozen=True)
class Shape:
    """A graph. Rows of the same shape, one after the other, share the compiled graph.

    Attributes:
        imports: modules that the actors import before the graph is compiled, since beside spinning loops it takes far longer.
    """

    wiring: Wiring
    actors: int
    method: Method = Method.ECHO
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One line of the result.

    Attributes:
        value: the value of each execution that is checked, by its number; number 0 is what the timed ones are given.
        in_flight: executions outstanding; None: one at a time, and each is timed.
        facts: what sets the row apart, for the result.
        stage_s: seconds that each stage sleeps; None: stages do nothing.
    """

    name: str
    family: Family
    shape: Shape
    value: Callable[[int], Any]
    in_flight: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    stage_s: float | None = None

    def expected(self, value: Any) -> Any:
        """What an execution with this input has to return."""
        return [value] * self.shape.actors if self.shape.wiring is Wiring.FAN_OUT else value


def number(place: int) -> int:
    return integer() + place


def tensor(place: int) -> Any:
    """float16, 192 KiB; whole numbers, exact up to place 10."""
    return tensor_192kib() + place


def _rows() -> list[Row]:
    echoes = Shape(Wiring.CHAIN, STAGES, imports=("torch",))
    rows = [Row(f"inflight_{count}", Family.IN_FLIGHT, echoes, number, count, {"in_flight": count}) for count in IN_FLIGHT]
    rows += [
        Row(f"inflight_{count}_tensor", Family.IN_FLIGHT, echoes, tensor, count, {"in_flight": count}) for count in IN_FLIGHT
    ]
    for wiring, family, fact in (
        (Wiring.CHAIN, Family.CHAIN, "hops"),
        (Wiring.FAN_OUT, Family.FAN_OUT, "fan_out"),
    ):
        rows += [Row(f"{family}_{length}", family, Shape(wiring, length), number, facts={fact: length}) for length in LENGTHS]
    for compute_ms in COMPUTE_MS:
        rows.append(_compute_row(compute_ms))
    return rows


def _compute_row(compute_ms: float) -> Row:
    stage_s = compute_ms / 1e3
    # The time is the value: one graph serves all of these rows.
    return Row(
        f"{Family.COMPUTE}_{compute_ms:g}",
        Family.COMPUTE,
        Shape(Wiring.CHAIN, STAGES, Method.PAUSE),
        lambda place: stage_s,
        STAGES,
        {"compute_ms": compute_ms},
        stage_s,
    )


ROWS: dict[str, Row] = {row.name: row for row in _rows()}


def choose(pattern: str | None) -> list[Row]:
    """The rows whose name the regular expression is found in; for `per_hop` all chains. Raises `ValueError` for no match."""
    chosen = select(pattern, {**ROWS, PER_HOP: None})
    return [row for row in ROWS.values() if row in chosen or (None in chosen and row.family is Family.CHAIN)]


def plan_turns(rows: Sequence[Row], systems: Sequence[str] = (RAYCOMM, RAY_GRAPH)) -> list[Turn]:
    """Turns of one round: all families of one system, then of the next, so that the actors of one serve all its rows."""
    return [
        Turn(system, family, tuple(row.name for row in rows if row.family is family))
        for system in systems
        for family in Family
        if any(row.family is family for row in rows)
    ]


def ideal_per_s(stage_s: float, stages: int, in_flight: int) -> float:
    """Executions per second of a chain whose hand-overs cost nothing and whose stages all work at once."""
    return min(stages, in_flight) / stages / stage_s


def complete(results: Sequence[Result]) -> list[Result]:
    """The results in the order of the rows, with what sets each row apart, and `per_hop` behind the chains."""
    systems = list(dict.fromkeys(result["system"] for result in results))
    found = {(result["row"], result["system"]): result for result in results}
    completed = []
    for row in ROWS.values():
        for system in systems:
            if (row.name, system) in found:
                completed.append({"row": row.name, "system": system} | dict(row.facts) | found[row.name, system])
        if row.family is Family.CHAIN and row.shape.actors == LENGTHS[-1]:
            lines = [per_hop([each for each in completed if each["system"] == system and "hops" in each]) for system in systems]
            completed += [line for line in lines if line is not None]
    return completed


def per_hop(chains: Sequence[Result]) -> Result | None:
    """What an actor more in a chain adds to the latency: the least-squares slope of p50 over the lengths of one system's chains.

    None: fewer than two lengths were asked for. A system whose loops spin leaves the line where it has more actors than there are
    cores; `residual_us`, the longest way of a chain from the line, says how far.
    """
    if len(chains) < 2:
        return None
    line: Result = {"row": PER_HOP, "system": chains[0]["system"]}
    points = [(chain["hops"], chain["p50_us"]) for chain in chains if "p50_us" in chain]
    if len(points) < 2:
        return line | {"error": "fewer than two lengths of chain were measured"}
    hops, latencies = zip(*points, strict=True)
    slope, intercept = statistics.linear_regression(hops, latencies)
    residual = max(abs(latency - intercept - slope * length) for length, latency in points)
    fit = f"least-squares slope of p50_us over chains of {', '.join(map(str, hops))} actors"
    return line | {"p50_us": slope, "intercept_us": intercept, "residual_us": residual, "fit": fit}
