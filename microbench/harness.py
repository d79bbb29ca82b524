"""What every bench shares: effort, timing loops, statistics, and rounds interleaved over the systems compared.

A *turn* is one system measuring its rows on one topology in one round. Rounds are interleaved (A B A B ...) so that a
machine that slows down half way slows both systems, and what is reported is the median of the rounds' figures: one
disturbed round moves nothing.

Every figure's key names its unit: `p50_us`, `p99_us`, `mean_us`, `std_us`, `per_s`, `cpu_percent`; `count` counts the calls.
"""

from __future__ import annotations

import math
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from microbench.process import ProcessLost, RequestFailed

Measurement = dict[str, float]
Result = dict[str, Any]  # {"row", "system", then figures, and "error" where a round failed}


@dataclass(frozen=True)
class Effort:
    """How long a row is measured in one round. Calls end after `measure_s`, but not before `min_calls`."""

    warmup_s: float
    measure_s: float
    min_calls: int
    max_calls: int
    native_calls: int  # round trips of the native rows, warm-up not counted
    idle_s: float  # length of the window in which an idle graph's CPU time is read
    idle_rounds: int  # a window of seconds needs no repetition to be steady, and costs most of a quick run
    turn_limit_s: float  # wall-clock limit of one system's turn, start of its actors included


FULL = Effort(0.5, 2.0, 10, 200_000, 50_000, idle_s=5.0, idle_rounds=3, turn_limit_s=240.0)
QUICK = Effort(0.05, 0.15, 3, 20_000, 5_000, idle_s=3.0, idle_rounds=1, turn_limit_s=60.0)

BANDS = ("p50_us", "mean_us", "unpaced_us", "p50_ms", "per_s", "cpu_percent")  # how their keys end

CLOSE_LIMIT_S = 15.0
WARMUP_MIN_CALLS = 1  # a slow row has had its first call, the checked one, before


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of an ascending sequence: always a value that was really measured."""
    if not ordered:
        raise ValueError("no samples")
    rank = math.ceil(len(ordered) * percent / 100)
    return ordered[max(rank, 1) - 1]


def latency(samples_ns: Iterable[int]) -> Measurement:
    """Figures in microseconds for single calls timed in nanoseconds."""
    ordered = sorted(samples_ns)
    return {
        "p50_us": statistics.median(ordered) / 1e3,
        "p99_us": percentile(ordered, 99) / 1e3,
        "mean_us": statistics.fmean(ordered) / 1e3,
        "std_us": statistics.pstdev(ordered) / 1e3,
        "count": len(ordered),
    }


def median_of_rounds(rounds: Sequence[Measurement]) -> Measurement:
    """The median of each figure over the rounds; `count` is summed, `rounds` says how many there were.

    Of those with an end in `BANDS` also lowest and highest, as `p50_us_low` and so on: `microbench.compare` takes them for noise.
    """
    if not rounds:
        raise ValueError("no rounds")
    merged: Measurement = {}
    for key in rounds[0]:
        values = [measurement[key] for measurement in rounds]
        merged[key] = sum(values) if key == "count" else statistics.median(values)
        if key.endswith(BANDS) and len(rounds) > 1:
            merged[f"{key}_low"], merged[f"{key}_high"] = min(values), max(values)
    merged["rounds"] = len(rounds)
    return merged


def warm_up(call: Callable[[Any], Any], value: Any, effort: Effort) -> None:
    """Calls until `warmup_s` has passed, so that imports, buffers and branch predictors are settled."""
    end = time.perf_counter() + effort.warmup_s
    calls = 0
    while calls < WARMUP_MIN_CALLS or time.perf_counter() < end:
        call(value)
        calls += 1


def time_calls(call: Callable[[Any], Any], value: Any, effort: Effort) -> tuple[array[int], Any]:
    """Nanoseconds of each call, and what the last call returned."""
    clock = time.perf_counter_ns
    samples = array("q")
    end = clock() + int(effort.measure_s * 1e9)
    while True:
        start = clock()
        result = call(value)
        stop = clock()
        samples.append(stop - start)
        if (stop >= end and len(samples) >= effort.min_calls) or len(samples) >= effort.max_calls:
            return samples, result


def time_throughput(
    submit: Callable[[Any], Any], fetch: Callable[[Any], Any], value: Any, in_flight: int, effort: Effort
) -> tuple[Measurement, Any]:
    """Executions per second with `in_flight` outstanding, one submitted for each fetched; and the last result."""
    clock = time.perf_counter_ns
    pending = deque(submit(value) for _ in range(in_flight))
    # Before the clock starts: with slow stages the first set takes as long as it takes to fill the graph.
    for _ in range(in_flight):
        fetch(pending.popleft())
        pending.append(submit(value))
    count = 0
    start = clock()
    end = start + int(effort.measure_s * 1e9)
    while True:
        # The clock is read once per full set in flight: on a fast system reading it each time would be measured too.
        for _ in range(in_flight):
            fetch(pending.popleft())
            pending.append(submit(value))
        count += in_flight
        stop = clock()
        if stop >= end and count >= effort.min_calls:
            break
    result = None
    while pending:
        result = fetch(pending.popleft())
    return {"per_s": count / ((stop - start) / 1e9), "count": count}, result


def highest_cpu_percent(pids: Sequence[int], window_s: float) -> float:
    """The highest share of one core, in percent, that any of the processes used over the window.

    From the scheduler's own nanosecond counts: the clock ticks behind `cpu_times` are too coarse to tell 0.5 % from 1 %.
    """

    def used(pid: int) -> int:
        total = 0
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[0])
            except OSError:
                continue  # a thread that has just ended
        return total

    before, start = [used(pid) for pid in pids], time.perf_counter()
    time.sleep(window_s)
    after, stop = [used(pid) for pid in pids], time.perf_counter()
    return max((end - begin) / (stop - start) / 1e7 for begin, end in zip(before, after, strict=True))


@dataclass(frozen=True)
class Turn:
    """One system's rows on one topology, or of one GPU graph."""

    system: str
    topology: str
    rows: tuple[str, ...]


class Limits(Protocol):
    """What an effort has to say of its turns. See `Effort`."""

    @property
    def turn_limit_s(self) -> float: ...


class Requests(Protocol):
    """What answers requests. See `BenchProcess`."""

    @property
    def running(self) -> bool: ...

    def ask(self, method: str, *args: Any, limit_s: float) -> Any: ...

    def kill(self) -> None: ...


class Progress(Protocol):
    """Told what a run does while it runs."""

    def turn(self, number: int, rounds: int, turn: Turn) -> None: ...

    def measured(self, row: str, system: str, measurement: Measurement) -> None: ...

    def failed(self, row: str, system: str, error: str) -> None: ...


def steps(turns: Sequence[Turn], rounds: int, fewer: Mapping[str, int]) -> int:
    """Measurements of all rounds. See `Rounds`."""
    return sum(min(rounds, fewer.get(row, rounds)) for turn in turns for row in turn.rows)


class Rounds:
    """Runs turns round after round in one bench process, and gathers what each row measured.

    Args:
        fewer: rows that need not be repeated so often, and in how many rounds they are measured at most.

    A row that fails is not tried again in later rounds; the other rows go on. A row that hangs costs the bench process,
    which is killed with everything it started; the next row gets a fresh one.
    """

    def __init__(self, process: Requests, effort: Limits, progress: Progress, fewer: Mapping[str, int] | None = None) -> None:
        self._process = process
        self._effort = effort
        self._progress = progress
        self._fewer = fewer or {}
        self._measured: dict[tuple[str, str], list[Measurement]] = {}
        self._errors: dict[tuple[str, str], str] = {}

    def run(self, turns: Sequence[Turn], rounds: int) -> list[Result]:
        """All rounds of all turns, in the order given; one result per row and system."""
        for number in range(rounds):
            for turn in turns:
                rows = [row for row in turn.rows if self._due(row, turn.system, number)]
                if rows:
                    self._progress.turn(number, rounds, turn)
                    self._take(turn, rows)
        return [self._result(row, turn.system) for turn in turns for row in turn.rows]

    def _due(self, row: str, system: str, number: int) -> bool:
        return (row, system) not in self._errors and (row not in self._fewer or number < self._fewer[row])

    def _take(self, turn: Turn, rows: Sequence[str]) -> None:
        end = time.monotonic() + self._effort.turn_limit_s
        opened = False
        for position, row in enumerate(rows):
            limit_s = end - time.monotonic()
            if limit_s <= 0:
                self._fail(turn, rows[position:], f"not reached: the turn's {self._effort.turn_limit_s:.0f} s were used up")
                break
            try:
                if not opened:
                    self._process.ask("open", turn.system, turn.topology, limit_s=limit_s)
                    opened = True
                measurement = self._process.ask("measure", row, self._effort, limit_s=end - time.monotonic())
            except (RequestFailed, ProcessLost) as error:
                # Without a graph none of the rows can run; after a failed row the graph may be out of step, so the
                # next row gets a new one.
                self._fail(turn, [row] if opened else rows[position:], str(error))
                self._close(discard=True)
                if not opened:
                    return
                opened = False
            else:
                self._measured.setdefault((row, turn.system), []).append(measurement)
                self._progress.measured(row, turn.system, measurement)
        self._close(discard=False)

    def _close(self, discard: bool) -> None:
        if not self._process.running:
            return
        try:
            self._process.ask("close", discard, limit_s=CLOSE_LIMIT_S)
        except (RequestFailed, ProcessLost):
            # A system that cannot let go must not run beside the next one.
            self._process.kill()

    def _fail(self, turn: Turn, rows: Sequence[str], error: str) -> None:
        for row in rows:
            self._errors[row, turn.system] = error
            self._progress.failed(row, turn.system, error)

    def _result(self, row: str, system: str) -> Result:
        result: Result = {"row": row, "system": system}
        measured = self._measured.get((row, system))
        if measured:
            result |= median_of_rounds(measured)
        if (row, system) in self._errors:
            result["error"] = self._errors[row, system]
        return result
