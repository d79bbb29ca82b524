"""`install()` in actors that compile graphs themselves."""

from __future__ import annotations

import pytest
import ray

from tests.ray.install_actors import Replica

pytestmark = pytest.mark.usefixtures("cluster")


def test_install_in_the_constructor() -> None:
    replica = Replica.remote()
    assert ray.get(replica.kind.remote()) == "CompatGraph"
    for value in range(20):
        assert ray.get(replica.call.remote(value)) == [value + 1, value + 2, value + 2]
        assert ray.get(replica.call_one_by_one.remote(value)) == [value + 1, value + 2, value + 2]
    ray.get(replica.end.remote())
    ray.kill(replica)
