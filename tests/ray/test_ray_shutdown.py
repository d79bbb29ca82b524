"""`ray.shutdown` in the process that compiled graphs: they end with it, and say so; handles from before are of no use.

In a process of its own: Ray's are still ending when `ray.shutdown` returns, which Python warns of.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("hook", ["with", "without"])
def test_shutdown_ends_graphs(tmp_path: Path, hook: str) -> None:
    script = ROOT / "tests" / "ray" / "scripts" / "shut_down.py"
    done = subprocess.run(
        [sys.executable, str(script), hook, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert (done.stdout.splitlines()[-1:], done.returncode) == (["well"], 0), done.stderr[-4000:]
