"""What runs inside the bench process of the GPU rows: one local Ray cluster, and the measuring of one row at a time."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import Any, ClassVar

from microbench.gpu_rows import GPU_ROWS, TORCH, GpuRow, Place, Wiring
from microbench.harness import WARMUP_MIN_CALLS, Effort, Measurement, latency, time_calls
from microbench.rivals.base import START_LIMIT_S, Calls
from microbench.rivals.gpu_workers import Bare, GpuActors, GpuSystem, Worker
from microbench.rows import RAY_GRAPH, RAYCOMM
from microbench.session import WrongResult

HIGHEST = 2000  # float16 has all whole numbers up to 2048
BARE_FIRST = 5  # sends whose time says how many fill a round


class GpuSession:
    """One system open at a time, for the rows of one graph. The cluster is started with the first.

    Attributes:
        place: of the tensors.
        cluster: settings of the cluster, beside those that are always the same.
        body: of the actors.
    """

    place: ClassVar[Place]
    cluster: ClassVar[Mapping[str, Any]] = {}
    body: ClassVar[type[Worker]] = Worker

    def __init__(self) -> None:
        self._pool: GpuActors | None = None
        self._systems: dict[tuple[str, bool], GpuSystem] = {}
        self._open: GpuSystem | None = None
        self._opened: Calls | Bare | None = None
        self._before: tuple[str, Wiring] | None = None
        self._numbers: Iterator[int] = cycle(range(1, HIGHEST + 1))
        self._number = 0  # asked for last

    def open(self, system: str, opens: str) -> None:
        """Makes a system ready for the rows that open the same."""
        row = next(row for row in GPU_ROWS.values() if row.opens == opens)
        pool = self._started()
        # Kept actors have GPUs that the next ones need.
        if self._before != (system, row.wiring):
            pool.discard()
        self._before = (system, row.wiring)
        key = (system, row.wiring is Wiring.BARE)
        if key not in self._systems:
            self._systems[key] = _adapter(system, row.wiring, pool)
        self._open = self._systems[key]
        self._opened = self._open.open(row)

    def measure(self, name: str, effort: Effort) -> Measurement:
        """One row. Each call of the warm-up asks for another number and is checked, as is the last one; so is one more."""
        row = GPU_ROWS[name]
        if isinstance(self._opened, Bare):
            return self._measure_bare(row, self._opened, effort)
        if self._opened is None:
            raise RuntimeError("no system is open")
        call = self._opened.call
        self._checked_call(row, call)  # also pays for imports and buffers
        end = time.perf_counter() + effort.warmup_s
        calls = 0
        while calls < WARMUP_MIN_CALLS or time.perf_counter() < end:
            self._checked_call(row, call)
            calls += 1
        self._check_end(row)
        number = next(self._numbers)
        samples, last = time_calls(call, row.request(number), effort)
        self._check(row, number, last)
        self._checked_call(row, call)
        self._check_end(row)
        return latency(samples)

    def close(self, discard: bool) -> None:
        """Closes the open system; `discard` also ends actors that would be kept, since a failure may linger in them."""
        system, self._open, self._opened = self._open, None, None
        try:
            if system is not None:
                system.close()
        finally:
            if discard and self._pool is not None:
                self._pool.discard()

    def shutdown(self) -> None:
        """Ends the cluster."""
        if self._pool is not None:
            import ray

            self.close(discard=True)
            ray.shutdown()

    def _started(self) -> GpuActors:
        if self._pool is None:
            import ray

            quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
            ray.init(address="local", num_cpus=1, **quiet, **self.cluster)
            self._pool = GpuActors(self.place, self.body)
        return self._pool

    def _measure_bare(self, row: GpuRow, bare: Bare, effort: Effort) -> Measurement:
        # The first of each run is left out: the sender may begin with it before the receiver is there.
        samples = self._checked_run(row, bare, 1 + BARE_FIRST)[1:]
        for seconds in (effort.warmup_s, effort.measure_s):
            samples = self._checked_run(row, bare, 1 + _as_many(samples, seconds, effort))[1:]
        return latency(samples)

    def _checked_run(self, row: GpuRow, bare: Bare, count: int) -> list[int]:
        number = next(self._numbers)
        samples, values = bare.run(row.request(number), count)
        if values != [number]:
            raise WrongResult(f"{row.name} received {values[:5]} where {number} was sent")
        return samples

    def _checked_call(self, row: GpuRow, call: Any) -> None:
        number = next(self._numbers)
        self._check(row, number, call(row.request(number)))

    def _check(self, row: GpuRow, number: int, got: Any) -> None:
        self._number = number
        wanted = None if row.wiring is Wiring.CHAIN4 else float(number)
        if got != wanted:
            raise WrongResult(f"{row.name} returned {got!r:.80} where {wanted} was wanted")

    def _check_end(self, row: GpuRow) -> None:
        """The end of the chain returns None; whether the right tensor came there it is asked by a plain call."""
        if row.wiring is Wiring.CHAIN4:
            import ray

            assert self._open is not None
            actors = self._open.actors()
            got, wanted = ray.get(actors[-1].kept.remote(), timeout=START_LIMIT_S), self._number + len(actors) - 2
            if got != wanted:
                raise WrongResult(f"{row.name}: {got} came to the end of the chain where {wanted} was wanted")


class OnGpus(GpuSession):
    """With `--device gpu`, and `auto` where there is one."""

    place = Place.GPU


class Simulated(GpuSession):
    """With `--device simulated`."""

    place = Place.SIMULATED
    cluster = {"num_gpus": 0}


def _as_many(samples: list[int], seconds: float, effort: Effort) -> int:
    """Calls that take about so long."""
    return min(max(int(seconds * 1e9 / statistics.median(samples)), effort.min_calls), effort.max_calls)


def _adapter(name: str, wiring: Wiring, pool: GpuActors) -> GpuSystem:
    """The adapters are imported when their turn comes: a peer that is not installed fails its own rows only."""
    if wiring is Wiring.BARE:
        if name == RAYCOMM:
            from microbench.rivals.raycomm_send import RaycommSend

            return RaycommSend(pool)
        if name == TORCH:
            from microbench.rivals.torch_send import TorchSend

            return TorchSend(pool)
    elif name == RAYCOMM:
        from microbench.rivals.raycomm_gpu_graph import RaycommGpuGraph

        return RaycommGpuGraph(pool)
    elif name == RAY_GRAPH:
        from microbench.rivals.ray_gpu_graph import RayGpuGraph

        return RayGpuGraph(pool)
    raise ValueError(f"no system {name!r} for {wiring}")
