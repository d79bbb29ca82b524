"""A driver that does what users reported, by the name in the first argument; the second is a cluster's address, or "local".

    python tests/ray/scripts/reports.py teardown_twice local

Prints "pids" and the processes it has started, then what the way prints, a word a line.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import os
import sys
import threading
import time
from typing import Any

import psutil
import ray

import raycomm

WAY, ADDRESS = (*sys.argv[1:3], "", "")[:2]  # also imported, for its actors
KEPT: list[Any] = []


class Worker:
    """One method, and a slow one."""

    def step(self, x: Any) -> Any:
        if x == "exit":
            os._exit(7)
        if x == "raise":
            raise ValueError("on purpose")
        return x

    def slow(self, x: Any) -> Any:
        time.sleep(0.3)
        return x

    def modules(self) -> list[str]:
        return list(sys.modules)


def say(*words: Any) -> None:
    """One line to the test, at once."""
    print(*words, flush=True)


def chain(*methods: Any) -> Any:
    """A graph of the methods one after the other."""
    with raycomm.InputNode() as x:
        value: Any = x
        for method in methods:
            value = raycomm.bind(method, value)
    return value


def in_child(what: Any) -> None:
    """Do `what` in a forked child, which then ends at once."""
    child = os.fork()
    if child == 0:
        try:
            what()
            os._exit(0)
        except raycomm.RaycommError:
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def main() -> None:
    """The way."""
    if ADDRESS == "local":
        ray.init(address="local", num_cpus=2, include_dashboard=False)
        worker: Any = ray.remote(num_cpus=0)(Worker)
        workers = [worker.remote() for _ in range(2)]
    else:
        ray.init(address=ADDRESS, namespace="reports", log_to_driver=False)
        workers = [ray.get_actor(f"w{number}") for number in range(2)]
    graph = raycomm.compile(chain(workers[0].step, workers[1].step), name=WAY)
    assert [graph.execute(value).get() for value in range(3)] == [0, 1, 2]
    say("pids", *[child.pid for child in psutil.Process().children(recursive=True)])
    if WAY == "teardown_twice":
        refs = [graph.execute(value) for value in range(5)]
        threads = [threading.Thread(target=graph.teardown) for _ in range(2)]
        for thread in threads:
            thread.start()
        del refs
        graph.teardown()
    elif WAY == "exit_in_method":
        try:
            graph.execute("exit").get()
        except raycomm.ActorDiedError:
            say("died")
    elif WAY == "raise_in_flight":
        KEPT.extend(graph.execute(value) for value in range(8))
        raise ValueError("of the driver")
    elif WAY == "unfetched":
        refs = [graph.execute(value) for value in range(8)]
        graph.teardown()
        del refs[:4]
        KEPT.extend(refs)
    elif WAY == "unfetched_async":

        async def some() -> None:
            KEPT.extend([graph.execute(value) for value in range(8)])
            assert await KEPT[3] == 3
            waiting = asyncio.ensure_future(asyncio.wait_for(KEPT[4], 10))
            await asyncio.sleep(0)
            waiting.cancel()

        asyncio.run(some())
    elif WAY == "error_kept":
        try:
            graph.execute("raise").get()
        except ValueError as error:
            KEPT.append(error)
        del graph
        gc.collect()
    elif WAY == "thread_in_get":
        slow = raycomm.compile(chain(workers[0].slow, workers[1].slow))
        KEPT.extend([graph, slow])
        refs = [slow.execute(value) for value in range(10)]

        def wait() -> None:
            with contextlib.suppress(raycomm.ChannelClosedError):  # what a waiting thread is told at exit
                refs[-1].get()

        threading.Thread(target=wait, daemon=True).start()
    elif WAY == "teardown_at_exit":
        atexit.register(graph.teardown)
        KEPT.append(graph.execute(1))
    elif WAY == "forked":
        ref = graph.execute(9)
        for what in (graph.teardown, lambda: graph.execute(1), lambda: ref.get(timeout=1), gc.collect):
            in_child(what)
        assert ref.get() == 9
        assert [graph.execute(value).get() for value in range(50)] == list(range(50))
        graph.teardown()
    elif WAY == "outlive":
        say("ready")
        sys.stdin.readline()
    elif WAY == "in_flight":
        slow = raycomm.compile(chain(workers[0].slow, workers[1].slow))
        KEPT.extend(slow.execute(value) for value in range(8))
        say("ready")
        for ref in KEPT:
            ref.get()
        time.sleep(60)
    elif WAY == "bare":
        loaded = set(sys.modules).union(*ray.get([actor.modules.remote() for actor in workers]))
        say("loaded", *sorted(loaded & {"pandas", "pyarrow", "cupy", "scipy"}))
    elif WAY == "many":
        for value in range(300):
            assert graph.execute(value).get() == value
        graph.teardown()
    else:
        raise SystemExit(f"no way {WAY!r}")
    say("done")


if __name__ == "__main__":
    main()
