"""What a collective does with torch tensors; imported only where there is one.

Tensors are put on memory with `set_`: it takes every dtype, where views, `numpy()` and `torch.empty` refuse or warn for some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from raycomm.graph.model import ReduceOp

if TYPE_CHECKING:
    from raycomm.runtime.reduction import Raw

_FUNCTIONS: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


class TorchArithmetic:
    """Combines tensors piece by piece; each step changes its first argument."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype_of(dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self._dtype.itemsize

    @property
    def family(self) -> str:
        """What operations make sense for."""
        if self._dtype is torch.bool:
            return "bool"
        if self._dtype.is_complex:
            return "complex"
        return "floating point" if self._dtype.is_floating_point else "integer"

    def on(self, raw: Raw) -> torch.Tensor:
        """A flat tensor on these bytes, which it keeps alive. Torch has no read-only tensors: see that nobody writes."""
        return _on_storage(torch.from_numpy(raw).untyped_storage(), self._dtype, (len(raw) // self.itemsize,))

    def new(self, shape: tuple[int, ...], elements: int) -> tuple[torch.Tensor, Raw]:
        """A new tensor and its bytes."""
        memory = torch.empty(elements * self.itemsize, dtype=torch.uint8, device="cpu")
        return _on_storage(memory.untyped_storage(), self._dtype, shape), memory.numpy()

    def step(self, op: ReduceOp, acc: torch.Tensor, x: torch.Tensor) -> None:
        """Combine `x` into `acc`."""
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            # Comparisons: which of 0.0 and -0.0 is a library's minimum depends on the place in the tensor.
            wins = x < acc if op is ReduceOp.MIN else x > acc
            if acc.is_floating_point():
                wins |= (x != x) & (acc == acc)
            acc[wins] = x[wins]
        elif op is ReduceOp.PRODUCT and acc.is_complex():
            # Part by part, each operation rounded once: fused ones are used in some places of a tensor and not in others.
            real, imag = acc.real * x.real - acc.imag * x.imag, acc.real * x.imag + acc.imag * x.real
            acc.real.copy_(real)
            acc.imag.copy_(imag)
        else:
            _FUNCTIONS[op](acc, x, out=acc)

    def divide(self, acc: torch.Tensor, count: int) -> None:
        """Divide `acc` by a number."""
        (torch.view_as_real(acc) if acc.is_complex() else acc).div_(count)


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name.

    Raises:
        AttributeError: this torch has none.
    """
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def raw_of(value: torch.Tensor) -> Raw:
    """The bytes of a tensor, row by row: a view of it where its memory is in that order."""
    flat = value.detach().resolve_conj().resolve_neg().contiguous()
    size = flat.numel() * flat.dtype.itemsize
    raw = torch.empty(0, dtype=torch.uint8, device="cpu")
    raw.set_(flat.untyped_storage(), flat.storage_offset() * flat.dtype.itemsize, (size,))  # type: ignore[call-overload]
    array: np.ndarray[Any, np.dtype[np.uint8]] = raw.numpy()
    return array


def _on_storage(storage: torch.UntypedStorage, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    value = torch.frombuffer(bytearray(dtype.itemsize), dtype=dtype)
    value.set_(storage, 0, shape)  # type: ignore[call-overload]
    return value
