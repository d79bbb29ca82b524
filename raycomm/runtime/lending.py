"""`raycomm.empty`: shared memory to be filled in place, so that sending it costs no copy."""

from __future__ import annotations

import contextvars
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from raycomm import _core
from raycomm.channel import ShmArena
from raycomm.errors import RaycommError
from raycomm.plan import Plan
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


def filled_by(lend: Callable[[int], _core.Buffer], shape: Sequence[int] | int, dtype: Any) -> Any:
    """As `empty`, with memory that `lend` gives: so many bytes, at least one."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    torch = sys.modules.get("torch")
    count = math.prod(sizes)
    if torch is not None and isinstance(dtype, torch.dtype):
        memory = lend(max(1, count * dtype.itemsize))
        return torch.frombuffer(memory, dtype=dtype, count=count).view(sizes) if count else torch.empty(sizes, dtype=dtype)
    import numpy

    kind = numpy.dtype(dtype)
    if kind.hasobject:
        raise RaycommError(f"raycomm.empty: dtype {kind} holds Python objects, which cannot lie in shared memory")
    return numpy.ndarray(sizes, kind, memoryview(lend(max(1, count * kind.itemsize)))) if count else numpy.empty(sizes, kind)
