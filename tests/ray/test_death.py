"""Death of an actor: everyone who waits hears of it, by name, and the survivors are free."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import ray.exceptions

import raycomm
from raycomm import ActorDiedError, ChannelTimeoutError, InputNode, MultiOutputNode, bind
from tests.ray.workers import PATIENCE_S, Broken, Gate, WorkerBody, start, until

pytestmark = pytest.mark.usefixtures("cluster")

_KERNEL = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))


def pipeline(workers: list[Any], middle: Any) -> Any:
    """input -> w0 -> `middle` of w1 -> w2."""
    with InputNode() as x:
        return bind(workers[2].echo, middle(bind(workers[0].echo, x)))


def free(*workers: Any) -> None:
    """The loops of these actors have left."""
    for worker in workers:
        until(lambda worker=worker: ray.get(worker.vitals.remote())["loops"] == 0, "the loop leaves")


def check_death(error: Any, graph: Any, worker: Any, pid: int, execution: int | None, node: str = "die") -> None:
    assert isinstance(error, ActorDiedError)
    assert isinstance(error, ray.exceptions.ActorDiedError)
    label = graph.plan.processes[2].label
    assert (error.actor, error.pid, error.graph, error.execution) == (label, pid, graph.name, execution)
    assert error.actor_id == worker._actor_id.hex()
    assert error.node is not None
    assert error.node.startswith(f"{label}.{node}#")
    assert error.node in str(error)
    assert f"{label} (pid {pid}) of graph {graph.name!r}" in str(error)
    assert "compile a new one" in str(error)
    if execution is not None:
        assert f"execution {execution}" in str(error)


@pytest.mark.skipif(_KERNEL < (6, 15), reason="this kernel does not tell others how a process ended")
@pytest.mark.parametrize(
    ("how", "words"), [("SIGKILL", "signal SIGKILL"), ("SIGSEGV", "signal SIGSEGV"), ("_exit", "exit code 1")]
)
def test_the_report_says_how_an_actor_died(cluster: None, how: str, words: str) -> None:
    workers = start(3)
    graph = raycomm.compile(pipeline(workers, lambda value: bind(workers[1].die, value, how)))
    with pytest.raises(ActorDiedError):
        graph.execute("go").get(timeout=PATIENCE_S)
    until(lambda: f"died ({words}) in " in graph.status().reason, "the process is reaped")
    with pytest.raises(ActorDiedError, match=re.escape(f"died ({words}) in ")):
        graph.execute("go")
    with pytest.raises(ActorDiedError):
        graph.empty(5, np.uint8)
    graph.teardown()


@pytest.mark.parametrize("how", ["SIGKILL", "_exit", "exit_actor", "sys.exit"])
def test_an_actor_that_ends_in_a_method(cluster: None, how: str) -> None:
    workers = start(3)
    pid = ray.get(workers[1].pid.remote())
    graph = raycomm.compile(pipeline(workers, lambda value: bind(workers[1].die, value, how)))
    before = graph.execute("stay")
    assert before.get() == "stay"
    doomed, after = graph.execute("go"), graph.execute("stay")
    for ref, execution in ((after, 2), (doomed, 1), (doomed, 1)):
        with pytest.raises(ray.exceptions.ActorDiedError) as caught:
            ref.get(timeout=PATIENCE_S)
        check_death(caught.value, graph, workers[1], pid, execution)
    with pytest.raises(ActorDiedError) as caught:
        graph.execute(5)
    check_death(caught.value, graph, workers[1], pid, 1)  # the one it died in
    assert before.get() == "stay"  # what had been fetched stays
    # Survivors answer and join a new graph, before and after the old one is torn down.
    assert ray.get([workers[0].add.remote(1), workers[2].add.remote(2)], timeout=PATIENCE_S) == [2, 3]
    with InputNode() as x:
        out = bind(workers[2].add, bind(workers[0].add, x))
    with raycomm.compile(out) as again:
        assert again.execute(1).get() == 3
        graph.teardown()
        assert again.execute(2).get() == 4
    free(workers[0], workers[2])


@pytest.mark.parametrize("kill", ["ray.kill", "SIGKILL"])
@pytest.mark.parametrize("fetch", ["get", "ray.get", "get with a limit", "await"])
def test_an_actor_that_is_killed_while_the_driver_waits(cluster: None, gate: Gate, kill: str, fetch: str) -> None:
    import asyncio
    import threading

    workers = start(3)
    pid = ray.get(workers[1].pid.remote())
    graph = raycomm.compile(pipeline(workers, lambda value: bind(workers[1].hold, value, gate.path)))
    ref = graph.execute(5)

    def end_it() -> None:
        gate.wait_entered()
        if kill == "ray.kill":
            ray.kill(workers[1])
        else:
            os.kill(pid, signal.SIGKILL)

    async def wait() -> Any:
        return await ref

    killer = threading.Thread(target=end_it)
    killer.start()
    begin = time.monotonic()
    with pytest.raises(ActorDiedError) as caught:
        if fetch == "await":
            asyncio.run(wait())
        elif fetch == "ray.get":
            ray.get(ref)
        else:
            ref.get(timeout=None if fetch == "get" else PATIENCE_S)
    assert time.monotonic() - begin < 20  # two seconds are promised
    killer.join()
    check_death(caught.value, graph, workers[1], pid, 0, "hold")
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(workers[1].pid.remote(), timeout=PATIENCE_S)
    graph.teardown()
    free(workers[0], workers[2])


def test_results_that_had_arrived_are_still_handed_out(cluster: None) -> None:
    workers = start(2)
    with InputNode() as x:
        a = bind(workers[0].echo, x)
        b = bind(workers[1].echo, a)
    graph = raycomm.compile(MultiOutputNode([a, b]))
    rows = [graph.execute(value) for value in range(4)]
    assert rows[3][1].get() == 3  # so all have arrived
    pid = ray.get(workers[1].pid.remote())
    os.kill(pid, signal.SIGKILL)
    until(lambda: ended(pid), "the process ends")
    with pytest.raises(ActorDiedError):
        graph.execute(4)[1].get(timeout=PATIENCE_S)
    assert [second.get() for _, second in rows] == [0, 1, 2, 3]
    assert [first.get() for first, _ in rows] == [0, 1, 2, 3]
    graph.teardown()


def test_execute_that_waits_for_room_hears_of_a_death(cluster: None, gate: Gate) -> None:
    import threading

    workers = start(3)
    graph = raycomm.compile(pipeline(workers, lambda value: bind(workers[1].hold, value, gate.path)), max_inflight=2)
    refs = [graph.execute(value) for value in range(2)]
    gate.wait_entered()
    killer = threading.Timer(0.05, ray.kill, [workers[1]])
    killer.start()
    with pytest.raises(ActorDiedError, match=graph.plan.processes[2].label):
        graph.execute(3)
    killer.join()
    with pytest.raises(ActorDiedError):
        refs[0].get()
    graph.teardown()


def test_teardown_with_a_dead_actor(cluster: None) -> None:
    workers = start(3)
    graph = raycomm.compile(pipeline(workers, lambda value: bind(workers[1].echo, value)))
    ray.kill(workers[1])
    begin = time.monotonic()
    graph.teardown()
    graph.teardown()
    assert time.monotonic() - begin < 20
    free(workers[0], workers[2])


def test_compile_with_a_dead_actor_leaves_nothing(cluster: None) -> None:
    workers = start(3)
    ray.kill(workers[1])
    until(lambda: dead(workers[1]), "Ray knows")
    for _ in range(2):
        with pytest.raises(ActorDiedError, match="WorkerBody#.*died before it was set up") as caught:
            raycomm.compile(pipeline(workers, lambda value: bind(workers[1].echo, value)))
        assert caught.value.actor_id == workers[1]._actor_id.hex()
        assert str(caught.value).endswith("The actor is dead because it was killed by `ray.kill`.")
        free(workers[0], workers[2])
    assert ray.get(workers[0].vitals.remote())["maps"] == 0


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def dead(worker: Any) -> bool:
    try:
        ray.get(worker.pid.remote(), timeout=PATIENCE_S)
    except ray.exceptions.ActorDiedError:
        return True
    return False


def test_compile_with_an_actor_whose_process_is_gone(cluster: None) -> None:
    """One line says which it is and how its process ended, where Ray has a page."""
    worker = ray.remote(num_cpus=0)(WorkerBody).options(name="the third").remote()
    pid = ray.get(worker.pid.remote())
    os.kill(pid, signal.SIGKILL)
    until(lambda: dead(worker), "Ray knows")
    with InputNode() as x:
        node = bind(worker.echo, x)
    with pytest.raises(ActorDiedError) as caught:
        raycomm.compile(node, name="late")
    text = str(caught.value)
    assert text.startswith(
        f"actor WorkerBody (named 'the third', pid {pid}) of graph 'late' died before it was set up (make it again"
    )
    assert "worker process has died" in text
    assert "\n" not in text
    assert len(text) < 400
    assert (caught.value.pid, caught.value.__cause__) == (pid, None)


def test_an_actor_whose_constructor_fails(cluster: None) -> None:
    workers = [*start(1), ray.remote(num_cpus=0)(Broken).remote(), *start(1)]
    with pytest.raises(ActorDiedError, match="cannot begin") as caught:
        raycomm.compile(pipeline(workers, lambda value: bind(workers[1].echo, value)))
    assert caught.value.actor == "Broken"
    free(workers[0], workers[2])


def test_a_restarted_actor_joins_a_new_graph(cluster: None) -> None:
    workers = start(2)
    restarting = start(1, max_restarts=1, max_task_retries=-1)[0]
    with InputNode() as x:
        out = bind(workers[0].echo, bind(restarting.die, x, "SIGKILL"))
    graph = raycomm.compile(out)
    with pytest.raises(ActorDiedError):
        graph.execute("go").get(timeout=PATIENCE_S)
    graph.teardown()
    assert ray.get(restarting.add.remote(1), timeout=PATIENCE_S) == 2
    with raycomm.compile(out) as again:
        assert again.execute("stay").get() == "stay"


def test_an_actor_lives_as_long_as_its_graph(cluster: None) -> None:
    """The user's handles go out of scope; the graph keeps its own."""
    workers = start(2)
    with InputNode() as x:
        out = bind(workers[1].add, bind(workers[0].add, x))
    graph = raycomm.compile(out)
    del workers, out, x
    import gc

    gc.collect()
    for value in range(200):
        assert graph.execute(value).get(timeout=PATIENCE_S) == value + 2
    graph.teardown()


@pytest.mark.parametrize("limit", [0, 0.01])
def test_a_death_is_seen_by_who_asks_again_and_again(cluster: None, gate: Gate, limit: float) -> None:
    """Each wait is over before anybody would look; together they are not."""
    workers = start(3)
    with raycomm.compile(pipeline(workers, lambda value: bind(workers[1].hold, value, gate.path))) as graph:
        ref = graph.execute(1)
        ray.kill(workers[1])

        def died() -> bool:
            try:
                ref.get(timeout=limit)
            except ChannelTimeoutError:
                return False
            except ActorDiedError:
                return True
            raise AssertionError("a result of an actor that was killed")

        until(died, "the death is seen", 20)
