"""Whether the kernel lets a process run, from real processes in each state."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from raycomm.observe.condition import Condition, condition_of

_ATTACH, _DETACH = 16, 17  # of ptrace
_NAMED = "import ctypes, time; ctypes.CDLL(None).prctl(15, b') T (t', 0, 0, 0); print(flush=True); time.sleep(60)"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose name looks like a state."""
    process = subprocess.Popen([sys.executable, "-c", _NAMED], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def becomes(pid: int, condition: Condition) -> None:
    end = time.monotonic() + 10
    while condition_of(pid) is not condition:
        assert time.monotonic() < end, condition_of(pid)
        time.sleep(0.001)


def test_running_and_stopped(child: subprocess.Popen[bytes]) -> None:
    becomes(child.pid, Condition.ALIVE)
    os.kill(child.pid, signal.SIGSTOP)
    becomes(child.pid, Condition.STOPPED)
    assert not condition_of(child.pid).runs
    os.kill(child.pid, signal.SIGCONT)
    becomes(child.pid, Condition.ALIVE)
    assert condition_of(child.pid).runs


def test_held_by_a_debugger(child: subprocess.Popen[bytes]) -> None:
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    if ptrace(_ATTACH, child.pid, None, None) != 0:
        pytest.skip(f"no permission to trace: {os.strerror(ctypes.get_errno())}")
    os.waitpid(child.pid, 0)
    assert condition_of(child.pid) is Condition.TRACED
    assert not Condition.TRACED.runs
    ptrace(_DETACH, child.pid, None, None)
    becomes(child.pid, Condition.ALIVE)


def test_this_process_and_none() -> None:
    assert condition_of(os.getpid()) in (Condition.ALIVE, Condition.IN_KERNEL)
    assert Condition.IN_KERNEL.runs
    assert condition_of(0) is Condition.ALIVE
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert condition_of(process.pid) is Condition.ALIVE
