"""``python -m raycomm plan`` of a file that uses `ray.dag`, with real actors and with stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raycomm.cli import main

FILE = """
import ray
from ray.dag import InputNode, MultiOutputNode
from raycomm.testing import stand_in


@ray.remote(num_cpus=0)
class Stage:
    def forward(self, x, scale=1):
        return x

    @ray.method(num_returns=2)
    def split(self, x):
        return x, x


def real():
    one, two = Stage.remote(), Stage.remote()
    with InputNode() as x:
        return two.forward.bind(one.forward.bind(x).with_tensor_transport("nccl", _static_shape=True), scale=2)


def standing_in():
    with InputNode() as x:
        left, right = stand_in(Stage, "one").split.bind(x)
        return stand_in(Stage, "two").forward.bind(right, left)
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    path = list(sys.path)
    file = tmp_path / "stages.py"
    file.write_text(FILE)
    yield file
    sys.path[:] = path
    sys.modules.pop("__raycomm_plan__", None)


@pytest.mark.usefixtures("cluster")
def test_actors_of_a_cluster(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{file}:real", "--devices", "simulated"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "transport device hint nccl static_shape yes" in out
    assert "link 0 1 -> 2 over simulated" in out
    assert main(["plan", f"{file}:real"]) == 2
    assert "no device was named for it" in capsys.readouterr().err


def test_stand_ins_for_a_class_that_ray_decorated(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{file}:standing_in"]) == 0
    out, _ = capsys.readouterr()
    assert 'process 1 "one"\nprocess 2 "two"\n' in out
    assert "r1, r2 = 0:split(r0)" in out
    assert out.endswith("no deadlock\n")
