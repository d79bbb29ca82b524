"""`dags.exchange` on the real loop: right where links have streams of their own, refused or seen hanging where they share one."""

from __future__ import annotations

import subprocess
import sys
import time

from dags.exchange import DEADLOCK, HANG
from tests.gpu.setting import Figures, Setting, StepFailed
from tests.gpu.suite import ROOT

_RIGHT = 0
_HANG_S = 5.0


def exchange(setting: Setting) -> Figures:
    """All four ways; with the stand-in, which is gloo, those two that do not take long, as `make test` has them all."""
    cases: list[tuple[str, list[str], int, str]] = [
        ("link", [], _RIGHT, "elements are right at both ranks"),
        ("shared", [], DEADLOCK, "DeadlockError"),
    ]
    if not setting.stand_in:
        cases.insert(1, ("direction", [], _RIGHT, "elements are right at both ranks"))
        cases.append(("shared", ["--no-verify", "--limit", f"{_HANG_S:g}"], HANG, "gave no result within"))
    figures: Figures = {"ranks": setting.sharing}
    wrong = []
    for policy, extra, expected, said in cases:
        name = " ".join([policy, *extra[:1]])
        figures[name], problem = _run(setting, policy, extra, expected, said)
        wrong += [f"{name}: {problem}"] if problem else []
    if wrong:
        raise StepFailed("; ".join(wrong), figures)
    return {**figures, "summary": f"as it has to be: {', '.join(list(figures)[1:])}"}


def on_two_devices(setting: Setting) -> Figures:
    """The exchange takes a GPU per rank where there are two."""
    figures, problem = _run(setting, "link", ["--executions", "20"], _RIGHT, "elements are right at both ranks")
    if problem:
        raise StepFailed(problem, figures)
    return {**figures, "summary": "20 exchanges right"}


def _run(setting: Setting, policy: str, extra: list[str], expected: int, said: str) -> tuple[Figures, str | None]:
    device = "gloo" if setting.stand_in else "cuda"
    command = [sys.executable, "-m", "dags.exchange", "--device", device, "--policy", policy, *extra]
    begin = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # the step has a limit
    print(done.stdout, done.stderr, sep="\n")
    output = done.stdout + done.stderr
    last = output.strip().rpartition("\n")[2]
    figures = {"status": done.returncode, "seconds": round(time.monotonic() - begin, 2), "last line": last[:300]}
    if done.returncode == expected and said in output:
        return figures, None
    return figures, f"status {done.returncode} and not {expected}: {last:.300}"
