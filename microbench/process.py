"""A bench process: a child that answers one request at a time and can always be got rid of.

The systems under test can hang where no Python exception reaches (a loop that never leaves, a teardown that waits for
ever), so they run in a child process, each request has a wall-clock limit, and a request that passes it costs the child
and everything it started. The child leads a session of its own: Ctrl-C in the terminal reaches the parent only, and the
session id, beside a mark in the environment, still finds the child's descendants after their parents are gone.

The alternative, a watchdog thread in one process, cannot help when the hang holds the GIL or sits in the driver's own
call; a child per turn would pay Ray's start each time.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from microbench import leftovers
from microbench.leftovers import MARK

START_LIMIT_S = 60.0
END_LIMIT_S = 10.0
_PR_SET_PDEATHSIG = 1
_ROOT = Path(__file__).resolve().parent.parent


class RequestFailed(Exception):
    """The request raised in the bench process; the process goes on."""


class ProcessLost(Exception):
    """The bench process passed a limit or died; it and its descendants are gone."""


class BenchProcess:
    """A child process that holds one object of class `serves` ("module:Class") and calls its methods on request.

    The child starts with the first request, and anew with the first one after it was lost. It runs in this interpreter, unless
    `python` is the path of another.
    """

    def __init__(self, serves: str, python: str = sys.executable) -> None:
        self._serves = serves
        self._python = python
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Any] | None = None
        self._log: Any = None
        self._mark = uuid.uuid4().hex

    @property
    def running(self) -> bool:
        return self._child is not None

    def ask(self, method: str, *args: Any, limit_s: float) -> Any:
        """What `method(*args)` returned in the child. Raises `RequestFailed` or, after `limit_s`, `ProcessLost`."""
        if self._connection is None:
            self._start()
        connection = self._connection
        assert connection is not None
        try:
            connection.send((method, args))
            if not connection.poll(max(limit_s, 0.0)):
                self.kill()
                raise ProcessLost(f"no answer to {method!r} within {limit_s:.0f} s; killed")
            done, answer = connection.recv()
        except (EOFError, OSError) as error:
            last = self._last_line()
            self.kill()
            raise ProcessLost(f"the bench process died in {method!r}" + (f": {last}" if last else "")) from error
        if not done:
            raise RequestFailed(answer)
        return answer

    def kill(self) -> None:
        """Ends the child and every process of its session, at once, and removes what they leave. Nothing if there is none."""
        child, self._child = self._child, None
        connection, self._connection = self._connection, None
        if child is not None:
            _kill_session(child.pid, self._mark)
            child.wait()
            leftovers.remove(self._mark)
        if connection is not None:
            connection.close()
        if self._log is not None:
            self._log.close()
            self._log = None

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        """Lets the child shut down in order within the limit, then ends whatever is left of its session."""
        if self.running:
            try:
                self.ask("shutdown", limit_s=limit_s)
            except (RequestFailed, ProcessLost):
                pass  # kill() follows in any case
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # An interrupted run does not wait for an orderly end.
        if error is None:
            self.close()
        else:
            self.kill()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in kill, lives as long as the child)
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        with ours, theirs:
            # `self._child` is set in the same statement that starts it: a Ctrl-C right after still finds it.
            self._child = subprocess.Popen(
                [self._python, "-m", "microbench.process", str(theirs.fileno()), self._serves],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, MARK: self._mark},
            )
            self._connection = Connection(ours.detach())
        if not self._connection.poll(START_LIMIT_S):
            self.kill()
            raise ProcessLost(f"the bench process did not start within {START_LIMIT_S:.0f} s")
        try:
            ready, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            last = self._last_line()
            self.kill()
            raise ProcessLost(f"the bench process died while starting: {last}") from error
        if not ready:
            self.kill()
            raise ProcessLost(answer)

    def _last_line(self) -> str:
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - 4096, 0))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _kill_session(session: int, mark: str) -> None:
    """Kills all processes of a session whose leader we started and have not reaped (so its id is still its own)."""
    end = time.monotonic() + END_LIMIT_S
    # Until none is left: one that is being killed may just have started another.
    while time.monotonic() < end:
        members = [pid for pid in psutil.pids() if _belongs(pid, session, mark)]
        if not members:
            return
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)


def _belongs(pid: int, session: int, mark: str) -> bool:
    try:
        if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        # The mark finds descendants that lead sessions of their own, the session those that wrote over their environment
        # (Ray's workers do, to set their titles).
        return os.getsid(pid) == session or psutil.Process(pid).environ().get(MARK) == mark
    except (ProcessLookupError, PermissionError, psutil.Error):
        return False


def _explain(error: BaseException) -> str:
    """One line that names the error and where it was raised."""
    text = str(error).strip().splitlines() or [""]
    # What a Ray actor raised comes as the text of its traceback, with the error at the end.
    line = text[-1] if "ray::" in text[0] else text[0]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {line}{place}"


def die_with_parent() -> bool:
    """From now on this process ends when its parent does, however: one that is killed outright would leave it behind, and perhaps
    a Ray cluster. False: the parent has gone already."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


def _serve(descriptor: int, serves: str) -> None:
    """The child: answers requests until the parent hangs up or is gone."""
    if not die_with_parent():
        return
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        module, _, name = serves.partition(":")
        served = getattr(importlib.import_module(module), name)()
    except BaseException as error:  # the parent reports it
        connection.send((False, _explain(error)))
        return
    connection.send((True, None))
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(served, method)(*args))
        except BaseException as error:  # the parent reports it
            traceback.print_exc()
            answer = (False, _explain(error))
        connection.send(answer)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
    # Threads that a rival left behind must not keep the process from ending.
    sys.stdout.flush()
    os._exit(0)
