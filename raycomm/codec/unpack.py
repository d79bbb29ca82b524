"""msgpack bytes to values: the decoding half of `values`.

Two readers give the same result. `Decoder.shallow` lets msgpack do the work, and is used where the payload can be shown to be
shallow without parsing it; `Decoder.deep` walks any payload with a stack of its own and checks every length and every level.
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgpack

from raycomm.codec import fallback, message
from raycomm.codec.message import DEPTH_LIMIT, PACKED_ELEMENTS, PACKED_LIST, PACKED_TUPLE, malformed

# A payload has at most as many levels as bytes that can open one: array, map and ext headers. (Data may hold such bytes too.)
_OPENERS: Final = bytes((*range(0x80, 0xA0), *range(0xC7, 0xCA), *range(0xD4, 0xD9), *range(0xDC, 0xE0)))
# msgpack turns ext code -1 of 4, 8 or 12 bytes into a Timestamp without asking; we refuse that code.
_MAYBE_TIMESTAMP: Final = re.compile(rb"[\xd6\xd7\x04\x08\x0c]\xff")
# Each nested `unpackb` takes about 40 KiB of C stack.
_C_NESTING: Final = 4

_CONTAINER_TYPES: Final[dict[int, Any]] = {message.TUPLE: tuple, message.SET: set, message.FROZENSET: frozenset}
_ROOT: Final = 0
_LIST: Final = -1
_DICT: Final = -2

_NUMBERS: Final = {
    byte: struct.Struct(">" + code)
    for byte, code in zip((0xCA, 0xCB, *range(0xCC, 0xD4)), ("f", "d", "B", "H", "I", "Q", "b", "h", "i", "q"), strict=True)
}
_CONSTANTS: Final = {0xC0: None, 0xC2: False, 0xC3: True}
_FIXEXT: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
# First byte to the width of the length that follows.
_BIN: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_EXT: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_STR: Final = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY: Final = {0xDC: 2, 0xDD: 4}
_MAP: Final = {0xDE: 2, 0xDF: 4}


class Decoder:
    """One message. Exceptions other than SerializationError may come out; `values.decode` wraps them."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._next = 0
        self._objects: list[object] = []
        self._nesting = 0

    def unpack(self, data: memoryview) -> object:
        raw = bytes(data)
        openers = len(raw) - len(raw.translate(None, _OPENERS))
        if openers <= DEPTH_LIMIT and _MAYBE_TIMESTAMP.search(raw) is None:
            return self.shallow(raw)
        return self.deep(data)

    def finish(self) -> None:
        if self._next != len(self._buffers):
            raise malformed(f"{len(self._buffers)} buffers came, {self._next} are named in the message")

    def shallow(self, data: bytes | memoryview) -> object:
        return msgpack.unpackb(data, raw=False, strict_map_key=False, ext_hook=self._ext)

    def _ext(self, code: int, body: bytes) -> object:
        kind = _CONTAINER_TYPES.get(code)
        if kind is None:
            return self._leaf(code, memoryview(body))
        if not body or not (0x90 <= body[0] < 0xA0 or body[0] in _ARRAY):
            raise malformed(f"ext {code} without an array")
        if self._nesting >= _C_NESTING:
            return kind(self.deep(memoryview(body)))
        self._nesting += 1
        try:
            return kind(self.shallow(body))
        finally:
            self._nesting -= 1

    def deep(self, data: memoryview) -> object:
        # Each frame: what a container is, its items so far, how many are to come, and where its bytes must end.
        stack: list[tuple[int, list[Any], int, int]] = []
        kind, remaining, end, pos = _ROOT, 1, len(data), 0
        items: list[Any] = []
        while True:
            while remaining == 0:
                if kind in _CONTAINER_TYPES or kind == _ROOT:
                    if pos != end:
                        raise malformed(f"{end - pos} bytes too many")
                    if kind == _ROOT:
                        return items[0]
                value = _close(kind, items)
                kind, items, remaining, end = stack.pop()
                items.append(value)
                remaining -= 1
            byte = _take(data, pos, 1, end)[0]
            pos += 1
            length, opened = -1, 0
            if byte < 0x80:
                value = byte
            elif byte >= 0xE0:
                value = byte - 256
            elif byte in _CONSTANTS:
                value = _CONSTANTS[byte]
            elif byte in _NUMBERS:
                number = _NUMBERS[byte]
                value = number.unpack(_take(data, pos, number.size, end))[0]
                pos += number.size
            elif 0xA0 <= byte < 0xC0 or byte in _STR:
                length, pos = (byte - 0xA0, pos) if byte < 0xC0 else _length(data, pos, _STR[byte], end)
                value = str(_take(data, pos, length, end), "utf-8")
                pos += length
            elif byte in _BIN:
                length, pos = _length(data, pos, _BIN[byte], end)
                value = bytes(_take(data, pos, length, end))
                pos += length
            elif 0x90 <= byte < 0xA0 or byte in _ARRAY:
                length, pos = (byte - 0x90, pos) if byte < 0xA0 else _length(data, pos, _ARRAY[byte], end)
                opened, limit = _LIST, end
            elif byte < 0x90 or byte in _MAP:
                length, pos = (byte - 0x80, pos) if byte < 0x90 else _length(data, pos, _MAP[byte], end)
                length *= 2
                opened, limit = _DICT, end
            elif byte in _FIXEXT or byte in _EXT:
                length, pos = (_FIXEXT[byte], pos) if byte in _FIXEXT else _length(data, pos, _EXT[byte], end)
                code = _take(data, pos, 1, end)[0]
                pos += 1
                body = _take(data, pos, length, end)
                if code in _CONTAINER_TYPES:
                    opened, limit = code, pos + length
                    byte = _take(data, pos, 1, limit)[0]
                    pos += 1
                    if 0x90 <= byte < 0xA0:
                        length = byte - 0x90
                    elif byte in _ARRAY:
                        length, pos = _length(data, pos, _ARRAY[byte], limit)
                    else:
                        raise malformed(f"ext {code} without an array")
                else:
                    if code == message.PACKED and len(stack) >= DEPTH_LIMIT:
                        raise malformed(f"more than {DEPTH_LIMIT} levels")
                    value = self._leaf(code, body)
                    pos += length
            else:
                raise malformed(f"byte {byte:#04x}")
            if opened:
                if len(stack) >= DEPTH_LIMIT:
                    raise malformed(f"more than {DEPTH_LIMIT} levels")
                if length > limit - pos:  # every item takes a byte
                    raise malformed(f"{length} items in {limit - pos} bytes")
                stack.append((kind, items, remaining, end))
                kind, items, remaining, end = opened, [], length, limit
            else:
                items.append(value)
                remaining -= 1

    def _leaf(self, code: int, body: memoryview) -> object:
        if code == message.TENSOR:
            from raycomm.codec import tensor

            return self._keep(tensor.decode(body, self._buffer(), self._next - 1))
        if code == message.ARRAY:
            from raycomm.codec import array as arrays

            return self._keep(arrays.decode(body, self._buffer(), self._next - 1))
        if code == message.REF:
            index = message.unpack_ref(body)
            if index >= len(self._objects):
                raise malformed(f"a reference to object {index} of {len(self._objects)}")
            return self._objects[index]
        if code == message.PACKED:
            return _unpack_packed(body)
        if code == message.PICKLE:
            first, count, pickled = message.unpack_pickle(body)
            if first != self._next or count > len(self._buffers) - first:
                raise malformed(f"pickle buffers {first} to {first + count} of {len(self._buffers)}")
            self._next += count
            return fallback.loads(pickled, self._buffers[first : first + count])
        if code == message.NPSCALAR:
            from raycomm.codec import array as arrays

            return arrays.decode_scalar(body)
        if code == message.BIGINT:
            return int.from_bytes(body, "little", signed=True)
        if code == message.SURROGATE_STR:
            return str(body, "utf-8", "surrogatepass")
        if code == message.BYTEARRAY:
            return bytearray(body)
        if code == message.MEMORYVIEW:
            return _unpack_memoryview(body)
        raise malformed(f"ext code {code}")

    def _buffer(self) -> memoryview:
        if self._next >= len(self._buffers):
            raise malformed(f"buffer {self._next} of {len(self._buffers)}")
        self._next += 1
        return self._buffers[self._next - 1]

    def _keep(self, value: object) -> object:
        self._objects.append(value)
        return value


def cast(contents: bytes | bytearray, form: str, shape: list[int]) -> memoryview:
    """`contents` as a memoryview of that format and shape; TypeError or ValueError where `memoryview.cast` has none."""
    view = memoryview(contents)
    # `cast` refuses zeros in a shape, and one dimension needs no shape.
    result: Any = view.cast(form) if len(shape) == 1 else view.cast(form, shape)  # type: ignore[call-overload]
    if result.format != form or list(result.shape) != shape:
        raise ValueError(f"format {form!r}, shape {shape}")
    rebuilt: memoryview = result
    return rebuilt


def _take(data: memoryview, pos: int, length: int, end: int) -> memoryview:
    if length > end - pos:
        raise malformed("it is cut short")
    return data[pos : pos + length]


def _length(data: memoryview, pos: int, width: int, end: int) -> tuple[int, int]:
    return int.from_bytes(_take(data, pos, width, end), "big"), pos + width


def _close(kind: int, items: list[Any]) -> object:
    if kind == _LIST:
        return items
    if kind == _DICT:
        return dict(zip(items[::2], items[1::2], strict=True))
    return _CONTAINER_TYPES[kind](items)


def _unpack_packed(body: memoryview) -> object:
    if len(body) < 2 or body[0] not in (PACKED_LIST, PACKED_TUPLE) or body[1] not in PACKED_ELEMENTS:
        raise malformed("head of a packed list")
    elements = array(PACKED_ELEMENTS[body[1]])
    if (len(body) - 2) % elements.itemsize:
        raise malformed("a packed list is cut short")
    elements.frombytes(body[2:])
    if sys.byteorder == "big":
        elements.byteswap()
    return tuple(elements) if body[0] == PACKED_TUPLE else elements.tolist()


def _unpack_memoryview(body: memoryview) -> memoryview:
    parts = msgpack.unpackb(body, raw=False, strict_map_key=False)
    if type(parts) is not list or [type(part) for part in parts] != [str, list, bool, bytes]:
        raise malformed("a memoryview")
    form, shape, readonly, contents = parts
    return cast(contents if readonly else bytearray(contents), form, shape)
