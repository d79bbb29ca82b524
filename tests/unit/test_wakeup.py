"""No wake-up is lost: a litmus of the parking protocol with the product's own wait and bell, and with park slices switched off.

One side polls and answers within nanoseconds; the other parks at once, after a pause of random length. So the poller's store
falls on every moment of the other's way to its park. A lost wake-up hangs the round, which ends at its time limit and is counted.
With release and acquire in place of seq_cst this loses one within a few thousand rounds.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raycomm import _core

ROUND_LIMIT_S = 20.0
POLL_US = (20.0, 1e9)  # spin, then yield for as long as it takes

PARKER = """
import sys
from raycomm import _core
pid, fd, rounds, pauses, seed = map(int, sys.argv[1:6])
pingpong = _core.PingPong.attach(pid, fd, 0.0, 0.0, False)
print(pingpong.rally(1, 0, False, rounds, pauses, seed, float(sys.argv[6])))
"""


def rally(rounds: int, pauses: int, seed: int, polls: bool) -> tuple[int, int]:
    """Rounds that the server here and the parker in another process played."""
    pingpong = _core.PingPong(2, *(POLL_US if polls else (0.0, 0.0)), False)
    arguments = map(str, (os.getpid(), pingpong.fd, rounds, pauses, seed, ROUND_LIMIT_S))
    with subprocess.Popen([sys.executable, "-c", PARKER, *arguments], stdout=subprocess.PIPE, text=True) as parker:
        here = pingpong.rally(0, 1, True, rounds, 0 if polls else pauses, seed + 1, ROUND_LIMIT_S)
        there, _ = parker.communicate(timeout=10 * ROUND_LIMIT_S)
    return here, int(there)


@pytest.mark.parametrize("polls", [True, False], ids=["one side parks", "both park"])
def test_no_wakeup_is_lost(seed: int, polls: bool) -> None:
    for pauses in (2, 16):
        rounds = 50_000 if polls else 25_000
        assert rally(rounds, pauses, seed, polls) == (rounds, rounds)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("polls", [True, False], ids=["one side parks", "both park"])
def test_no_wakeup_is_lost_in_millions(seed: int, polls: bool) -> None:
    rounds = 2_000_000 if polls else 800_000  # two parks a round take four times as long
    for pauses in (1, 4, 8, 16, 64):
        assert rally(rounds, pauses, seed, polls) == (rounds, rounds)


def test_a_missing_answer_is_seen() -> None:
    pingpong = _core.PingPong(2, 0.0, 0.0, False)
    assert pingpong.rally(0, 1, True, 10, 0, 1, 0.05) == 0
    pingpong.post(0, 1)
    assert pingpong.rally(0, 1, True, 10, 0, 1, 0.05) == 1


def test_a_wake_up_that_is_lost_costs_time_and_nothing_else() -> None:
    """The value is stored and nobody is woken: the parked one looks again by itself, at the end of its slice."""
    pingpong = _core.PingPong(1, 0.0, 0.0)
    with mmap.mmap(pingpong.fd, 0) as cells, ThreadPoolExecutor(1) as pool:
        parked = pool.submit(pingpong.wait, 0, 1, ROUND_LIMIT_S)
        time.sleep(0.05)
        assert not parked.done()
        begin = time.monotonic()
        cells[0] = 1
        assert parked.result()
        assert time.monotonic() - begin < ROUND_LIMIT_S / 2  # a fifth of a second is promised


def test_a_wait_ends_at_its_limit_and_not_before() -> None:
    pingpong = _core.PingPong(1, 0.0, 0.0)
    assert not pingpong.wait(0, 1, 0.0)
    assert not pingpong.wait(0, 1, 0.01)
    pingpong.post(0, 1)
    assert pingpong.wait(0, 1, 0.0)
    with pytest.raises(IndexError):
        pingpong.post(1, 1)
