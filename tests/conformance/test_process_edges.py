"""What happens at the edges of a process: forks, exits, no memory, calls from inside calls."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest

from raycomm import _core
from raycomm.channel import RingLayout, ShmArena
from raycomm.codec import Failure
from raycomm.options import Options

MIB = 1 << 20

PRELUDE = """
import os, resource, sys, threading, time
from raycomm import _core
from raycomm.channel import RingLayout, ShmArena
from raycomm.options import Options
options = Options(shm_limit_bytes=64 << 20)
writing = ShmArena.create(0, [RingLayout(0, 16, 256, (1,))], options, loops=2)
reading = ShmArena.create(1, [], options, loops=2)
writing.attach(reading.address)
reading.attach(writing.address)
writing.join(0)
writer = writing.writer([0])
reader = reading.reader(0, 0, 0, drain=True)
class Ref:
    _index = -1
    _value = None
"""


def run(script: str, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
    code = PRELUDE + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit_s, check=False)


def pair(limit: int = 64 * MIB) -> tuple[ShmArena, ShmArena]:
    options = Options(shm_limit_bytes=limit)
    writing = ShmArena.create(0, [RingLayout(0, 16, 256, (1,))], options, loops=2)
    reading = ShmArena.create(1, [], options, loops=2)
    writing.attach(reading.address)
    reading.attach(writing.address)
    writing.join(0)
    return writing, reading


def test_a_forked_child_cannot_close_its_parents_arenas() -> None:
    writing, reading = pair()
    child = os.fork()
    if child == 0:
        try:
            writing.close(_core.CLOSED_TEARDOWN, 0)
            reading.core.set_loop_state(_core.LOOP_LEFT, 0)
            assert writing.core.wait_left([1], 5)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (writing.closed, reading.closed) == ((0, 0), (0, 0))
    assert writing.core.loop_state(1) == _core.LOOP_NONE
    writing.writer([0]).write("still open")
    assert reading.reader(0, 0, 0, drain=True).read(5) == "still open"


@pytest.mark.parametrize(
    "limit", [-1, 0.0005]
)  # one long wait, and one that comes back all the time, also while the interpreter ends
@pytest.mark.parametrize("ends", ["pass", "sys.exit(3)", "raise KeyError"])
def test_a_thread_parked_at_exit_does_not_abort_the_process(ends: str, limit: float) -> None:
    done = run(f"""
        class Slow:
            def __del__(self, sleep=time.sleep):
                sleep(0.2)  # lets the GIL go in the middle of finalization, and the thread try to take it
        slow = Slow()
        started = threading.Event()
        def park():
            started.set()
            while True:
                try:
                    reader.read({limit})
                except _core.TimedOut:
                    pass
        threading.Thread(target=park, daemon=True).start()
        started.wait()
        time.sleep(0.05)
        {ends}
    """)
    assert done.returncode == {"pass": 0, "sys.exit(3)": 3, "raise KeyError": 1}[ends], done.stderr
    assert "KeyError" in done.stderr if "raise" in ends else not done.stderr


def test_no_memory_for_an_input_submits_nothing() -> None:
    done = run("""
        value = b"x" * (300 << 20)
        size = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size + (100 << 20), -1))
        def submit(value):
            return writer.submit((value,), Ref, "graph", ("queue",), "pending", (reader,), 10, 1.0)
        try:
            submit(value)
        except MemoryError:
            pass
        else:
            sys.exit("it fitted")
        assert writer.published == 0
        (ref,) = submit(5)
        assert (ref._index, ref._value) == (0, "pending")
        reader.fetch(ref, {}, set(), 0, 10, 1.0)
        assert ref._value == 5
    """)
    assert done.returncode == 0, done.stderr


def test_a_tensor_where_torch_cannot_be_imported_is_a_serialization_error() -> None:
    import torch

    payload, buffers = _core.encode(torch.ones(2))
    done = run(f"""
        sys.modules["torch"] = None
        from raycomm.errors import SerializationError
        try:
            _core.decode({payload!r}, {buffers!r})
        except SerializationError as error:
            assert "torch" in str(error) and isinstance(error.__cause__, ImportError), repr(error)
        else:
            sys.exit("decoded")
    """)
    assert done.returncode == 0, done.stderr


class CallsBack:
    """Writes to the graph it is being sent to."""

    def __init__(self, submit: Any) -> None:
        self.submit = submit

    def __reduce__(self) -> Any:
        self.submit()
        return int, (7,)


class Ref:
    """As much of a ref as the native part needs."""

    _index = -1
    _value: Any = None


def test_a_call_from_inside_a_call_is_refused() -> None:
    writing, reading = pair()
    writer, reader = writing.writer([0]), reading.reader(0, 0, 0, drain=True)
    raised: list[BaseException] = []

    def again() -> None:
        try:
            writer.submit((1,), Ref, "graph", ("queue",), "pending", (reader,), 10, 5.0)
        except _core.Misuse as error:
            raised.append(error)

    refs = writer.submit((CallsBack(again),), Ref, "graph", ("queue",), "pending", (reader,), 10, 5.0)
    assert refs is not None
    (ref,) = refs
    assert raised
    assert all("from inside one of its own calls" in str(error) for error in raised)
    reader.fetch(ref, {}, set(), 0, 10, 5.0)
    assert ref._value == 7


def test_a_failure_holds_no_frames() -> None:
    def fails(argument: np.ndarray) -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError(argument.sum()) from error

    try:
        fails(np.ones(3))
    except ValueError as error:
        failure = Failure.capture(error, "here", 1)
    assert "in fails" in failure.traceback
    assert "KeyError" in failure.traceback
    assert failure.exception is not None
    assert failure.exception.__traceback__ is None
    assert failure.exception.__cause__ is not None
    assert failure.exception.__cause__.__traceback__ is None
