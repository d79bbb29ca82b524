"""What of the CUDA device can be seen where there is none: its refusal, and how the host waits for an event."""

from __future__ import annotations

import socket
import time

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


class Link:
    """A communicator, whose peer dies at the n-th poll."""

    def __init__(self, polls: int = 10**9, *, failed: bool = False) -> None:
        self.failure: CommunicatorError | None = PeerDiedError("rank 1 is gone", peer=1) if failed else None
        self.library_says: Exception | None = None
        self._polls = polls

    def check(self) -> None:
        if self.library_says is not None:
            raise self.library_says

    def poll(self) -> None:
        self._polls -= 1
        if self._polls < 0:
            self.failure = PeerDiedError("rank 1 is gone", peer=1)
            raise self.failure.fresh()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_device_is_an_error_that_says_so() -> None:
    with pytest.raises(CommunicatorError, match=r"torch finds no CUDA device in this process; see nvidia-smi"):
        CudaDevice()


def test_the_host_waits_until_the_event_is_reached() -> None:
    event = CudaEvent(After(30), "a send", frozenset((Link(),)))
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
def test_a_failure_that_was_known_is_raised_whether_the_event_is_reached_or_not(looks: int) -> None:
    """It may be reached because what is before it was aborted."""
    with pytest.raises(PeerDiedError):
        CudaEvent(After(looks), "a receive", frozenset((Link(), Link(0, failed=True)))).synchronize()


def test_a_failure_while_the_host_waits_ends_the_wait() -> None:
    with pytest.raises(PeerDiedError):
        CudaEvent(After(10**9), "a receive", frozenset((Link(20), Link()))).synchronize()


def test_what_had_been_reached_before_a_failure_was_known_is_good_and_stays_so() -> None:
    link = Link(3)
    event = CudaEvent(After(3), "a receive", frozenset((link,)))
    event.synchronize()
    with pytest.raises(PeerDiedError):
        link.poll()
    event.synchronize()
    with pytest.raises(PeerDiedError):
        CudaEvent(After(0), "a receive", frozenset((link,))).synchronize()


def test_a_transfer_that_the_library_ended_by_itself_is_not_good() -> None:
    link = Link()
    link.library_says = CommunicatorError("remote error")
    with pytest.raises(CommunicatorError, match="remote error"):
        CudaEvent(After(0), "a receive", frozenset((link,))).synchronize()


@pytest.mark.parametrize(
    ("name", "into"), [("conj", torch.zeros(4, dtype=torch.complex64).conj()), ("neg", torch._neg_view(torch.zeros(4)))]
)
def test_a_buffer_that_would_show_what_arrives_changed_is_refused(name: str, into: torch.Tensor) -> None:
    link = GlooCommunicator(torch.distributed.HashStore(), "link", 0, 2)
    with pytest.raises(TensorMismatchError, match=rf"a lazily evaluated {name} of a tensor; call \.resolve_{name}\(\)") as caught:
        check_buffer(link, into, (4,), into.dtype, 1)
    assert (caught.value.rank, caught.value.peer, caught.value.host) == (0, 1, socket.gethostname())
