"""The bench's killable process, and rounds that go on after failures; without Ray."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from microbench import leftovers
from microbench.harness import Effort, Measurement, Rounds, Turn
from microbench.process import BenchProcess, ProcessLost, RequestFailed, _explain

BRIEF = Effort(0.0, 0.0, 4, 100, 10, idle_s=0.0, idle_rounds=1, turn_limit_s=30.0)

SERVED = """
import pathlib, subprocess, sys, time
from multiprocessing import shared_memory
from microbench import leftovers

class Served:
    def __init__(self):
        self.system = None

    def pids(self):
        code = "import subprocess, sys; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)"
        orphan = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
        return [int(orphan.stdout), apart.pid]

    def make_files(self):
        leftovers.name_shared_memory()
        self.directory = leftovers.scratch_directory()
        self.shared = shared_memory.SharedMemory(create=True, size=100)
        directory = pathlib.Path(self.directory.name)
        inside, elsewhere = directory / "socket", pathlib.Path("/dev/shm", f"theirs_{directory.name}_data")
        inside.touch()
        elsewhere.touch()
        return [str(path) for path in (directory, inside, elsewhere, f"/dev/shm/{self.shared.name}")]

    def open(self, system, topology):
        if system == "absent":
            raise ImportError("no such system")
        self.system = system

    def measure(self, row, effort):
        if row == "hangs":
            time.sleep(600)
        if row == "raises":
            raise ValueError("wrong result")
        if row == "exits":
            sys.exit(3)
        return {"p50_us": 1.0, "count": 2}

    def close(self, discard):
        if self.system == "clings":
            raise TimeoutError("cannot let go")

    def shutdown(self):
        pass
"""


@pytest.fixture
def serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "served.py").write_text(SERVED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "served:Served"


def gone(pids: list[int]) -> bool:
    """Whether all processes end soon; zombies whose parent does not wait for them count as ended."""
    for _ in range(200):
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        if not alive:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("way", ["close", "kill", "interrupt", "hang"])
def test_nothing_the_bench_process_started_outlives_it(serves: str, way: str) -> None:
    process = BenchProcess(serves)
    pids = process.ask("pids", limit_s=30)
    if way == "close":
        process.close()
    elif way == "kill":
        process.kill()
    elif way == "interrupt":
        with pytest.raises(KeyboardInterrupt), process:
            raise KeyboardInterrupt
    else:
        with pytest.raises(ProcessLost, match="no answer to 'measure' within 0 s"):
            process.ask("measure", "hangs", None, limit_s=0.1)
    assert not process.running
    assert gone(pids)


@pytest.mark.parametrize("way", ["kill", "hang", "close"])
def test_files_go_with_the_process_that_made_them(serves: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    other = BenchProcess(serves)
    with BenchProcess(serves) as process, other:
        left = [Path(name) for name in process.ask("make_files", limit_s=30)]
        theirs = [Path(name) for name in other.ask("make_files", limit_s=30)]
        assert all(path.exists() for path in left + theirs)
        if way == "hang":
            with pytest.raises(ProcessLost):
                process.ask("measure", "hangs", None, limit_s=0.1)
        elif way == "kill":
            process.kill()
        else:
            process.close()
        assert [path for path in left if path.exists()] == []
        assert all(path.exists() for path in theirs)
    assert [path for path in theirs if path.exists()] == []


def test_only_files_of_this_user_and_this_process_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(leftovers.MARK, "0123abcd4567")
    with leftovers.scratch_directory() as name:
        leftovers.remove("9123abcd4567")
        assert Path(name).exists()
        with monkeypatch.context() as patched:
            patched.setattr(os, "getuid", lambda: -1)
            leftovers.remove("0123abcd4567")
        assert Path(name).exists()
        leftovers.remove("0123abcd4567")
        assert not Path(name).exists()
        Path(name).mkdir()  # which its owner removes


def test_a_request_that_raises_leaves_the_process_running(serves: str) -> None:
    with BenchProcess(serves) as process:
        with pytest.raises(RequestFailed, match="ValueError: wrong result"):
            process.ask("measure", "raises", None, limit_s=30)
        assert process.ask("measure", "fine", None, limit_s=30)["count"] == 2


def test_a_class_that_cannot_be_imported_is_named(serves: str) -> None:
    with BenchProcess("served:Missing") as process, pytest.raises(ProcessLost, match="Missing"):
        process.ask("open", limit_s=30)


class Silent:
    """A progress that keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []

    def turn(self, number: int, rounds: int, turn: Turn) -> None:
        self.told.append(("turn", turn.system, str(number)))

    def measured(self, row: str, system: str, measurement: Measurement) -> None:
        self.told.append(("measured", system, row))

    def failed(self, row: str, system: str, error: str) -> None:
        self.told.append(("failed", system, row))


def test_rounds_alternate_and_go_on_after_failures(serves: str) -> None:
    turns = [
        Turn("a", "echo", ("first", "raises", "exits", "last")),
        Turn("absent", "echo", ("first", "last")),
        Turn("clings", "echo", ("first",)),
    ]
    progress = Silent()
    with BenchProcess(serves) as process:
        results = Rounds(process, BRIEF, progress, fewer={"last": 1}).run(turns, 2)
    found = {(result["row"], result["system"]): result for result in results}
    assert len(found) == len(results) == 7
    figures = {"p50_us": 1.0, "p50_us_low": 1.0, "p50_us_high": 1.0, "count": 4, "rounds": 2}
    assert found["first", "a"] == {"row": "first", "system": "a", **figures}
    assert found["last", "a"]["rounds"] == 1
    assert "wrong result" in found["raises", "a"]["error"]
    assert found["exits", "a"]["error"]
    assert "no such system" in found["last", "absent"]["error"]
    assert found["first", "clings"]["rounds"] == 2
    assert [told[1:] for told in progress.told if told[0] == "turn"] == [
        ("a", "0"), ("absent", "0"), ("clings", "0"), ("a", "1"), ("clings", "1"),
    ]  # fmt: skip


def test_a_hanging_row_costs_no_more_than_its_turn(serves: str) -> None:
    effort = Effort(0.0, 0.0, 1, 1, 1, 0.0, 1, turn_limit_s=2.0)
    with BenchProcess(serves) as process:
        results = Rounds(process, effort, Silent()).run([Turn("a", "echo", ("hangs", "next")), Turn("b", "echo", ("fine",))], 1)
    assert "no answer to 'measure'" in results[0]["error"]
    assert "not reached" in results[1]["error"]
    assert results[2]["count"] == 2


def test_an_error_of_a_ray_actor_is_named_by_its_last_line() -> None:
    text = "\x1b[36mray::Worker.make()\x1b[39m (pid=1)\n  File 'x.py', line 1\nModuleNotFoundError: No module named 'cupy'"
    assert _explain(RuntimeError(text)) == "RuntimeError: ModuleNotFoundError: No module named 'cupy'"
    assert _explain(RuntimeError("first\nlast")) == "RuntimeError: first"
    assert _explain(RuntimeError()) == "RuntimeError: "
