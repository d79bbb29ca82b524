"""Executes and gets in a loop while SIGINT strikes at random moments, each raised as KeyboardInterrupt; checks every value.

Arguments: a seed, and how many strikes to wait for.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from typing import Any

import ray

import raycomm
from tests.ray.workers import start

SEED, STRIKES = map(int, sys.argv[1:])
ALARM_S = 0.004  # the mean time between strikes


class Strikes:
    """Sends this process SIGINT after random times, until enough were seen."""

    def __init__(self) -> None:
        self.seen = 0
        self.outside = 0
        self.wanted = False  # until somebody is there to catch them
        self._rng = random.Random(SEED)
        self._stop = threading.Event()
        signal.signal(signal.SIGINT, self._strike)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _strike(self, _number: int, _frame: Any) -> None:
        if self.wanted:
            self.seen += 1
            raise KeyboardInterrupt

    def _run(self) -> None:
        while not self._stop.wait(self._rng.expovariate(1 / ALARM_S)):
            os.kill(os.getpid(), signal.SIGINT)


def value_of(number: int) -> Any:
    """What execution `number` carries; every fourth one is large enough for a block."""
    return (number, bytes([number % 251]) * 5000) if number % 4 == 0 else (number, b"")


def run(graph: Any, strikes: Strikes, rng: random.Random) -> tuple[int, int]:
    """Until enough strikes were seen. Returns how many values were checked, and how many gets were struck and repeated."""
    # An execution whose ref was lost to a strike has no one to check it; that it is given up shows in those that follow.
    kept: list[tuple[int, Any]] = []
    checked = repeated = number = 0
    ref: Any = None
    strikes.wanted = True
    while strikes.seen < STRIKES:
        try:
            while strikes.seen < STRIKES:
                if len(kept) < 12 and rng.random() < 0.6:
                    number += 1
                    ref = None
                    ref = graph.execute(value_of(number), timeout=20)
                    kept.append((number, ref))
                elif kept:
                    place = rng.randrange(len(kept))
                    expected, held = kept[place]
                    assert held.get(timeout=20) == value_of(expected), expected
                    # Checked, and struck before it is taken off the list: then it is checked again, which is fine.
                    checked += 1
                    del kept[place]
        except KeyboardInterrupt:
            repeated += 1
    strikes.end()
    for expected, held in kept:
        assert held.get(timeout=20) == value_of(expected), expected
        checked += 1
    return checked, repeated


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    workers = start(2)
    with raycomm.InputNode() as x:
        out = raycomm.bind(workers[1].echo, raycomm.bind(workers[0].echo, x))
    graph = raycomm.compile(out, max_inflight=4, max_buffered_results=30)
    strikes = Strikes()
    rng = random.Random(SEED + 1)
    strikes.begin()
    while True:
        try:
            checked, repeated = run(graph, strikes, rng)
            break
        except KeyboardInterrupt:  # between two of its statements
            strikes.outside += 1
    for number in range(200):  # unharmed: in order, at full length
        assert graph.execute(value_of(number), timeout=20).get(timeout=20) == value_of(number)
    refs = [graph.execute(value_of(number), timeout=20) for number in range(20)]
    assert [held.get(timeout=20) for held in refs] == [value_of(number) for number in range(20)]
    graph.teardown()
    print(f"{strikes.seen} strikes, {checked} values checked, {repeated} caught")
    ray.shutdown()


main()
