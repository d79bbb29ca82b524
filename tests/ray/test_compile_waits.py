"""Actors that keep `compile` waiting: it says why that may be, and refuses where it would wait for ever."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import ray

import raycomm
from raycomm import ChannelTimeoutError, CompileError
from raycomm.observe import notice
from tests.ray.self_compilers import Itself, ItselfInALoop
from tests.ray.workers import PATIENCE_S, Gate, Worker, chain, start

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.mark.parametrize(
    ("kind", "blocked", "remedy"), [(Itself, "thread", "max_concurrency=2"), (ItselfInALoop, "event loop", "to_thread")]
)
def test_an_actor_that_would_wait_for_itself_is_refused(kind: type[Any], blocked: str, remedy: str) -> None:
    actor: Any = ray.remote(num_cpus=0)(kind).remote()
    with pytest.raises(CompileError, match=f"graph 'own' goes through actor {kind.__name__}, which is compiling it") as caught:
        ray.get(actor.go.remote([actor]), timeout=PATIENCE_S)
    assert blocked in str(caught.value)
    assert remedy in str(caught.value)
    assert ray.get(actor.echo.remote(1), timeout=PATIENCE_S) == 1


def test_an_actor_that_can_answer_compiles_through_itself() -> None:
    """As the errors say; and a synchronous one may compile graphs that go through others."""
    threaded: Any = ray.remote(num_cpus=0)(Itself).options(max_concurrency=2).remote()
    assert ray.get(threaded.go.remote([threaded]), timeout=PATIENCE_S) == 7
    looped: Any = ray.remote(num_cpus=0)(ItselfInALoop).remote()
    assert ray.get(looped.aside.remote([looped]), timeout=PATIENCE_S) == 7
    plain: Any = ray.remote(num_cpus=0)(Itself).remote()
    assert ray.get(plain.go.remote([looped]), timeout=PATIENCE_S) == 7


@pytest.mark.parametrize("why", ["busy", "no resources"])
def test_a_wait_for_an_actor_says_why_that_may_be(
    gate: Gate, why: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notice, "FIRST_NOTICE_S", 0.05)
    if why == "busy":
        actor = start(1)[0]
        busy = actor.hold.remote(1, gate.path)
        gate.wait_entered()
    else:
        actor = Worker.options(num_cpus=100).remote()
    with caplog.at_level(logging.WARNING, "raycomm"), pytest.raises(ChannelTimeoutError, match="not ready within") as caught:
        raycomm.compile(chain(actor.echo), name="g", compile_timeout=0.5)
    for text in (str(caught.value), caplog.text):
        for part in ("graph 'g'", "set-up waits for WorkerBody", "resources", "ray status", "constructor", "plain call"):
            assert part in text
    assert "larger compile_timeout" in str(caught.value)
    if why == "busy":
        gate.open()
        assert ray.get(busy, timeout=PATIENCE_S) == 1
