"""Plain functions as nodes: an actor's own `__ray_call__` runs any function on it, so it needs no method for each."""

from __future__ import annotations

from typing import Any

import pytest
from ray.dag import InputNode as RayInputNode

import raycomm
from raycomm import InputNode, bind
from tests.ray.workers import PATIENCE_S, start

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return start(2)


@pytest.mark.parametrize("family", ["ray", "raycomm"])
def test_a_function_is_called_with_the_actor_and_the_values(workers: list[Any], family: str) -> None:
    w, v = workers
    step = 10

    def grow(worker: Any, x: int, by: int = 1) -> tuple[str, int]:
        return worker.name, x + by * step

    if family == "ray":
        with RayInputNode() as x:
            first = w.__ray_call__.bind(grow, x)
            out: Any = v.__ray_call__.bind(lambda worker, pair, more: (*pair, worker.name, more), first, "constant")
    else:
        with InputNode() as x:
            first = bind(w.__ray_call__, grow, x, by=2)
            out = bind(v.__ray_call__, lambda worker, pair, more: (*pair, worker.name, more), first, "constant")
    with raycomm.compile(out) as graph:
        for number in range(3):
            expected = number + step * (1 if family == "ray" else 2)
            assert graph.execute(number).get(timeout=PATIENCE_S) == ("w0", expected, "w1", "constant")


def test_its_error_is_that_of_the_function(workers: list[Any]) -> None:
    def refuse(worker: Any, x: int) -> int:
        raise LookupError(f"no {x} at {worker.name}")

    with InputNode() as x:
        out = bind(workers[0].__ray_call__, refuse, x)
    with raycomm.compile(out) as graph, pytest.raises(LookupError, match="no 5 at w0"):
        graph.execute(5).get(timeout=PATIENCE_S)
