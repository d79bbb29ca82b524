"""raycomm's codec in Python, which writes the same bytes; the native encoder calls it for what it does not know itself.

Its buffers alias the value. A channel copies them into its memory, and so does encoding here. Decoded arrays and tensors stand on
them, as on a channel with those of at least `raycomm._core.BLOCK_THRESHOLD` bytes: nothing is copied then.
"""

from __future__ import annotations

from itertools import starmap
from typing import Any

from microbench.codecs.base import Calls, each, size_of_parts
from microbench.serialized import Value
from raycomm.codec import decode, encode


def calls_for(value: Value) -> Calls:
    return Calls(each(_encode), lambda messages: list(starmap(decode, messages)), size_of_parts)


def _encode(value: Any) -> tuple[bytes, list[bytearray]]:
    payload, buffers = encode(value)
    return payload, [bytearray(buffer) for buffer in buffers]
