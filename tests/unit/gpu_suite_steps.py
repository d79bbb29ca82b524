"""Steps of `tests.gpu.suite` that end in every way there is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.gpu.setting import Figures, Setting, StepFailed, StepSkipped


def works(setting: Setting) -> Figures:
    return {"summary": "as it should", "limit": setting.limit_s}


def hangs(setting: Setting) -> Figures:
    """As does what it has started."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print("started", child.pid, flush=True)
    time.sleep(1000)
    return {}


def crashes(setting: Setting) -> Figures:
    print("about to crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def leaves(setting: Setting) -> Figures:
    os._exit(7)


def raises(setting: Setting) -> Figures:
    raise ValueError("of some kind")


def measures_and_fails(setting: Setting) -> Figures:
    raise StepFailed("too slow", {"ratio": 2.0})


def is_left_out(setting: Setting) -> Figures:
    raise StepSkipped("no reason")
