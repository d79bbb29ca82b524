"""The one thread that calls a library which orders its work by the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from raycomm.device.host_ordered import CallThread
from raycomm.errors import CommunicatorClosedError

LIMIT_S = 20.0


@pytest.fixture
def calls() -> Iterator[CallThread]:
    thread = CallThread("link 3", torch.device("cpu"))
    yield thread
    thread.stop()


def test_calls_come_one_after_the_other_on_one_thread(calls: CallThread) -> None:
    names: list[str] = []
    ends = [calls.call(lambda: names.append(threading.current_thread().name)) for _ in range(3)]
    assert all(end.wait(LIMIT_S) for end in ends)
    assert names == ["raycomm link 3"] * 3
    assert calls.first.is_set()


def test_a_call_that_fails_ends_with_its_failure_and_the_next_is_made(calls: CallThread) -> None:
    def leave() -> None:
        raise SystemExit(3)

    failed, fine = calls.call(leave), calls.call(lambda: None)
    assert failed.wait(LIMIT_S)
    assert fine.wait(LIMIT_S)
    assert isinstance(failed.failure, SystemExit)
    assert fine.failure is None


def test_idle_means_that_nothing_is_under_way(calls: CallThread) -> None:
    assert calls.call_if_idle(lambda: None) is None  # it has not begun
    gate, entered = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert gate.wait(LIMIT_S)

    held = calls.call(hold)
    assert entered.wait(LIMIT_S)
    assert calls.call_if_idle(lambda: None) is None
    gate.set()
    assert held.wait(LIMIT_S)
    done = calls.call_if_idle(lambda: None)  # at once: whoever hears of an end finds it idle
    assert done is not None
    assert done.wait(LIMIT_S)


def test_a_stopped_one_refuses(calls: CallThread) -> None:
    done = calls.call(lambda: None)
    calls.stop()
    assert done.wait(LIMIT_S)  # what waited is called
    called: list[int] = []
    with pytest.raises(CommunicatorClosedError, match="link 3 is closed") as caught:
        calls.call(lambda: called.append(1))
    assert caught.value.communicator == "link 3"
    assert calls.call_if_idle(lambda: called.append(2)) is None
    assert called == []


def test_one_that_cannot_start_says_so_each_time(calls: CallThread, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start"):
                calls.call(lambda: None)
    assert calls.call(lambda: None).wait(LIMIT_S)
