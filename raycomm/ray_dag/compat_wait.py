"""Waiting for all outputs of an execution, or for the first of them that fails: Ray's rule for graphs with several outputs."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from raycomm.errors import ChannelTimeoutError
from raycomm.runtime.refs import PENDING, Ref

_NO_LIMIT: Final = -1
_SLICE_S: Final = 0.01


def wait_for_all(refs: tuple[Ref, ...], end: float | None) -> Ref | None:
    """Blocks until all have a value; returns None, or the first ref that failed, at once.

    Args:
        refs: of one execution.
        end: on the monotonic clock; None: no limit.

    Raises:
        ChannelTimeoutError: not within the limit. ActorDiedError, ChannelClosedError: the graph has ended.
    """
    waiting = list(dict.fromkeys(refs))
    while waiting:
        for ref in _ready(waiting, end):
            if not _succeeded(ref):
                return ref
            waiting.remove(ref)
    return None


async def wait_for_all_async(refs: tuple[Ref, ...]) -> Ref | None:
    """As `wait_for_all`, in the event loop and without a limit."""
    distinct = list(dict.fromkeys(refs))
    if len(distinct) == 1:
        await _settled(distinct[0])
        return None if _succeeded(distinct[0]) else distinct[0]
    tasks = {asyncio.ensure_future(_settled(ref)): ref for ref in distinct}
    try:
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
                if not _succeeded(tasks[task]):
                    return tasks[task]
        return None
    finally:
        for task in tasks:
            task.cancel()


async def _settled(ref: Ref) -> None:
    """Returns once `ref` has a value or failure."""
    try:
        await ref
    except Exception:
        if ref._value is PENDING:
            raise


def _succeeded(ref: Ref) -> bool:
    """Of a ref that has a value or failure."""
    try:
        ref.get(0)
    except Exception:
        if ref._value is PENDING:
            raise
        return False
    return True


def _ready(waiting: list[Ref], end: float | None) -> list[Ref]:
    """At least one of `waiting`, with a value or failure."""
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        if len(waiting) == 1:
            return [waiting[0]] if _there(waiting[0], left) else []
        ready = [ref for ref in waiting if _there(ref, 0.0, quiet=True)]
        if ready:
            return ready
        _there(waiting[0], 0.0 if left == 0.0 else _SLICE_S, quiet=left != 0.0)


def _there(ref: Ref, limit: float | None, quiet: bool = False) -> bool:
    try:
        ref.get(_NO_LIMIT if limit is None else limit)
    except Exception as error:
        if ref._value is not PENDING:
            return True
        if quiet and isinstance(error, ChannelTimeoutError):
            return False
        raise
    return True
