"""raycomm's native encoder and decoder, to bytes and back.

A channel runs the same encoder into its slot, and the same decoder out of it. Here the payload and the buffers (elements of
arrays and tensors) become `bytes` objects, for which the payload is copied once more, and decoding copies the buffers, as a
channel does only with those under `raycomm._core.BLOCK_THRESHOLD`.
"""

from __future__ import annotations

from itertools import starmap

from microbench.codecs.base import Calls, each, size_of_parts
from microbench.serialized import Value
from raycomm import _core


def calls_for(value: Value) -> Calls:
    return Calls(each(_core.encode), lambda messages: list(starmap(_core.decode, messages)), size_of_parts)
