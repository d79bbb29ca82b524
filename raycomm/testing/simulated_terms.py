"""What a collective gives, for the two kinds of contents of simulated memory: terms, and real tensors."""

from __future__ import annotations

import sys
from typing import Any


def combine(kind: str, op: str | None, root: int | None, rank: int, given: list[Any]) -> Any:
    """What `rank` gets from what each rank gives.

    Tensors are combined; anything else becomes a term that shows the collective, the rank and all that was given.
    """
    torch = sys.modules.get("torch")  # Where it is not loaded, there are no tensors.
    if torch is None or not all(isinstance(content, torch.Tensor) for content in given):
        return (kind, op, rank, tuple(given))
    from raycomm.device.combining import combine as combine_tensors

    return combine_tensors(kind, op, root, rank, given)
