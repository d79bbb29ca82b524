"""The snippets of docs/guide.md run as they stand, one after the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.ray.workers import PATIENCE_S

_ROOT = Path(__file__).parents[2]
_CLUSTER = 'import ray\nray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)\n'


def test_the_guide(tmp_path: Path) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", (_ROOT / "docs" / "guide.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 8
    script = tmp_path / "guide.py"
    script.write_text(_CLUSTER + "\n".join(snippets) + '\nprint("to the end")\n')
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    ran = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1.8 * PATIENCE_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.endswith("to the end\n")
    assert "graph 'guide': running; 105 executions submitted, 105 finished" in ran.stdout
    assert "Traceback" not in ran.stderr
