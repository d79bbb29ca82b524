"""What the driver raises: our errors that are also Ray's, so that code written for `ray.get` keeps catching what it caught.

`except` looks at real bases only, so each class below derives from ours and from Ray's, where this Ray has it: the three
channel exceptions leave with Ray's Compiled Graphs, and `raycomm` must go on without them.
"""

from __future__ import annotations

import builtins
import copy
import re
from dataclasses import dataclass, replace
from typing import Any, Final

import ray.exceptions

from raycomm import errors
from raycomm.codec import Failure

_HEADER: Final = "Traceback (most recent call last):"
# How Ray words the death of an actor: a line of no news, lines of facts, and the cause, before what is the same for all.
_UNEXPECTED: Final = "The actor died unexpectedly before finishing this task."
_FACT: Final = re.compile(r"^\t(class_name|actor_id|pid|name|namespace|ip): (.*)\n?", re.MULTILINE)
_ANY_DEATH: Final = "Some common causes include"


class _OfRay(Exception):
    """Stands between ours and Ray's, whose constructors take something else than a text (ActorDiedError asserts that), or do not
    hand it on: an OSError, which a TimeoutError is, then has no text at all.
    """

    def __init__(self, message: str = "") -> None:
        if isinstance(self, ray.exceptions.RayActorError):
            ray.exceptions.RayActorError.__init__(self, error_msg=message)
        elif isinstance(self, ray.exceptions.RaySystemError):
            ray.exceptions.RaySystemError.__init__(self, message)  # type: ignore[no-untyped-call]
        self.args = (message,)


def _also(ours: type[errors.RaycommError], ray_name: str) -> type[Any]:
    theirs = getattr(ray.exceptions, ray_name, None)
    if theirs is None:
        return ours
    return type(ours.__name__, (ours, _OfRay, theirs), {"__module__": __name__, "__doc__": ours.__doc__})


ChannelTimeoutError = _also(errors.ChannelTimeoutError, "RayChannelTimeoutError")
ChannelClosedError = _also(errors.ChannelClosedError, "RayChannelError")
ActorDiedError = _also(errors.ActorDiedError, "ActorDiedError")
CapacityExceededError = _also(errors.CapacityExceededError, "RayCgraphCapacityExceeded")


def _fresh(error: Exception) -> Exception:
    """A copy for one `get`: the error that was stored would, once raised, hold the frames of that `get`, and they the graph."""
    try:
        again = copy.copy(error)
        again.__cause__ = error.__cause__
    except Exception:
        return error.with_traceback(None)
    return again if type(again) is type(error) else error.with_traceback(None)


@dataclass(frozen=True, slots=True)
class Place:
    """The process that a failure comes from, as Ray names it in the first line of an error.

    Attributes:
        label: the actor, in the graph.
        pid: of its process.
        actor_id: Ray's, in hex; None where unknown.
    """

    label: str
    pid: int
    actor_id: str | None

    @property
    def class_name(self) -> str:
        """The class of the actor."""
        return self.label.partition("#")[0]


@dataclass(frozen=True, slots=True)
class Death:
    """What Ray's text about a dead actor says, without what it says of every death.

    Attributes:
        cause: what killed it.
        name: under which it was made, if it was.
        pid: of its process; None where the text has none.
    """

    cause: str
    name: str | None = None
    pid: int | None = None

    @classmethod
    def told_by(cls, text: str) -> Death:
        """Of a text in another form than the known one, all is the cause."""
        facts = dict(_FACT.findall(text))
        cause = _FACT.sub("", text.removeprefix(_UNEXPECTED))
        cause = "\n".join(line.partition(_ANY_DEATH)[0].strip() for line in cause.strip().splitlines() if line.strip())
        pid = facts.get("pid", "")
        return cls(cause or text, facts.get("name"), int(pid) if pid.isdecimal() else None) if facts else cls(text)

    @property
    def who(self) -> str:
        """To be put behind the actor's label: " (named 'x', pid 7)", or as much of that as is known."""
        known = [] if self.name is None else [f"named {self.name!r}"]
        known += [] if self.pid is None else [f"pid {self.pid}"]
        return f" ({', '.join(known)})" if known else ""


def raised_by_method(failure: Failure, graph: str, place: Place | None) -> BaseException:
    """The exception that `get` raises for a failed execution.

    It is an instance of the user's own type and of Ray's `RayTaskError`, as with plain actor calls, and shows the remote
    traceback. Ray's error types raised in a method, and ours, are raised as they are.

    Args:
        failure: what arrived.
        graph: its name.
        place: the actor that raised; None where no actor did.
    """
    if failure.exception is None:
        failure = replace(failure, exception=_by_name(failure))
    where = f"raised by {failure.origin} in execution {failure.execution} of graph {graph!r}"
    cause = failure.exception
    if isinstance(cause, errors.RaycommError | ray.exceptions.RayError):
        cause = _fresh(cause)
        note = where + _traceback_beside(failure)
        if note not in getattr(cause, "__notes__", ()):  # a ref may be got again
            cause.add_note(note)
        return cause
    shown = cause if isinstance(cause, Exception) else RuntimeError(f"{failure.type_name}: {failure.message}")
    error = _task_error(failure, graph, place, shown).as_instanceof_cause()
    assert isinstance(error, BaseException)
    error.add_note(where)
    return error


def _by_name(failure: Failure) -> Exception | None:
    """The exception of a report that had no room for it, where its name and its text make one: our own kinds and Python's."""
    ours = getattr(errors, failure.type_name.removeprefix("raycomm.errors."), None)
    kind = ours if ours is not None else getattr(builtins, failure.type_name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return None
    try:
        return kind(failure.message)
    except TypeError:  # UnicodeDecodeError, for one, takes more than a text
        return None


def _task_error(failure: Failure, graph: str, place: Place | None, shown: Exception) -> Any:
    """Ray's error, whose text has a line about the process in place of each header of a traceback. Behind what Ray says there
    come the execution and the graph: loggers that print the error alone do not show notes."""
    text = failure.traceback
    if not text.strip():
        text = f"{failure.type_name}: {failure.message}\n"
    if not any(line.startswith(_HEADER) for line in text.splitlines()):  # an exception group begins otherwise
        text = f"{_HEADER}\n{text}"
    kind: Any = ray.exceptions.RayTaskError
    if place is None:
        return kind(failure.origin, text, shown)
    call = f"{place.class_name}{failure.origin.removeprefix(place.label)}"
    return kind(
        failure.origin,
        text,
        shown,
        proctitle=f"ray::{call}",
        pid=place.pid,
        actor_repr=f"{place.label}, execution={failure.execution}, graph={graph!r}",
        actor_id=place.actor_id,
    )


def _traceback_beside(failure: Failure) -> str:
    """What the remote traceback says beyond the error's own text, which is shown right above."""
    if _HEADER not in failure.traceback:
        return ""
    text = failure.traceback.rstrip()
    if failure.message and text.endswith(failure.message):
        text = f"{text.removesuffix(failure.message)}(as above)"
    return f"; there:\n{text}"
