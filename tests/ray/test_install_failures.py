"""`install()`: what methods raise, one failed output among several, actors that die, and what can be used afterwards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayChannelTimeoutError

import raycomm
from tests.ray.install_actors import Late
from tests.ray.install_fixtures import compiled, dag
from tests.ray.workers import Gate, start

pytestmark = pytest.mark.usefixtures("cluster", "installed")


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    raycomm.install()
    yield
    raycomm.uninstall()


def test_what_a_method_raises(workers: list[Any]) -> None:
    a = workers[0]
    for build in (lambda inp: a.add.bind(inp), lambda inp: a.add.bind(a.add.bind(inp))):
        with compiled(build) as graph:
            for _ in range(3):
                ref = graph.execute("text")
                with pytest.raises(TypeError) as caught:
                    ray.get(ref)
                assert "return x + by" in str(caught.value), "the remote line is in the message"
                assert isinstance(caught.value, ray.exceptions.RayTaskError)
                with pytest.raises(ValueError, match="only be called once"):
                    ray.get(ref)
            assert ray.get(graph.execute(1)) in (2, 3)


@pytest.mark.parametrize("together", [True, False])
def test_a_failure_reaches_every_output(workers: list[Any], together: bool) -> None:
    with compiled(lambda inp: [w.add.bind(inp) for w in workers[:2]]) as graph:
        for _ in range(2):
            refs = graph.execute("text")
            if together:
                with pytest.raises(TypeError, match=re.escape("return x + by")):
                    ray.get(refs)
            else:
                for ref in refs:
                    with pytest.raises(TypeError, match=re.escape("return x + by")):
                        ray.get(ref)
            del refs
        assert ray.get(graph.execute(1)) == [2, 2]
        assert graph._result_buffer == {}


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("asked", [0, 1, 2, None])
def test_the_first_failure_ends_the_wait(workers: list[Any], gate: Gate, failing: int, asked: int | None) -> None:
    """Ray's fast fail: outputs that will still take long are not waited for, whichever is asked for."""

    def build(inp: Any) -> Any:
        return [w.fail.bind(inp) if i == failing else w.hold.bind(inp, gate.path) for i, w in enumerate(workers)]

    with compiled(build) as graph:
        refs = graph.execute(6)
        with pytest.raises(ValueError, match="bad 6"):
            ray.get(refs if asked is None else refs[asked], timeout=60)
        gate.open()


def test_after_a_failed_execution_the_next_waits_for_the_slow_output(workers: list[Any], gate: Gate) -> None:
    a = workers[0]
    with compiled(lambda inp: [a.fail_if_odd.bind(inp), workers[1].hold.bind(inp, gate.path)]) as graph:
        with pytest.raises(ValueError, match="bad 1"):
            ray.get(graph.execute(1))
        refs = graph.execute(2)
        with pytest.raises(RayChannelTimeoutError):
            ray.get(refs, timeout=0.2)
        gate.open()
        assert ray.get(refs, timeout=60) == [2, 2]
        for value in range(4, 40, 2):
            assert ray.get(graph.execute(value)) == [value, value]


def test_several_returns_and_their_failures(workers: list[Any]) -> None:
    with compiled(lambda inp: list(workers[0].as_two.bind(inp))) as graph:
        assert ray.get(graph.execute((1, 2))) == [1, 2]
        for wrong in ((1, 2, 3), (1,), 5):
            for ref in graph.execute(wrong):
                with pytest.raises(ValueError, match="2 values"):
                    ray.get(ref)
        assert ray.get(graph.execute([3, 4])) == [3, 4], "a wrong number of values fails its own execution only"


def test_an_exception_that_is_returned_is_a_value(workers: list[Any]) -> None:
    with compiled(lambda inp: [workers[0].return_exception.bind(inp), workers[1].echo.bind(inp)]) as graph:
        value, other = ray.get(graph.execute(1))
        assert isinstance(value, ValueError)
        assert other == 1


def test_rays_own_errors_raised_by_a_method_keep_their_text(workers: list[Any]) -> None:
    late = Late.remote()
    with compiled(lambda inp: late.late.bind(inp)) as graph:
        ref = graph.execute(1)
        with pytest.raises(RayChannelTimeoutError, match="mine 1") as caught:
            ray.get(ref)
        assert "RAY_CGRAPH" not in str(caught.value)
        with pytest.raises(ValueError, match="only be called once"):
            ray.get(ref)


def test_actors_of_a_graph_with_failures_are_used_again(workers: list[Any]) -> None:
    def chain(inp: Any, members: list[Any]) -> Any:
        for worker in members:
            inp = worker.fail_if_odd.bind(inp)
        return inp

    with compiled(lambda inp: chain(inp, workers)) as graph:
        for value in range(20):
            if value % 2:
                with pytest.raises(ValueError, match=f"bad {value}"):
                    ray.get(graph.execute(value))
            else:
                assert ray.get(graph.execute(value)) == value
    assert ray.get([w.echo.remote(1) for w in workers]) == [1] * 3
    with compiled(lambda inp: chain(inp, workers[1:])) as graph:
        assert [ray.get(graph.execute(value)) for value in range(0, 40, 2)] == list(range(0, 40, 2))


@pytest.mark.parametrize("together", [True, False])
def test_an_actor_that_dies(workers: list[Any], together: bool) -> None:
    mortal = start(1)[0]
    a, b, _ = workers
    graph = dag(lambda inp: [mortal.die.bind(inp, "_exit"), a.echo.bind(inp), b.echo.bind(inp)]).experimental_compile()
    for _ in range(3):
        assert ray.get(graph.execute("stay")) == ["stay"] * 3
    refs = graph.execute("go")
    with pytest.raises(ActorDiedError, match="The actor died unexpectedly before finishing this task.") as caught:
        ray.get(refs) if together else [ray.get(ref) for ref in refs]
    assert isinstance(caught.value, raycomm.ActorDiedError)
    assert caught.value.actor_id == mortal._actor_id.hex()
    with pytest.raises(ActorDiedError):
        graph.execute("again")
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(mortal.echo.remote(1))
    # The others are free although nothing was torn down.
    with compiled(lambda inp: [a.echo.bind(inp), b.echo.bind(inp)]) as again:
        assert [ray.get(again.execute(value)) for value in range(20)] == [[value] * 2 for value in range(20)]
    graph.teardown()


def test_teardown_while_a_method_runs(workers: list[Any], gate: Gate) -> None:
    a = workers[0]
    graph = dag(lambda inp: a.hold.bind(inp, gate.path)).experimental_compile()
    ref = graph.execute(3)
    gate.wait_entered()
    gate.open()
    graph.teardown()
    with pytest.raises(ray.exceptions.RayChannelError):
        ray.get(ref)
    with compiled(lambda inp: a.echo.bind(inp)) as again:
        assert ray.get(again.execute(0.1)) == 0.1
