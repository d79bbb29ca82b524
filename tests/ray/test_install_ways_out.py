"""`install()`: how a process leaves that holds graphs, and workers that install by Ray's hook. Each is a driver of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

pytestmark = pytest.mark.usefixtures("cluster")

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "ray" / "scripts"


def begin(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A driver on this module's cluster."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / script), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "RAY_ADDRESS": ray.get_runtime_context().gcs_address, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script: str, *arguments: str, **environment: str) -> list[str]:
    process = begin(script, *arguments, **environment)
    try:
        out, errors = process.communicate(timeout=100)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, errors[-4000:]
    assert "Traceback" not in errors, errors[-4000:]
    assert "ResourceWarning" not in errors, errors[-4000:]
    return out.splitlines()


def test_every_worker_of_a_job_installs_by_rays_setup_hook() -> None:
    # Ray's own graph is in it, which gives up after 10 s on a busy machine.
    assert run("install_by_hook.py", RAY_CGRAPH_get_timeout="80") == [
        "CompatGraph [2, 3, 3]",
        "ray.dag.dag_node in the driver",
        "CompiledDAG 5",
    ]


def test_ray_shutdown_tears_down_and_kills_the_actors() -> None:
    assert run("install_and_leave.py", "shutdown") == ["[1, 2]", "killed True"]


def test_the_interpreter_exits_with_a_graph_running() -> None:
    assert run("install_and_leave.py", "exit") == ["[1, 2]"]


def test_the_interpreter_exits_after_asyncio() -> None:
    assert run("install_and_leave.py", "asyncio") == ["[1, 2]"]


def test_ctrl_c_in_get_ends_the_process() -> None:
    process = begin("install_and_leave.py", "interrupt", RAY_CGRAPH_teardown_timeout="0")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "executing\n"
        time.sleep(0.3)  # well inside ray.get; were it not, the process would end the same way
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert "KeyboardInterrupt" in errors
    finally:
        process.kill()
        process.communicate()
