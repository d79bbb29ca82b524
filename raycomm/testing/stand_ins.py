"""Stand-ins for actors: graphs can be bound and planned without a cluster, and without Ray.

    worker = stand_in(Worker, "W1")              # a plain class, or one decorated with ray.remote
    with raycomm.InputNode() as batch:
        graph = raycomm.bind(worker.forward, batch)

`python -m raycomm plan FILE:graph` shows what becomes of it. `raycomm.compile` refuses it: nothing runs.
"""

from __future__ import annotations

import inspect
import itertools
from types import SimpleNamespace
from typing import Any, NoReturn

from raycomm.errors import CompileError
from raycomm.graph.calls import bind

_numbers = itertools.count()  # tells stand-ins apart; says nothing about a graph


def stand_in(cls: type, name: str | None = None) -> Any:
    """What a handle of an actor of class `cls` is to `raycomm.bind`: its methods, checked against their signatures.

    Args:
        cls: what the actor would be made of. It is not instantiated. ``ray.method(num_returns=n)`` is respected.
        name: what plans and messages call the actor; None: the name of the class, with a number where several have it.

    Raises:
        CompileError: `cls` is no class.
    """
    metadata = getattr(cls, "__ray_metadata__", None)  # the mark of what ray.remote makes of a class
    plain: object = getattr(metadata, "modified_class", cls)
    if not isinstance(plain, type):
        remedy = "pass the class of the actor"
        text = f"stand_in: a value of type {type(cls).__name__} is no class; {remedy}"
        raise CompileError(text, argument="cls", remedy=remedy)
    return StandIn(plain, name or str(getattr(metadata, "class_name", plain.__name__)))


class StandIn:
    """Has the attributes of a handle that `raycomm.graph.actor` reads, and the methods of its class."""

    def __init__(self, cls: type, name: str) -> None:
        self._actor_id = _Id(f"{next(_numbers):06x}")
        self._ray_dag_bind_index = 0
        self._ray_actor_creation_function_descriptor = SimpleNamespace(class_name=name)
        self._ray_method_signatures: dict[str, list[inspect.Parameter]] = {}
        for method, function in inspect.getmembers(cls, inspect.isroutine):
            if not method.startswith("__"):
                self._ray_method_signatures[method] = _parameters(function, bound=_is_bound(cls, method))
                returns = getattr(function, "__ray_num_returns__", None)
                setattr(self, method, StandInMethod(self, method, 1 if returns is None else returns))

    @property
    def __ray_call__(self) -> NoReturn:
        raise TypeError(f"{self!r} stands in for an actor: it can be planned and not be run")

    def __repr__(self) -> str:
        return f"StandIn({self._ray_actor_creation_function_descriptor.class_name})"


class StandInMethod:
    """A method of a stand-in. Its `bind` makes nodes of raycomm, and `options` takes ``num_returns``, as Ray's does."""

    def __init__(self, actor: StandIn, method: str, num_returns: object) -> None:
        self._actor = actor
        self._method_name = method
        self._num_returns = num_returns
        self._signature = actor._ray_method_signatures[method]

    def options(self, **options: Any) -> StandInMethod:
        """The method with other options; all but ``num_returns`` are for running it."""
        return StandInMethod(self._actor, self._method_name, options.get("num_returns", self._num_returns))

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        """See `raycomm.bind`."""
        return bind(self, *args, **kwargs)


class _Id:
    def __init__(self, text: str) -> None:
        self._text = text

    def hex(self) -> str:
        return self._text


def _is_bound(cls: type, method: str) -> bool:
    """Whether the class gives the method without a `self` to pass."""
    return isinstance(inspect.getattr_static(cls, method), (staticmethod, classmethod))


def _parameters(function: Any, *, bound: bool) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # written in C, without a signature
        return [
            inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
            inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
        ]
    return parameters if bound else parameters[1:]
