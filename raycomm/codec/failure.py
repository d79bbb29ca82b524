"""Exceptions as values: what a method raised, on its way to whoever asked.

The payload is the version byte and one msgpack array:

    [type name, message, traceback, origin, execution, form, pickled exception bin]

Form 0: the exception does not travel, the bin is empty. Form 1: the exception itself. Form 2: a stand-in, made where an exception
pickles but does not unpickle (a constructor with required arguments), or holds something that does not pickle (a lock): an
instance of the same class, made without its constructor, with the arguments and attributes that can travel. The sender proves
forms 1 and 2 by unpickling before it sends. Buffers are the out-of-band buffers of the pickle.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgpack

from raycomm.codec import fallback
from raycomm.codec.message import VERSION, as_bytes, malformed, open_payload
from raycomm.errors import ExecutionCancelledError, SerializationError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_ABSENT: Final = 0
_ITSELF: Final = 1
_STAND_IN: Final = 2
_BY_CANCEL: Final = "ref.cancel()"
_CANCELLED: Final = f"{ExecutionCancelledError.__module__}.{ExecutionCancelledError.__qualname__}"
_TYPES: Final = [str, str, str, str, int, int, bytes]


@dataclass(frozen=True, slots=True)
class Failure:
    """What was raised, and where.

    Attributes:
        exception: the exception, or a stand-in of its type; None where neither can travel or be made here.
        type_name: the qualified name of its type.
        message: its text.
        traceback: the formatted traceback, causes and contexts included.
        origin: the label of the node that raised.
        execution: the index of the execution.
        wire: the message it arrived in. Passing a failure on sends that again: a process on the way may not have the
            exception's class, and must not strip it of its type for those behind it.
    """

    exception: BaseException | None
    type_name: str
    message: str
    traceback: str
    origin: str
    execution: int
    wire: tuple[bytes, list[bytes]] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def capture(cls, exception: BaseException, origin: str, execution: int) -> Failure:
        """A failure from an exception just caught. Never raises because of what the exception is."""
        message = "".join(_message(exception))
        try:
            text = "".join(traceback.format_exception(exception))
        except Exception as error:
            text = f"(the traceback cannot be formatted: {type(error).__name__})\n{fallback.type_name(exception)}: {message}\n"
        _forget_frames(exception)
        # Joined, they are real strings: the text of an exception may be of a class of its own, which does as it likes.
        return cls(exception, fallback.type_name(exception), message, "".join(text), origin, execution)

    @property
    def is_cancellation(self) -> bool:
        """Whether the caller cancelled the execution before any actor began it. A method that raises the same error is none."""
        # Not by the exception: where there was no room for all of the report, it arrives without.
        return self.origin == _BY_CANCEL and self.type_name == _CANCELLED


def _forget_frames(exception: BaseException) -> None:
    """Drop the tracebacks, now text, of an exception and of what led to it: their frames hold the method's arguments, and with
    them blocks of shared memory."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [exception]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        # Not by assignment: a class may forbid that, as a frozen dataclass does.
        BaseException.with_traceback(one, None)
        with suppress(Exception):  # a class may have its own idea of these two
            waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def encode_failure(failure: Failure) -> tuple[bytes, list[memoryview]]:
    """The payload and the out-of-band buffers, which alias the exception's memory.

    Raises:
        SerializationError: a field other than the exception cannot be sent.
    """
    if failure.wire is not None:
        payload, copies = failure.wire
        return payload, [memoryview(copy) for copy in copies]
    form, body, buffers = _encode_exception(failure.exception, failure.message)
    texts = (failure.type_name, failure.message, failure.traceback, failure.origin)
    try:
        # Lone surrogates in a text are shown, not refused: an error report must arrive.
        fields = [text.encode("utf-8", "backslashreplace").decode() for text in texts]
        return bytes((VERSION,)) + msgpack.packb([*fields, failure.execution, form, body], use_bin_type=True), buffers
    except Exception as error:
        raise SerializationError(
            f"a failure cannot be sent ({type(error).__name__}: {error})", type_name=failure.type_name
        ) from error


def decode_failure(payload: Buffer, buffers: Sequence[Buffer] = ()) -> Failure:
    """What `encode_failure` encoded; `exception` is None where it cannot be made in this process.

    Raises:
        SerializationError: the message is malformed.
    """
    data = open_payload(payload)
    views = [as_bytes(buffer, "buffer") for buffer in buffers]
    try:
        parts = msgpack.unpackb(data, raw=False)
    except Exception as error:
        raise malformed(f"{type(error).__name__}: {error}") from error
    if type(parts) is not list or [type(part) for part in parts] != _TYPES or parts[5] not in (_ABSENT, _ITSELF, _STAND_IN):
        raise malformed("the fields of a failure")
    kind, text, trace, origin, execution, form, body = parts
    try:
        exception = _decode_exception(form, body, views)
    except Exception:
        exception = None
    return Failure(exception, kind, text, trace, origin, execution, (bytes(payload), [bytes(view) for view in views]))


def undecodable(error: BaseException, execution: int) -> Failure:
    """The failure of an execution whose result arrived but cannot be decoded here."""
    return Failure.capture(error, "decoding the result", execution)


def cancelled(execution: int) -> Failure:
    """The failure of an execution that its caller cancelled before any actor began it; no method runs for it."""
    error = ExecutionCancelledError(f"execution {execution} was cancelled before it began", execution=execution)
    return Failure.capture(error, _BY_CANCEL, execution)


def _encode_exception(exception: BaseException | None, message: str) -> tuple[int, bytes, list[memoryview]]:
    if exception is None:
        return _ABSENT, b"", []
    for form, value in ((_ITSELF, lambda: exception), (_STAND_IN, lambda: _parts(exception, message))):
        try:
            body, buffers = fallback.dumps(value())
            if type(_decode_exception(form, body, buffers)) is type(exception):
                return form, body, buffers
        except Exception:
            continue
    return _ABSENT, b"", []


def _decode_exception(form: int, body: bytes, buffers: Sequence[memoryview]) -> BaseException | None:
    if form == _ABSENT:
        return None
    value = fallback.loads(body, buffers)
    exception = value if form == _ITSELF else _stand_in(value)
    if not isinstance(exception, BaseException):
        raise malformed("a failure that holds no exception")
    str(exception)  # one that cannot be printed is of no use
    return exception


def _parts(exception: BaseException, message: str) -> tuple[type, tuple[Any, ...], dict[str, Any]]:
    """What of an exception can travel: its class, its arguments or else its text, and each attribute that pickles."""
    arguments = exception.args if _survives(exception.args) else (message,)
    attributes = {name: value for name, value in vars(exception).items() if _survives(value)}
    return type(exception), arguments, attributes


def _stand_in(parts: Any) -> BaseException:
    cls, arguments, attributes = parts
    exception: BaseException
    try:
        exception = cls.__new__(cls, *arguments)
    except TypeError:
        exception = cls.__new__(cls)
    exception.args = arguments
    vars(exception).update(attributes)
    return exception


def _survives(value: object) -> bool:
    try:
        fallback.loads(*fallback.dumps(value))
    except Exception:
        return False
    return True


def _message(exception: BaseException) -> str:
    try:
        return str(exception)
    except Exception as error:
        return f"(its text cannot be made: {type(error).__name__})"
