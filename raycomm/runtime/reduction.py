"""Tensors of several ranks, described, compared and combined. Knows no channels.

A tensor travels as a `Spec` and its raw bytes, a flat array of uint8: so every dtype travels, and peers read it where it lies in
shared memory. Everything here gives the same bits on every rank: tensors are combined in order of rank, in pieces of a fixed size
(libraries treat the ends of a piece apart, and split large ones among as many threads as a process has), with operations that
round each element once. torch is imported only where there is a torch tensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from raycomm.graph.model import CollectiveKind, ReduceOp

# Elements combined at a time: small enough for a core's cache, and for torch to use one thread.
_PIECE = 16384

_NUMPY, _TORCH, OTHER = "numpy", "torch", "other"
_ORDER = frozenset({ReduceOp.MIN, ReduceOp.MAX})
_BITS = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
_NUMBERS = frozenset({ReduceOp.SUM, ReduceOp.PRODUCT})
_ALLOWED = {
    "bool": _ORDER | _BITS,
    "integer": _NUMBERS | _ORDER | _BITS,
    "floating point": _NUMBERS | _ORDER | {ReduceOp.AVG},
    "complex": _NUMBERS | {ReduceOp.AVG},
}

Raw: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


@dataclass(frozen=True, slots=True)
class Spec:
    """What a tensor is. `kind` is "numpy", "torch", or "other" for what cannot be exchanged; then `dtype` says what it is."""

    kind: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        if self.kind == OTHER:
            return self.dtype
        if self.kind not in (_NUMPY, _TORCH):
            return f"torch {self.dtype} {self.shape} on its device"
        return f"{self.kind} {np.dtype(self.dtype) if self.kind == _NUMPY else self.dtype} {self.shape}"

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """How many bytes."""
        return self.elements * int(arithmetic(self).itemsize)


class Mismatch(Exception):
    """The tensors of the ranks cannot be exchanged; the text says why, without naming ranks."""


class NumpyArithmetic:
    """Combines arrays piece by piece; each step changes its first argument."""

    def __init__(self, dtype: str) -> None:
        self._dtype: np.dtype[Any] = np.dtype(dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self._dtype.itemsize

    @property
    def family(self) -> str:
        """What operations make sense for."""
        return {"b": "bool", "f": "floating point", "c": "complex"}.get(self._dtype.kind, "integer")

    def on(self, raw: Raw) -> Any:
        """A flat array on these bytes, which it keeps alive."""
        return raw.view(self._dtype)

    def new(self, shape: tuple[int, ...], elements: int) -> tuple[Any, Raw]:
        """A new array and its bytes."""
        array = np.empty(elements, self._dtype)
        return array.reshape(shape), array.view(np.uint8)

    def step(self, op: ReduceOp, acc: Any, x: Any) -> None:
        """Combine `x` into `acc`; the remarks in `torch_tensors` hold here too."""
        if op in _ORDER:
            wins = x < acc if op is ReduceOp.MIN else x > acc
            np.copyto(acc, x, where=wins | ((x != x) & (acc == acc)) if self._dtype.kind == "f" else wins)
        elif op is ReduceOp.PRODUCT and self._dtype.kind == "c":
            acc.real, acc.imag = acc.real * x.real - acc.imag * x.imag, acc.real * x.imag + acc.imag * x.real
        else:
            _UFUNCS[op](acc, x, out=acc)

    def divide(self, acc: Any, count: int) -> None:
        """Divide `acc` by a number."""
        for part in (acc.real, acc.imag) if self._dtype.kind == "c" else (acc,):
            np.divide(part, part.dtype.type(count), out=part)


_UFUNCS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def arithmetic(spec: Spec) -> Any:
    """How to calculate with tensors of this kind and dtype.

    Raises:
        Mismatch: this process's library lacks the dtype.
    """
    if spec.kind == _NUMPY:
        return NumpyArithmetic(spec.dtype)
    try:
        from raycomm.runtime.torch_tensors import TorchArithmetic

        return TorchArithmetic(spec.dtype)
    except (ImportError, AttributeError) as error:
        raise Mismatch(f"an actor cannot take part: {error}") from None


def describe(value: Any) -> Spec:
    """The spec of a value; of kind "other" where it cannot be exchanged."""
    if type(value) is np.ndarray:
        known = value.dtype.kind in "biufc"
        return Spec(_NUMPY, value.dtype.str, value.shape) if known else Spec(OTHER, f"a numpy array of {value.dtype}", ())
    torch: Any = sys.modules.get("torch")
    if torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.device.type != "cpu":
            return Spec(OTHER, f"a torch tensor on {value.device}", ())
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            return Spec(OTHER, f"a torch tensor of layout {value.layout} and dtype {value.dtype}", ())
        return Spec(_TORCH, str(value.dtype).removeprefix("torch."), tuple(value.shape))
    return Spec(OTHER, f"a value of type {type(value).__name__}", ())


def raw_of(value: Any) -> Raw:
    """The bytes of a tensor, row by row: a view of it where its memory is in that order."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    from raycomm.runtime import torch_tensors

    return torch_tensors.raw_of(value)


def check(kind: CollectiveKind, op: ReduceOp | None, root: int | None, ranks: Sequence[Sequence[Spec]]) -> None:
    """Whether the tensors of all ranks can be exchanged; every rank comes to the same answer.

    Raises:
        Mismatch: they cannot.
    """
    looked_at = ranks if root is None else [ranks[root]]
    if any(spec.kind == OTHER for specs in looked_at for spec in specs):
        needs = "every actor must give CPU tensors of torch, or every actor arrays of numpy, of numbers"
        if any("torch tensor on" in spec.dtype for specs in looked_at for spec in specs):
            needs += "; for tensors on GPUs communicator='nccl' says what keeps these actors from combining them there"
        raise Mismatch(needs)
    if any(specs != looked_at[0] for specs in looked_at):
        raise Mismatch("they must be alike in kind, dtype and shape")
    first, *others = looked_at[0]
    if any((spec.kind, spec.dtype) != (first.kind, first.dtype) for spec in others):
        raise Mismatch("the tensors of one actor must have one kind and dtype")
    if kind in (CollectiveKind.ALLGATHER, CollectiveKind.REDUCESCATTER) and not first.shape:
        raise Mismatch(f"{kind} needs a dimension 0")
    if kind is CollectiveKind.REDUCESCATTER and first.shape[0] % len(ranks):
        raise Mismatch(f"dimension 0 must be divisible by the {len(ranks)} actors")
    if op is not None:
        family = arithmetic(first).family
        if op not in _ALLOWED[family]:
            fits = ", ".join(sorted(known.name for known in _ALLOWED[family]))
            raise Mismatch(f"{op.name} is not for {family} tensors, which have {fits}; convert them first")


def combine(spec: Spec, op: ReduceOp, sources: Sequence[Raw], into: Raw) -> None:
    """Combine the bytes of tensors, one per rank in order, into others of the same length.

    Raises:
        Mismatch: torch has no such operation for the dtype on a CPU.
    """
    numbers = arithmetic(spec)
    step = _PIECE * numbers.itemsize
    try:
        with np.errstate(all="ignore"):
            for start in range(0, len(into), step):
                piece = slice(start, start + step)
                into[piece] = sources[0][piece]
                result = numbers.on(into[piece])
                for source in sources[1:]:
                    numbers.step(op, result, numbers.on(_unmarked(source[piece])))
                if op is ReduceOp.AVG:
                    numbers.divide(result, len(sources))
    except (RuntimeError, TypeError) as error:  # what torch raises for "not implemented for 'Float8...'"
        problem = f"{spec.kind} cannot combine {spec.dtype} with {op.name} on a CPU ({error}); convert the tensors"
        raise Mismatch(problem) from None


class _Alias:
    """The memory of a read-only array without the mark; keeps the array alive."""

    def __init__(self, raw: Raw) -> None:
        self._raw = raw
        self.__array_interface__ = {**raw.__array_interface__, "data": (raw.ctypes.data, False)}


def _unmarked(raw: Raw) -> Raw:
    # torch has no read-only tensors and warns of the mark; nothing here writes to it.
    return raw if raw.flags.writeable else np.asarray(_Alias(raw))
