"""vLLM's shared-memory message queue, the real one, in the environment that `make bench-vllm` makes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from microbench.leftovers import name_shared_memory
from microbench.transports.base import LIMIT_S, Place, as_array, as_tensor, limited, pickled


class VllmQueue:
    """`enqueue` and `dequeue`. It pickles; arrays go beside the pickle."""

    def __init__(self, place: Place) -> None:
        self._place = place
        os.environ["VLLM_RPC_BASE_PATH"] = str(place.directory)  # for its sockets, which it leaves behind
        name_shared_memory()
        self._queue: Any = MessageQueue(place.readers, place.readers) if place.writes else None

    def offer(self) -> Any:
        return self._queue.export_handle() if self._place.writes else None

    def join(self, offers: Sequence[Any]) -> None:
        if not self._place.writes:
            self._queue = MessageQueue.create_from_handle(offers[0], self._place.rank - 1)
        with limited("the queue was not ready"):  # it has no limit of its own
            self._queue.wait_until_ready()

    def prepare(self, encoded_bytes: int) -> None:
        """Nothing to do."""

    def encoded_bytes(self, value: Any) -> int:
        return len(pickled(value))

    def write(self, value: Any) -> None:
        self._queue.enqueue(as_array(value), timeout=LIMIT_S)

    def read(self) -> Any:
        return as_tensor(self._queue.dequeue(timeout=LIMIT_S))

    def close(self) -> None:
        self._queue = None
