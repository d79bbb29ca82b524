"""The suite of all communicators, on this machine's GPUs, and what of the CUDA device needs none."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile

from tests.gpu.setting import Figures, Setting, StepFailed
from tests.gpu.suite import ROOT

_MARGIN_S = 10.0  # of the step's limit, for saying what was seen until then
_OUTCOME = re.compile(r"^(\S*::\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
_BEGUN = re.compile(r"^(\S*::\S.*?) *$", re.MULTILINE)


def conformance(setting: Setting) -> Figures:
    """tests/unit/test_communicators.py over NCCL only, and tests/unit/test_cuda_without_a_gpu.py."""
    files = ["tests/unit/test_communicators.py", "tests/unit/test_cuda_without_a_gpu.py"]
    # With the stand-in a few are enough: `make test` runs them all.
    which = "nccl and (exchange or buffer)" if setting.stand_in else setting.kind
    return run_tests([*files, "-k", f"({which}) or test_cuda_without_a_gpu"], setting)


def run_tests(arguments: list[str], setting: Setting) -> Figures:
    """What pytest says of them, also where it does not get to its end.

    Raises:
        StepFailed: names the tests that failed, or the one that was under way when the limit came.
    """
    settings = ["-c", "tests/gpu/pytest.ini", "--rootdir", str(ROOT), "--confcutdir", str(ROOT)]
    command = [sys.executable, "-m", "pytest", *settings, *arguments]
    # For Ray's workers, too, which find raycomm and the tests by this.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile("w+") as output:
        # In the step's group, so that it goes with the step; and the same for what it starts.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status: int | None = process.wait(max(1.0, setting.limit_s - _MARGIN_S))
        except subprocess.TimeoutExpired:
            status = None
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    print(text)
    outcomes: dict[str, str] = dict(_OUTCOME.findall(text))
    failed = [name.rpartition("::")[2] for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    passed = sum(outcome == "PASSED" for outcome in outcomes.values())
    skipped = sum(outcome == "SKIPPED" for outcome in outcomes.values())
    summary = f"{passed} passed, {skipped} skipped, {len(failed)} failed"
    figures: Figures = {"passed": passed, "skipped": skipped, "failed": failed, "summary": summary}
    if status is None:
        under_way = [name.rpartition("::")[2] for name in _BEGUN.findall(text)][-1:]
        where = f" in {under_way[0]}" if under_way else ""
        raise StepFailed(f"not done within {setting.limit_s - _MARGIN_S:g} s{where}: {summary}: {', '.join(failed)}", figures)
    if status or not passed:
        raise StepFailed(f"pytest ended with status {status}: {summary}: {', '.join(failed)}", figures)
    return figures
