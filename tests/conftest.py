"""For every test: a seed that is printed when the test fails, a look for what it leaves, and one Ray cluster per module."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_SETTLE_S = 2.0  # how long threads, processes and descriptors of a test may take to go away
_MEMFD = "memfd:raycomm"
_GRPC_THREADS = (
    "default-executo",
    "event_engine",
    "grpc_global_tim",
    "resolver-execut",
)  # Ray's; they come back after a shutdown
_FAILED = pytest.StashKey[bool]()


@pytest.fixture
def seed(record_property: pytest.RecordProperty, request: pytest.FixtureRequest) -> int:
    """The seed of this test's random choices: RAYCOMM_TEST_SEED if that is set, else a new one each time."""
    given = os.environ.get("RAYCOMM_TEST_SEED")
    value = int(given) if given else int.from_bytes(os.urandom(4), "big")
    record_property("seed", value)
    request.node.add_report_section("setup", "seed", f"run again with RAYCOMM_TEST_SEED={value}\n")
    return value


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Random choices that the printed seed reproduces."""
    return random.Random(seed)


class Belongings:
    """What this process holds that a test could leave behind."""

    def __init__(self) -> None:
        self.descriptors: Counter[str] = Counter()
        self.memfds: Counter[str] = Counter()
        for entry in _listing("/proc/self/fd"):
            target = _target(entry)
            if _MEMFD in target:
                self.memfds[target] += 1
            elif "pidfd" in target:
                self.descriptors["pidfd"] += 1
        self.mappings = sum(_MEMFD in line for line in Path("/proc/self/maps").read_text().splitlines())
        self.threads = {thread.ident: thread.name for thread in threading.enumerate()}
        self.tasks = {int(entry.name): _comm(entry) for entry in _listing("/proc/self/task")}
        self.children = _children()

    def left_since(self, before: Belongings, *, ray_runs: bool) -> list[str]:
        """What is here and was not there before; while Ray runs, its processes and threads come and go."""
        left = [f"descriptor of {name} ({n} more)" for name, n in (self.memfds - before.memfds).items()]
        left += [f"{n} more descriptors of kind {name}" for name, n in (self.descriptors - before.descriptors).items()]
        if self.mappings > before.mappings:
            left.append(f"{self.mappings - before.mappings} more mappings of {_MEMFD}")
        if not ray_runs:
            left += [f"thread {name!r}" for ident, name in self.threads.items() if ident not in before.threads]
            left += [f"process {pid}: {name}" for pid, name in self.children.items() if pid not in before.children]
            python = {thread.native_id for thread in threading.enumerate()}
            native = {
                task: name
                for task, name in self.tasks.items()
                if task not in before.tasks and task not in python and name not in _GRPC_THREADS
            }
            left += [f"native thread {task} ({name})" for task, name in native.items()]
        return left


@pytest.fixture(scope="session", autouse=True)
def library_pools() -> None:
    """Makes torch start the threads that it keeps, so that they are nobody's leak."""
    import torch

    torch.ones(1 << 20).add(1).sum()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Remembers that a test has failed: its traceback then holds what it had made."""
    if call.when == "call" and call.excinfo is not None:
        item.stash[_FAILED] = True
    yield


@pytest.fixture(autouse=True)
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves processes, threads, arenas, their mappings, or pidfds behind."""
    ray_ran = _ray_runs()
    before = Belongings()
    yield
    if _FAILED in request.node.stash:
        return
    deadline = time.monotonic() + _SETTLE_S
    pause = 0.005
    while left := Belongings().left_since(before, ray_runs=ray_ran or _ray_runs()):
        if time.monotonic() > deadline:
            break
        if not gc.collect():
            time.sleep(pause)
        pause = min(2 * pause, 0.2)
    assert not left, "left behind: " + "; ".join(left)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray cluster on this machine for all tests of a module; its processes are gone afterwards."""
    import ray

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    ray.shutdown()
    _, alive = psutil.wait_procs(started, timeout=30)
    for process in alive:
        process.kill()
    assert not alive, f"Ray's processes outlived ray.shutdown by 30 s: {alive}"


def _ray_runs() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", bool)())


def _listing(directory: str) -> list[Path]:
    return [Path(directory) / name for name in os.listdir(directory)]


def _target(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:  # the listing's own descriptor
        return ""


def _comm(entry: Path) -> str:
    try:
        return (entry / "comm").read_text().strip()
    except OSError:
        return ""


def _children() -> dict[int, str]:
    """Living child processes, with their command lines. Read from /proc: looking through all processes takes 10 ms a test."""
    try:
        pids = [int(pid) for task in _listing("/proc/self/task") for pid in (task / "children").read_text().split()]
    except OSError:  # a thread ended meanwhile, or a kernel without this list
        pids = [child.pid for child in psutil.Process().children()]
    return {pid: command for pid in pids if (command := _command(pid)) is not None}


def _command(pid: int) -> str | None:
    """None: it has ended."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())[:200]
    except psutil.Error:
        return None
