"""The same graph in plain Python: what each output must be, or how it must fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from tests.chaos.graphs import Call, Const, Exchange, Input, Operand, Result, Spec
from tests.chaos.methods import Methods
from tests.chaos.values import holds_unsendable

_METHODS = Methods()
_OPS: dict[str, Any] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}


@dataclass(frozen=True)
class Failed:
    """One of these errors must come: the name of its type, and a part of its text."""

    ways: frozenset[tuple[str, str]]

    def admits(self, error: BaseException) -> bool:
        """Whether `error` is one of them."""
        names = {kind.__name__ for kind in type(error).__mro__}
        return any(name in names and text in str(error) for name, text in self.ways)


def evaluate(spec: Spec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The outputs of one execution: values, or `Failed`."""
    made: list[list[Any]] = []

    def value(operand: Operand, reader: int | None) -> Any:
        """As actor `reader`, or the driver, gets it."""
        if isinstance(operand, Const):
            return operand.value
        if isinstance(operand, Input):
            return args[operand.key or 0] if not isinstance(operand.key, str) else kwargs[operand.key]
        found = made[operand.step][operand.element]
        if spec.owner(operand) != reader and holds_unsendable(found):
            return Failed(frozenset({("SerializationError", "Unsendable")}))
        return found

    for step in spec.steps:
        made.append(_call(step, value) if isinstance(step, Call) else _exchange(step, value))
    return [value(operand, None) for operand in spec.outputs]


def _failures(values: Sequence[Any]) -> Failed | None:
    found = [value.ways for value in values if isinstance(value, Failed)]
    return Failed(frozenset().union(*found)) if found else None


def _call(step: Call, value: Any) -> list[Any]:
    args = [value(operand, step.actor) for operand in step.args]
    kwargs = {name: value(operand, step.actor) for name, operand in step.kwargs.items()}
    failed = _failures([*args, *kwargs.values()])
    if failed is not None:
        return [failed] * step.returns
    try:
        result = getattr(_METHODS, step.method)(*args, **kwargs)
    except LookupError as error:
        return [Failed(frozenset({("LookupError", str(error))}))]
    if step.returns == 1:
        return [result]
    if not isinstance(result, (tuple, list)) or len(result) != step.returns:
        return [Failed(frozenset({("ValueError", f"is declared to return {step.returns} values")}))] * step.returns
    return list(result)


def _exchange(step: Exchange, value: Any) -> list[Any]:
    tensors = [value(result, actor) for actor, result in step.ranks]
    world = len(tensors)
    failed = _failures(tensors)
    if failed is not None:
        return [failed] * world
    if step.kind == "broadcast":
        return [tensors[step.root]] * world
    if step.kind == "allgather":
        return [torch.cat(tensors)] * world
    assert step.op is not None
    total = reduce(_OPS[step.op], tensors)
    return list(total.chunk(world)) if step.kind == "reducescatter" else [total] * world


__all__ = ["Failed", "Result", "evaluate"]
