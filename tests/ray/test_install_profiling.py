"""`install()`: what ``RAY_CGRAPH_ENABLE_PROFILING`` records in the actors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import ray.dag.constants

import raycomm
from raycomm.ray_dag import profiling
from tests.ray.install_fixtures import compiled
from tests.ray.workers import Worker, until

pytestmark = pytest.mark.usefixtures("cluster", "installed")


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    raycomm.install()
    yield
    raycomm.uninstall()


@pytest.fixture
def workers(cluster: None) -> Iterator[list[Any]]:
    made = [Worker.options(name=name).remote() for name in ("a", "b")]
    yield made
    for worker in made:
        ray.kill(worker)


def events(worker: Any) -> list[Any]:
    def read(instance: Any) -> Any:
        return getattr(instance, "__ray_cgraph_events", [])

    found = ray.get(worker.__ray_call__.remote(read))
    assert isinstance(found, list)
    return found


def test_each_call_reads_computes_and_writes(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.dag.constants, "RAY_CGRAPH_ENABLE_PROFILING", True)
    a, b = workers

    def build(inp: Any) -> Any:
        x = a.add.bind(inp)
        y = b.add.bind(inp)
        return [x, b.join.bind(y, x)]

    with compiled(build) as graph:
        for value in range(3):
            assert ray.get(graph.execute(value)) == [value + 1, ((value + 1, value + 1), {})]
        until(lambda: len(events(a)) == 9 and len(events(b)) == 18, "three records per call and execution")
    for worker, name, methods in ((a, "a", ["add"]), (b, "b", ["add", "join"])):
        found = events(worker)
        assert [(e.method_name, e.operation) for e in found] == [
            (method, operation) for method in methods for operation in ("READ", "COMPUTE", "WRITE")
        ] * 3
        assert {(e.actor_classname, e.actor_name, e.actor_id) for e in found} == {("WorkerBody", name, worker._actor_id.hex())}
        assert [e.bind_index for e in found] == [index for index in range(len(methods)) for _ in range(3)] * 3
        times = [moment for e in found if e.start_t != e.end_t for moment in (e.start_t, e.end_t)]
        assert times == sorted(times)
        assert set(found[0].to_dict()) >= {"method_name", "operation", "start_t", "end_t"}
    waited = events(b)[6]
    assert waited.operation == "READ"
    assert waited.end_t > waited.start_t


def test_failures_are_recorded_like_other_calls(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.dag.constants, "RAY_CGRAPH_ENABLE_PROFILING", True)
    a, b = workers
    with compiled(lambda inp: b.echo.bind(a.fail_if_odd.bind(inp))) as graph:
        with pytest.raises(ValueError, match="bad 1"):
            ray.get(graph.execute(1))
        assert ray.get(graph.execute(2)) == 2
        until(lambda: len(events(a)) == len(events(b)) == 6, "both executions are recorded")


def test_nothing_is_recorded_unasked(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].echo.bind(inp)) as graph:
        assert ray.get(graph.execute(1)) == 1
    assert events(workers[0]) == []


def test_the_records_are_bounded(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.dag.constants, "RAY_CGRAPH_ENABLE_PROFILING", True)
    a = workers[0]

    def keep_less(_instance: Any) -> None:
        profiling._KEPT = 30  # type: ignore[misc]

    ray.get(a.__ray_call__.remote(keep_less))
    with compiled(lambda inp: a.echo.bind(inp)) as graph:
        for value in range(50):
            assert ray.get(graph.execute(value)) == value
        until(lambda: events(a)[-1].operation == "WRITE", "the last call is recorded")
    found = events(a)
    assert 15 <= len(found) <= 30
    assert found[-1].end_t == max(e.end_t for e in found)
