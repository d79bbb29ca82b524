"""What the tests of awaiting share: graphs to await, and ways to run a coroutine that ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from raycomm import InputNode, MultiOutputNode, bind
from tests.ray.workers import PATIENCE_S, Gate


def held(workers: list[Any], gate: Gate) -> Any:
    """input -> w0 holds at the gate -> w1 passes on."""
    with InputNode() as x:
        return bind(workers[1].echo, bind(workers[0].hold, x, gate.path))


def forked(workers: list[Any]) -> Any:
    """Three outputs, the second from the first; the input itself is the third."""
    with InputNode() as x:
        a = bind(workers[0].echo, x)
        b = bind(workers[1].add, a)
        return MultiOutputNode([a, b, x])


async def one(graph: Any, *args: Any, **kwargs: Any) -> Any:
    return await (await graph.execute_async(*args, **kwargs))


async def soon(condition: Any, what: str) -> None:
    """Returns once `condition()` is true, leaving the event loop to others meanwhile."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.001)


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, PATIENCE_S))


def armed(graph: Any) -> bool:
    """Whether something still stands by for the graph's results: a task, a loop that watches, or one about to look again."""
    waker = graph._waker
    return bool(waker.waiting or waker._watching or waker._soon or len(graph._line))
