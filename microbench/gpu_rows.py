"""The GPU rows of the actor-graph bench, named as in Ray's own GPU microbenchmark and by shape, and which of them a machine can
run.

Pair: the driver asks a sender for a tensor, which goes over a hinted edge to a receiver, which returns one element of it.
Bare: the same work of sender and receiver around a plain send and receive, without a graph. Chain: W1 to W4 over three hinted
edges; W4 returns None.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from microbench.harness import Result, Turn
from microbench.rows import RAY_GRAPH, RAYCOMM

TORCH = "torch_distributed"

# float16: 2, 196 608 and 100 000 bytes.
SHAPES: dict[str, tuple[int, ...]] = {"1x1": (1, 1), "4x24576": (4, 24576), "100000B": (50_000,)}


class Place(enum.StrEnum):
    """Where the tensors of GPU rows lie."""

    GPU = "gpu"
    SIMULATED = "simulated"  # in host memory, for a look at the bench itself


class Wiring(enum.StrEnum):
    """How the actors of a row are connected."""

    BARE = "bare"
    PAIR = "pair"
    CHAIN4 = "chain4"

    @property
    def actors(self) -> int:
        return 4 if self is Wiring.CHAIN4 else 2


@dataclass(frozen=True)
class GpuRow:
    """One GPU row. The last two are what its hint promises."""

    variation: str
    wiring: Wiring
    shape_name: str
    static_shape: bool = False
    direct_return: bool = False
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.variation}_{self.shape_name}")

    @property
    def systems(self) -> tuple[str, ...]:
        return (RAYCOMM, TORCH) if self.wiring is Wiring.BARE else (RAYCOMM, RAY_GRAPH)

    @property
    def opens(self) -> str:
        """What a turn opens for it: a graph that promises one shape is no other row's."""
        return self.name if self.static_shape else self.variation

    def request(self, number: int) -> tuple[int, ...]:
        """What an execution is asked for: a tensor of this shape, full of the number."""
        return (number, *SHAPES[self.shape_name])


def _rows() -> list[GpuRow]:
    dag = "exec_ray_dag_gpu_nccl"
    rows = [GpuRow("exec_nccl_gpu", Wiring.BARE, shape) for shape in SHAPES]
    rows += [GpuRow(dag, Wiring.PAIR, shape) for shape in SHAPES]
    rows += [GpuRow(f"{dag}_static_shape", Wiring.PAIR, shape, static_shape=True) for shape in SHAPES]
    rows += [GpuRow(f"{dag}_direct_return", Wiring.PAIR, shape, direct_return=True) for shape in SHAPES]
    rows += [GpuRow(f"{dag}_static_shape_direct_return", Wiring.PAIR, shape, True, True) for shape in SHAPES]
    return rows + [GpuRow("chain4_gpu", Wiring.CHAIN4, shape) for shape in SHAPES]


GPU_ROWS: dict[str, GpuRow] = {row.name: row for row in _rows()}


@dataclass(frozen=True)
class Gpus:
    """What a machine has. `nccl` is a number such as 23203 for 2.32.3."""

    count: int
    card: str
    torch: str
    cupy: str
    nccl: int

    @property
    def ranks_share(self) -> bool:
        """Whether NCCL takes several ranks on one GPU, which it does from 2.30 on if told so."""
        return self.nccl >= 23000

    def needed(self, row: GpuRow, system: str) -> int:
        """How many GPUs a system needs for a row. Ray's graph refuses several actors on one GPU, or hangs."""
        return 1 if self.ranks_share and system != RAY_GRAPH else row.wiring.actors

    def describe(self) -> dict[str, object]:
        """For the JSON document."""
        return {"card": self.card, "count": self.count, "torch": self.torch, "cupy": self.cupy, "nccl": self.nccl_text}

    @property
    def nccl_text(self) -> str:
        return f"{self.nccl // 10000}.{self.nccl // 100 % 100}.{self.nccl % 100}"

    def __str__(self) -> str:
        return f"{self.count} x {self.card}; torch {self.torch}, cupy {self.cupy}, NCCL {self.nccl_text}"


def plan_gpu_turns(rows: Sequence[GpuRow], rivals: Collection[str], gpus: Gpus | None) -> tuple[list[Turn], list[Result]]:
    """Turns of one round, one system after the other on each wiring, and a result for each row that needs more GPUs.

    Args:
        rivals: the systems to compare with.
        gpus: that there are; None where none is needed.
    """
    turns: list[Turn] = []
    left_out: list[Result] = []
    for wiring in Wiring:
        here = [row for row in rows if row.wiring is wiring]
        for system in dict.fromkeys(system for row in here for system in row.systems):
            if system != RAYCOMM and system not in rivals:
                continue
            can = []
            for row in here:
                needed = 0 if gpus is None else gpus.needed(row, system)
                if gpus is not None and needed > gpus.count:
                    left_out.append({"row": row.name, "system": system, "left_out": f"needs {needed} GPUs"})
                else:
                    can.append(row)
            for opens in dict.fromkeys(row.opens for row in can):
                turns.append(Turn(system, opens, tuple(row.name for row in can if row.opens == opens)))
    return turns, left_out
