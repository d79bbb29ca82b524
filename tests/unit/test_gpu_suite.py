"""The suite for GPU machines, where there is none: on a stand-in, and with steps that hang and crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.gpu import conformance, report, suite
from tests.gpu.overlap import beside_each_other
from tests.gpu.setting import Setting, StepFailed
from tests.gpu.suite import ROOT, Record, State, Step

SETTING = Setting(gpus=1, stand_in=True, limit_s=60.0, trace="")
STEPS = "tests.unit.gpu_suite_steps:"


def program(*arguments: str, pretend: bool) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAYCOMM_TEST_GPU": "pretend" if pretend else ""}
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False)


def run(*steps: Step, limit_s: float = 100.0) -> dict[str, Record]:
    return {record.name: record for record in suite.run(steps, SETTING, limit_s)}


def test_all_of_it_on_a_stand_in(tmp_path: Path) -> None:
    done = program("--json", str(tmp_path / "gpu.json"), pretend=True)
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, Any] = json.loads((tmp_path / "gpu.json").read_text())
    assert (said["stand_in"], said["passed"], said["card"]) == (True, True, "not measured: a stand-in")
    steps = {step["name"]: step for step in said["steps"]}
    assert list(steps) == [step.name for step in suite.STEPS]
    for name, step in steps.items():
        assert f"{name:24} {step['state']}" in done.stdout
    left_out = {name: step["reason"] for name, step in steps.items() if step["state"] != "ok"}
    two = "needs 2 GPUs"
    assert left_out == {"rank per device": two, "exchange on two devices": two, "graphs": "needs a GPU"}
    assert steps["overlap"]["figures"]["ratio"] == "ran; not measured on a stand-in"
    assert json.loads((tmp_path / "gpu.trace.json").read_text())["traceEvents"]
    assert [row["system"] for row in steps["overhead"]["figures"]["rows"]] == ["send/recv", "channel"] * 3
    assert steps["conformance"]["figures"]["passed"] >= 12
    assert steps["early free"]["figures"]["wrong"] == []
    assert "9 ok, 0 failed, 3 skipped" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path) -> None:
    done = program("--json", str(tmp_path / "gpu.json"), pretend=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("no NVIDIA GPU: torch finds no CUDA device")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "gpu.json").exists()


def test_a_failed_step_is_in_the_exit_status_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = program("--json", str(path), "--only", "environment", "--seconds", "1", pretend=True)
    assert done.returncode == 1, done.stdout
    assert "not begun: the 1 s of the whole suite are used up" in done.stdout
    assert json.loads(path.read_text())["passed"] is False
    done = program("--only", "weather", pretend=True)
    assert done.returncode == 2
    assert "there are environment, conformance" in done.stderr


def test_a_step_that_hangs_or_crashes_is_reported_and_the_others_still_run() -> None:
    names = ("crashes", "leaves", "raises", "measures_and_fails", "is_left_out", "works")
    steps = [Step("hangs", STEPS + "hangs", 4.0), *(Step(name, STEPS + name, 60.0) for name in names)]
    records = run(Step("two", STEPS + "works", 60.0, gpus=2), *steps)
    states = {name: record.state for name, record in records.items()}
    assert states == {
        "two": State.SKIPPED,
        **dict.fromkeys(("hangs", "crashes", "leaves", "raises", "measures_and_fails"), State.FAILED),
        "is_left_out": State.SKIPPED,
        "works": State.OK,
    }
    reasons = {name: record.reason for name, record in records.items()}
    child = int(records["hangs"].output.split()[-1])
    assert reasons == {
        "two": "needs 2 GPUs",
        "hangs": f"not done within 4 s; the last it said: started {child}",
        "crashes": "crashed: SIGSEGV; the last it said: about to crash",
        "leaves": "ended with status 7 and said no result; the last it said: nothing",
        "raises": "ValueError: of some kind",
        "measures_and_fails": "too slow",
        "is_left_out": "no reason",
        "works": "",
    }
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert records["measures_and_fails"].figures == {"ratio": 2.0}
    assert "ValueError" in records["raises"].output
    assert not report.passed(list(records.values()))
    assert "1 ok, 5 failed, 2 skipped" in report.foot(list(records.values()))


def test_what_there_is_no_time_for_has_failed() -> None:
    records = run(Step("hangs", STEPS + "hangs", 60.0), Step("works", STEPS + "works", 60.0), limit_s=6.0)
    assert records["hangs"].reason.startswith("not done within 6")
    assert records["works"].reason == "not begun: the 6 s of the whole suite are used up"


def test_tests_that_fail_or_hang_are_named(tmp_path: Path) -> None:
    """Also where pytest is killed before it could sum up."""
    file = tmp_path / "test_some.py"
    file.write_text(
        "import time\ndef test_good(): pass\ndef test_bad(): assert 0\ndef test_long(): time.sleep(1000)\ndef test_last(): pass\n"
    )
    setting = Setting(gpus=1, stand_in=True, limit_s=14.0, trace="")
    with pytest.raises(StepFailed, match="not done within 4 s in test_long: 1 passed, 0 skipped, 1 failed: test_bad") as caught:
        conformance.run_tests([str(file)], setting)
    assert caught.value.figures["failed"] == ["test_bad"]
    with pytest.raises(StepFailed, match="status 1: 1 passed, 0 skipped, 1 failed: test_bad"):
        conformance.run_tests([str(file), "-k", "good or bad"], setting)
    assert conformance.run_tests([str(file), "-k", "good or last"], setting)["passed"] == 2


def test_how_long_kernels_run_beside_each_other(tmp_path: Path) -> None:
    def kernel(name: str, begin: float, us: float) -> dict[str, Any]:
        return {"cat": "kernel", "name": name, "ts": begin, "dur": us}

    events = [
        kernel("ncclDevKernel_SendRecv", 100.0, 1000.0),
        kernel("gemm", 0.0, 150.0),
        kernel("gemm", 150.0, 100.0),
        kernel("gemm", 1050.0, 100.0),
        kernel("gemm", 2000.0, 100.0),
        {"cat": "cpu_op", "name": "aten::mm", "ts": 300.0, "dur": 500.0},
        {"name": "process_name"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert beside_each_other(str(path)) == pytest.approx(200e-6)
