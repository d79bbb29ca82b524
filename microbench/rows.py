"""The rows of the actor-graph bench: name, topology, payload, and which systems measure it."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

RAYCOMM = "raycomm"
RAY_GRAPH = "ray_compiled_graph"
RAY_CALL = "ray_actor_call"
NATIVE = "native"

IN_FLIGHT = 8

AnyRow = TypeVar("AnyRow")


class Topology(enum.StrEnum):
    """How the actors of a graph are connected; the value is what JSON and messages show."""

    NONE = "none"  # plain processes, no Ray actor
    ECHO = "echo"  # driver -> 1 actor -> driver
    CHAIN4 = "chain4"  # driver -> 4 actors one after the other -> driver
    BROADCAST4 = "broadcast4"  # driver -> 4 actors side by side -> driver, four outputs

    @property
    def actors(self) -> int:
        return {Topology.NONE: 0, Topology.ECHO: 1, Topology.CHAIN4: 4, Topology.BROADCAST4: 4}[self]


class Kind(enum.Enum):
    """What a row measures."""

    LATENCY = enum.auto()  # one execution at a time
    BUSY = enum.auto()  # the same, while a plain call of the actor computes in Python
    THROUGHPUT = enum.auto()  # IN_FLIGHT executions outstanding
    IDLE = enum.auto()  # CPU time of a graph that nobody calls
    NATIVE = enum.auto()  # no Ray: plain processes on the native core


# torch is imported where a tensor is made, so that lists of rows and checks of results do without it.


def integer() -> int:
    return 12345


def list_of_1024() -> list[int]:
    return list(range(1024))


def tensor_1x1() -> Any:
    """One float32: 4 bytes."""
    import torch

    return torch.full((1, 1), 1.5, dtype=torch.float32)


def tensor_192kib() -> Any:
    """float16 (4, 24576): 196,608 bytes, no two neighbours alike."""
    import torch

    return torch.arange(4 * 24576, dtype=torch.int64).remainder(2039).to(torch.float16).view(4, 24576)


def tensor_16mib() -> Any:
    """uint8: 16,777,216 bytes."""
    import torch

    return torch.arange(16 << 20, dtype=torch.int64).remainder(251).to(torch.uint8)


def same(got: Any, wanted: Any) -> bool:
    """Whether a value came back as it was sent: type, shape, dtype and every element."""
    if type(got) is not type(wanted):
        return False
    if isinstance(wanted, list):
        if wanted and not isinstance(wanted[0], int):
            return len(got) == len(wanted) and all(map(same, got, wanted))
        return bool(got == wanted)
    if hasattr(wanted, "dtype"):
        import torch

        return bool(got.dtype == wanted.dtype and torch.equal(got, wanted))
    return bool(got == wanted)


@dataclass(frozen=True)
class Row:
    """One line of the result: what is measured, on which topology, by which systems."""

    name: str
    topology: Topology
    payload: Callable[[], Any]
    kind: Kind = Kind.LATENCY
    systems: tuple[str, ...] = (RAYCOMM, RAY_GRAPH)

    def expected(self, value: Any) -> Any:
        """What an execution with this input has to return."""
        return [value] * self.topology.actors if self.topology is Topology.BROADCAST4 else value


_ECHO, _CHAIN4, _BROADCAST4, _NONE = Topology.ECHO, Topology.CHAIN4, Topology.BROADCAST4, Topology.NONE

ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row("floor_pingpong", _NONE, integer, Kind.NATIVE, (NATIVE,)),
        Row("floor_chain5", _NONE, integer, Kind.NATIVE, (NATIVE,)),
        Row("channel_pingpong_8B", _NONE, integer, Kind.NATIVE, (RAYCOMM,)),
        Row("echo_int", _ECHO, integer),
        Row("echo_list1024", _ECHO, list_of_1024),
        Row("echo_tensor_1x1", _ECHO, tensor_1x1),
        Row("echo_tensor_192KiB", _ECHO, tensor_192kib),
        Row("echo_int_beside_busy_call", _ECHO, integer, Kind.BUSY),
        Row("plain_actor_call", _ECHO, integer, systems=(RAY_CALL,)),
        Row("chain4_int", _CHAIN4, integer),
        Row("chain4_tensor_1x1", _CHAIN4, tensor_1x1),
        Row("chain4_tensor_192KiB", _CHAIN4, tensor_192kib),
        Row("chain4_tensor_16MiB", _CHAIN4, tensor_16mib),
        Row("throughput_chain4_int", _CHAIN4, integer, Kind.THROUGHPUT),
        Row("throughput_chain4_tensor_1x1", _CHAIN4, tensor_1x1, Kind.THROUGHPUT),
        # Plain actors are in it too: Ray's own background threads set what an idle actor costs at the least.
        Row("idle_cpu_percent", _CHAIN4, integer, Kind.IDLE, (RAYCOMM, RAY_GRAPH, RAY_CALL)),
        Row("broadcast4_int", _BROADCAST4, integer),
        Row("broadcast4_tensor_192KiB", _BROADCAST4, tensor_192kib),
    )
}


def select(pattern: str | None, rows: Mapping[str, AnyRow], what: str = "row") -> list[AnyRow]:
    """Those of the rows whose name the regular expression is found in; all without one. Raises `ValueError` for no match.

    Args:
        what: what the rows are, for messages.
    """
    if pattern is None:
        return list(rows.values())
    try:
        matches = re.compile(pattern).search
    except re.error as error:
        raise ValueError(f"not a regular expression: {pattern!r} ({error})") from error
    chosen = [row for name, row in rows.items() if matches(name)]
    if not chosen:
        raise ValueError(f"no {what} matches {pattern!r}; {what}s: {', '.join(rows)}")
    return chosen
