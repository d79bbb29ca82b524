"""`install()`: how a process leaves that holds graphs, and workers that install by Ray's hook. Each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "ray" / "scripts"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}


def run(script: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    assert "ResourceWarning" not in done.stderr, done.stderr[-4000:]
    return done.stdout.splitlines()


def test_every_worker_of_a_job_installs_by_rays_setup_hook() -> None:
    assert run("install_by_hook.py") == ["CompatGraph [2, 3, 3]", "ray.dag.dag_node in the driver", "CompiledDAG 5"]


def test_ray_shutdown_tears_down_and_kills_the_actors() -> None:
    assert run("install_and_leave.py", "shutdown") == ["[1, 2]", "killed True"]


def test_the_interpreter_exits_with_a_graph_running() -> None:
    assert run("install_and_leave.py", "exit") == ["[1, 2]"]


def test_the_interpreter_exits_after_asyncio() -> None:
    assert run("install_and_leave.py", "asyncio") == ["[1, 2]"]


def test_ctrl_c_in_get_ends_the_process() -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "install_and_leave.py"), "interrupt"],
        cwd=ROOT,
        env={**ENVIRONMENT, "RAY_CGRAPH_teardown_timeout": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
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
