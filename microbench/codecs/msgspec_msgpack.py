"""msgspec's msgpack. Its decoder is told the type of the value, as it is meant to be: it makes dataclasses and tuples again."""

from __future__ import annotations

import msgspec

from microbench.codecs.base import Calls, each, each_of
from microbench.serialized import Value


def calls_for(value: Value) -> Calls:
    return Calls(each(msgspec.msgpack.Encoder().encode), each_of(msgspec.msgpack.Decoder(value.schema).decode))
