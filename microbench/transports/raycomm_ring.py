"""raycomm's shared-memory channel, as a graph uses it, without a graph: one ring, written by rank 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from microbench.transports.base import LIMIT_S, Place, pickled, unpickled
from raycomm import _core
from raycomm.channel import Address, RingLayout, ShmArena
from raycomm.channel.shm import slots_for
from raycomm.options import Options

_CHANNEL = 0


class RaycommRing:
    """Values by raycomm's own codec."""

    def __init__(self, place: Place) -> None:
        self._place = place
        options = Options()
        readers = tuple(range(1, place.readers + 1))
        ring = RingLayout(_CHANNEL, slots_for(options.max_inflight), options.inline_bytes, readers)
        size = place.readers + 1
        self._arena = ShmArena.create(
            place.rank, [ring] if place.writes else [], options, loops=size, processes=size if place.writes else 0
        )
        self._end: Any = None

    def offer(self) -> Address:
        return self._arena.address

    def join(self, offers: Sequence[Any]) -> None:
        for address in offers:
            if address.process != self._place.rank:
                self._arena.attach(address)
        self._arena.join(0)
        if self._place.writes:
            self._end = self._arena.writer([_CHANNEL])
        else:
            self._end = self._arena.reader(0, _CHANNEL, self._place.rank - 1, drain=True)

    def prepare(self, encoded_bytes: int) -> None:
        """Nothing to do."""

    def encoded_bytes(self, value: Any) -> int:
        payload, buffers = _core.encode(value)
        return len(payload) + sum(memoryview(buffer).nbytes for buffer in buffers)

    def write(self, value: Any) -> None:
        self._end.write(value, LIMIT_S)

    def read(self) -> Any:
        return self._end.read(LIMIT_S)

    def close(self) -> None:
        self._arena.close(_core.CLOSED_TEARDOWN, self._place.rank)
        self._end = None


class RaycommRingPickle(RaycommRing):
    """The same ring with pickled bytes in it: what the codec is worth."""

    def encoded_bytes(self, value: Any) -> int:
        return len(pickled(value))

    def write(self, value: Any) -> None:
        self._end.write(pickled(value), LIMIT_S)

    def read(self) -> Any:
        return unpickled(self._end.read(LIMIT_S))
