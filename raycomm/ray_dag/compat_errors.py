"""Errors in the words of Ray's compiled graphs, for code that looks for them; what raycomm knows beyond that follows behind.

All are raycomm's dual classes: ours, and Ray's of the same meaning.
"""

from __future__ import annotations

from typing import Any

from raycomm.errors import ActorDiedError, ChannelClosedError, ChannelTimeoutError, RaycommError
from raycomm.runtime import ray_errors


def too_many_in_flight(graph: str, limit: int, count: int) -> BaseException:
    """`execute` beyond the in-flight limit."""
    error: BaseException = ray_errors.CapacityExceededError(
        f"The compiled graph can't have more than {limit} in-flight executions, and you currently have {count} in-flight "
        "executions. Retrieve an output using ray.get before submitting more requests or increase "
        "`_max_inflight_executions`. `dag.experimental_compile(_max_inflight_executions=...)`",
        graph=graph,
        limit=limit,
        count=count,
    )
    return error


def too_many_buffered(graph: str, limit: int, count: int) -> BaseException:
    """`get` of a result with too many earlier ones unfetched."""
    error: BaseException = ray_errors.CapacityExceededError(
        f"The compiled graph can't have more than {limit} buffered results, and you currently have {count} buffered results. "
        "Call `ray.get()` on CompiledDAGRef's (or await on CompiledDAGFuture's) to retrieve results, or increase "
        "`_max_buffered_results` if buffering is desired, note that this will increase driver memory usage.",
        graph=graph,
        limit=limit,
        count=count,
    )
    return error


def submitting(error: RaycommError, submit_timeout: float) -> BaseException:
    """What `execute` raises in place of `error`."""
    if isinstance(error, ChannelTimeoutError):
        return _behind(_LATE.format(what="submit", timeout=submit_timeout, worst="execution"), error, str(error))
    return _reworded(error)


def fetching(error: RaycommError, get_timeout: float, limit: float | None) -> BaseException:
    """What `get` raises in place of `error`, which is about the graph and not what a method raised."""
    if isinstance(error, ChannelTimeoutError):
        more = f"Execution {error.execution} of graph {error.graph!r} gave no result within {limit} s: {error.waits_for}"
        return _behind(_LATE.format(what="get", timeout=get_timeout, worst="the execution"), error, more)
    return _reworded(error)


_LATE = (
    "If the execution is expected to take a long time, increase RAY_CGRAPH_{what}_timeout which is currently {timeout} seconds. "
    "Otherwise, this may indicate that {worst} is hanging."
)


def _reworded(error: RaycommError) -> BaseException:
    if isinstance(error, ChannelClosedError):
        return _behind("Channel closed.", error, str(error))
    if isinstance(error, ActorDiedError):
        return _behind("The actor died unexpectedly before finishing this task.", error, str(error))
    return error


def _behind(text: str, error: Any, more: str) -> BaseException:
    again: BaseException = type(error)(f"{text} {more}", **error.attributes)
    return again
