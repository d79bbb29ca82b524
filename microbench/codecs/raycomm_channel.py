"""A value through raycomm's shared-memory channel, both ends in this process: what a hop costs without waiting.

Encoding is `Writer.write`: one native call that encodes into the ring's slot, or a block, and publishes. Decoding is
`Reader.read`: one native call that finds the message there and makes the value; large arrays stand on the block, which is free
when they are gone.
"""

from __future__ import annotations

from itertools import repeat
from typing import Any

from microbench.codecs.base import Calls
from microbench.serialized import Value
from raycomm.channel import RingLayout, ShmArena
from raycomm.options import Options

SLOTS = 1024  # more than a batch: a write never waits for room
LIMIT_S = 10.0  # of what cannot take any time, were it not for a mistake
MEMORY_BYTES = 256 << 20
_WRITER, _READER = 0, 1  # processes, as the arenas number them


class _Channel:
    """Both ends of one channel."""

    def __init__(self) -> None:
        options = Options(shm_limit_bytes=MEMORY_BYTES)
        ring = RingLayout(0, SLOTS, options.inline_bytes, (_READER,))
        self._ours = ShmArena.create(_WRITER, [ring], options, loops=2)
        self._theirs = ShmArena.create(_READER, [], options, loops=2)
        self._ours.attach(self._theirs.address)
        self._theirs.attach(self._ours.address)
        self._ours.join(_WRITER)
        self._writer = self._ours.writer([0])
        self._reader = self._theirs.reader(_WRITER, 0, 0, drain=True)

    def encode(self, value: Any, count: int) -> list[None]:
        return list(map(self._writer.write, repeat(value, count), repeat(LIMIT_S)))

    def decode(self, messages: list[None]) -> list[Any]:
        return list(map(self._reader.read, repeat(LIMIT_S, len(messages))))

    def size(self, message: None) -> int:
        """Of all messages so far, as the ring counts them, which are alike."""
        counters = self._ours.core.channel_counters(_WRITER, 0)
        return int(counters["bytes"] // counters["published"])


def calls_for(value: Value) -> Calls:
    channel = _Channel()
    return Calls(channel.encode, channel.decode, channel.size)
