"""Coroutine methods of asynchronous actors as nodes: they run on the actor's own event loop and are awaited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import ray.exceptions

import raycomm
from raycomm import ActorDiedError, CompileError, InputNode, MultiOutputNode, bind
from tests.ray.async_actors import Async
from tests.ray.workers import PATIENCE_S, Gate, start, until

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def actor(cluster: None) -> Any:
    return Async.remote()


@pytest.fixture
def own(cluster: None) -> Iterator[Any]:
    """An actor for one test, ended by it or after it."""
    actor = Async.remote()
    yield actor
    ray.kill(actor)


def one(method: Any, *args: Any) -> Any:
    with InputNode() as x:
        return bind(method, x, *args)


def test_results_are_awaited_in_order(actor: Any) -> None:
    with raycomm.compile(one(actor.add)) as graph:
        refs = [graph.execute(value) for value in range(50)]
        assert [ref.get(timeout=PATIENCE_S) for ref in refs] == list(range(1, 51))
    assert ray.get(actor.add.remote(1)) == 2


def test_it_runs_on_the_event_loop_of_plain_calls(actor: Any) -> None:
    with InputNode() as x:
        out = MultiOutputNode([bind(actor.where, x), bind(actor.aside, x), bind(actor.plain, x)])
    with raycomm.compile(out) as graph:
        where, aside, plain = (ref.get(timeout=PATIENCE_S) for ref in graph.execute(7))
    assert where == ray.get(actor.where.remote(0))
    assert aside == ray.get(actor.aside.remote(0))
    assert where[0] != aside[0]  # each concurrency group has its own
    assert plain == (70, f"raycomm:{graph.name}")  # plain methods stay on the loop's thread


def test_it_shares_what_belongs_to_the_event_loop(own: Any) -> None:
    """A plain call sets the asyncio event that the graph's coroutine awaits; other plain calls run meanwhile."""
    with raycomm.compile(one(own.until_set)) as graph:
        ref = graph.execute("set")
        until(lambda: ray.get(own.counts.remote()) == (1, 0), "the coroutine begins")
        assert ray.get([own.add.remote(value) for value in range(5)], timeout=PATIENCE_S) == [1, 2, 3, 4, 5]
        ray.get(own.set.remote())
        assert ref.get(timeout=PATIENCE_S) == "set"


def test_coroutines_and_plain_methods_and_several_actors(actor: Any) -> None:
    worker = start(1)[0]
    with InputNode() as inp:
        a = bind(actor.add, inp[0], by=inp.by)
        b = bind(worker.add, a)
        plus, minus = bind(actor.both, b)
        total = bind(actor.sum_of, plus, 3)
    with raycomm.compile(MultiOutputNode([total, minus])) as graph:
        for value in range(10):
            got = [ref.get(timeout=PATIENCE_S) for ref in graph.execute(value, by=5)]
            assert got == [3 * (value + 6) + 3, -(value + 6)]


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("value", ValueError, "bad value"),
        ("cancelled", ray.exceptions.TaskCancelledError, r"coroutine of AsyncBody\.fail was cancelled"),
        ("cancels itself", ray.exceptions.TaskCancelledError, r"coroutine of AsyncBody\.fail was cancelled"),
        ("closed", RuntimeError, r"coroutine of AsyncBody\.fail raised GeneratorExit"),
    ],
)
@pytest.mark.parametrize("form", ["one call", "several"])
def test_what_a_coroutine_raises_fails_one_execution(actor: Any, form: str, what: str, error: Any, text: str) -> None:
    with InputNode() as x:
        failing = bind(actor.fail, x)
        out = failing if form == "one call" else MultiOutputNode([failing, bind(actor.fail, failing)])
    with raycomm.compile(out) as graph:
        rows = [graph.execute(value) for value in ("fine", what, "after")]
        refs = rows if form == "one call" else [row[1] for row in rows]
        assert refs[0].get(timeout=PATIENCE_S) == "fine"
        with pytest.raises(error, match=text) as caught:
            refs[1].get(timeout=PATIENCE_S)
        assert any("execution 1 of graph" in note for note in caught.value.__notes__)
        assert refs[2].get(timeout=PATIENCE_S) == "after"


def test_sys_exit_in_a_coroutine_ends_the_graph_but_not_the_event_loop() -> None:
    actor = Async.remote()
    worker = start(1)[0]
    with InputNode() as x:
        out = bind(worker.echo, bind(actor.leave, x))
    with raycomm.compile(out) as graph:
        assert graph.execute("stay").get(timeout=PATIENCE_S) == "stay"
        with pytest.raises(ActorDiedError, match="AsyncBody"):
            graph.execute("sys.exit").get(timeout=PATIENCE_S)
        assert ray.get(worker.add.remote(1)) == 2
    assert ray.get(actor.add.remote(1), timeout=PATIENCE_S) == 2


def last_words(actor: Any) -> str:
    """What Ray says of an actor on its way out, once it has ended. Until then it may answer, or be out of reach."""
    said: list[str] = []

    def ended() -> bool:
        try:
            ray.get(actor.add.remote(1), timeout=PATIENCE_S)
        except ray.exceptions.ActorDiedError as error:
            said.append(str(error))
        except ray.exceptions.ActorUnavailableError:
            pass
        return bool(said)

    until(ended, "the actor ends")
    return said[0]


@pytest.mark.parametrize("method", ["leave", "leave_plainly", "raise_exit"])
def test_exit_actor_ends_the_actor_for_good(method: str) -> None:
    """As after a plain call: Ray says that it was meant, and does not start the actor again."""
    actor = Async.options(max_restarts=1).remote()
    worker = start(1)[0]
    with InputNode() as x:
        out = bind(worker.echo, bind(getattr(actor, method), x))
    with raycomm.compile(out) as graph:
        assert graph.execute("stay").get(timeout=PATIENCE_S) == "stay"
        with pytest.raises(ActorDiedError, match="AsyncBody"):
            graph.execute("exit_actor").get(timeout=PATIENCE_S)
        assert ray.get(worker.add.remote(1)) == 2
    assert "INTENDED_USER_EXIT" in last_words(actor)


def test_teardown_does_not_wait_for_a_coroutine_that_never_ends(own: Any) -> None:
    graph = raycomm.compile(one(own.until_set))
    graph.execute("never")
    until(lambda: ray.get(own.counts.remote()) == (1, 0), "the coroutine begins")
    begin = time.monotonic()
    graph.teardown()
    assert time.monotonic() - begin < 20  # a look every 0.2 s
    until(lambda: ray.get(own.counts.remote()) == (1, 1), "it is cancelled")
    until(lambda: ray.get(own.vitals.remote())["loops"] == 0, "the loop leaves")
    ray.get(own.set.remote())
    with raycomm.compile(one(own.until_set)) as again:
        assert again.execute("again").get(timeout=PATIENCE_S) == "again"


def test_teardown_does_not_wait_for_a_coroutine_that_ignores_cancellation(own: Any, gate: Gate) -> None:
    graph = raycomm.compile(one(own.stubborn, gate.path))
    graph.execute("stubborn")
    until(lambda: ray.get(own.counts.remote()) == (1, 0), "the coroutine begins")
    begin = time.monotonic()
    graph.teardown()
    assert time.monotonic() - begin < 20
    until(lambda: ray.get(own.counts.remote()) == (1, 1), "it is asked to end")
    assert ray.get(own.vitals.remote())["loops"] == 0
    gate.open()


def test_a_peer_that_dies_while_a_coroutine_runs(own: Any) -> None:
    worker = start(1)[0]
    with InputNode() as x:
        out = bind(worker.echo, bind(own.until_set, x))
    graph = raycomm.compile(out)
    ref = graph.execute("never")
    until(lambda: ray.get(own.counts.remote()) == (1, 0), "the coroutine begins")
    ray.kill(worker)
    with pytest.raises(ActorDiedError, match="WorkerBody"):
        ref.get(timeout=PATIENCE_S)
    until(lambda: ray.get(own.counts.remote()) == (1, 1), "it is cancelled")
    graph.teardown()


def test_a_coroutine_awaits_other_actors(actor: Any) -> None:
    worker = start(1)[0]
    with InputNode() as x:
        out = bind(actor.ask, worker, x)
    with raycomm.compile(out) as graph:
        assert [graph.execute(value).get(timeout=PATIENCE_S) for value in range(3)] == [1, 2, 3]


def test_context_variables_do_not_pass_from_one_execution_to_the_next(actor: Any) -> None:
    with raycomm.compile(one(actor.number)) as graph:
        assert [graph.execute(value).get(timeout=PATIENCE_S) for value in (1, 2)] == [(None, 1), (None, 2)]


def test_arrays_are_released_after_a_coroutine(own: Any) -> None:
    import numpy as np

    with raycomm.compile(one(own.size), shm_limit_bytes=16 << 20) as graph:
        for value in range(20):
            assert graph.execute(np.full(2 << 20, value % 2, np.uint8)).get(timeout=PATIENCE_S) == (value % 2) * (2 << 20)


def test_a_plain_method_that_returns_a_coroutine(actor: Any) -> None:
    with raycomm.compile(one(actor.returns_coroutine)) as graph:
        refs = [graph.execute(value) for value in (2, 3, 4)]
        assert refs[0].get(timeout=PATIENCE_S) == 2
        with pytest.raises(raycomm.SerializationError, match=r"coroutine.*declare the method 'async def'"):
            refs[1].get(timeout=PATIENCE_S)
        assert refs[2].get(timeout=PATIENCE_S) == 4


def test_asynchronous_generators_are_refused(actor: Any) -> None:
    with InputNode() as x:
        out = bind(actor.stream.options(num_returns=1), x)
    with pytest.raises(CompileError, match=r"node AsyncBody\.stream#0 is an asynchronous generator.*return a list"):
        raycomm.compile(out)
    until(lambda: ray.get(actor.vitals.remote())["loops"] == 0, "nothing was started")
