"""Encode and decode any value; the whole codec in Python, to the format of `message`.

Both directions walk with a stack of their own, so that neither the depth of a value nor the depth of the caller's stack matters.
Two shortcuts keep plain data fast, and change no byte: a container of nothing but plain scalars is packed by msgpack in one call,
and a payload that is provably shallow is unpacked by msgpack in one call (`unpack.Decoder.shallow`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import msgpack

from raycomm.codec import fallback, message, unpack
from raycomm.codec.message import (
    DEPTH_LIMIT,
    PACKED_ELEMENTS,
    PACKED_LIST,
    PACKED_MINIMUM,
    PACKED_TUPLE,
    VERSION,
    ext_header,
    malformed,
)
from raycomm.errors import SerializationError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_CONTAINERS: Final = frozenset({list, tuple, dict, set, frozenset})
_CONTAINER_CODES: Final[dict[type, int]] = {tuple: message.TUPLE, set: message.SET, frozenset: message.FROZENSET}
_INT_ELEMENTS: Final = ((1, 2**7), (2, 2**15), (3, 2**31), (4, 2**63))
_FLOAT_ELEMENT: Final = 5
_BUFFER_SIZE: Final = 4096  # msgpack's default of 256 KiB costs more than a small message


class _TooDeep(Exception):
    """The value nests deeper than DEPTH_LIMIT, or holds itself."""


def encode(value: object, *, allow_pickle: bool = True) -> tuple[bytes, list[memoryview]]:
    """The payload and the out-of-band buffers. The buffers alias the value's memory where they can.

    Raises:
        SerializationError: part of the value cannot be sent; names it by its path in the value.
    """
    payload, buffers, _ = encode_counted(value, allow_pickle)
    return payload, buffers


def encode_counted(value: object, allow_pickle: bool) -> tuple[bytes, list[memoryview], int]:
    """As `encode`, and how many values in it had to be pickled."""
    try:
        try:
            encoder = _Encoder(allow_pickle)
            return encoder.encode(value), encoder.buffers, encoder.pickles
        except _TooDeep:
            encoder = _Encoder(allow_pickle)
            return encoder.encode_whole(value), encoder.buffers, encoder.pickles
    except SerializationError:
        raise
    except RecursionError as error:  # calls nothing of ours: the caller's stack may be all but full
        raise SerializationError("cannot send value: the stack is too deep", path="value") from error
    except Exception as error:
        name = fallback.type_name(value)
        raise SerializationError(
            f"cannot send value ({name}): {type(error).__name__}: {error}", path="value", type_name=name
        ) from error


def decode(payload: Buffer, buffers: Sequence[Buffer] = ()) -> Any:
    """The value. Arrays and tensors stand on `buffers` and keep them alive; read-only ones give read-only arrays, copied tensors.

    Raises:
        SerializationError: the message is malformed, or an object in it cannot be made here.
    """
    try:
        data = message.open_payload(payload)
        decoder = unpack.Decoder([message.as_bytes(buffer, "buffer") for buffer in buffers])
        value = decoder.unpack(data)
        decoder.finish()
        return value
    except SerializationError:
        raise
    except RecursionError as error:
        raise SerializationError("cannot decode a message: the stack is too deep") from error
    except MemoryError as error:
        raise SerializationError("cannot decode a message: out of memory") from error
    except Exception as error:
        raise malformed(f"{type(error).__name__}: {error}") from error


class _Encoder:
    def __init__(self, allow_pickle: bool) -> None:
        self.buffers: list[memoryview] = []
        self.pickles = 0
        self._allow_pickle = allow_pickle
        self._packer = msgpack.Packer(use_bin_type=True, buf_size=_BUFFER_SIZE)
        self._pack = self._packer.pack
        self._references: dict[int, int] = {}
        self._kept: list[object] = []  # an id means something only while its object lives

    def encode(self, root: object) -> bytes:
        out = bytearray((VERSION,))
        # Each frame: what is left of a container, where its bytes go, the ext code of its body (0: no ext, it shares `out`).
        stack: list[tuple[Iterator[object], bytearray, int]] = []
        rest: Iterator[object] = iter((root,))
        code = 0
        item = root
        try:
            while True:
                for item in rest:
                    kind = type(item)
                    if kind in _SCALARS:
                        out += self._scalar(item)
                    elif kind in _CONTAINERS:
                        if len(stack) >= DEPTH_LIMIT:
                            raise _TooDeep
                        opened = self._open(item, kind)
                        if isinstance(opened, bytes):
                            out += opened
                            continue
                        stack.append((rest, out, code))
                        header, rest, code = opened
                        if code:
                            out = bytearray()
                        out += header
                        break
                    else:
                        out += self._single(item, kind)
                else:
                    if not stack:
                        return bytes(out)
                    body, closed = out, code
                    rest, out, code = stack.pop()
                    if closed:
                        out += ext_header(closed, len(body))
                        out += body
        except SerializationError as error:
            if error.path is not None:
                raise
            path, name = _path_to(root, item), fallback.type_name(item)
            raise SerializationError(f"cannot send {path} ({name}): {error}", path=path, type_name=name) from error.__cause__
        except _Unpicklable as failure:
            raise fallback.explain(item, _path_to(root, item), failure.error) from failure.error

    def encode_whole(self, root: object) -> bytes:
        try:
            return bytes((VERSION,)) + self._pickle(root)
        except _Unpicklable as failure:
            if not isinstance(failure.error, RecursionError):
                raise fallback.explain(root, "value", failure.error) from failure.error
            error: Exception = failure.error
            reason = "pickle runs into the recursion limit; flatten it, or raise the limit with sys.setrecursionlimit"
        except SerializationError as refusal:
            error, reason = refusal, str(refusal)
        name = fallback.type_name(root)
        raise SerializationError(
            f"cannot send value ({name}), which nests deeper than {DEPTH_LIMIT} levels: {reason}", path="value", type_name=name
        ) from error

    def _open(self, value: Any, kind: type) -> bytes | tuple[bytes, Iterator[object], int]:
        """All bytes of a container, or its header, its items and the ext code of its body.

        Works on a copy: another thread may change the value meanwhile, and the header has said how many items follow.
        """
        code = _CONTAINER_CODES.get(kind, 0)
        if kind is dict:
            copy = value.copy()
            if _SCALARS.issuperset(map(type, copy)) and _SCALARS.issuperset(map(type, copy.values())):
                try:
                    return self._whole(copy, 0)
                except (OverflowError, ValueError):
                    pass  # one by one, then: an item needs an ext, or is to be named in an error
            return self._packer.pack_map_header(len(copy)), chain.from_iterable(copy.items()), 0
        items = tuple(value)
        types = set(map(type, items))
        if len(items) >= PACKED_MINIMUM and len(types) == 1 and (kind is list or kind is tuple):
            packed = _packed(items, types.pop(), PACKED_LIST if kind is list else PACKED_TUPLE)
            if packed is not None:
                return packed
            types = {type(items[0])}
        if types <= _SCALARS:
            try:
                return self._whole(items, code)
            except (OverflowError, ValueError):
                pass  # as above
        return self._packer.pack_array_header(len(items)), iter(items), code

    def _whole(self, items: object, code: int) -> bytes:
        packed: bytes = self._pack(items)
        return ext_header(code, len(packed)) + packed if code else packed

    def _scalar(self, value: Any) -> bytes:
        try:
            packed: bytes = self._pack(value)
            return packed
        except OverflowError:
            return _ext(message.BIGINT, value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True))
        except UnicodeEncodeError:
            return _ext(message.SURROGATE_STR, value.encode("utf-8", "surrogatepass"))
        except ValueError as error:
            raise SerializationError(f"{error}; at most 2**32 - 1 bytes fit, send an array or a tensor instead") from error

    def _single(self, value: Any, kind: type) -> bytes:
        if kind is bytearray:
            return _ext(message.BYTEARRAY, bytes(value))
        if kind is memoryview:
            return self._memoryview(value)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, getattr(torch, "Tensor", ())):
            return self._tensor(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if kind is getattr(numpy, "ndarray", None):
                return self._array(value)
            generic: Any = getattr(numpy, "generic", ())
            if isinstance(value, generic):
                from raycomm.codec import array as arrays

                scalar = arrays.encode_scalar(value)
                if scalar is not None:
                    return _ext(message.NPSCALAR, scalar)
                return self._pickle(value, _same_type)  # numpy's reducer turns a subclass into its base
        return self._pickle(value)

    def _memoryview(self, value: memoryview) -> bytes:
        contents, shape = value.tobytes(), list(value.shape or ())
        try:
            unpack.cast(contents, value.format, shape)
        except (TypeError, ValueError) as error:
            raise SerializationError(
                f"a memoryview of format {value.format!r} and shape {value.shape} cannot be rebuilt; send bytes instead"
            ) from error
        return _ext(message.MEMORYVIEW, self._pack([value.format, shape, value.readonly, contents]))

    def _tensor(self, value: Any) -> bytes:
        from raycomm.codec import tensor

        if not tensor.goes_raw(value):
            return self._pickle(value, tensor.same)
        known = self._references.get(id(value))
        if known is not None:
            return _ext(message.REF, message.pack_ref(known))
        return self._with_buffer(message.TENSOR, value, *tensor.encode(value, len(self.buffers)))

    def _array(self, value: Any) -> bytes:
        from raycomm.codec import array as arrays

        known = self._references.get(id(value))
        if known is not None:
            return _ext(message.REF, message.pack_ref(known))
        encoded = arrays.encode(value, len(self.buffers))
        return self._pickle(value) if encoded is None else self._with_buffer(message.ARRAY, value, *encoded)

    def _with_buffer(self, code: int, value: object, body: bytes, buffer: memoryview) -> bytes:
        self.buffers.append(buffer)
        self._references[id(value)] = len(self._references)
        self._kept.append(value)
        return _ext(code, body)

    def _pickle(self, value: object, same: Any = None) -> bytes:
        """The PICKLE ext. `same(sent, arrived)` says whether the value survives, where that is in doubt."""
        if not self._allow_pickle:
            raise SerializationError("it would need pickle, and the graph was compiled with allow_pickle=False")
        try:
            body, buffers = fallback.dumps(value)
        except Exception as error:
            raise _Unpicklable(error) from error
        if same is not None and not same(value, fallback.loads(body, buffers)):
            raise SerializationError("pickle does not bring it back with the same type, dtype, layout and value")
        self.pickles += 1
        first = len(self.buffers)
        self.buffers.extend(buffers)
        return _ext(message.PICKLE, message.pack_pickle(first, len(buffers), body))


class _Unpicklable(Exception):
    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def _same_type(sent: object, arrived: object) -> bool:
    return type(sent) is type(arrived)


def _ext(code: int, body: bytes) -> bytes:
    return ext_header(code, len(body)) + body


def _packed(items: tuple[Any, ...], kind: type, container: int) -> bytes | None:
    """The PACKED ext, or None where the items do not fit one element type."""
    if kind is float:
        element = _FLOAT_ELEMENT
    elif kind is int:
        low, high = min(items), max(items)
        element = next((code for code, bound in _INT_ELEMENTS if -bound <= low and high < bound), 0)
        if not element:
            return None
    else:
        return None
    elements = array(PACKED_ELEMENTS[element], items)
    if sys.byteorder == "big":
        elements.byteswap()
    return _ext(message.PACKED, bytes((container, element)) + elements.tobytes())


def _path_to(root: object, target: object) -> str:
    """Where `target` is in `root`, by identity."""
    stack: list[tuple[object, str]] = [(root, "value")]
    seen: set[int] = set()
    while stack:
        value, path = stack.pop()
        if value is target:
            return path
        if type(value) not in _CONTAINERS or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            for key, item in reversed(list(value.items())):
                stack += (key, f"{path}.<key {fallback.key_text(key)}>"), (item, f"{path}[{fallback.key_text(key)}]")
        elif isinstance(value, (list, tuple)):
            stack += ((item, f"{path}[{index}]") for index, item in reversed(list(enumerate(value))))
        elif isinstance(value, (set, frozenset)):
            stack += ((item, f"{path}.<member>") for item in list(value))
    return "value"
