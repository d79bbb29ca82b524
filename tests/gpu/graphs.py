"""Graphs on Ray actors with GPUs, where Ray can be imported."""

from __future__ import annotations

import importlib.util

from tests.gpu.conformance import run_tests
from tests.gpu.setting import Figures, Setting, StepSkipped
from tests.gpu.suite import ROOT

_TESTS = "tests/ray/test_gpu_edges.py"


def graphs(setting: Setting) -> Figures:
    """The tests of edges between GPUs."""
    if setting.stand_in:
        raise StepSkipped("needs a GPU")
    if importlib.util.find_spec("ray") is None:
        raise StepSkipped("Ray is not installed; put a packed one on PYTHONPATH")
    if not (ROOT / _TESTS).exists():
        raise StepSkipped(f"there is no {_TESTS}")
    return run_tests([_TESTS], setting)
