"""What runs inside the bench process: one local Ray cluster, the systems, and the measuring of one row at a time."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from microbench.harness import Effort, Measurement, highest_cpu_percent, latency, time_calls, time_throughput, warm_up
from microbench.rivals.base import Actors, Calls, System, busy_call
from microbench.rows import IN_FLIGHT, RAY_CALL, RAY_GRAPH, RAYCOMM, ROWS, Kind, Row, Topology, same

QUIET_S = 2.0  # an idle graph is measured this long after its last message
NATIVE_WARMUP = 0.2  # share of a native row's round trips that come before the timed ones


class WrongResult(Exception):
    """An execution returned something else than what was sent."""


class Session:
    """One system open at a time. Started lazily: native rows need no cluster."""

    def __init__(self) -> None:
        self._actors: Actors | None = None
        self._systems: dict[str, System] = {}
        self._open: System | None = None
        self._calls: Calls | None = None

    def open(self, system: str, topology: str) -> None:
        """Makes a system ready on a topology; `Topology.NONE` needs nothing."""
        if topology == Topology.NONE:
            return
        self._open = self._system(system)
        self._calls = self._open.open(Topology(topology))

    def measure(self, name: str, effort: Effort) -> Measurement:
        """One row of the open system, checked before and after the timed calls."""
        row = ROWS[name]
        if row.kind is Kind.NATIVE:
            return _measure_native(name, effort)
        if self._open is None or self._calls is None:
            raise RuntimeError("no system is open")
        value = row.payload()
        # Checked once before anything is timed; this call also pays for imports in the actors.
        _check(row, value, self._calls.call(value))
        if row.kind is Kind.BUSY:
            with busy_call(self._open.actors()[0]):
                samples, last = time_calls(self._calls.call, value, effort)
            _check(row, value, last)
            return latency(samples)
        warm_up(self._calls.call, value, effort)
        if row.kind is Kind.IDLE:
            time.sleep(QUIET_S)
            return {"cpu_percent": highest_cpu_percent([os.getpid(), *self._open.processes()], effort.idle_s)}
        if row.kind is Kind.THROUGHPUT:
            measurement, last = time_throughput(self._calls.submit, self._calls.fetch, value, IN_FLIGHT, effort)
        else:
            samples, last = time_calls(self._calls.call, value, effort)
            measurement = latency(samples)
        _check(row, value, last)
        return measurement

    def close(self, discard: bool) -> None:
        """Closes the open system; `discard` also ends actors that would be kept, since a failure may linger in them."""
        system, self._open, self._calls = self._open, None, None
        try:
            if system is not None:
                system.close()
        finally:
            if discard and self._actors is not None:
                self._actors.discard()

    def shutdown(self) -> None:
        """Ends the cluster."""
        if self._actors is not None:
            import ray

            self.close(discard=True)
            ray.shutdown()

    def _system(self, name: str) -> System:
        if self._actors is None:
            import ray

            # num_cpus=1: Ray starts that many idle workers ahead, and none is wanted here; the actors ask for no CPU.
            ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            self._actors = Actors()
        if name not in self._systems:
            self._systems[name] = _adapter(name)(self._actors)
        return self._systems[name]


def _adapter(name: str) -> Callable[[Actors], System]:
    """The adapters are imported when their turn comes: a peer that is not installed fails its own rows only."""
    if name == RAYCOMM:
        from microbench.rivals.raycomm_graph import RaycommGraph

        return RaycommGraph
    if name == RAY_GRAPH:
        from microbench.rivals.ray_compiled_graph import RayCompiledGraph

        return RayCompiledGraph
    if name == RAY_CALL:
        from microbench.rivals.ray_actor_call import RayActorCall

        return RayActorCall
    raise ValueError(f"unknown system {name!r}")


def _measure_native(name: str, effort: Effort) -> Measurement:
    from microbench.rivals import native

    warmup = int(effort.native_calls * NATIVE_WARMUP)
    return latency(native.samples_ns(name, warmup + effort.native_calls)[warmup:])


def _check(row: Row, value: Any, got: Any) -> None:
    if not same(got, row.expected(value)):
        raise WrongResult(f"{row.name} returned {repr(got)[:120]}")
