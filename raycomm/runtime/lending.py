"""`raycomm.empty`: shared memory to be filled in place, so that sending it costs no copy."""

from __future__ import annotations

import contextvars
import math
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

from raycomm import _core
from raycomm.channel import Deadline, ShmArena, ShmReader
from raycomm.errors import ArgumentError, RaycommError
from raycomm.observe.notice import Notice
from raycomm.plan.actions import Plan
from raycomm.runtime.memory_error import shared_memory_error

# The graph whose loop runs the current method. Weak: a task that a method starts inherits the context, and may outlive the graph.
_current: contextvars.ContextVar[tuple[weakref.ref[ShmArena], Plan]] = contextvars.ContextVar("raycomm_graph")


@contextmanager
def lending(arena: ShmArena, plan: Plan) -> Iterator[None]:
    """In this context methods of the graph run, and may take memory of it."""
    token = _current.set((weakref.ref(arena), plan))
    try:
        yield
    finally:
        _current.reset(token)


def empty(shape: Sequence[int] | int, dtype: Any) -> Any:
    """An uninitialised tensor or array in shared memory, for a graph's method to fill and return: it is sent without a copy.

    Ownership: it is the method's until it is returned, and its receivers' from then on. Receivers see, torn or not, what is
    written to it after it was returned: do not keep it. It is sent without a copy once, whole, on one edge; on a second edge or
    in another execution, as a slice, or below 32 KiB it is copied as usual. Its memory goes back to the graph when neither this
    process nor a receiver has a view of it.

    Args:
        shape: of the result; an integer for one dimension.
        dtype: a `torch.dtype` gives a `torch.Tensor`, anything `numpy.dtype` takes a `numpy.ndarray`. Contiguous, row-major.

    Raises:
        RaycommError: called outside a method that a graph runs; in the driver use `graph.empty`.
        TypeError, ArgumentError: `shape` is none, or `dtype` is none.
        SharedMemoryError: no memory for it.
    """
    here = _current.get(None)
    if here is None:
        raise RaycommError("raycomm.empty works inside a method that a graph runs; in the driver use graph.empty(shape, dtype)")
    arena, plan = here[0](), here[1]
    if arena is None or arena.closed[0]:
        raise RaycommError(f"raycomm.empty: graph {plan.name!r}, which ran this method, has ended")

    def lend(size: int) -> _core.Buffer:
        try:
            return arena.core.lend(size)
        except _core.PoolFull as error:
            raise shared_memory_error(error, arena.core, plan, "raycomm.empty") from None
        except _core.Closed:
            raise RaycommError(f"raycomm.empty: graph {plan.name!r}, which ran this method, has ended") from None

    return filled_by(lend, shape, dtype)


def lent_in_time(
    arena: ShmArena,
    size: int,
    deadline: Deadline,
    readers: tuple[ShmReader, ...],
    free: Callable[[], None],
    waits: Callable[[], str],
) -> _core.Buffer:
    """Memory of the driver, for an input. Waits while messages on their way hold all.

    Args:
        arena: the driver's.
        size: in bytes.
        readers: of results. When one can be taken, `free` is called: the memory it lies in may be what lacks.
        free: moves finished results aside.
        waits: the log line for a long wait.

    Raises:
        raycomm._core.TimedOut: none before the deadline. PoolFull: none at all. Closed, Misuse: see there.
    """
    notice = Notice()
    while True:
        try:
            return arena.core.lend(size, deadline.left(at_most=notice.left()), readers)
        except _core.PoolBusy:
            free()
        except _core.TimedOut:
            if deadline.over:
                raise
            notice.give(waits)


def filled_by(lend: Callable[[int], _core.Buffer], shape: Sequence[int] | int, dtype: Any) -> Any:
    """As `empty`, with memory that `lend` gives: so many bytes, at least one."""
    sizes = _sizes(shape)
    torch = sys.modules.get("torch")
    count = math.prod(sizes)
    if torch is not None and isinstance(dtype, torch.dtype):
        if not count:
            return torch.empty(sizes, dtype=dtype)
        return torch.frombuffer(lend(_bytes(count, dtype.itemsize, shape)), dtype=dtype, count=count).view(sizes)
    import numpy

    try:
        kind = numpy.dtype(dtype)
    except Exception as error:
        wanted = "a torch.dtype, or what numpy.dtype takes"
        raise TypeError(f"raycomm.empty: {dtype!r:.80} is no dtype; give {wanted} ({error})") from None
    if kind.hasobject:
        raise RaycommError(f"raycomm.empty: dtype {kind} holds Python objects, which cannot lie in shared memory")
    if not count:
        return numpy.empty(sizes, kind)
    return numpy.ndarray(sizes, kind, memoryview(lend(_bytes(count, kind.itemsize, shape))))


def _sizes(shape: Sequence[int] | int) -> tuple[int, ...]:
    """`shape` as plain integers; those of numpy are as good.

    Raises:
        TypeError: it is neither an integer nor a sequence of such. ArgumentError: one is negative.
    """
    wanted = "an integer of at least 0, or a sequence of such"
    try:
        # Among those refused: bool, which is a condition in the wrong place, and what has no order.
        if isinstance(shape, (bool, str, bytes, Set, Mapping)):
            raise TypeError
        given: list[Any] = [shape] if _is_integer(shape) else list(shape)  # type: ignore[arg-type]
        if any(isinstance(size, bool) for size in given):
            raise TypeError
        sizes = tuple(map(operator.index, given))
    except TypeError:
        raise TypeError(f"raycomm.empty: {shape!r:.80} is no shape; give {wanted}") from None
    if any(size < 0 for size in sizes):
        raise ArgumentError(
            f"raycomm.empty: shape {shape!r:.80} has a negative size; give {wanted}", expected=wanted, given=f"{shape!r:.80}"
        )
    return sizes


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _bytes(count: int, item_bytes: int, shape: object) -> int:
    """How much memory to ask for: a block has at least one byte."""
    size = count * item_bytes
    if size > sys.maxsize:
        raise ArgumentError(
            f"raycomm.empty: shape {shape!r:.80} takes {size} bytes, more than there can be; give a smaller one",
            expected=f"at most {sys.maxsize} bytes",
            given=f"{size} bytes",
        )
    return max(1, size)
