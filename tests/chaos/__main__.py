"""`make chaos`. Exits 0 only if every value was right, nothing hung and nothing is left."""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import ray._private.worker
import torch
from rich.console import Console
from rich.table import Table

import raycomm
from tests.chaos.actors import Crew
from tests.chaos.driving import ActorDiedError, Driver, Ended, Expected, Wrong
from tests.chaos.events import Event, Killed, draw_event
from tests.chaos.graphs import Draw, Spec, bind
from tests.chaos.watching import Times, Watchdog, belongings, bytes_in_use, settled

_MIX = 0x9E3779B97F4A7C15
_PROGRESS_S = 5.0
# Fitted growth of memory in use over the second half of a run. Ray keeps some 13 KiB of each actor that was made and killed.
_GROWTH_BYTES = 16 << 20
_ENOUGH_SAMPLES = 40


class Run:
    """All graphs of one seed."""

    def __init__(self, seed: int, crew: int) -> None:
        self.seed = seed
        self.times = Times()
        self.watchdog = Watchdog(self._report, self._abandon, self.times)
        self.results = 0
        self.graphs = 0
        self.samples: dict[str, list[float]] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="raycomm-chaos-"))
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        # Ray prints a paragraph for each process that is killed, here many a minute, whatever log_to_driver says.
        vars(ray._private.worker)["print_to_stdstream"] = lambda *_, **__: None
        torch.ones(1 << 20).add(1).sum()  # starts the threads that torch keeps
        self.crew = Crew(crew, self._directory)
        self._scene = "before the first graph"
        self._graph: Any = None

    def close(self) -> None:
        """End Ray and what is on disk."""
        ray.shutdown()
        shutil.rmtree(self._directory, ignore_errors=True)

    def one(self, index: int) -> None:
        """Draw graph `index`, use it, disturb it, look what is left.

        Raises:
            Wrong: what must not happen.
        """
        rng = random.Random((self.seed * _MIX + index) % 2**64)
        spec = Draw(rng, len(self.crew.handles), self.crew.asynchronous).draw()
        event = draw_event(rng, spec, self.crew)
        expected = Expected()
        event.expect(expected)
        way = rng.choice(("in_order", "window", "window", "threads", "asynchronous"))
        self._scene = f"graph {index}: {way}, event: {event}\n{spec}"
        root = bind(spec, self.crew.handles)
        for again in range(2 if type(event) is Event and rng.random() < 0.2 else 1):
            self._live(spec, root, event, expected, way, rng, f"chaos-{index}-{again}")
        del root
        self.graphs += 1
        self._look_after(spec, event)

    def _live(self, spec: Spec, root: Any, event: Event, expected: Expected, way: str, rng: random.Random, name: str) -> None:
        graph = self._compile(spec, root, event, expected, name)
        if graph is None:
            return
        self._graph = graph
        driver = Driver(graph, spec, self.watchdog, expected)
        twin = self._twin(spec, root, event, rng, name)
        event.begin(graph)
        try:
            try:
                getattr(driver, way)(rng, rng.choice((1, 5, 20, 40)))
                if twin is not None:
                    twin.window(rng, 10)
                    driver.in_order(rng, 3)
                event.join()
                if event.ends_graph:
                    driver.until_ended(rng)
            except Ended:
                event.join()
            if isinstance(event, Killed) and expected.ended_at is not None and event.struck_at is not None:
                self.times.add("death to error", max(0.0, expected.ended_at - event.struck_at))
        finally:
            event.join()
            self._graph = None
            if twin is not None:
                self._tear_down(twin)
            if rng.random() < 0.1:
                driver.check_held()
                self._drop(driver)
            else:
                self._tear_down(driver)
        self.results += driver.results

    def _compile(self, spec: Spec, root: Any, event: Event, expected: Expected, name: str) -> Any:
        try:
            with self.watchdog.guard("compile", "compile"), event.around_compile():
                return raycomm.compile(root, name=name, **spec.options)
        except ActorDiedError:
            if not event.in_compile:
                raise
            return None

    def _twin(self, spec: Spec, root: Any, event: Event, rng: random.Random, name: str) -> Driver | None:
        """Now and then the same graph a second time, on the same actors at once."""
        if type(event) is not Event or "loop_thread" in spec.options or rng.random() < 0.8:
            return None
        graph = self._compile(spec, root, event, Expected(), f"{name}-twin")
        return Driver(graph, spec, self.watchdog, Expected())

    def _tear_down(self, driver: Driver) -> None:
        with self.watchdog.guard("teardown", "teardown"):
            driver.graph.teardown()
        driver.check_held()
        driver.graph.teardown()

    def _drop(self, driver: Driver) -> None:
        driver.graph = None

    def _look_after(self, spec: Spec, event: Event) -> None:
        gc.collect()
        left = settled(belongings, {})
        if left:
            raise Wrong(f"left in the driver: {left}")
        if event.victims:
            self.crew.replace(event.victims)
        for place in spec.actors:
            handle = self.crew.handles[place]
            last: dict[str, float] = {}

            def look(handle: Any = handle, last: dict[str, float] = last) -> dict[str, float]:
                with self.watchdog.guard("a plain call of an actor after the graph", "plain call"):
                    ray.get(handle.let_go.remote())  # each time: an execution may still have been under way
                    last.update(ray.get(handle.belongings.remote()))
                return last

            left = settled(look, {})
            if left:
                raise Wrong(f"left in actor {place}: {left}")
            for what in ("in use", "descriptors", "threads"):
                self.samples.setdefault(f"actor {self.crew.pids[place]} {what}", []).append(last[what])
        self.samples.setdefault("driver in use", []).append(bytes_in_use())

    def growth(self) -> list[tuple[str, int, float, float]]:
        """(what, samples, first half's end, fitted growth over the second half) where there are enough samples."""
        rows = []
        for what, samples in self.samples.items():
            half = np.array(samples[len(samples) // 2 :], float)
            if len(samples) >= _ENOUGH_SAMPLES and not what.endswith(("descriptors", "threads")):
                rows.append((what, len(samples), half[0], float(np.polyfit(np.arange(len(half)), half, 1)[0]) * len(half)))
        return rows

    def _report(self) -> str:
        graph = self._graph
        status = "" if graph is None else f"{graph.status()}\n"
        return f"{self.scene()}\n{status}{self.crew.all_stacks()}"

    def scene(self) -> str:
        """What was going on, and how to see it again."""
        return f"seed {self.seed}, {self._scene}\nagain: python -m tests.chaos --seed {self.seed} --first GRAPH --graphs 1"

    def _abandon(self) -> None:
        """A hang: end all that this process has started, and itself."""
        for child in psutil.Process().children(recursive=True):
            child.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(3)


def report(run: Run, console: Console) -> bool:
    """Print the tables; whether nothing grew."""
    table = Table("seconds", "times", "median", "p99", "max")
    for what, count, median, high, top in run.times.table():
        table.add_row(what, f"{count:,}", f"{median:.4f}", f"{high:.4f}", f"{top:.4f}")
    console.print(table)
    table = Table("memory", "samples", "half way", "grown since", "")
    flat = True
    for what, count, first, grown in run.growth():
        fits = grown <= _GROWTH_BYTES
        flat &= fits
        table.add_row(what, str(count), f"{first / 2**20:.1f} MiB", f"{grown / 2**20:.1f} MiB", "" if fits else "GROWS")
    console.print(table)
    return flat


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Random graphs under random disturbance, compared with plain Python.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--max-actors", type=int, default=6)
    parser.add_argument("--first", type=int, default=0, help="begin with this graph of the seed")
    parser.add_argument("--graphs", type=int, default=None, help="stop after so many")
    parser.add_argument("--failures", type=int, default=1, help="go on until so many graphs have failed")
    given = parser.parse_args()
    warnings.simplefilter("ignore", ResourceWarning)  # graphs dropped on purpose
    console = Console(width=120)
    console.print(f"seed {given.seed}")
    run = Run(given.seed, given.max_actors)
    begin = told = time.monotonic()
    failures = 0
    try:
        for index in itertools.count(given.first):
            now = time.monotonic()
            if now - begin > given.seconds or (given.graphs is not None and index >= given.first + given.graphs):
                break
            if now - told > _PROGRESS_S:
                told = now
                console.print(
                    f"{now - begin:6.0f} s  {run.graphs:6,} graphs  {run.results:9,} results, all right", highlight=False
                )
            try:
                run.one(index)
            except Exception:
                failures += 1
                print(f"FAILED: {run.scene().replace('GRAPH', str(index))}\n{traceback.format_exc()}", flush=True)
                if failures >= given.failures:
                    break
                run.crew.replace(list(range(given.max_actors)))
        flat = report(run, console)
    finally:
        run.close()
    took = time.monotonic() - begin
    console.print(f"seed {given.seed}: {run.graphs:,} graphs, {run.results:,} results in {took:.0f} s, {failures} failures")
    return 0 if flat and not failures else 1


if __name__ == "__main__":
    sys.exit(main())
