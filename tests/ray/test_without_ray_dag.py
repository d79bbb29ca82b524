"""Graphs of raycomm's own nodes work without `ray.dag`, `ray.experimental`, Ray's ref class and its channel exceptions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_without_what_rays_compiled_graphs_take_along() -> None:
    script = ROOT / "tests" / "ray" / "scripts" / "without_ray_dag.py"
    done = subprocess.run([sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.stdout.splitlines()[-1:], done.returncode) == (["well"], 0), done.stderr[-4000:]


def test_the_block_blocks() -> None:
    """The same block around the adapter's import: it fails, so the script tests something."""
    code = (
        "source = open('tests/ray/scripts/without_ray_dag.py').read().replace('\\nmain()\\n', '\\n')\n"
        "space = {'__name__': 'script'}; exec(compile(source, 'script', 'exec'), space)\n"
        "space['load_raycomm_without']()\n"
        "try:\n    import raycomm.ray_dag.read\nexcept ImportError as error:\n    print(error)\n"
        "import raycomm.runtime.ray_errors as errors, raycomm\n"
        "print(errors.ChannelTimeoutError is raycomm.ChannelTimeoutError)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == ["ray.dag is refused to raycomm.ray_dag.read", "True"], done.stderr[-4000:]
