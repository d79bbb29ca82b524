"""What of the CUDA device can be seen where there is none: its refusal, and how the host waits for an event."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch

from raycomm.device.checks import check_buffer
from raycomm.device.cuda import CudaDevice, CudaEvent
from raycomm.device.gloo import GlooCommunicator
from raycomm.errors import CommunicatorError, PeerDiedError, TensorMismatchError, TransferTimeoutError


class After:
    """An event that is reached at the n-th look."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0


def nothing() -> None:
    return


def gone() -> None:
    raise PeerDiedError("rank 1 is gone", peer=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_device_is_an_error_that_says_so() -> None:
    with pytest.raises(CommunicatorError, match=r"torch finds no CUDA device in this process; see nvidia-smi"):
        CudaDevice()


def test_the_host_waits_until_the_event_is_reached() -> None:
    event = CudaEvent(After(30), "a send", frozenset((nothing,)))
    event.synchronize()
    event.synchronize(0.0)  # and is not asked again
    assert event.event.left == -1


def test_a_limit_that_passes() -> None:
    begin = time.monotonic()
    with pytest.raises(TransferTimeoutError, match=r"a send did not end within 0\.05 s") as caught:
        CudaEvent(After(10**9), "a send", frozenset()).synchronize(0.05)
    assert (caught.value.limit_s, caught.value.waits_for) == (0.05, "a send")
    assert 0.05 <= time.monotonic() - begin < 10.0
    with pytest.raises(TransferTimeoutError):
        CudaEvent(After(10**9), "a send", frozenset()).synchronize(0.0)


@pytest.mark.parametrize("looks", [0, 10**9])
def test_a_failure_before_an_event_is_raised_whether_it_is_reached_or_not(looks: int) -> None:
    with pytest.raises(PeerDiedError):
        CudaEvent(After(looks), "a receive", frozenset((nothing, gone))).synchronize()


def test_what_was_good_once_stays_good() -> None:
    looks: list[Any] = []

    def look() -> None:
        if looks:
            gone()

    event = CudaEvent(After(3), "a receive", frozenset((look,)))
    event.synchronize()
    looks.append("the peer has died since")
    event.synchronize()


@pytest.mark.parametrize(
    ("name", "into"), [("conj", torch.zeros(4, dtype=torch.complex64).conj()), ("neg", torch._neg_view(torch.zeros(4)))]
)
def test_a_buffer_that_would_show_what_arrives_changed_is_refused(name: str, into: torch.Tensor) -> None:
    link = GlooCommunicator(torch.distributed.HashStore(), "link", 0, 2)
    with pytest.raises(TensorMismatchError, match=rf"a lazily evaluated {name} of a tensor; call \.resolve_{name}\(\)") as caught:
        check_buffer(link, into, (4,), into.dtype, 1)
    assert (caught.value.rank, caught.value.peer, caught.value.host) == (0, 1, socket.gethostname())
