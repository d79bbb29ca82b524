"""Waiting for all outputs of an execution, or for the first of them that fails: Ray's rule for graphs with several outputs."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from raycomm.runtime.refs import PENDING, Ref
from raycomm.runtime.waiting import wait

_NO_LIMIT: Final = -1


def wait_for_all(refs: tuple[Ref, ...], end: float | None) -> Ref | None:
    """Blocks until all have a value; returns None, or the first ref that failed, at once.

    Args:
        refs: of one execution.
        end: on the monotonic clock; None: no limit.

    Raises:
        ChannelTimeoutError: not within the limit. ActorDiedError, ChannelClosedError: the graph has ended.
    """
    waiting = list(dict.fromkeys(refs))
    while len(waiting) > 1:
        done, others = wait(waiting, 1, _left(end))
        if not done:
            break
        if not _succeeded(done[0], None):
            return done[0]
        waiting = others
    for ref in waiting:
        if not _succeeded(ref, end):
            return ref
    return None


async def wait_for_all_async(refs: tuple[Ref, ...]) -> Ref | None:
    """As `wait_for_all`, in the event loop, and as long as the refs themselves may be awaited."""
    distinct = list(dict.fromkeys(refs))
    if len(distinct) == 1:
        return None if await _succeeded_async(distinct[0]) else distinct[0]
    tasks = {asyncio.ensure_future(_succeeded_async(ref)): ref for ref in distinct}
    for task in tasks:
        task.add_done_callback(_looked_at)
    try:
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.result():
                    return tasks[task]
        return None
    finally:
        for task in tasks:
            task.cancel()


def _succeeded(ref: Ref, end: float | None) -> bool:
    """Blocks until it has a value, or has failed. What is no failure of its execution is raised."""
    left = _left(end)
    try:
        ref.get(_NO_LIMIT if left is None else left)
    except Exception:
        if ref._value is PENDING:
            raise
        return False
    return True


async def _succeeded_async(ref: Ref) -> bool:
    try:
        await ref
    except Exception:
        if ref._value is PENDING:
            raise
        return False
    return True


def _looked_at(task: asyncio.Task[bool]) -> None:
    """asyncio logs an error that nobody asks for; of several, one is raised, and that says it all."""
    if not task.cancelled():
        task.exception()


def _left(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())
