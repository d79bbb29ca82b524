"""Ends of graphs that go another way than usual: torn down twice, with kills, with the actor's thread, and what they say."""

from __future__ import annotations

import logging
import os
import socket
import threading
from typing import Any

import pytest
import ray

import raycomm
from raycomm import InputNode, RaycommError, bind
from raycomm.observe import notice
from tests.ray.workers import PATIENCE_S, Gate, start, until

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return start(2)


def chain(*methods: Any) -> Any:
    with InputNode() as x:
        value: Any = x
        for method in methods:
            value = bind(method, value)
    return value


def test_a_second_teardown_may_kill_what_the_first_waited_for(
    cluster: None, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    worker, other = start(2)
    with InputNode() as x:
        out = bind(other.echo, bind(worker.hold, x, gate.path))
    graph = raycomm.compile(out)
    graph.execute(1)
    gate.wait_entered()
    with caplog.at_level(logging.WARNING, "raycomm"):
        graph.teardown(timeout=0.1)
    assert "kill_actors=True" in caplog.text
    graph.teardown(timeout=0.1, kill_actors=True)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(worker.pid.remote(), timeout=PATIENCE_S)
    assert ray.get(other.add.remote(1), timeout=PATIENCE_S) == 2
    graph.teardown(kill_actors=True)  # nobody is left to kill
    assert ray.get(other.add.remote(1), timeout=PATIENCE_S) == 2


def test_a_teardown_that_does_not_wait_blames_nobody_who_idles(workers: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "raycomm"):
        for _ in range(5):
            graph = raycomm.compile(chain(workers[0].echo, workers[1].echo))
            assert graph.execute(1).get() == 1
            graph.teardown(timeout=0)
    assert not caplog.records
    until(lambda: ray.get(workers[0].vitals.remote())["loops"] == 0, "the loops leave")


def test_the_actors_thread_gives_all_back(cluster: None) -> None:
    """With `loop_thread="actor"` too nothing of a graph stays mapped, and its memory is not to be had any more."""
    worker = start(1)[0]
    with raycomm.compile(chain(worker.echo), loop_thread="actor") as graph:
        assert graph.execute(bytes(100_000)).get() == bytes(100_000)
    until(lambda: ray.get(worker.vitals.remote())["maps"] == 0, "the mappings go")
    call = worker.__ray_call__.remote(lambda self: raycomm.empty(10, float))
    with pytest.raises(RaycommError, match="works inside a method"):
        ray.get(call, timeout=PATIENCE_S)


@pytest.mark.parametrize("name", ["x", "a/b", f"{'0' * 32}/notahex!/g", f"{'0' * 32}/{'0' * 8}/fake", "//"])
def test_a_foreign_socket_name_stops_nobody(workers: list[Any], name: str) -> None:
    """Anybody on the machine may bind any name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as foreign:
        foreign.bind(f"\0raycomm-thread/{name}")
        with raycomm.compile(chain(workers[0].echo)) as graph:
            assert graph.execute(1).get() == 1


def test_a_false_claim_on_an_actor_that_answers_is_not_believed(workers: list[Any]) -> None:
    actor = workers[0]._actor_id.hex()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as foreign:
        foreign.bind(f"\0raycomm-thread/{actor}/{'0' * 8}/liar")
        with raycomm.compile(chain(workers[0].echo)) as graph:
            assert graph.execute(1).get() == 1


@pytest.mark.parametrize("how", ["wait", "teardown"])
def test_long_waits_say_for_whom(
    workers: list[Any], gate: Gate, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `get` does: after ten seconds, here made short."""
    monkeypatch.setattr(notice, "FIRST_NOTICE_S", 0.05)
    with InputNode() as x:
        out = bind(workers[0].hold, x, gate.path)
    graph = raycomm.compile(out)
    ref = graph.execute(1)
    gate.wait_entered()
    waits = (lambda: raycomm.wait([ref])) if how == "wait" else (lambda: graph.teardown(timeout=-1))
    with caplog.at_level(logging.WARNING, "raycomm"):
        thread = threading.Thread(target=waits)
        thread.start()
        until(lambda: ".hold#0" in caplog.text, "a log line")
        gate.open()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert how in caplog.text
    assert "waiting for" in caplog.text
    graph.teardown()


def test_an_interrupted_close_is_finished_at_exit(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the flag and the closing of the channels: the exit hook, or a second teardown, closes them."""
    graph = raycomm.compile(chain(workers[0].echo))
    close = graph._arena.close

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(graph._arena, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        graph.teardown()
    monkeypatch.setattr(graph._arena, "close", close)
    graph.close_at_exit(PATIENCE_S)
    assert ray.get(workers[0].vitals.remote())["loops"] == 0
    graph.teardown()
    assert os.getpid() == graph.status().rows[0].pid
