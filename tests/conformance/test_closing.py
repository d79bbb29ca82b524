"""How waits end: by a close, a signal, a death. The bounds on time are hang guards, ten times what is promised."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raycomm import _core
from tests.conformance.net import KINDS, Net, Nets, all_at_once
from tests.conformance.peer import ROOT, Agent, Remote

kinds = pytest.mark.parametrize("kind", KINDS)
reasons = pytest.mark.parametrize("reason", [_core.CLOSED_TEARDOWN, _core.CLOSED_PEER_DIED, _core.CLOSED_FAILED])
DEATH_GUARD_S = 20.0  # a death is promised to be seen within 2 s


def until(condition: Any) -> None:
    """Polls, with a hang guard."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def parked(agent: Any) -> bool:
    """Whether an agent of this process waits in its arena's doorbell."""
    from tests.conformance.peer import peek

    return peek(agent.arena, _core.layout()["ArenaHeader.doorbell.sleepers"], "I") > 0


@kinds
@reasons
def test_a_close_wakes_parked_readers(net_of: Nets, kind: str, reason: int) -> None:
    with net_of(kind) as net, all_at_once(net.readers, "read", -1.0) as results:
        if kind == "one process":
            until(lambda: parked(net.reader))
        net.writer.close(reason, 3)
        for result in results:
            with pytest.raises(_core.Closed) as caught:
                result.result(20)
            assert caught.value.args == (reason, 3)


@kinds
@reasons
def test_a_close_wakes_a_parked_writer(net_of: Nets, kind: str, reason: int) -> None:
    with net_of(kind, slots=2) as net, ThreadPoolExecutor(1) as pool:
        written = pool.submit(net.writer.write_forever)
        until(lambda: parked(net.writer))
        net.reader.close(reason, 1)
        with pytest.raises(_core.Closed) as caught:
            written.result(20)
        assert caught.value.args == (reason, 1)
        assert net.writer.published() == 2


@kinds
def test_the_first_reason_stays(net_of: Nets, kind: str) -> None:
    with net_of(kind) as net:
        net.reader.close(_core.CLOSED_FAILED, 1)
        net.writer.close(_core.CLOSED_TEARDOWN, 0)
        assert {agent.is_closed() for agent in (net.writer, net.reader)} == {(_core.CLOSED_FAILED, 1)}
        with pytest.raises(_core.Closed):
            net.writer.write(1)
        assert net.writer.published() == 0


@kinds
def test_draining_hands_out_what_was_published_and_no_more(net_of: Nets, kind: str) -> None:
    with net_of(kind, drain=True) as net:
        for number in range(3):
            net.writer.write([number, b"x" * 50_000])
        net.writer.close()
        for reader in net.readers:
            assert [reader.read()[0] for _ in range(3)] == [0, 1, 2]
            for call in (reader.read, reader.skip, reader.read):
                with pytest.raises(_core.Closed):
                    call(0)
            assert reader.taken() == 3


@kinds
def test_leaving_leaves_at_once(net_of: Nets, kind: str) -> None:
    with net_of(kind, drain=False) as net:
        net.writer.write(1)
        net.writer.close()
        for reader in net.readers:
            for call in (reader.read, reader.skip):
                with pytest.raises(_core.Closed):
                    call(-1.0)
            assert reader.taken() == 0


@contextlib.contextmanager
def mortal(writes: bool) -> Iterator[tuple[Net, Remote]]:
    """A channel to or from a process that the test may end."""
    victim = Remote()
    try:
        net = Net([Agent], writer=victim.become) if writes else Net([victim.become], slots=2)
        yield net, victim
    finally:
        victim.stop()


@pytest.mark.parametrize("writes", [True, False], ids=["writer dies", "reader dies"])
def test_a_peers_death_ends_the_wait(writes: bool) -> None:
    with mortal(writes) as (net, victim), ThreadPoolExecutor(1) as pool:
        mine = net.reader if writes else net.writer
        waiting = pool.submit(mine.read, -1.0) if writes else pool.submit(mine.write_forever)
        until(lambda: parked(mine))
        victim.popen.send_signal(signal.SIGSTOP)
        time.sleep(0.7)  # several slices: someone who stands still is not dead
        assert not waiting.done()
        assert mine.is_closed() == (0, 0)
        victim.popen.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(_core.Closed) as caught:
            waiting.result(DEATH_GUARD_S)
        assert time.monotonic() - begin < DEATH_GUARD_S
        assert caught.value.args == (_core.CLOSED_PEER_DIED, 0 if writes else 1)
        assert not mine.arena.core.alive(0 if writes else 1)


def test_what_a_dead_writer_published_is_still_read() -> None:
    with mortal(writes=True) as (net, victim):
        victim.write([1, b"x" * 100_000])
        victim.write(2)
        victim.stop()
        assert net.reader.read() == [1, b"x" * 100_000]
        assert net.reader.read() == 2
        with pytest.raises(_core.Closed) as caught:
            net.reader.read(DEATH_GUARD_S)
        assert caught.value.args == (_core.CLOSED_PEER_DIED, 0)


INTERRUPTED = """
import sys, time
from raycomm import _core
from tests.conformance.net import Net
from tests.conformance.peer import Agent
net = Net([Agent], slots=2)
try:
    print("ready", flush=True)
    if sys.argv[1] == "read":
        net.reader.read(-1.0)
    else:
        net.writer.write_forever()
except KeyboardInterrupt:
    print("interrupted", flush=True)
if sys.argv[1] == "read":
    net.writer.write("after")
print(net.reader.read())
"""


@pytest.mark.parametrize(("action", "after"), [("read", "after"), ("write", "0")])
def test_an_interrupt_ends_a_parked_wait_and_loses_nothing(action: str, after: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, action]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)  # into the park
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        assert time.monotonic() - begin < 10.0  # promised: within a second
        assert process.stdout.readline() == after + "\n"
        assert process.wait(20) == 0


def test_a_signal_handler_that_returns_does_not_end_the_wait() -> None:
    net = Net([Agent])
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(_core.TimedOut):
            net.reader.read(1.0)
        assert seen == [1]
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_two_threads_on_one_end_are_misuse() -> None:
    net = Net([Agent], slots=2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(net.reader.read, -1.0)
        until(lambda: parked(net.reader))
        for call in (net.reader.read, net.reader.skip):
            with pytest.raises(_core.Misuse, match="two threads"):
                call(0)
        net.writer.write(1)
        assert waiting.result(20) == 1
        waiting = pool.submit(net.writer.write_forever)
        until(lambda: parked(net.writer))
        with pytest.raises(_core.Misuse, match="two threads"):
            net.writer.write(1, 0)
        assert net.reader.read() == 0
        net.writer.close()
        with pytest.raises(_core.Closed):
            waiting.result(20)


class Interrupts:
    """Unpickling it is interrupted the first time."""

    times = 0

    def __reduce__(self) -> Any:
        return interrupt_once, ()


def interrupt_once() -> str:
    Interrupts.times += 1
    if Interrupts.times == 1:
        raise KeyboardInterrupt
    return "whole"


def test_an_interrupted_decode_is_taken_up_again() -> None:
    import numpy as np

    net = Net([Agent])
    Interrupts.times = 0
    net.writer.write([Interrupts(), np.full(40_000, 1, np.uint8)])
    net.writer.write(np.full(40_000, 2, np.uint8))
    with pytest.raises(KeyboardInterrupt):
        net.reader.read()
    text, array = net.reader.read()
    assert (text, array[0], net.reader.read()[0]) == ("whole", 1, 2)
    del array
    assert net.writer.in_use() == 0


def test_skipping_an_interrupted_message_does_not_show_its_bytes_as_the_next() -> None:
    import numpy as np

    net = Net([Agent])
    Interrupts.times = 0
    net.writer.write([Interrupts(), np.full(40_000, 1, np.uint8)])
    net.writer.write(np.full(40_000, 2, np.uint8))
    with pytest.raises(KeyboardInterrupt):
        net.reader.read()
    net.reader.skip()
    assert net.reader.read()[0] == 2
    assert net.writer.in_use() == 0
