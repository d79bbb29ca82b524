"""Which thread the loop runs on, and what that thread knows; several graphs on one actor."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
import ray
import ray.exceptions

import raycomm
from raycomm import ActorDiedError, ChannelTimeoutError, CompileError, InputNode, MultiOutputNode, bind
from tests.ray.stateful import TORCH_DEFAULTS, make
from tests.ray.workers import PATIENCE_S, Gate, start, until

pytestmark = pytest.mark.usefixtures("cluster")


def one(method: Any, *args: Any) -> Any:
    with InputNode() as x:
        return bind(method, x, *args)


def end(worker: Any, pid: int) -> None:
    """Kill an actor; returns once its process has ended."""
    ray.kill(worker)
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "the process ends")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("plain", {"tenant": "plain", "precision": 7}),
        ("numpy", {"divide": "raise"}),
        ("torch", TORCH_DEFAULTS),
        ("no grad", TORCH_DEFAULTS | {"grad": False, "grad of a product": False}),
        ("inference", TORCH_DEFAULTS | {"grad": False, "inference": True, "inference tensor": True}),
        ("device", TORCH_DEFAULTS | {"device": "meta", "factory": "meta"}),
        ("autocast", TORCH_DEFAULTS | {"autocast": (True, "torch.float16"), "cache": False, "product": "torch.float16"}),
        ("autocast off", TORCH_DEFAULTS | {"autocast cuda": (False, "torch.bfloat16")}),
    ],
)
def test_the_loop_has_the_state_that_the_constructor_set(kind: str, expected: dict[str, Any]) -> None:
    actor = make(kind)
    before = ray.get(actor.state.remote())
    assert {key: before[key] for key in expected} == expected
    with raycomm.compile(one(actor.state)) as graph:
        assert graph.execute(0).get(timeout=PATIENCE_S) == before
        assert ray.get(actor.state.remote()) == before
    assert ray.get(actor.state.remote()) == before
    with raycomm.compile(one(actor.state)) as graph:  # a thread that ended took nothing with it
        assert graph.execute(0).get(timeout=PATIENCE_S) == before


def test_a_change_on_one_thread_stays_there() -> None:
    actor = make("torch")
    before = ray.get(actor.state.remote())
    with InputNode() as x:
        changed = bind(actor.change, x)
        out = MultiOutputNode([changed, bind(actor.state, changed)])
    with raycomm.compile(out) as graph:
        _, state = graph.execute(0)
        changed_state = state.get(timeout=PATIENCE_S)
        assert (changed_state["tenant"], changed_state["precision"]) == ("changed", 3)
        assert (changed_state["grad"], changed_state["autocast"][0]) == (False, True)
        assert ray.get(actor.state.remote()) == before
    assert ray.get(actor.state.remote()) == before


def test_torch_is_not_imported_for_this() -> None:
    actor = make("plain")
    with raycomm.compile(one(actor.add)) as graph:
        assert graph.execute(1).get(timeout=PATIENCE_S) == 2
        assert "torch" not in ray.get(actor.modules.remote())


def test_thread_locals_are_not_carried_to_a_thread_of_the_loops_own() -> None:
    """What the documentation says; with the actor's own thread they are there."""
    actor = make("plain")
    with raycomm.compile(one(actor.local)) as graph:
        assert graph.execute(0).get(timeout=PATIENCE_S) is None
    with raycomm.compile(one(actor.local), loop_thread="actor") as graph:
        assert graph.execute(0).get(timeout=PATIENCE_S) == "plain"


# --- the loop on the actor's own thread ---


def test_plain_calls_wait_until_the_actors_thread_is_free() -> None:
    actor, worker = make("torch"), start(1)[0]
    with InputNode() as x:
        out = MultiOutputNode([bind(actor.thread, x), bind(worker.add, bind(actor.add, x))])
    begin = time.monotonic()
    with raycomm.compile(out, loop_thread="actor") as graph:
        assert time.monotonic() - begin < 20  # the set-up call returns although the thread is taken
        waiting = actor.thread.remote()
        thread, value = (ref.get(timeout=PATIENCE_S) for ref in graph.execute(1))
        assert (thread, value) == ("MainThread", 3)
        assert ray.wait([waiting], timeout=0.3)[0] == []
        assert [graph.execute(n)[1].get(timeout=PATIENCE_S) for n in range(100)] == [n + 2 for n in range(100)]
    assert ray.get(waiting, timeout=PATIENCE_S) == "MainThread"
    assert ray.get([actor.add.remote(1), worker.add.remote(1)], timeout=PATIENCE_S) == [2, 2]
    assert not [name for name in ray.get(actor.warm.remote()) if name.startswith("raycomm")]


def test_state_that_a_method_changes_on_the_actors_thread_stays() -> None:
    """As with plain calls, for it is their thread."""
    actor = make("plain")
    with raycomm.compile(one(actor.change), loop_thread="actor") as graph:
        graph.execute(0).get(timeout=PATIENCE_S)
    assert ray.get(actor.state.remote())["tenant"] == "changed"


def test_graphs_on_the_actors_thread_follow_each_other() -> None:
    actor = make("plain")
    first = ray.get(actor.vitals.remote())
    for value in range(20):
        with raycomm.compile(one(actor.add), loop_thread="actor") as graph:
            assert graph.execute(value).get(timeout=PATIENCE_S) == value + 1
    until(lambda: ray.get(actor.vitals.remote())["maps"] == 0, "the last graph's memory goes")
    last = ray.get(actor.vitals.remote())
    assert (last["memfds"], last["loops"]) == (0, 0)
    assert last["descriptors"] - first["descriptors"] < 20  # Ray's own come and go


@pytest.mark.parametrize("second", ["own", "actor"])
def test_a_second_graph_is_refused_and_names_the_first(second: str) -> None:
    actor, worker = make("plain"), start(1)[0]
    with InputNode() as x:
        out = bind(actor.add, bind(worker.add, x))
    with raycomm.compile(one(actor.add), loop_thread="actor", name="the first, with a ü/slash and\nmore") as graph:
        begin = time.monotonic()
        with pytest.raises(
            CompileError, match=r"actor Stateful: its thread is lent to graph .*the first, with a .*tear"
        ) as caught:
            raycomm.compile(out, loop_thread=second, name="the second")
        assert time.monotonic() - begin < 20
        assert "'the second'" in str(caught.value)
        assert graph.execute(1).get(timeout=PATIENCE_S) == 2
        until(lambda: ray.get(worker.vitals.remote())["loops"] == 0, "the second graph leaves nothing")
    with raycomm.compile(out, loop_thread=second) as graph:
        assert graph.execute(1).get(timeout=PATIENCE_S) == 3


def test_a_graph_that_takes_the_thread_while_another_waits_for_it(gate: Gate) -> None:
    """The second graph's set-up call is already on its way when the first gets the thread: it is told all the same."""
    actor = make("plain")
    busy = actor.hold.remote(0, gate.path)
    gate.wait_entered()
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(raycomm.compile, one(actor.add), loop_thread="actor")
        second = pool.submit(raycomm.compile, one(actor.add), loop_thread="actor")
        gate.open()
        ray.get(busy)
        until(lambda: first.done() and second.done(), "both are answered")
    errors = [future.exception() for future in (first, second)]
    refused = [error for error in errors if error is not None]
    assert [type(error) for error in refused] == [CompileError]
    [graph] = [future.result() for future, error in zip((first, second), errors, strict=True) if error is None]
    assert f"lent to graph {graph.name!r}" in str(refused[0])
    assert graph.execute(1).get(timeout=PATIENCE_S) == 2
    graph.teardown()


@pytest.mark.parametrize("options", [{"max_concurrency": 2}, {"concurrency_groups": {"side": 1}}])
def test_threaded_actors_have_no_such_thread(options: dict[str, Any]) -> None:
    actor = make("plain", **options)
    with pytest.raises(CompileError, match=r"actor Stateful .*asynchronous or threaded.*loop_thread='own'"):
        raycomm.compile(one(actor.add), loop_thread="actor")
    with raycomm.compile(one(actor.add)) as graph:
        assert graph.execute(1).get(timeout=PATIENCE_S) == 2


def test_asynchronous_actors_have_no_such_thread() -> None:
    from tests.ray.async_actors import Async

    actor = Async.remote()
    with pytest.raises(CompileError, match=r"actor AsyncBody .*asynchronous or threaded.*loop_thread='own'"):
        raycomm.compile(one(actor.add), loop_thread="actor")
    assert ray.get(actor.vitals.remote())["loops"] == 0


def test_a_failed_compile_gives_the_thread_back() -> None:
    actor, worker = make("plain"), start(1)[0]
    ray.kill(worker)
    with InputNode() as x:
        out = bind(worker.add, bind(actor.add, x))
    with pytest.raises(ActorDiedError):
        raycomm.compile(out, loop_thread="actor")
    assert ray.get(actor.add.remote(1), timeout=PATIENCE_S) == 2


def test_a_compile_that_takes_too_long_gives_the_thread_back(gate: Gate) -> None:
    actor, busy = make("plain"), make("plain")
    held = busy.hold.remote(0, gate.path)
    gate.wait_entered()
    with InputNode() as x:
        out = bind(busy.add, bind(actor.add, x))
    with pytest.raises(ChannelTimeoutError):
        raycomm.compile(out, loop_thread="actor", compile_timeout=1)
    assert ray.get(actor.add.remote(1), timeout=PATIENCE_S) == 2
    gate.open()
    ray.get(held)
    assert ray.get(busy.add.remote(1), timeout=PATIENCE_S) == 2
    with raycomm.compile(out, loop_thread="actor") as graph:
        assert graph.execute(1).get(timeout=PATIENCE_S) == 3


def test_a_dropped_graph_gives_the_thread_back() -> None:
    actor = make("plain")
    graph = raycomm.compile(one(actor.add), loop_thread="actor")
    assert graph.execute(1).get(timeout=PATIENCE_S) == 2
    with pytest.warns(ResourceWarning, match="dropped"):
        del graph
    assert ray.get(actor.add.remote(1), timeout=PATIENCE_S) == 2


@pytest.mark.parametrize("how", ["exit_actor", "sys.exit"])
def test_a_method_that_ends_its_actor_on_the_actors_thread(how: str) -> None:
    actor, worker = make("plain"), start(1)[0]
    with InputNode() as x:
        out = bind(worker.echo, bind(actor.leave, x, how))
    graph = raycomm.compile(out, loop_thread="actor")
    assert graph.execute("stay").get(timeout=PATIENCE_S) == "stay"
    with pytest.raises(ActorDiedError, match="Stateful"):
        graph.execute("go").get(timeout=PATIENCE_S)
    with pytest.raises(ray.exceptions.ActorDiedError):  # as after a plain call
        ray.get(actor.add.remote(1), timeout=PATIENCE_S)
    assert ray.get(worker.add.remote(1), timeout=PATIENCE_S) == 2
    graph.teardown()


def test_a_peer_that_dies_gives_the_thread_back() -> None:
    actor, worker = make("plain"), start(1)[0]
    with InputNode() as x:
        out = bind(worker.add, bind(actor.add, x))
    pid = ray.get(worker.pid.remote())
    graph = raycomm.compile(out, loop_thread="actor")
    end(worker, pid)
    with pytest.raises(ActorDiedError):
        graph.execute(1).get(timeout=PATIENCE_S)
    assert ray.get(actor.add.remote(1), timeout=PATIENCE_S) == 2
    graph.teardown()


_DRIVER = """
import sys, time, ray, raycomm
ray.init(address=sys.argv[1], namespace="threads", log_to_driver=False)
actor = ray.get_actor("lent")
with raycomm.InputNode() as x:
    out = raycomm.bind(actor.add, x)
graph = raycomm.compile(out, loop_thread=sys.argv[2])
assert graph.execute(1).get(timeout=60) == 2
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("loop_thread", ["actor", "own"])
def test_a_driver_that_is_killed_gives_the_thread_back(loop_thread: str) -> None:
    actor = make("plain", name="lent", namespace="threads")
    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", _DRIVER, address, loop_thread], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        driver.kill()
        assert ray.get(actor.add.remote(1), timeout=PATIENCE_S) == 2
        until(lambda: ray.get(actor.vitals.remote())["loops"] == 0, "the loop leaves", 20)
        with raycomm.compile(one(actor.add), loop_thread="actor") as graph:
            assert graph.execute(1).get(timeout=PATIENCE_S) == 2
    finally:
        driver.kill()
        driver.wait()
        assert driver.stdout is not None
        driver.stdout.close()
        ray.kill(actor)


# --- several graphs on the same actors ---


def test_two_graphs_on_the_same_actors_at_once() -> None:
    a, b = start(2)
    with InputNode() as x:
        forth = bind(b.pair, bind(a.add, x), x)
    with InputNode() as x:
        back = bind(a.pair, bind(b.add, x), x)
    first, second = raycomm.compile(forth), raycomm.compile(back)
    for value in range(50):
        one_ref, other_ref = first.execute(value), second.execute(-value)
        call = a.add.remote(value)
        assert other_ref.get(timeout=PATIENCE_S) == ("w0", -value + 1, -value)
        assert one_ref.get(timeout=PATIENCE_S) == ("w1", value + 1, value)
        assert ray.get(call, timeout=PATIENCE_S) == value + 1
    refs = [(first.execute(value), second.execute(value)) for value in range(10)]
    second.teardown()
    assert [ref.get(timeout=PATIENCE_S) for ref, _ in refs] == [("w1", value + 1, value) for value in range(10)]
    with pytest.raises(raycomm.ChannelClosedError):
        refs[0][1].get()
    third = raycomm.compile(back)
    with pytest.warns(ResourceWarning, match="dropped"):
        del first, refs, one_ref
    assert third.execute(1).get(timeout=PATIENCE_S) == ("w0", 2, 1)
    until(lambda: all(ray.get(worker.vitals.remote())["loops"] == 1 for worker in (a, b)), "the dropped graph's loops leave")
    assert third.execute(2).get(timeout=PATIENCE_S) == ("w0", 3, 2)
    third.teardown()


def test_one_graph_waits_in_a_method_and_the_other_goes_on(gate: Gate) -> None:
    a, b = start(2)
    with InputNode() as x:
        slow = bind(b.echo, bind(a.hold, x, gate.path))
    with InputNode() as x:
        quick = bind(b.add, bind(a.add, x))
    with raycomm.compile(slow) as first, raycomm.compile(quick) as second:
        held = first.execute("held")
        gate.wait_entered()
        assert [second.execute(value).get(timeout=PATIENCE_S) for value in range(20)] == [value + 2 for value in range(20)]
        gate.open()
        assert held.get(timeout=PATIENCE_S) == "held"


def test_a_death_closes_the_graphs_that_it_is_in_and_no_other() -> None:
    a, b, c = start(3)
    with InputNode() as x:
        doomed = bind(b.add, bind(a.add, x))
    with InputNode() as x:
        spared = bind(c.add, bind(a.add, x))
    pid = ray.get(b.pid.remote())
    first, second = raycomm.compile(doomed), raycomm.compile(spared)
    end(b, pid)
    with pytest.raises(ActorDiedError, match=f"pid {pid}"):
        first.execute(1).get(timeout=PATIENCE_S)
    assert [second.execute(value).get(timeout=PATIENCE_S) for value in range(10)] == [value + 2 for value in range(10)]
    first.teardown()
    assert second.execute(1).get(timeout=PATIENCE_S) == 3
    second.teardown()
