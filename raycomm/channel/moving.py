"""Copies the tensors of a value from one kind of device to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raycomm.channel.tensors import put_together, take_apart


def move(to: str, those_on: str) -> Callable[[Any], Any]:
    """Gives values with those tensors copied to device `to` that lie on `those_on`; one without any stays itself.

    Looks in dicts, lists and tuples. Blocks for the copies. What it returns raises `SerializationError` for a value that is
    nested too deeply, and what torch raises where memory is short.
    """

    def is_meant(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == those_on

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.detach().to(to)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(there, requires_grad=tensor.requires_grad)
        return there.requires_grad_(tensor.requires_grad)

    def of(value: Any) -> Any:
        structure, tensors, leaves = take_apart(value, is_meant)
        return put_together(structure, [moved(tensor) for tensor in tensors], leaves) if tensors else value

    return of
