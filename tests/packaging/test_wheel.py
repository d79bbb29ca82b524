"""The wheel alone, in an empty environment, runs README's first example."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def first_example() -> str:
    """The first Python block of README.md."""
    match = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert match is not None
    return match[1]


def test_the_first_example_prints_what_readme_says(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(first_example())
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[12, 13, 14]"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_alone_runs_the_first_example(tmp_path: Path) -> None:
    wheels = sorted((ROOT / "dist").glob("raycomm-*.whl"))
    if not wheels:
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
        subprocess.run(command, check=True, timeout=300, capture_output=True)
        wheels = sorted(tmp_path.glob("raycomm-*.whl"))
    inside = zipfile.ZipFile(wheels[-1]).namelist()
    assert any(re.fullmatch(r"raycomm/_core\..*\.so", name) for name in inside)
    assert {"raycomm/py.typed", "raycomm/_core.pyi"} <= set(inside)
    strays = [name for name in inside if not name.startswith(("raycomm/", "raycomm-")) or name.endswith((".cpp", ".hpp", ".txt"))]
    assert [name for name in strays if ".dist-info/" not in name] == []

    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    # torch first: asked for by another package it would be a CUDA build.
    subprocess.run([*install, "torch==2.13.0"], check=True, timeout=600)
    subprocess.run([*install, str(wheels[-1])], check=True, timeout=600)
    script = tmp_path / "example.py"
    script.write_text(first_example())
    done = subprocess.run([str(python), str(script)], capture_output=True, text=True, timeout=200, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[12, 13, 14]"
