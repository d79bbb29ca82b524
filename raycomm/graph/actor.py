"""The one place that knows what a Ray actor method looks like, without importing Ray.

Used of a method: `_actor`, `_method_name`, `_num_returns`, `_signature`; of what `method.options(...)` gives: `_actor_method`,
`_options`; of another family's node: `_get_actor_handle`; of a handle: `_actor_id`, `_ray_method_signatures`,
`_ray_actor_creation_function_descriptor`, `_ray_dag_bind_index`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from raycomm.errors import CompileError

# Ray appends this parameter to the signature of every traced method; callers neither see nor pass it.
_TRACE_PARAMETER = "_ray_trace_ctx"

_REMEDY = "create the actor with Cls.remote(...) and pass a method of its handle, as in bind(handle.method, x)"


@dataclass(frozen=True, slots=True)
class ActorIdentity:
    """An actor as a handle shows it. Several handle objects of one actor have equal keys."""

    key: str
    class_name: str
    handle: object


@dataclass(frozen=True, slots=True)
class ActorMethodView:
    """A method of a created actor. `signature` is None where Ray keeps none (other languages)."""

    actor: ActorIdentity
    method: str
    num_returns: object
    signature: inspect.Signature | None

    @property
    def label(self) -> str:
        """`Class.method`."""
        return f"{self.actor.class_name}.{self.method}"


def read_actor(handle: object) -> ActorIdentity | None:
    """The actor that `handle` names, or None where it is no handle of a created actor."""
    signatures = getattr(handle, "_ray_method_signatures", None)
    if not isinstance(signatures, Mapping):
        return None
    actor_id = getattr(handle, "_actor_id", None)
    to_hex = getattr(actor_id, "hex", None)
    # An id that is not hex-able still tells objects apart while the handle lives, and the graph keeps it alive.
    key = str(to_hex()) if callable(to_hex) else f"object-{id(handle):x}"
    descriptor = getattr(handle, "_ray_actor_creation_function_descriptor", None)
    class_name = getattr(descriptor, "class_name", None) or type(handle).__name__
    return ActorIdentity(key=key, class_name=str(class_name).rsplit(".", 1)[-1], handle=handle)


def actor_of_foreign_node(node: object) -> ActorIdentity | None:
    """The actor whose method a node of `ray.dag` calls, or None where it is no such node.

    Asked of the class, not of the object: Ray's input node makes a part of itself of any unknown attribute.
    """
    get_handle = getattr(type(node), "_get_actor_handle", None)
    return read_actor(get_handle(node)) if callable(get_handle) else None


def read_method(method: object) -> ActorMethodView:
    """What `bind` needs of an actor method, options included.

    Raises:
        CompileError: `method` is no method of a created actor.
    """
    options: Mapping[str, object] = {}
    inner = getattr(method, "_actor_method", None)
    if inner is not None:
        given = getattr(method, "_options", None)
        options = given if isinstance(given, Mapping) else {}
        method = inner
    if type(method).__module__.startswith("ray.util.client"):
        text = _text_of(method)
        remedy = "run the driver on the cluster, for instance with ray job submit"
        raise CompileError(
            f"bind: {text} was reached through Ray Client, which gives no way to share memory with the actor; {remedy}",
            node=text,
            argument="method",
            remedy=remedy,
        )
    name = getattr(method, "_method_name", None)
    handle = getattr(method, "_actor", None)
    if not isinstance(name, str) or handle is None:
        text = _text_of(method)
        raise CompileError(
            f"bind: {text} is not a method of a created actor; {_REMEDY}", node=text, argument="method", remedy=_REMEDY
        )
    actor = read_actor(handle)
    if actor is None:
        raise CompileError(
            f"bind: method {name!r} belongs to an actor that has not been created; {_REMEDY}",
            node=name,
            argument="method",
            remedy=_REMEDY,
        )
    parameters = getattr(method, "_signature", None)
    if parameters is None:
        parameters = getattr(handle, "_ray_method_signatures", {}).get(name)
    num_returns = options.get("num_returns")
    if num_returns is None:
        num_returns = getattr(method, "_num_returns", 1)
    return ActorMethodView(actor=actor, method=name, num_returns=num_returns, signature=_signature(parameters))


def take_bind_index(handle: object) -> int | None:
    """The next bind index of this handle object, counted up as Ray's own `bind` does: both kinds of node share one order."""
    index = getattr(handle, "_ray_dag_bind_index", None)
    if not isinstance(index, int):
        return None
    handle._ray_dag_bind_index = index + 1  # type: ignore[attr-defined]
    return index


def _signature(parameters: object) -> inspect.Signature | None:
    if parameters is None:
        return None
    given = cast("Iterable[inspect.Parameter]", parameters)
    return inspect.Signature([parameter for parameter in given if parameter.name != _TRACE_PARAMETER])


def _text_of(value: object) -> str:
    # A repr may be pages long (Ray's nodes) or run user code, so a name is preferred and a type is the rest.
    name = getattr(value, "__qualname__", None) or getattr(value, "_function_name", None)
    return f"{type(value).__name__} {name!r}" if isinstance(name, str) else f"a value of type {type(value).__name__}"
