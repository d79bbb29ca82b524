"""Ends in the way that the first argument names. Its actors run a graph's loops ("raycomm") or are called plainly ("plain").

    python tests/ray/scripts/way_out.py falls_off raycomm

Prints one line of JSON: the processes that Ray started and the files under /dev/shm that are mapped; then what the way prints.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import ray

WAY, MODE = sys.argv[1:]


@ray.remote(num_cpus=0)
class Worker:
    """One method, which passes its argument on unless it is told otherwise."""

    def step(self, x: Any) -> Any:
        if x == "sleep":
            time.sleep(3600)
        if x == "exit_actor":
            ray.actor.exit_actor()
        return x


class Plain:
    """Does with plain calls what a graph does: a chain of two, and refs with `get`."""

    def __init__(self, workers: list[Any]) -> None:
        self._workers = list(workers)

    def execute(self, x: Any) -> Any:
        return PlainRef(self._workers[1].step.remote(self._workers[0].step.remote(x)))


class PlainRef:
    """A ref with `get`."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    def get(self) -> Any:
        return ray.get(self._ref)


def make(workers: list[Any]) -> Any:
    """A graph of the two, or its plain double."""
    if MODE == "plain":
        return Plain(workers)
    import raycomm

    with raycomm.InputNode() as x:
        out = raycomm.bind(workers[1].step, raycomm.bind(workers[0].step, x))
    return raycomm.compile(out)


def shared_files(pids: list[int]) -> list[str]:
    """Files under /dev/shm that these processes map."""
    files: set[str] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        files |= {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
    return sorted(files)


def say(text: str) -> None:
    """One line to the test, at once."""
    print(text, flush=True)


def say_when_blocked(thread: int) -> None:
    """Says so once that thread is inside a ref's `get`."""
    while True:
        frame: Any = sys._current_frames()[thread]
        while frame is not None and frame.f_code.co_name != "get":
            frame = frame.f_back
        if frame is not None:
            say("blocked")
            return
        time.sleep(0.001)


def main() -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    workers = [Worker.remote() for _ in range(2)]
    graph = make(workers)
    for value in range(3):
        assert graph.execute(value).get() == value
    pids = [child.pid for child in psutil.Process().children(recursive=True)]
    say(json.dumps({"pids": pids, "files": shared_files([os.getpid(), *pids])}))
    if WAY == "falls_off":
        pass
    elif WAY == "sys_exit":
        sys.exit(3)
    elif WAY == "uncaught":
        raise ValueError("on purpose")
    elif WAY == "interrupt":
        ref = graph.execute("sleep")
        threading.Thread(target=say_when_blocked, args=[threading.get_ident()], daemon=True).start()
        try:
            ref.get()
        except KeyboardInterrupt:
            say(f"interrupted {time.monotonic()}")
            raise
    elif WAY == "dropped":
        del graph
    elif WAY == "unfetched":
        global refs
        refs = [graph.execute(value) for value in range(5)]
    elif WAY == "in_a_method":
        global busy
        busy = graph.execute("sleep")
    elif WAY == "shutdown":
        ray.shutdown()
    elif WAY == "exit_actor":
        try:
            graph.execute("exit_actor").get()
        except ray.exceptions.ActorDiedError:
            say("died")
    elif WAY == "handle_gone":
        del workers
        say(str(graph.execute(7).get()))
    elif WAY == "killed":
        say("blocked")
        time.sleep(3600)
    else:
        raise SystemExit(f"no way {WAY!r}")
    if WAY == "falls_off":
        global kept
        kept = graph  # lives until the interpreter ends


main()
