"""Graphs on Ray actors with GPUs, where Ray can be imported."""

from __future__ import annotations

import importlib.util

from tests.gpu.conformance import run_tests
from tests.gpu.setting import Figures, Setting, StepSkipped

_TESTS = ("tests/ray/test_tensor_edges.py", "tests/ray/test_device_collectives.py")


def graphs(setting: Setting) -> Figures:
    """The tests of edges between GPUs, and of collectives on them."""
    if setting.stand_in:
        raise StepSkipped("needs a GPU")
    if importlib.util.find_spec("ray") is None:
        raise StepSkipped("Ray is not installed; put a packed one on PYTHONPATH")
    return run_tests([*_TESTS, "-k", "nccl"], setting)
