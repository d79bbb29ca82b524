"""iceoryx2 publish and subscribe, a slice of bytes with the pickled value in it.

Its subscribers look for a message in a loop that yields the processor: they never sleep, so they are woken by nobody, and each
takes a core's time for as long as it waits.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any

import iceoryx2

from microbench.transports.base import AHEAD, LIMIT_S, Place, pickled, unpickled


class Iceoryx2PubSub:
    """No message is dropped: the publisher is never more than `AHEAD` messages ahead, and the subscribers have room for them."""

    def __init__(self, place: Place) -> None:
        self._place = place
        iceoryx2.set_log_level(iceoryx2.LogLevel.Fatal)
        config = iceoryx2.config.default()
        # Its files are this broadcast's alone, and can be told from all others: it leaves some even when it is closed.
        config.global_cfg.root_path = iceoryx2.Path.new(str(place.directory))
        config.global_cfg.prefix = iceoryx2.FileName.new(f"iox2_{place.directory.name}_")
        node = iceoryx2.NodeBuilder.new().config(config).create(iceoryx2.ServiceType.Ipc)
        service = (
            node.service_builder(iceoryx2.ServiceName.new("broadcast"))
            .publish_subscribe(iceoryx2.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .max_subscribers(place.readers)
            .subscriber_max_buffer_size(2 * AHEAD)
            .open_or_create()
        )
        self._kept = node, service
        self._port: Any = None if place.writes else service.subscriber_builder().create()

    def offer(self) -> None:
        """Nothing: they meet by name."""

    def join(self, offers: Sequence[Any]) -> None:
        if self._place.writes:
            _, service = self._kept
            growing = iceoryx2.AllocationStrategy.PowerOfTwo
            self._port = service.publisher_builder().initial_max_slice_len(1024).allocation_strategy(growing).create()

    def prepare(self, encoded_bytes: int) -> None:
        """Nothing to do."""

    def encoded_bytes(self, value: Any) -> int:
        return len(pickled(value))

    def write(self, value: Any) -> None:
        data = pickled(value)
        sample = self._port.loan_slice_uninit(len(data))
        ctypes.memmove(sample.payload().as_ptr(), data, len(data))
        sample.assume_init().send()

    def read(self) -> Any:
        end = time.monotonic() + LIMIT_S
        while (sample := self._port.receive()) is None:
            os.sched_yield()
            if time.monotonic() > end:
                raise TimeoutError(f"no message within {LIMIT_S:g} s")
        return unpickled(sample.payload().as_memory_view())

    def close(self) -> None:
        self._port = None
        self._kept = (None, None)
