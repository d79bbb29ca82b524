"""Takes the arguments of `execute` apart, by the plan's signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raycomm.errors import ArgumentError
from raycomm.graph.model import Key, Nothing, Position, Projection
from raycomm.plan.actions import Plan, Signature


def split_arguments(plan: Plan, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    """The values to write, one per `plan.inputs`.

    Raises:
        ArgumentError: the arguments are not those that `plan.signature` asks for.
    """
    check_arguments(plan, args, kwargs)
    return [project(item.projection, args, kwargs) for item in plan.inputs]


def project(projection: Projection, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """One part of arguments that `check_arguments` accepted; also the value of a `FromInput` output."""
    if isinstance(projection, Key):
        return kwargs[projection.name]
    if isinstance(projection, Nothing):
        return None
    return args[projection.index if isinstance(projection, Position) else 0]


def check_arguments(plan: Plan, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuse a wrong count, a missing keyword and a surplus keyword.

    Raises:
        ArgumentError: with `expected` and `given`.
    """
    arity = 1 if plan.signature.arity is None else plan.signature.arity
    keys = plan.signature.keys
    if len(args) == arity and len(kwargs) == len(keys) and all(key in kwargs for key in keys):
        return
    problems = []
    if missing := [key for key in keys if key not in kwargs]:
        problems.append(f"missing {', '.join(map(repr, missing))}")
    if surplus := [key for key in kwargs if key not in keys]:
        problems.append(f"unknown {', '.join(map(repr, surplus))}")
    expected = _expected(plan.signature)
    given = _counts(len(args), sorted(kwargs))
    raise ArgumentError(
        f"execute of graph {plan.name!r} takes {expected}, was given {given}{': ' if problems else ''}{'; '.join(problems)}",
        expected=expected,
        given=given,
    )


def _expected(signature: Signature) -> str:
    if signature.arity is None:
        return "one positional argument, the whole input"
    # Where the number is from: parts between may not be used at all.
    last = f" (inp[{signature.arity - 1}] is used)" if signature.arity else ""
    return _counts(signature.arity, signature.keys, last)


def _counts(positional: int, keys: Sequence[str], last: str = "") -> str:
    names = f"keyword arguments {', '.join(map(repr, keys))}" if keys else "no keyword arguments"
    return f"{positional} positional argument{'' if positional == 1 else 's'}{last} and {names}"
