"""`raycomm.empty`: shared memory to be filled in place, so that sending it costs no copy."""

from __future__ import annotations

import contextvars
import math
import sys
from collections.abc import Sequence
from typing import Any

from raycomm import _core
from raycomm.channel import ShmArena
from raycomm.errors import RaycommError
from raycomm.plan import Plan
from raycomm.runtime.loop import shared_memory_error

# The graph whose loop runs the current method. Set once in each loop's own context.
_current: contextvars.ContextVar[tuple[ShmArena, Plan]] = contextvars.ContextVar("raycomm_graph")


def enter(arena: ShmArena, plan: Plan) -> None:
    """Say, in the context of a loop's thread, which graph's methods run there."""
    _current.set((arena, plan))


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
    return empty_in(*here, shape, dtype)


def empty_in(arena: ShmArena, plan: Plan, shape: Sequence[int] | int, dtype: Any) -> Any:
    """As `empty`, in the memory of one graph."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    torch = sys.modules.get("torch")
    count = math.prod(sizes)
    if torch is not None and isinstance(dtype, torch.dtype):
        memory = _lend(arena, plan, count * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(sizes) if count else torch.empty(sizes, dtype=dtype)
    import numpy

    kind = numpy.dtype(dtype)
    if kind.hasobject:
        raise RaycommError(f"raycomm.empty: dtype {kind} holds Python objects, which cannot lie in shared memory")
    return (
        numpy.ndarray(sizes, kind, memoryview(_lend(arena, plan, count * kind.itemsize))) if count else numpy.empty(sizes, kind)
    )


def _lend(arena: ShmArena, plan: Plan, size: int) -> _core.Buffer:
    try:
        return arena.core.lend(max(size, 1))
    except _core.PoolFull as error:
        raise shared_memory_error(error, plan, "raycomm.empty") from None
