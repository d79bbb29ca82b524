"""What users of such systems ran into, as far as it takes processes of its own: ways to end, to be killed, and to start again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

import raycomm
from tests.ray.scripts import reports
from tests.ray.workers import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("cluster")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "ray" / "scripts" / "reports.py"
NOISE = re.compile(r"Traceback|raycomm|Fatal|Segmentation|Exception ignored|[Aa]bort|core dumped|resource_tracker|leaked")


class Driver:
    """One run of the script; its output goes to files, so nothing waits for a reader."""

    def __init__(self, way: str, address: str, directory: Path, env: dict[str, str] | None = None) -> None:
        stem = f"{way}-{len(list(directory.glob(f'{way}-*.out')))}"
        self._out, self._err = directory / f"{stem}.out", directory / f"{stem}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), way, address],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0", **(env or {})},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
            )

    @property
    def errors(self) -> str:
        """Standard error so far."""
        return self._err.read_text()

    def wait_said(self, word: str) -> list[str]:
        """The words after `word` on the line that it begins."""
        found: list[str] = []

        def said() -> bool:
            lines = [line.split() for line in self._out.read_text().splitlines()]
            found[:] = next((line for line in lines if line[:1] == [word]), [])
            assert found or self.process.poll() is None, self.errors
            return bool(found)

        until(said, f"the driver says {word!r}")
        return found[1:]

    def finish(self, limit_s: float = PATIENCE_S) -> int:
        """Its exit code, once it and all it had started have ended."""
        pids = [int(pid) for pid in self.wait_said("pids")]
        code = self.process.wait(limit_s)
        until(lambda: not any(map(runs, pids)), f"processes {pids} end", 30)
        return code

    def clean_up(self) -> None:
        """Nothing survives a failed test."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def begin(way: str, address: str = "local", env: dict[str, str] | None = None) -> Driver:
        drivers.append(Driver(way, address, tmp_path, env))
        return drivers[-1]

    yield begin
    for driver in drivers:
        driver.clean_up()


@pytest.fixture(scope="module")
def shared(cluster: None) -> Iterator[str]:
    """The address of this module's cluster, on which two named actors outlive every driver."""
    actors = [
        ray.remote(num_cpus=0)(reports.Worker)
        .options(name=f"w{number}", namespace="reports", lifetime="detached", max_concurrency=2)
        .remote()
        for number in range(2)
    ]
    ray.get([actor.step.remote(1) for actor in actors])
    yield ray.get_runtime_context().gcs_address
    for actor in actors:
        ray.kill(actor)


def named() -> set[str]:
    """Names in /dev/shm; none of them may come from a graph."""
    return set(os.listdir("/dev/shm"))


WAYS = {
    "teardown_twice": 0,
    "exit_in_method": 0,
    "raise_in_flight": 1,
    "unfetched": 0,
    "unfetched_async": 0,
    "error_kept": 0,
    "thread_in_get": 0,
    "teardown_at_exit": 0,
    "forked": 0,
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow) if way == "exit_in_method" else way for way in WAYS])
def test_a_way_to_end(drive: Callable[..., Driver], shared: str, way: str) -> None:
    """The script's own exit code, nothing on standard error, all gone; and the actors are free."""
    # One ends an actor: on a cluster of its own.
    driver = drive(way) if way == "exit_in_method" else drive(way, shared)
    assert driver.finish() == WAYS[way], driver.errors
    errors = driver.errors
    if way == "raise_in_flight":
        assert errors.count("Traceback") == 1
        assert errors.rstrip().endswith("ValueError: of the driver")
    else:
        assert not NOISE.search(errors), errors
    free(shared)


def free(shared: str) -> None:
    """The two shared actors take part in a graph of this process."""
    workers = [ray.get_actor(f"w{number}", namespace="reports") for number in range(2)]
    with raycomm.compile(reports.chain(workers[0].step, workers[1].step), compile_timeout=PATIENCE_S) as graph:
        assert [graph.execute(value).get(timeout=PATIENCE_S) for value in range(5)] == list(range(5))


def memfds(pids: list[int]) -> int:
    """Descriptors of graphs' memory in these processes."""
    count = 0
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                count += "memfd:raycomm" in os.readlink(entry)
            except OSError:
                continue
    return count


def killed_and_started_again(drive: Callable[..., Driver], shared: str, times: int) -> None:
    pids = [
        ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for actor in (ray.get_actor(f"w{n}", "reports") for n in (0, 1))
    ]
    before = named()
    for _ in range(times):
        driver = drive("outlive", shared)
        driver.wait_said("ready")
        driver.process.kill()
        assert driver.process.wait(PATIENCE_S) == -signal.SIGKILL
    until(lambda: memfds(pids) == 0, "the loops of the killed drivers leave", 20)
    assert not {name for name in named() - before if "raycomm" in name}
    free(shared)
    until(lambda: memfds(pids) == 0, "and those of the driver that came after", 20)


def test_a_killed_driver_blocks_no_later_start(drive: Callable[..., Driver], shared: str) -> None:
    killed_and_started_again(drive, shared, 2)


@pytest.mark.slow
def test_twenty_killed_drivers_block_no_later_start(drive: Callable[..., Driver], shared: str) -> None:
    killed_and_started_again(drive, shared, 20)


def test_two_drivers_at_once_on_the_same_actors(drive: Callable[..., Driver], shared: str) -> None:
    drivers = [drive("many", shared), drive("many", shared)]
    free(shared)
    assert [driver.finish() for driver in drivers] == [0, 0], [driver.errors for driver in drivers]
    free(shared)


def test_a_driver_is_killed_beside_another(drive: Callable[..., Driver], shared: str) -> None:
    """The other one's graph on the same actors goes on."""
    doomed, steady = drive("outlive", shared), drive("outlive", shared)
    doomed.wait_said("ready")
    steady.wait_said("ready")
    doomed.process.kill()
    free(shared)
    assert steady.process.stdin is not None
    steady.process.stdin.write(b"\n")
    steady.process.stdin.flush()
    assert steady.finish() == 0, steady.errors


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_with_results_in_flight(drive: Callable[..., Driver], sent: signal.Signals) -> None:
    """The whole tree is gone soon, and nothing is left in shared memory."""
    before = named()
    driver = drive("in_flight")
    driver.wait_said("ready")
    begin = time.monotonic()
    driver.process.send_signal(sent)
    assert driver.finish() != 0
    assert time.monotonic() - begin < 60
    assert not {name for name in named() - before if "raycomm" in name}
    assert "Fatal" not in driver.errors
    assert "core dumped" not in driver.errors


def test_packages_that_are_not_declared_are_not_needed(drive: Callable[..., Driver], tmp_path: Path) -> None:
    """An environment in which pandas, pyarrow, cupy and scipy cannot be imported, in driver and actors."""
    for name in ("pandas", "pyarrow", "cupy", "scipy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ModuleNotFoundError('no {name} here', name='{name}')\n")
    driver = drive("bare", env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    assert driver.wait_said("loaded") == []
    assert driver.finish() == 0, driver.errors
