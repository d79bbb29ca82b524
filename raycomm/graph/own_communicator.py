"""Communicators that users bring: classes of their own, and objects of Ray's `Communicator`.

A class has the interface of `raycomm.device.Communicator` and makes an end of a link or group from the arguments
``(store, name, rank, size)``; a `functools.partial` of one gives it more. An object of Ray's has its actors, each with a rank;
it is copied to each of them, and all that goes over it, whatever the direction, is one sequence of operations there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raycomm.graph.actor import read_actor
from raycomm.graph.tensor_transport import TensorTransport

# Of `raycomm.device.Communicator`, which is not imported here: a graph is built without torch.
_CALLED = ("warm_up", "send", "recv", "allreduce", "allgather", "reducescatter", "broadcast", "poll", "abort")
# Of Ray's `Communicator`.
_CALLED_OF_RAY = ("initialize", "get_actor_handles", "get_rank", "send", "recv", "get_transport_name")
_CPU = "cpu"


@dataclass(frozen=True, slots=True, eq=False)
class OwnCommunicator:
    """A communicator that a user brought. Equal to another one if it is the same class or object.

    Attributes:
        name: of its class.
        made: the class, or Ray's object.
        members: keys of its actors by rank; None for a class, which makes ends for any actors.
    """

    name: str
    made: Any
    members: tuple[str, ...] | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnCommunicator) and self.made is other.made

    def __hash__(self) -> int:
        return id(self.made)


class NoCommunicatorError(ValueError):
    """What is wrong with a value that is to be a communicator. Attribute: `remedy`."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


def read_communicator(value: object) -> OwnCommunicator | TensorTransport | None:
    """What a class or object stands for; None: it is nothing of the kind.

    A transport where it only stands for one that raycomm has.

    Raises:
        NoCommunicatorError: it is meant for one, and cannot be used.
    """
    given = value.func if isinstance(value, functools.partial) else value
    kind = given if isinstance(given, type) else type(given)
    stands_for = getattr(kind, "stands_for", None)
    if isinstance(stands_for, TensorTransport):
        return stands_for
    of_ray = all(callable(getattr(kind, name, None)) for name in _CALLED_OF_RAY)
    missing = [name for name in _CALLED if not callable(getattr(kind, name, None))]
    if isinstance(given, type):
        if of_ray:
            raise NoCommunicatorError(f"{kind.__name__} is a class of Ray's", "pass an object of it, made of its actors' handles")
        if len(missing) == len(_CALLED):
            return None
        if missing:
            problem = f"class {kind.__name__} has no {', '.join(missing)}"
            raise NoCommunicatorError(problem, "give it the methods of raycomm.device.Communicator")
        return OwnCommunicator(kind.__name__, value)
    if of_ray:
        return _of_ray(value)
    if not missing:
        remedy = "pass its class, which is called with (store, name, rank, size) for each end of a link"
        raise NoCommunicatorError(f"it is one end of a communicator, a {kind.__name__}", remedy)
    return None


def shown(value: object) -> str:
    """What is no communicator, in messages."""
    if isinstance(value, str):
        return repr(value)
    return f"class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def works_on_cpu(own: OwnCommunicator) -> bool:
    """Whether it is an object that says so. Ray sends from actor to actor through shared memory beside it."""
    return own.members is not None and bool(_asked(own.made, own.made.get_transport_name) == _CPU)


def is_rays_for_cpu(own: OwnCommunicator) -> bool:
    """Whether it is Ray's own object for CPU tensors, which combines them in one actor: shared memory does what it is for."""
    return works_on_cpu(own) and type(own.made).__module__.startswith("ray.")


def _of_ray(value: Any) -> OwnCommunicator:
    kind = type(value)
    by_rank: dict[int, str] = {}
    handles = list(_asked(value, value.get_actor_handles))
    for handle in handles:
        actor = read_actor(handle)
        if actor is None:
            raise NoCommunicatorError(f"{kind.__name__} is of something that is no actor", "make it of the actors' handles")
        by_rank[_asked(value, value.get_rank, handle)] = actor.key
    if sorted(by_rank) != list(range(len(handles))) or len(set(by_rank.values())) < len(handles):
        problem = f"{kind.__name__} gives its {len(handles)} actors the ranks {sorted(by_rank, key=str)}"
        raise NoCommunicatorError(problem, "give each of them one rank, from 0")
    return OwnCommunicator(kind.__name__, value, tuple(by_rank[rank] for rank in range(len(handles))))


def _asked(communicator: object, question: Callable[..., Any], *args: Any) -> Any:
    """What code of the user's answers."""
    try:
        return question(*args)
    except Exception as error:
        name = getattr(question, "__name__", "a method")
        problem = f"{name} of {type(communicator).__name__} failed with {type(error).__name__}: {error}"
        raise NoCommunicatorError(problem, "see what it raises") from error
