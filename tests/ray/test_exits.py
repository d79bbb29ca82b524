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
    """One run of the script. Its output goes to files: nothing waits for a reader, and nothing is lost in one."""

    def __init__(self, way: str, mode: str, directory: Path) -> None:
        self._out, self._err = directory / f"{mode}.out", directory / f"{mode}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "default::ResourceWarning:raycomm", str(SCRIPT), way, mode],
                cwd=ROOT,
                env={**os.environ, "RAY_DEDUP_LOGS": "0"},
                stdout=out,
                stderr=err,
            )
        self.pids: list[int] = []
        self.files: list[str] = []

    @property
    def lines(self) -> list[str]:
        """What the script has said so far, without what Ray prints to standard output."""
        said = ("{", "blocked", "interrupted", "died", "7")
        return [line for line in self._out.read_text().splitlines() if line.startswith(said)]

    @property
    def errors(self) -> list[str]:
        """Standard error so far."""
        return comparable(self._err.read_text())

    def wait_said(self, text: str) -> str:
        """The first line that starts with `text`."""

        def said() -> bool:
            ended = self.process.poll() is not None
            there = any(line.startswith(text) for line in self.lines)
            assert there or not ended, self._err.read_text()
            return there

        until(said, f"the script says {text!r}")
        return next(line for line in self.lines if line.startswith(text))

    def begin(self) -> None:
        """Wait for the line that says what runs."""
        facts = json.loads(self.wait_said("{"))
        self.pids, self.files = facts["pids"], facts["files"]

    def finish(self) -> int:
        """Wait for the end, and for all that it had started; the exit code."""
        code = self.process.wait(PATIENCE_S)
        until(lambda: not any(runs(pid) for pid in self.pids), f"processes {self.pids} end", 30)
        assert [file for file in self.files if Path(file).exists()] == []
        return code

    def clean_up(self) -> None:
        """Nothing survives a failed test."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
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
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Runs of one way, with plain calls and with a graph, side by side."""
    runs = [Run(request.param, mode, tmp_path) for mode in ("plain", "raycomm")]
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
    "in_a_method": 0,
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
            run.wait_said("blocked")
            sent = time.monotonic()
            run.process.send_signal(signal.SIGINT)
            assert float(run.wait_said("interrupted").split()[1]) - sent < 10  # a second is promised
    codes = [run.finish() for run in (plain, graph)]
    assert codes[1] == CODES[way], graph.errors
    if way != "interrupt":  # there Ray's own blocking call turns the signal into exit code 1 at times
        assert codes[0] == CODES[way], plain.errors
    assert [line.split()[0] for line in plain.lines[1:]] == [line.split()[0] for line in graph.lines[1:]]
    extra = [line for line in graph.errors if line not in plain.errors]
    # A graph that nobody tore down says so, where Python shows such warnings.
    if way == "dropped":
        extra = [line for line in extra if "ResourceWarning" not in line]
    assert extra == []


def test_a_killed_driver_takes_its_actors_along(tmp_path: Path) -> None:
    run = Run("killed", "raycomm", tmp_path)
    try:
        run.begin()
        run.wait_said("blocked")
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
