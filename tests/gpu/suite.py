"""Runs the steps one after the other. A step that hangs or crashes costs its limit, and never the rest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.gpu.setting import Figures, Setting

ROOT = Path(__file__).parents[2]
_LOOK_EVERY_S = 0.05
_OUTPUT_KEPT = 6000  # characters of a failed step's output
_LEAST_S = 5.0  # with less time left, a step is not begun


class State(StrEnum):
    """What came of a step."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Step:
    """A function of a `Setting` that returns figures, runs in a process of its own, and leaves no process behind.

    Attributes:
        entry: "module:function".
        limit_s: for all of it.
        gpus: how many it needs.
    """

    name: str
    entry: str
    limit_s: float
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class Record:
    """What came of a step, as it stands in the JSON."""

    name: str
    state: State
    seconds: float
    reason: str = ""
    figures: Figures = field(default_factory=dict)
    output: str = ""


STEPS = (
    Step("environment", "tests.gpu.environment:environment", 90),
    Step("conformance", "tests.gpu.conformance:conformance", 170),
    Step("exchange", "tests.gpu.exchange:exchange", 120),
    Step("overlap", "tests.gpu.overlap:overlap", 75),
    Step("early free", "tests.gpu.memory:early_free", 45),
    Step("early read", "tests.gpu.memory:early_read", 45),
    Step("overwrite", "tests.gpu.memory:overwrite", 45),
    Step("overhead", "tests.gpu.overhead:overhead", 60),
    Step("death", "tests.gpu.death:death", 60),
    Step("rank per device", "tests.gpu.environment:rank_per_device", 45, gpus=2),
    Step("exchange on two devices", "tests.gpu.exchange:on_two_devices", 60, gpus=2),
    Step("graphs", "tests.gpu.graphs:graphs", 120),
)


def run(
    steps: Sequence[Step], setting: Setting, limit_s: float, done: Callable[[Record], object] = lambda record: None
) -> list[Record]:
    """Run all steps within `limit_s` seconds; those there is no time for have failed.

    Args:
        done: called after each step.
    """
    end = time.monotonic() + limit_s
    records = []
    for step in steps:
        left = end - time.monotonic()
        if step.gpus > 1 and setting.gpus < step.gpus:
            record = Record(step.name, State.SKIPPED, 0.0, f"needs {step.gpus} GPUs")
        elif left < min(_LEAST_S, step.limit_s):
            record = Record(step.name, State.FAILED, 0.0, f"not begun: the {limit_s:g} s of the whole suite are used up")
        else:
            record = run_step(step, replace(setting, limit_s=min(step.limit_s, left)))
        records.append(record)
        done(record)
    return records


def run_step(step: Step, setting: Setting) -> Record:
    """Run one step in a process of its own; it and all it started have ended when this returns."""
    with tempfile.TemporaryDirectory(prefix="raycomm-gpu-") as directory:
        result, log = Path(directory) / "result", Path(directory) / "log"
        begin = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.step", step.entry, setting.to_text(), str(result)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            in_time = _wait(process, begin + setting.limit_s)
        seconds = round(time.monotonic() - begin, 2)
        text = log.read_bytes().decode(errors="replace")
        if result.exists():
            record = _of_result(step, seconds, json.loads(result.read_text()))
        else:
            last = text.strip().rpartition("\n")[2] or "nothing"
            how = _how(process.returncode) if in_time else f"not done within {setting.limit_s:g} s"
            record = Record(step.name, State.FAILED, seconds, f"{how}; the last it said: {last:.300}")
    return record if record.state is not State.FAILED else replace(record, output=text[-_OUTPUT_KEPT:])


def _wait(process: subprocess.Popen[bytes], end: float) -> bool:
    """Whether it ended in time. In either case its group is gone; until it is waited for, the group's number is not another's."""
    in_time = False
    while not in_time and time.monotonic() < end:
        time.sleep(_LOOK_EVERY_S)
        in_time = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return in_time


def _how(status: int) -> str:
    return f"crashed: {signal.Signals(-status).name}" if status < 0 else f"ended with status {status} and said no result"


def _of_result(step: Step, seconds: float, result: dict[str, Any]) -> Record:
    return Record(step.name, State(result["state"]), seconds, result.get("reason", ""), result.get("figures", {}))
