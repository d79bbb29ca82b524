"""`bind`: a call node from an actor method."""

from __future__ import annotations

from raycomm.errors import CompileError
from raycomm.graph.actor import ActorMethodView, read_method
from raycomm.graph.nodes import MethodNode, MethodOutputNode


def bind(method: object, /, *args: object, **kwargs: object) -> MethodNode | tuple[MethodOutputNode, ...]:
    """A node that calls `method`, a method of an actor handle, in each execution.

    Arguments are nodes (raycomm's or, where an adapter is used to compile, `ray.dag`'s) or constants; at least one must be a node
    when the graph is compiled. The order of `bind` calls on an actor is the order in which it runs them.

    Returns:
        The node, or one node per returned value where the method has ``num_returns > 1``.

    Raises:
        CompileError: not a method of a created actor, arguments that do not fit its signature, or returns that cannot be counted.
    """
    view = read_method(method)
    _check_signature(view, args, kwargs)
    num_returns = view.num_returns
    if isinstance(num_returns, bool) or not isinstance(num_returns, int) or num_returns < 1:
        remedy = "return the values together, or set num_returns to the number of values with method.options(num_returns=n)"
        raise CompileError(
            f"bind: {view.label} has num_returns={num_returns!r}, but a graph needs a fixed number of at least 1; {remedy}",
            node=view.label,
            argument="num_returns",
            remedy=remedy,
        )
    node = MethodNode(view.actor, view.method, args, dict(kwargs), num_returns)
    if num_returns == 1:
        return node
    return tuple(MethodOutputNode(node, index) for index in range(num_returns))


def _check_signature(view: ActorMethodView, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    if view.signature is None:
        return
    try:
        view.signature.bind(*args, **kwargs)
    except TypeError as mismatch:
        # Types, not values: an argument may be a tensor or a node, whose text tells nothing here.
        given = ", ".join(
            [*(type(arg).__name__ for arg in args), *(f"{name}={type(arg).__name__}" for name, arg in kwargs.items())]
        )
        remedy = f"pass arguments that fit {view.method}{view.signature}"
        raise CompileError(
            f"bind: {view.label}{view.signature} was given ({given}): {mismatch}; {remedy}",
            node=view.label,
            argument=str(mismatch),
            remedy=remedy,
        ) from None
