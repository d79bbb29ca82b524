"""Processes at the other ends of the channels, shared by all tests: starting one takes seconds, because it imports torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.net import Nets
from tests.conformance.peer import Remote


@pytest.fixture(scope="session")
def peers() -> Iterator[list[Remote]]:
    started = [Remote() for _ in range(3)]
    yield started
    for peer in started:
        peer.stop()


@pytest.fixture
def net_of(peers: list[Remote]) -> Nets:
    return Nets(peers)
