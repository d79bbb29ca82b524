"""The rows of the lifecycle bench: what a graph costs outside of its calls.

Graphs are chains of plain methods over at most four actors of this machine, round robin where there are more nodes than actors.

Figures, beside those of `microbench.harness` with ms in place of us:

* `compile_N`: of N nodes, on actors that had such a graph before. `ready_p50_ms` is compile and the first result: Ray's compile
  returns before its loops run, raycomm's when they do.
* `teardown_N`: of that graph, after one call.
* `new_actors_4`: as `compile_4`, on actors that never had a graph: the first one pays for imports.
* `idle_cpu_percent`: the busiest process, driver or actor, while nobody calls. Plain idle actors are in it too, since Ray's own
  background threads use some.
* `death_idle`: SIGKILL of the first of two actors, at a random moment, to the driver's error, the driver calling from then on.
* `death_in_call`: the same, in the middle of a call, the driver in `get`. In both the error has to be an `ActorDiedError`.
* `growth_100_graphs`: what each of 100 graphs of one actor that were compiled, called once and torn down left in the driver and
  in the actor, `driver_rss_kib_per_graph` and so on; see `microbench.footprint`. Resident memory moves by some hundred KiB by
  itself, so a few KiB a graph are noise.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields

from microbench.footprint import Footprint
from microbench.harness import Measurement, Turn, latency

RAYCOMM = "raycomm"
RAY_GRAPH = "ray:compiled_graph"
RAY_ACTORS = "ray:actors"  # without a graph

ACTORS = 4  # at most
NODES = (1, 4, 16, 64)
GRAPHS = 100
WARM_GRAPHS = 20


class Kind(enum.Enum):
    """What a row measures."""

    NEW_ACTORS = enum.auto()
    COMPILE = enum.auto()
    TEARDOWN = enum.auto()
    IDLE = enum.auto()
    GROWTH = enum.auto()
    DEATH_IDLE = enum.auto()
    DEATH_IN_CALL = enum.auto()


class Group(enum.StrEnum):
    """Rows that are measured one after the other on the same actors."""

    GRAPHS = "graphs"
    DEATHS = "deaths"
    GROWTH = "growth"

    @property
    def actors(self) -> int:
        return {Group.GRAPHS: ACTORS, Group.DEATHS: 2, Group.GROWTH: 1}[self]


@dataclass(frozen=True)
class LifecycleRow:
    """One line of the result: what is measured, of a graph of how many nodes, by which systems."""

    name: str
    kind: Kind
    nodes: int
    systems: tuple[str, ...] = (RAYCOMM, RAY_GRAPH)

    @property
    def group(self) -> Group:
        return {Kind.DEATH_IDLE: Group.DEATHS, Kind.DEATH_IN_CALL: Group.DEATHS, Kind.GROWTH: Group.GROWTH}.get(
            self.kind, Group.GRAPHS
        )

    @property
    def seldom(self) -> bool:
        """Measured in one round only of a quick run: it takes seconds."""
        return self.kind not in (Kind.COMPILE, Kind.TEARDOWN)


LIFECYCLE_ROWS: dict[str, LifecycleRow] = {
    row.name: row
    for row in (
        LifecycleRow(f"new_actors_{ACTORS}", Kind.NEW_ACTORS, ACTORS),  # first: the actors are new then
        *(LifecycleRow(f"{kind.name.lower()}_{nodes}", kind, nodes) for nodes in NODES for kind in (Kind.COMPILE, Kind.TEARDOWN)),
        LifecycleRow("idle_cpu_percent", Kind.IDLE, ACTORS, (RAYCOMM, RAY_GRAPH, RAY_ACTORS)),
        LifecycleRow("death_idle", Kind.DEATH_IDLE, 2),
        LifecycleRow("death_in_call", Kind.DEATH_IN_CALL, 2),
        LifecycleRow(f"growth_{GRAPHS}_graphs", Kind.GROWTH, 1),
    )
}


def plan_turns(rows: Sequence[LifecycleRow]) -> list[Turn]:
    """Turns of one round: group by group, and in each one system after the other."""
    turns = []
    for group in Group:
        here = [row for row in rows if row.group is group]
        for system in dict.fromkeys(system for row in here for system in row.systems):
            turns.append(Turn(system, group, tuple(row.name for row in here if system in row.systems)))
    return turns


def in_milliseconds(samples_ns: Sequence[int]) -> Measurement:
    """As `latency`, in milliseconds."""
    return {
        key.replace("_us", "_ms"): value / 1e3 if key.endswith("_us") else value for key, value in latency(samples_ns).items()
    }


def growth(process: str, before: Footprint, after: Footprint, graphs: int) -> Measurement:
    """What each graph added to a process, one figure per field of a footprint."""
    return {
        f"{process}_{field.name}_per_graph": (getattr(after, field.name) - getattr(before, field.name)) / graphs
        for field in fields(Footprint)
    }
