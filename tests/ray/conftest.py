"""One local Ray per test module, and what the tests on real actors share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.ray.workers import Gate


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A local Ray, shared by a module's tests."""
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A gate that `Worker.hold` waits at; opened at the end at the latest, so no actor stays in it."""
    gate = Gate(str(tmp_path / "gate"))
    yield gate
    gate.open()
