"""Every way out of a program whose actors sit in their loops: as quiet as with plain actor calls, with the right exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ray.workers import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "ray" / "scripts" / "way_out.py"


class Run:
    """One run of the script."""

    def __init__(self, way: str, mode: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "default::ResourceWarning:raycomm", str(SCRIPT), way, mode],
            cwd=ROOT,
            env={**os.environ, "RAY_DEDUP_LOGS": "0", "PYTHONFAULTHANDLER": "", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pids: list[int] = []
        self.files: list[str] = []
        self.lines: list[str] = []
        self.errors: list[str] = []
        self.code: int | None = None

    def begin(self) -> None:
        """Read up to the line that says what runs."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"pids"'):
                facts = json.loads(line)
                self.pids, self.files = facts["pids"], facts["files"]
                return
        self.process.kill()
        raise AssertionError(f"it ended early: {self.process.communicate()[1]}")

    def read_until(self, text: str) -> str:
        """The next line that starts with `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(text):
                return line
        raise AssertionError(f"no {text!r}: {self.process.communicate()[1]}")

    def finish(self) -> None:
        """Wait for the end, and for all that it had started."""
        try:
            out, errors = self.process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self.lines += out.splitlines()
        self.errors = comparable(errors)
        self.code = self.process.returncode
        until(lambda: not any(runs(pid) for pid in self.pids), f"processes {self.pids} end", 30)
        assert [file for file in self.files if Path(file).exists()] == []

    def clean_up(self) -> None:
        """Nothing survives a failed test."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        for pid in self.pids:
            if runs(pid):
                os.kill(pid, signal.SIGKILL)


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def comparable(text: str) -> list[str]:
    """Lines of standard error without what differs from run to run: colours, times, numbers, ids, and where a traceback went."""
    lines = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        if line.strip() and not line.startswith((" ", "Traceback (most recent")):
            lines.append(re.sub(r"[0-9a-f]{16,}|\d+", "N", line))
    return lines


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Any:
    """Runs of one way, with plain calls and with a graph, side by side."""
    runs = [Run(request.param, mode) for mode in ("plain", "raycomm")]
    yield request.param, *runs
    for run in runs:
        run.clean_up()


CODES = {
    "falls_off": 0,
    "sys_exit": 3,
    "uncaught": 1,
    "interrupt": -signal.SIGINT,
    "dropped": 0,
    "unfetched": 0,
    "shutdown": 0,
    "exit_actor": 0,
    "handle_gone": 0,
}


@pytest.mark.parametrize("pair", list(CODES), indirect=True)
def test_way_out(pair: tuple[str, Run, Run]) -> None:
    way, plain, graph = pair
    for run in (plain, graph):
        run.begin()
    if way == "interrupt":
        for run in (plain, graph):
            run.read_until("blocked")
            sent = time.monotonic()
            run.process.send_signal(signal.SIGINT)
            assert float(run.read_until("interrupted").split()[1]) - sent < 10  # a second is promised
    for run in (plain, graph):
        run.finish()
    assert graph.code == CODES[way], graph.errors
    if way != "interrupt":  # there Ray's own blocking call turns the signal into exit code 1 at times
        assert plain.code == CODES[way], plain.errors
    assert plain.lines == graph.lines
    extra = [line for line in graph.errors if line not in plain.errors]
    # A graph that nobody tore down says so, where Python shows such warnings.
    if way == "dropped":
        extra = [line for line in extra if "ResourceWarning" not in line]
    assert extra == []


def test_a_killed_driver_takes_its_actors_along() -> None:
    run = Run("killed", "raycomm")
    try:
        run.begin()
        run.read_until("blocked")
        memory = {pid for pid in run.pids if maps_memory(pid)}
        assert len(memory) == 2  # the actors
        os.kill(run.process.pid, signal.SIGKILL)
        until(lambda: not any(runs(pid) and maps_memory(pid) for pid in memory), "the loops end", 20)
        assert run.process.wait(PATIENCE_S) == -signal.SIGKILL
    finally:
        run.clean_up()


def maps_memory(pid: int) -> bool:
    """Whether a process has a graph's memory mapped."""
    try:
        return "memfd:raycomm" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False
