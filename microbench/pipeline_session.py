"""What runs inside the bench process of the pipeline bench: one local Ray cluster, and the measuring of one row at a time."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from microbench.harness import Effort, Measurement, latency, time_calls, time_throughput, warm_up
from microbench.pipeline_rows import COMPUTE_MS, ROWS, Family, Row, Shape, ideal_per_s
from microbench.rows import RAY_GRAPH, RAYCOMM, same
from microbench.session import WrongResult

if TYPE_CHECKING:
    from microbench.rivals.base import Calls
    from microbench.rivals.pipeline_graphs import Pipelines

CHECKED = 2  # executions before anything is timed, or as many as are in flight
SLEEPS = 21


class PipelineSession:
    """One system open at a time, for the rows of one family. The cluster is started with the first."""

    def __init__(self) -> None:
        self._systems: dict[str, Pipelines] = {}
        self._open: Pipelines | None = None
        self._compiled: tuple[Shape, Calls] | None = None
        self._slept_s: dict[float, float] = {}

    def open(self, system: str, family: str) -> None:
        """Makes a system ready for the rows of a family; the one before it rests."""
        opened = self._system(system)
        if self._open is not None and self._open is not opened:
            self._open.rest()
        self._open = opened
        if family == Family.COMPUTE and not self._slept_s:
            # Once, with no graph about, so that all systems and rounds are held against the same.
            self._slept_s = {compute_ms / 1e3: slept_s(compute_ms / 1e3) for compute_ms in COMPUTE_MS if compute_ms}

    def measure(self, name: str, effort: Effort) -> Measurement:
        """One row. The graph of the row before it serves where it has the same shape."""
        if self._open is None:
            raise RuntimeError("no system is open")
        row = ROWS[name]
        if self._compiled is None or self._compiled[0] != row.shape:
            self._compiled = None
            self._open.teardown()
            self._compiled = row.shape, self._open.compile(row.shape)
        measurement = measure(row, self._compiled[1], effort)
        if row.stage_s and row.in_flight is not None:
            slept = self._slept_s[row.stage_s]
            measurement |= {"stage_us": slept * 1e6, "ideal_per_s": ideal_per_s(slept, row.shape.actors, row.in_flight)}
        return measurement

    def close(self, discard: bool) -> None:
        """Ends the graph; `discard` also ends the actors."""
        self._compiled = None
        if self._open is not None:
            try:
                self._open.teardown()
            finally:
                if discard:
                    self._open.discard()

    def shutdown(self) -> None:
        """Ends the cluster."""
        if self._systems:
            import ray

            self.close(discard=True)
            ray.shutdown()

    def _system(self, name: str) -> Pipelines:
        if not self._systems:
            import ray

            ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        if name not in self._systems:
            from microbench.rivals.pipeline_graphs import RaycommPipelines, RayPipelines

            kinds: dict[str, Callable[[], Pipelines]] = {RAYCOMM: RaycommPipelines, RAY_GRAPH: RayPipelines}
            self._systems[name] = kinds[name]()
        return self._systems[name]


def measure(row: Row, calls: Calls, effort: Effort) -> Measurement:
    """Figures of a row. Before anything is timed different values have to come back, in order; after it the last one."""
    values = [row.value(place) for place in range(max(CHECKED, row.in_flight or 0))]
    tickets = [calls.submit(value) for value in values]
    for value, ticket in zip(values, tickets, strict=True):
        _check(row, value, calls.fetch(ticket))
    value = values[0]
    _check(row, value, calls.call(value))
    warm_up(calls.call, value, effort)
    if row.in_flight is None:
        samples, last = time_calls(calls.call, value, effort)
        measurement = latency(samples)
    else:
        measurement, last = time_throughput(calls.submit, calls.fetch, value, row.in_flight, effort)
    _check(row, value, last)
    return measurement


def slept_s(seconds: float) -> float:
    """How long a sleep of so many seconds takes on this machine: the median of some. The kernel adds some 60 us."""
    taken = []
    for _ in range(SLEEPS):
        start = time.perf_counter()
        time.sleep(seconds)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _check(row: Row, value: object, got: object) -> None:
    if not same(got, row.expected(value)):
        raise WrongResult(f"{row.name} returned {repr(got)[:120]} where {repr(row.expected(value))[:120]} was wanted")
