"""Values outside the table: pickle protocol 5 with out-of-band buffers. The only module of raycomm that imports pickle.

Plain pickle comes first, because it is fast and names classes by reference. cloudpickle follows where plain pickle fails, and
where its output names `__main__`: a class of the driver's `__main__` does not exist in the actor's.

Plain torch tensors inside a pickled object go through our own tensor format: torch's reducer puts the storage in band, and has
none for the newer dtypes.
"""

from __future__ import annotations

import dis
import io
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from raycomm.codec.message import as_bytes
from raycomm.errors import SerializationError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PROTOCOL: Final = 5
_WALK_LIMIT: Final = 64  # levels below the value that the search for an unpicklable member goes
_SCALARS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
_CONTAINERS: Final = frozenset({dict, list, tuple, set, frozenset})
REMEDY: Final = "Leave it out of what is sent, or say with __reduce__ or __getstate__ on its class how to pickle it."


def dumps(value: object) -> tuple[bytes, list[memoryview]]:
    """Pickle bytes and the out-of-band buffers, which alias the value.

    Raises:
        Exception: whatever pickling raised; `explain` turns it into a SerializationError.
    """
    try:
        body, buffers = _dump(_PlainPickler, value)
    except Exception as plain_error:
        if isinstance(plain_error, (RecursionError, MemoryError, SerializationError)):
            raise
        return _dump(_cloud_pickler(), value)
    if b"__main__" not in body:
        return body, buffers
    try:
        return _dump(_cloud_pickler(), value)
    except Exception:
        return body, buffers


def loads(body: Buffer, buffers: Sequence[memoryview]) -> object:
    """What `dumps` pickled.

    Raises:
        SerializationError: unpickling raised anything.
    """
    try:
        return pickle.loads(body, buffers=buffers)
    except Exception as error:
        raise SerializationError(
            f"unpickling failed with {type(error).__name__}: {_text(error)}. "
            "The value's class must be importable, and its reducer must succeed, in the receiving process."
        ) from error


def explain(value: object, path: str, error: BaseException) -> SerializationError:
    """The error for a value that cannot be pickled, naming its smallest member that cannot."""
    offender, refusal = value, None
    if not isinstance(error, (RecursionError, MemoryError)):  # those have no single member to blame
        try:
            offender, path, refusal = _smallest_offender(value, path)
        except (RecursionError, MemoryError):
            pass
    name = type_name(offender)
    said = error if isinstance(error, SerializationError) else refusal
    if said is not None:
        return SerializationError(f"cannot send {path} ({name}): {said}", path=path, type_name=name)
    reason = f"{type(error).__name__}: {_text(error)}"
    return SerializationError(
        f"cannot send {path} ({name}), it cannot be pickled ({reason}). {REMEDY}", path=path, type_name=name
    )


def type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        _refuse_object_ref(value)
        return _reduce_tensor(value)


@cache
def _cloud_pickler() -> type[pickle.Pickler]:
    import cloudpickle

    class CloudPickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined, unused-ignore]
        def reducer_override(self, value: object) -> Any:
            _refuse_object_ref(value)
            reduced = _reduce_tensor(value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    return CloudPickler


def _dump(pickler: Callable[..., pickle.Pickler], value: object) -> tuple[bytes, list[memoryview]]:
    file = io.BytesIO()
    buffers: list[memoryview] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        """Keep `buffer` out of band; True, meaning in band, where it is not contiguous."""
        try:
            buffers.append(buffer.raw())
        except BufferError:
            return True
        return False

    pickler(file, protocol=_PROTOCOL, buffer_callback=take).dump(value)
    return file.getvalue(), buffers


def _refuse_object_ref(value: object) -> None:
    """Pickled outside of Ray's own calls a ref holds nothing: its object would be lost, and `ray.get` on it wait for ever."""
    kind = type(value)
    if kind.__module__ in ("ray", "ray._raylet") and kind.__name__ in ("ObjectRef", "ObjectRefGenerator"):
        raise SerializationError(
            f"a Ray {kind.__name__} does not keep its object alive in a message; send what ray.get gives, or hand it to "
            "the actor in a plain call"
        )


def _reduce_tensor(value: Any) -> Any:
    torch = sys.modules.get("torch")
    kind: Any = getattr(torch, "Tensor", ())
    if not isinstance(value, kind):
        return NotImplemented
    from raycomm.codec import tensor

    if not tensor.goes_raw(value, attributes=True):
        return NotImplemented
    head, raw = tensor.encode(value, 0)
    attributes = value.__dict__ or None
    return rebuild_tensor, (head, pickle.PickleBuffer(raw)), attributes, None, None, set_attributes


def rebuild_tensor(head: bytes, buffer: Buffer) -> object:
    """Named in pickles; keep the name and the signature."""
    from raycomm.codec import tensor

    return tensor.decode(memoryview(head), as_bytes(buffer, "tensor buffer"), 0)


def set_attributes(value: object, attributes: dict[str, object]) -> None:
    """Named in pickles; keep the name and the signature."""
    vars(value).update(attributes)


def _smallest_offender(value: object, path: str) -> tuple[object, str, str | None]:
    """The innermost member that cannot be pickled, where it is, and what its class says of that."""
    seen = {id(value)}
    for _ in range(_WALK_LIMIT):
        reduced = _reduced(value)
        for member, step in _members(value, reduced):
            if id(member) not in seen and type(member) not in _SCALARS and not _can_pickle(member):
                seen.add(id(member))
                value, path = member, path + step
                break
        else:
            return value, path, reduced.reason if isinstance(reduced, _NotReduced) else None
    return value, path, None


def _can_pickle(value: object) -> bool:
    try:
        dumps(value)
    except Exception:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _NotReduced:
    """A reducer that raised. What it raised is not kept: its frames would hold the value until a garbage collection.

    Attributes:
        refused: the class says itself that it is not pickled.
        reason: and why; None where it says nothing, or another error came of it.
    """

    refused: bool
    reason: str | None


def _reduced(value: object) -> object:
    """What pickle is told to pickle in place of `value`, or a `_NotReduced`; None where pickle asks no reducer.

    Asked once for each object on the way: a reducer may do more than to answer.
    """
    if type(value) in _CONTAINERS or isinstance(value, type):
        return None
    try:
        return value.__reduce_ex__(_PROTOCOL)
    except Exception as error:
        refused = _reduces_itself(value) and _raised_on_purpose(error)
        says = refused and isinstance(error, (TypeError, ValueError, pickle.PicklingError))
        return _NotReduced(refused, _text(error).rstrip(".") or None if says else None)


def _members(value: object, reduced: object) -> Iterator[tuple[object, str]]:
    """What pickling `value`, whose reducer gave `reduced`, would pickle next, and how it is reached."""
    if isinstance(value, dict):
        for key, item in list(value.items()):
            yield item, f"[{key_text(key)}]"
            yield key, f".<key {key_text(key)}>"
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(list(value)):
            yield item, f"[{index}]"
    elif isinstance(value, (set, frozenset)):
        for item in list(value):
            yield item, ".<member>"
    if reduced is None:
        return
    if callable(value) and hasattr(value, "__closure__"):
        names = value.__code__.co_freevars if hasattr(value, "__code__") else ()
        for name, cell in zip(names, value.__closure__ or (), strict=False):
            yield _cell_contents(cell), f".<closure {name}>"
    if isinstance(reduced, tuple):
        yield from _reduced_members(value, reduced)
    elif isinstance(reduced, _NotReduced) and not reduced.refused:
        # Not refused as a whole: a lock, a socket; or one of slots without __getstate__. Its attributes are all there is.
        yield from ((item, f".{name}") for name, item in _attributes(value))


def _reduced_members(value: object, reduced: tuple[Any, ...]) -> Iterator[tuple[object, str]]:
    # The state is what is pickled, which __getstate__ may have chosen.
    states = reduced[2] if len(reduced) > 2 else None
    for state in states if isinstance(states, tuple) else (states,):
        if isinstance(state, dict):
            yield from ((item, f".{name}") for name, item in state.items())
        elif isinstance(state, list) and is_dataclass(value):  # frozen ones with slots pickle their fields in order
            yield from ((item, f".{field.name}") for field, item in zip(fields(value), state, strict=False))
        elif state is not None:
            yield state, ".<state>"
    if len(reduced) > 1 and isinstance(reduced[1], tuple):
        for index, item in enumerate(reduced[1]):
            if item is not value and not isinstance(item, type):
                yield item, f".<constructor argument {index}>"


def _reduces_itself(value: object) -> bool:
    """Whether its class says how it is pickled, or that it is not."""
    kind = type(value)
    return kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__


def _raised_on_purpose(error: BaseException) -> bool:
    """Whether a `raise` statement raised it, and not something that failed: what __reduce__ pickles, or a mistake in it."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)


def _cell_contents(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def key_text(key: object) -> str:
    """A key as it would be written in code, or its type where its repr is the user's own or long."""
    text = repr(key) if type(key) in _SCALARS else f"<{type(key).__qualname__}>"
    return text if len(text) <= 80 else text[:77] + "..."
