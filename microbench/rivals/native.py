"""The floor: raycomm's native core between plain processes, without Ray and without a graph.

The two functions at the end are the only place that touches `raycomm._core`.
"""

from __future__ import annotations

from collections.abc import Sequence

PAYLOAD_8B = bytes(range(8))


def samples_ns(row: str, count: int) -> Sequence[int]:
    """Nanoseconds of `count` round trips of a native row."""
    if row == "floor_pingpong":
        return pingpong(2, count)
    if row == "floor_chain5":
        return pingpong(5, count)
    if row == "channel_pingpong_8B":
        return channel_pingpong(PAYLOAD_8B, count)
    raise ValueError(f"not a native row: {row!r}")


def pingpong(processes: int, count: int) -> Sequence[int]:
    """Nanoseconds of each of `count` round trips of a bare wait/post around a ring of `processes` processes.

    The calling process is one of them and posts first; the others each wait for the one before them and post to the one
    after. They are started here and have ended when this returns, also after an error.
    """
    raise NotImplementedError("the native ping-pong is not connected yet")


def channel_pingpong(payload: bytes, count: int) -> Sequence[int]:
    """Nanoseconds of each of `count` round trips of `payload` over two of raycomm's rings, there and back.

    One other plain process, started here, reads each message and writes it back; it has ended when this returns. Raises
    `ValueError` when the last message came back changed.
    """
    raise NotImplementedError("the channel ping-pong is not connected yet")
