"""What the tests on real actors share. The cluster is `tests/conftest.py`'s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raycomm.testing import Stall
from tests.ray.workers import Gate, start


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    """Three `Worker`s, for the tests of a module."""
    return start(3)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A gate that `Worker.hold` waits at; opened at the end at the latest, so no actor stays in it."""
    gate = Gate(str(tmp_path / "gate"))
    yield gate
    gate.open()


@pytest.fixture
def stall(tmp_path: Path) -> Iterator[Stall]:
    """A place for faults to stall at; released at the end at the latest."""
    stall = Stall(str(tmp_path / "stall"))
    yield stall
    stall.release()
