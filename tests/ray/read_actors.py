"""What the tests of reading `ray.dag` graphs share: two actors whose handles are all they need, and what a refusal must say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray

from raycomm.errors import CompileError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.ray_dag.read import ADAPTER


class Worker:
    def forward(self, x: Any) -> Any:
        return x

    def join(self, *parts: Any, **named: Any) -> Any:
        return parts, named

    @ray.method(num_returns=2)
    def split(self, x: Any) -> Any:
        return x, x


class Other(Worker):
    pass


@ray.remote
def double(x: int) -> int:
    return 2 * x


@contextmanager
def two_actors() -> Iterator[tuple[Any, Any]]:
    """A `Worker` and an `Other`; handles only, their processes need not be up."""
    worker = ray.remote(num_cpus=0)(Worker).options(name="worker").remote()
    other = ray.remote(num_cpus=0)(Other).remote()
    yield worker, other
    ray.kill(worker)
    ray.kill(other)


def call(family: str, method: Any, *args: Any, **kwargs: Any) -> Any:
    return bind(method, *args, **kwargs) if family == "raycomm" else method.bind(*args, **kwargs)


def refused(root: Any, pattern: str, node: str) -> CompileError:
    with pytest.raises(CompileError, match=pattern) as caught:
        build(root, ADAPTER)
    error = caught.value
    assert error.node == node
    assert error.remedy
    assert str(error).endswith(error.remedy)
    return error
