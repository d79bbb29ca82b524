"""What the tests of the simulated device share."""

from __future__ import annotations

from typing import Any

from raycomm.testing.simulated import Delays, Stream, Tensor

INSTANT = Delays(host=(0.0, 0.0), compute=(1.0, 1.0), transfer=(1.0, 1.0), notice=(1.0, 1.0))


def filled(stream: Stream, content: Any, name: str = "mine") -> Tensor:
    """A tensor of that content, made by a kernel on `stream`."""
    tensor = stream.device.allocate((), "term", stream, name)
    stream.compute("make", (), (tensor,), lambda _: [content])
    return tensor
