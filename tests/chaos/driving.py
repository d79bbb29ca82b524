"""Uses a graph as users do, in many ways at once, and compares every outcome with the reference."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import ray

import raycomm
from raycomm import (
    ActorDiedError,
    CapacityExceededError,
    ChannelClosedError,
    ChannelTimeoutError,
    ExecutionCancelledError,
    SerializationError,
    SharedMemoryError,
)
from tests.chaos.graphs import Call, Input, Spec, inputs_of
from tests.chaos.reference import Failed, evaluate
from tests.chaos.values import digest, draw_unsendable, same, scribble
from tests.chaos.watching import HANG_S, Watchdog

_HELD = 12
_PATIENCE_S = 2 * HANG_S


class Wrong(Exception):
    """What must not happen."""


class Ended(Exception):
    """The graph has ended, as was to be expected."""


@dataclass
class Execution:
    """One execution; its inputs follow from the seed."""

    seed: int
    refs: list[Any]
    passed: dict[int, Any]  # parts of the input that are outputs, by place
    cancelled: bool = False


@dataclass
class Expected:
    """Errors that the disturbance, the options or the driver's own doing account for, besides those of the reference."""

    ends: set[type[Exception]] = field(default_factory=set)
    others: set[type[Exception]] = field(default_factory=set)
    marks: list[str] = field(default_factory=list)  # texts of errors that faults raise
    ended_at: float | None = None

    def sees(self, error: Exception) -> bool:
        """Whether `error` was to be expected; remembers when the end was first noticed."""
        if isinstance(error, tuple(self.ends)):
            self.ended_at = self.ended_at or time.monotonic()
            return True
        return isinstance(error, tuple(self.others)) or any(mark in str(error) for mark in self.marks)


class Driver:
    """One graph and what is known of it.

    Args:
        graph: compiled from `spec`.
        spec: of the graph.
        watchdog: guards every operation.
        expected: errors that are no news.
    """

    def __init__(self, graph: Any, spec: Spec, watchdog: Watchdog, expected: Expected) -> None:
        self.graph = graph
        self.spec = spec
        self.expected = expected
        self.held: list[tuple[Any, int]] = []
        self.results = 0
        self._watchdog = watchdog
        self._relieving = "max_buffered_results" in spec.options
        self._seeds: list[int] = []
        used = {operand for step in spec.steps if isinstance(step, Call) for operand in (*step.args, *step.kwargs.values())}
        self._sent = [key for key in spec.inputs if Input(key) in used]
        if "shm_limit_bytes" in spec.options:
            expected.others.add(SharedMemoryError)
        if self._relieving:
            expected.others.add(CapacityExceededError)

    # --- one execution ---

    def submit(self, rng: random.Random, relieve: Any = None) -> Execution:
        """Execute with new inputs. `relieve` makes room where too many results wait."""
        if self._sent and rng.random() < 0.02:
            self._refused(rng)
        seed = rng.getrandbits(60)
        args, kwargs = inputs_of(self.spec, seed)
        limit = rng.choice((None, None, None, None, 0, 0.001, 30))
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with self._watchdog.guard(f"execute({limit}) of {self.graph.name}", "execute"):
                    given = self.graph.execute(*args, timeout=limit, **kwargs)
                break
            except ChannelTimeoutError as error:
                if limit is None and "submit_timeout" not in self.spec.options:
                    raise Wrong("execute timed out without a limit") from error
                limit = None
            except CapacityExceededError as error:
                if not self._relieving:
                    raise Wrong("too many results without a limit") from error
                if relieve is None or not relieve():
                    time.sleep(0.001)
            except Exception as error:
                self._ended_or_wrong(error)
                if not self._memory(error):
                    raise
                args, kwargs = inputs_of(self.spec, seed)
                if relieve is None or not relieve():
                    seed = rng.getrandbits(60)  # a smaller one may fit
                    args, kwargs = inputs_of(self.spec, seed)
            if time.monotonic() > end:
                raise Wrong(f"execute found no room in {_PATIENCE_S} s")
        return self._submitted(seed, given, rng, args, kwargs)

    def _submitted(self, seed: int, given: Any, rng: random.Random, args: list[Any], kwargs: dict[str, Any]) -> Execution:
        self._seeds.append(seed)
        passed = {
            place: kwargs[output.key] if isinstance(output.key, str) else args[output.key or 0]
            for place, output in enumerate(self.spec.outputs)
            if isinstance(output, Input)
        }
        execution = Execution(seed, [given] if self.spec.single else given, passed)
        if len(execution.refs) != len(self.spec.outputs):
            raise Wrong(f"{len(execution.refs)} refs for {len(self.spec.outputs)} outputs")
        if rng.random() < 0.2:
            for value in (*args, *kwargs.values()):
                scribble(value)
        return execution

    def _memory(self, error: Exception) -> bool:
        return isinstance(error, SharedMemoryError) and SharedMemoryError in self.expected.others

    def _ended_or_wrong(self, error: Exception) -> None:
        if isinstance(error, tuple(self.expected.ends)):
            self.expected.sees(error)
            raise Ended from error
        if not self._memory(error):
            raise Wrong(f"execute: {type(error).__name__}: {error}") from error

    def _refused(self, rng: random.Random) -> None:
        """An input that cannot be sent is refused, and nothing is submitted."""
        args, kwargs = inputs_of(self.spec, rng.getrandbits(60))
        key = rng.choice(self._sent)
        if isinstance(key, str):
            kwargs[key] = draw_unsendable(rng)
        else:
            args[key or 0] = draw_unsendable(rng)
        try:
            with self._watchdog.guard("execute with what cannot be sent"):
                self.graph.execute(*args, **kwargs)
        except SerializationError:
            return
        except (ChannelTimeoutError, CapacityExceededError):
            return
        except Exception as error:
            self._ended_or_wrong(error)
            return
        raise Wrong(f"an input that cannot be sent was taken: {args!r:.300} {kwargs!r:.300}")

    def check(self, execution: Execution, rng: random.Random) -> None:
        """Fetch every result and compare it."""
        wanted = self._wanted(execution)
        for place in rng.sample(range(len(wanted)), len(wanted)):
            ref = execution.refs[place]
            outcome = self._fetch(ref, rng)
            self._judge(execution, place, wanted[place], outcome)
            if rng.random() < 0.1:
                again = self._fetch(ref, rng)
                if not isinstance(outcome, Exception) and again is not outcome:
                    raise Wrong(f"got again, a ref gives another object: {outcome!r:.200} and {again!r:.200}")

    def _wanted(self, execution: Execution) -> list[Any]:
        return evaluate(self.spec, *inputs_of(self.spec, execution.seed))

    def _fetch(self, ref: Any, rng: random.Random) -> Any:
        """The value, or the exception that was raised."""
        limit = rng.choice((None, None, None, None, None, 0, 0.0005, 20))
        if rng.random() < 0.02:
            with self._watchdog.guard("status and stats", "status and stats"):
                str(self.graph.status()), str(self.graph.stats())
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with self._watchdog.guard(f"get({limit}) of {ref!r}", "get"):
                    if limit is None and rng.random() < 0.3:
                        return ray.get(ref)
                    return ref.get(timeout=limit)
            except ChannelTimeoutError as error:
                if limit is None and "get_timeout" not in self.spec.options:
                    raise Wrong("get timed out without a limit") from error
                limit = None
            except Exception as error:  # CapacityExceededError among them: nobody else would fetch what stands in the way
                # Without its traceback, which holds this frame and the caller's, where the error itself stands beside the ref:
                # until a garbage collection the ref would count as one that somebody wants.
                return error.with_traceback(None)
            if time.monotonic() > end:
                raise Wrong(f"{ref!r} gave nothing in {_PATIENCE_S} s")

    def _judge(self, execution: Execution, place: int, wanted: Any, outcome: Any) -> None:
        what = f"output {place} of execution with seed {execution.seed}"
        if place in execution.passed:
            if outcome is not execution.passed[place]:
                raise Wrong(f"{what} is not the input itself but {outcome!r:.200}")
            return
        if isinstance(outcome, Exception) and not (isinstance(wanted, Exception) and same(wanted, outcome)):
            if execution.cancelled and isinstance(outcome, ExecutionCancelledError):
                return
            if (isinstance(wanted, Failed) and wanted.admits(outcome)) or self.expected.sees(outcome):
                return
            raise Wrong(f"{what}: {type(outcome).__name__}: {outcome}; wanted {wanted!r:.300}") from outcome
        if execution.cancelled:
            raise Wrong(f"{what} was cancelled and gave {outcome!r:.200}")
        if isinstance(wanted, Failed):
            raise Wrong(f"{what} is {outcome!r:.300}; it should have failed with {sorted(wanted.ways)}")
        if not same(wanted, outcome):
            raise Wrong(f"{what} is {_shown(outcome)}; wanted {_shown(wanted)}; {self._whose(place, outcome)}")
        self.results += 1
        if execution.seed % 8 == 0 and len(self.held) < _HELD:
            self.held.append((outcome, digest(outcome)))

    def _whose(self, place: int, outcome: Any) -> str:
        """Which execution a wrong result belongs to."""
        for number, seed in enumerate(self._seeds):
            wanted = evaluate(self.spec, *inputs_of(self.spec, seed))[place]
            if not isinstance(wanted, Failed) and same(wanted, outcome):
                return f"it is that of execution {number} of {len(self._seeds)}, with seed {seed}"
        return f"it is that of no other execution; the input is {inputs_of(self.spec, self._seeds[-1])}"

    def check_held(self) -> None:
        """What was held must not have changed; then it is let go."""
        for value, number in self.held:
            if digest(value) != number:
                raise Wrong(f"a held result has changed: {value!r:.300}")
        self.held.clear()

    # --- ways to use it ---

    def in_order(self, rng: random.Random, count: int) -> None:
        """One at a time."""
        for _ in range(count):
            self.check(self.submit(rng), rng)

    def window(self, rng: random.Random, count: int) -> None:
        """Several under way; fetched in any order, dropped, cancelled, waited for."""
        width = rng.choice((2, 5, 12, 25))
        pending: deque[Execution] = deque()

        def relieve() -> bool:
            if not pending:
                return False
            self.check(pending.popleft(), rng)
            return True

        for _ in range(count):
            pending.append(self.submit(rng, relieve))
            while len(pending) >= width or (pending and rng.random() < 0.3):
                turn = rng.random()
                if turn < 0.1:
                    pending.pop()  # dropped, not fetched
                elif turn < 0.2 and not pending[-1].cancelled:
                    pending[-1].cancelled = pending[-1].refs[0].cancel()
                elif turn < 0.3:
                    self._wait(pending, rng)
                elif turn < 0.5:
                    pending.rotate(rng.randrange(len(pending)))
                    relieve()
                else:
                    relieve()
        while relieve():
            pass

    def _wait(self, pending: deque[Execution], rng: random.Random) -> None:
        refs = [execution.refs[-1] for execution in pending]
        refs = list({id(ref): ref for ref in refs}.values())
        count = rng.randint(1, len(refs)) if not self._relieving else 1
        limit = rng.choice((None, 0, 0.001))
        with self._watchdog.guard("raycomm.wait", "wait"):
            done, rest = raycomm.wait(refs, num_returns=count, timeout=limit)
        if {id(ref) for ref in (*done, *rest)} != {id(ref) for ref in refs} or (limit is None and len(done) < count):
            raise Wrong(f"wait({count}, {limit}) of {len(refs)} refs gave {len(done)} done and {len(rest)} pending")
        if not all(ref.done() for ref in done):
            raise Wrong("wait gave a ref that is not done")

    def threads(self, rng: random.Random, count: int) -> None:
        """Several threads, each with results of its own."""
        raised: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                mine = random.Random(seed)
                mine.choice((self.in_order, self.window))(mine, max(1, count // 3))
            except BaseException as error:
                raised.append(error)

        workers = [threading.Thread(target=work, args=(rng.getrandbits(60),)) for _ in range(rng.randint(2, 4))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for error in sorted(raised, key=lambda error: isinstance(error, Ended)):
            raise error

    def asynchronous(self, rng: random.Random, count: int) -> None:
        """Many tasks in one event loop; some are cancelled."""
        asyncio.run(self._tasks(rng, count))

    async def _tasks(self, rng: random.Random, count: int) -> None:
        tasks = [asyncio.create_task(self._one(random.Random(rng.getrandbits(60)))) for _ in range(count)]
        for task in tasks:
            if rng.random() < 0.2:
                await asyncio.sleep(rng.choice((0, 0, 0.002)))
                task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        found = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        for error in sorted(found, key=lambda error: isinstance(error, Ended)):
            raise error

    async def _one(self, rng: random.Random) -> None:
        try:
            await self._one_execution(rng)
        except asyncio.CancelledError:
            return  # a task that ends so keeps its frames, and with them a ref that would count as wanted, until it goes itself

    async def _one_execution(self, rng: random.Random) -> None:
        seed = rng.getrandbits(60)
        args, kwargs = inputs_of(self.spec, seed)
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with self._watchdog.guard("execute_async", "execute_async"):
                    given = await self.graph.execute_async(*args, **kwargs)
                break
            except ChannelTimeoutError as error:
                if "submit_timeout" not in self.spec.options:
                    raise Wrong("execute_async timed out without a limit") from error
            except CapacityExceededError as error:
                if not self._relieving:
                    raise Wrong("too many results without a limit") from error
            except Exception as error:
                self._ended_or_wrong(error)
                seed = rng.getrandbits(60)  # a smaller one may fit
                args, kwargs = inputs_of(self.spec, seed)
            if time.monotonic() > end:
                raise Wrong(f"execute_async found no room in {_PATIENCE_S} s")
            await asyncio.sleep(0.001)
        execution = self._submitted(seed, given, rng, args, kwargs)
        wanted = self._wanted(execution)
        for place in rng.sample(range(len(wanted)), len(wanted)):
            self._judge(execution, place, wanted[place], await self._outcome(execution.refs[place]))

    async def _outcome(self, ref: Any) -> Any:
        end = time.monotonic() + _PATIENCE_S
        while True:
            try:
                with self._watchdog.guard(f"await {ref!r}", "await"):
                    return await ref
            except ChannelTimeoutError as error:
                if "get_timeout" not in self.spec.options:
                    raise Wrong("await timed out without a limit") from error
            except Exception as error:
                return error
            if time.monotonic() > end:
                raise Wrong(f"{ref!r} gave nothing in {_PATIENCE_S} s")

    def until_ended(self, rng: random.Random) -> None:
        """Go on until the graph is seen to have ended."""
        end = time.monotonic() + HANG_S
        while True:
            self.check(self.submit(rng), rng)
            if self.expected.ended_at is not None:
                return
            if time.monotonic() > end:
                raise Wrong(f"the end of the graph was not noticed within {HANG_S} s")


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.300} (digest {digest(value):016x})"


__all__ = ["ActorDiedError", "ChannelClosedError", "Driver", "Ended", "Expected", "Wrong"]
