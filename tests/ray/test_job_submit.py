"""The built wheel, in the runtime environment of a job on a cluster that `ray start --head` made, runs a ready pipeline."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
_START_S = 120.0
_JOB_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest of `make wheel`, or one built now."""
    built = sorted((ROOT / "dist").glob("raycomm-*.whl"), key=lambda file: file.stat().st_mtime)
    if built:
        return built[-1]
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(ROOT)]
    subprocess.run(command, check=True, timeout=600, capture_output=True)
    return next(target.glob("raycomm-*.whl"))


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, for Ray's sockets lie deep in it."""
    path = Path(tempfile.mkdtemp(prefix="rcj", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def bare_python(place: Path) -> tuple[str, dict[str, str]]:
    """An interpreter, and its environment, with all that is installed here except raycomm itself.

    Packages on PYTHONPATH are found without their .pth files, which is where an editable install of raycomm hooks in.
    """
    venv.create(place / "venv", with_pip=False, symlinks=True)
    python = place / "venv" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYCOMM_", "VIRTUAL_ENV"))}
    environment |= {
        "PYTHONPATH": sysconfig.get_path("purelib"),
        "PATH": os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), environment.get("PATH", "")]),
        "RAY_AUTH_MODE": "disabled",  # equal everywhere, or nobody may join
        # Ray installs the wheel with a plain `pip install`: what it depends on is there already.
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
    }
    return str(python), environment


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """One node, made by `ray start --head`; `stop` ends every process of it by its pid."""

    def __init__(self, place: Path) -> None:
        self.python, self.environment = bare_python(place)
        self.dashboard = f"http://127.0.0.1:{(port := free_port())}"
        command = [self.python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=4"]
        command += [f"--port={free_port()}", f"--dashboard-port={port}", "--dashboard-host=127.0.0.1", "--include-dashboard=true"]
        command += [f"--temp-dir={place / 'ray'}", f"--dashboard-agent-listen-port={free_port()}", "--disable-usage-stats"]
        self._log = (place / "ray-start").open("w+")
        self._head = subprocess.Popen(
            command, env=self.environment, cwd=place, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._place = place

    def wait_up(self) -> None:
        """Returns once jobs can be submitted."""
        end = time.monotonic() + _START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.dashboard}/api/version", timeout=5):
                    return
            except OSError:
                assert self._head.poll() is None, f"ray start ended: {self.output()}"
                assert time.monotonic() < end, f"no dashboard within {_START_S} s: {self.output()}"
                time.sleep(0.2)

    def output(self) -> str:
        """What `ray start` has printed."""
        return (self._place / "ray-start").read_text()

    def ray(self, *args: str, timeout: float) -> subprocess.CompletedProcess[str]:
        """Ray's command line, as a user of this cluster calls it."""
        command = [self.python, "-m", "ray.scripts.scripts", *args]
        environment = {**self.environment, "RAY_ADDRESS": self.dashboard}
        return subprocess.run(
            command, env=environment, cwd=self._place, timeout=timeout, capture_output=True, text=True, check=False
        )

    def submit(self, entry: list[str], environment: str) -> subprocess.CompletedProcess[str]:
        """`ray job submit`, which streams the job's output and returns when it has ended."""
        end = time.monotonic() + _START_S
        while True:
            done = self.ray("job", "submit", f"--runtime-env-json={environment}", "--", "python", *entry, timeout=_JOB_S)
            # The dashboard answers before the process that starts jobs does.
            if "No available agent" not in done.stderr or time.monotonic() > end:
                return done

    def _processes(self) -> list[psutil.Process]:
        """All of this cluster: its temporary directory stands in the command line or the environment of each."""
        mine = []
        for process in psutil.process_iter():
            try:
                told = " ".join([*process.cmdline(), process.environ().get("PATH", "")])
            except psutil.Error:
                continue
            if str(self._place) in told:
                mine.append(process)
        return mine

    def stop(self) -> list[Any]:
        """End everything; gives what outlived it."""
        self._head.terminate()
        try:
            self._head.wait(30)
        except subprocess.TimeoutExpired:
            self._head.kill()
            self._head.wait()
        processes = self._processes()
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(processes, timeout=30)
        self._log.close()
        return alive


@pytest.fixture
def cluster_of_its_own(place: Path) -> Iterator[Cluster]:
    cluster = Cluster(place)
    try:
        cluster.wait_up()
        yield cluster
    finally:
        alive = cluster.stop()
    assert not alive


def test_a_pipeline_runs_as_a_job_with_the_wheel(cluster_of_its_own: Cluster, place: Path, wheel: Path) -> None:
    work = place / "work"
    shutil.copytree(ROOT / "dags", work / "dags", ignore=shutil.ignore_patterns("__pycache__", "*.ipynb"))
    (work / "which.py").write_text(
        "import raycomm, ray\n"
        "ray.init()\n"
        "print('driver has', raycomm.__file__)\n"
        "print('task has', ray.get(ray.remote(lambda: __import__('raycomm').__file__).remote()))\n"
    )
    environment = json.dumps({"working_dir": str(work), "py_modules": [str(wheel)]})
    for entry in ("which.py", "-m dags.pipeline --executions 6 --in-flight 3"):
        done = cluster_of_its_own.submit(entry.split(), environment)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        assert "succeeded" in output
        if entry == "which.py":
            files = [line.split()[-1] for line in output.splitlines() if " has " in line]
            assert len(files) == 2, output
            assert all("py_modules_files" in file for file in files), f"raycomm did not come from the wheel: {files}"
        else:
            assert output.count(": ok") == 6, output
            assert "per second" in output
