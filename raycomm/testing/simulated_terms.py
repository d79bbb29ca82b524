"""What a collective gives, for the two kinds of contents of simulated memory: terms, and real tensors."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

_REDUCE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add,
    "avg": operator.add,
    "product": operator.mul,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}


def combine(kind: str, op: str | None, root: int | None, rank: int, given: list[Any]) -> Any:
    """What `rank` gets from what each rank gives.

    Tensors are combined; anything else becomes a term that shows the collective, the rank and all that was given.
    """
    torch = sys.modules.get("torch")
    if torch is None or not all(isinstance(content, torch.Tensor) for content in given):
        return (kind, op, root, rank, tuple(given))
    if kind == "broadcast":
        return given[root or 0]
    if kind == "allgather":
        return torch.cat(given)
    whole = _reduced(torch, str(op), given)
    return torch.chunk(whole, len(given))[rank] if kind == "reducescatter" else whole


def _reduced(torch: Any, op: str, given: list[Any]) -> Any:
    if op in ("min", "max"):
        return functools.reduce(torch.minimum if op == "min" else torch.maximum, given)
    whole = functools.reduce(_REDUCE[op], given)
    return whole / len(given) if op == "avg" else whole
