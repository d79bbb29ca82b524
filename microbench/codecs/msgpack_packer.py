"""msgpack as it is, without hooks: its packer is reused, as it should be where speed matters."""

from __future__ import annotations

import msgpack

from microbench.codecs.base import Calls, each, each_of
from microbench.serialized import Value


def calls_for(value: Value) -> Calls:
    return Calls(each(msgpack.Packer().pack), each_of(msgpack.unpackb))
