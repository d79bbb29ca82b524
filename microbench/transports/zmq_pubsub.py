"""ZeroMQ PUB/SUB, over a Unix socket or TCP, with pickle or msgpack.

The writer's socket is an XPUB, which is a PUB that says who has subscribed: so the first message is not lost. No message is
dropped: there is no high-water mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import zmq

from microbench.transports.base import LIMIT_S, Place, as_array, as_tensor, pickled, unpickled

_LIMIT_MS = int(LIMIT_S * 1e3)


class ZmqPubSub:
    """ipc, pickle."""

    encode: Callable[[Any], bytes] = staticmethod(pickled)
    decode: Callable[[Any], Any] = staticmethod(unpickled)
    tcp = False

    def __init__(self, place: Place) -> None:
        self._place = place
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB if place.writes else zmq.SUB)
        self._socket.setsockopt(zmq.SNDHWM if place.writes else zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SNDTIMEO if place.writes else zmq.RCVTIMEO, _LIMIT_MS)
        self._socket.setsockopt(zmq.LINGER, 0)
        if place.writes:
            self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # every subscription counts, though they are alike
            self._socket.setsockopt(zmq.RCVTIMEO, _LIMIT_MS)

    def offer(self) -> str | None:
        if not self._place.writes:
            return None
        if self.tcp:
            self._socket.bind("tcp://127.0.0.1:*")
        else:
            self._socket.bind(f"ipc://{self._place.directory}/zmq")
        endpoint: Any = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        return str(endpoint, "ascii").rstrip("\0")

    def join(self, offers: Sequence[Any]) -> None:
        if not self._place.writes:
            self._socket.connect(offers[0])
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
            return
        for _ in range(self._place.readers):
            self._socket.recv()

    def prepare(self, encoded_bytes: int) -> None:
        """Nothing to do."""

    def encoded_bytes(self, value: Any) -> int:
        return len(self.encode(value))

    def write(self, value: Any) -> None:
        self._socket.send(self.encode(value), copy=False)

    def read(self) -> Any:
        return self.decode(self._socket.recv(copy=False).buffer)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def _packed(value: Any) -> bytes:
    array = as_array(value)
    if hasattr(array, "dtype"):
        array = {"dtype": array.dtype.str, "shape": array.shape, "data": array.data.cast("B")}
    packed: bytes = msgpack.packb(array)
    return packed


def _unpacked(data: Any) -> Any:
    value = msgpack.unpackb(data, max_bin_len=1 << 31)
    if isinstance(value, dict):
        import numpy as np

        return as_tensor(np.frombuffer(value["data"], value["dtype"]).reshape(value["shape"]))
    return value


class ZmqPubSubMsgpack(ZmqPubSub):
    """ipc, msgpack."""

    encode = staticmethod(_packed)
    decode = staticmethod(_unpacked)


class ZmqPubSubTcp(ZmqPubSub):
    """TCP, pickle."""

    tcp = True


class ZmqPubSubTcpMsgpack(ZmqPubSubMsgpack):
    """TCP, msgpack."""

    tcp = True
