"""What a collective gives, from the tensors of all ranks: in order of rank, so every rank computes the same bits."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import torch

_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": operator.add,
    "avg": operator.add,
    "product": operator.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": operator.and_,
    "bor": operator.or_,
    "bxor": operator.xor,
}


def combine(kind: str, op: str | None, root: int | None, rank: int, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """What `rank` gets. The result may share memory with `given`."""
    if kind == "broadcast":
        return given[root or 0]
    if kind == "allgather":
        return torch.cat(list(given))
    if op == "avg" and not (given[0].is_floating_point() or given[0].is_complex()):
        raise ValueError(f"the average of {given[0].dtype} is not of that dtype; use sum, or floating point numbers")
    if op not in _REDUCE:
        raise ValueError(f"no operation {op!r}; there are {', '.join(_REDUCE)}")
    whole = functools.reduce(_REDUCE[op], given)
    if op == "avg":
        whole = whole / len(given)
    return whole.chunk(len(given))[rank] if kind == "reducescatter" else whole
