"""What refs and graphs say of themselves: while they wait, when they are done, when they never will be, and in a forked child."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import ray

import raycomm
from raycomm import ActorDiedError, ChannelClosedError, InputNode, MultiOutputNode, RaycommError, bind
from tests.ray.workers import PATIENCE_S, Gate, chain, start, until

pytestmark = pytest.mark.usefixtures("cluster")


def said(ref: Any) -> str:
    """The last words of a ref's text."""
    found = re.fullmatch(r"<Ref of graph 'g', (.*?), (.*)>", repr(ref))
    assert found is not None, repr(ref)
    assert found[1] == ("a part of the input" if ref._index < 0 else f"execution {ref._index}")
    assert str(ref) == repr(ref)
    return found[2]


def test_pending_done_fetched_failed(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        node = MultiOutputNode([bind(workers[0].hold, x, gate.path), bind(workers[1].fail_if_odd, x), x])
    with raycomm.compile(node, name="g") as graph:
        rounds = [graph.execute(number) for number in range(2)]
        gate.wait_entered()
        until(lambda: all(failing.done() for _, failing, _ in rounds), "the quick outputs are there")
        assert [said(held) for held, _, _ in rounds] == ["pending"] * 2
        assert [said(quick) for _, quick, _ in rounds] == ["done, not fetched"] * 2
        assert [said(given) for _, _, given in rounds] == ["there"] * 2
        assert [given.done() for _, _, given in rounds] == [True, True]
        gate.open()
        refs = [ref for held, quick, _ in rounds for ref in (held, quick)]
        done, _ = raycomm.wait(refs, num_returns=4, timeout=PATIENCE_S)
        assert [said(ref) for ref in done] == ["done, not fetched"] * 4  # looked at, not fetched
        with pytest.raises(ValueError, match="bad 1"):
            ray.get(refs)
        assert [said(ref) for ref in refs] == ["fetched", "fetched", "fetched", "failed"]
        unfetched = graph.execute(4)
        until(unfetched[0].done, "it is there")
        late = graph.execute(6)[0]
        until(late.done, "it is there")
        assert late.get() == 6  # which moves the one before it aside
        assert said(unfetched[0]) == "done, not fetched"
    assert said(unfetched[0]) == "lost: the graph is torn down"
    assert said(refs[0]) == "fetched"
    assert said(rounds[0][2]) == "there"
    with pytest.raises(ChannelClosedError):
        unfetched[0].get()


def test_lost_with_its_actor(workers: list[Any], gate: Gate) -> None:
    victim = start(1)[0]
    with InputNode() as x:
        node = MultiOutputNode([bind(workers[0].echo, x), bind(victim.hold, x, gate.path)])
    graph = raycomm.compile(node, name="g")
    quick, held = graph.execute(1)
    gate.wait_entered()
    until(quick.done, "it is there")
    assert said(held) == "pending"
    os.kill(graph.board.pid(2), signal.SIGKILL)
    until(held.done, "it is lost")
    assert (said(quick), said(held)) == ("done, not fetched", "lost: the graph is closed")
    assert quick.get() == 1
    with pytest.raises(ActorDiedError):
        held.get()
    assert said(held) == "lost: the graph is closed"
    status = graph.status()
    label = graph.plan.processes[2].label
    assert (
        status.reason.replace(" (signal SIGKILL)", "")
        == f"actor {label} (pid {graph.board.pid(2)}) died in {label}.hold#1, execution 0"
    )
    assert str(status).startswith(f"graph 'g': closed ({status.reason}); 1 executions submitted, 0 finished")
    graph.teardown()
    assert said(held) == "lost: the graph is torn down"
    assert graph.status().reason == status.reason


def test_a_graph_that_nobody_ended_gives_no_reason(workers: list[Any]) -> None:
    graph = raycomm.compile(chain(workers[0].echo), name="g")
    assert graph.status().reason == ""
    assert str(graph.status()).startswith("graph 'g': running; ")
    graph.teardown()
    assert graph.status().reason == ""
    assert str(graph.status()).startswith("graph 'g': torn down; ")


def test_set_up_belongs_to_no_execution(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo), name="g") as graph:
        text = str(graph.status())
        assert "write set-up: " in text
        assert "read set-up: " in text
        assert not re.search(r"set-up of execution", text)
        assert graph.execute(1).get() == 1
        assert "read input of execution 0: " in str(graph.status())


def in_child(what: Callable[[], None], meanwhile: Callable[[], None] = lambda: None) -> None:
    """Do `what` in a forked child, and `meanwhile` here; fail with the child's traceback if it fails there."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads
        child = os.fork()
    if child == 0:
        signal.alarm(30)
        text = ""
        try:
            what()
        except BaseException:
            text = traceback.format_exc()
        os.write(writing, text.encode()[:60_000])
        os._exit(0)
    os.close(writing)
    meanwhile()
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    assert not text, text


def refused(asked: dict[str, Callable[[], Any]]) -> None:
    """In a forked child: each raises, and says whose graph it is."""
    for name, ask in asked.items():
        try:
            answer = ask()
        except RaycommError as error:
            for part in ("belongs to ", "'g'", "fork"):
                assert part in str(error), (name, error)
        else:
            raise AssertionError(f"{name} answered {answer!r}")


async def awaited(ref: Any) -> Any:
    return await ref


def test_a_forked_child_is_refused_whatever_it_asks(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        node = MultiOutputNode([bind(workers[0].hold, x, gate.path), bind(workers[1].echo, x)])
    with raycomm.compile(node, name="g") as graph:
        aside, fetched = graph.execute(1)[1], graph.execute(2)[1]
        held, quick = graph.execute(3)
        assert fetched.get(PATIENCE_S) == 2
        until(quick.done, "it is there")
        owner = os.getpid()

        def child() -> None:
            refused(
                {
                    "done": quick.done,
                    "done of what is pending": held.done,
                    "wait": lambda: raycomm.wait([held, quick], timeout=0),
                    "get": lambda: quick.get(timeout=0),
                    "execute": lambda: graph.execute(3, timeout=0),
                    "status": graph.status,
                    "stats": graph.stats,
                }
            )
            assert said(quick) == said(held) == f"of process {owner}, which compiled it"
            # What had reached the process before belongs to both.
            assert (said(fetched), said(aside)) == ("fetched", "done, not fetched")
            assert fetched.done()
            assert aside.done()
            assert raycomm.wait([fetched, aside], num_returns=2, timeout=0) == ([fetched, aside], [])
            assert (fetched.get(), aside.get()) == (2, 1)

        in_child(child)
        assert (said(aside), said(quick), said(held)) == ("done, not fetched", "done, not fetched", "pending")
        gate.open()
        assert (quick.get(PATIENCE_S), held.get(PATIENCE_S), aside.get()) == (3, 3, 1)


def test_a_forked_child_does_not_wait_for_what_its_parent_fetched_meanwhile(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo), name="g") as graph:
        ref = graph.execute(1)
        until(ref.done, "it is there")
        reading, writing = os.pipe()

        def child() -> None:
            os.close(writing)
            os.read(reading, 1)
            refused({"get": ref.get, "await": lambda: asyncio.run(awaited(ref)), "done": ref.done})

        def parent() -> None:
            assert ref.get(PATIENCE_S) == 1
            os.close(writing)

        in_child(child, parent)
        os.close(reading)
