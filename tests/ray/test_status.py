"""`graph.status()`, the chain of who waits for whom in time-outs, the log line of long waits, and the flight recorder."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray

import raycomm
from raycomm import ActorDiedError, ChannelTimeoutError, InputNode, MultiOutputNode, bind
from raycomm.observe import notice
from raycomm.observe.board import Row, State
from tests.ray.workers import PATIENCE_S, Gate, chain, start, until

pytestmark = pytest.mark.usefixtures("cluster")


def held(first: Any, second: Any, third: Any, gate: Gate) -> Any:
    """input -> first passes on -> second holds at the gate -> third passes on."""
    with InputNode() as x:
        return bind(third.echo, bind(second.hold, bind(first.echo, x), gate.path))


def row(graph: Any, process: int) -> Row:
    rows: tuple[Row, ...] = graph.status().rows
    return rows[process]


def labels(graph: Any) -> list[str]:
    return [process.label for process in graph.plan.processes]


def test_before_anything_ran(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo, workers[1].echo), name="fresh") as graph:
        until(lambda: row(graph, 1).state is State.READING, "the first actor waits")
        status = graph.status()
        assert (status.graph, status.state, status.submitted, status.finished) == ("fresh", "running", 0, 0)
        assert [r.label for r in status.rows] == labels(graph)
        assert [r.pid for r in status.rows] == [os.getpid(), *ray.get([w.pid.remote() for w in workers[:2]])]
        assert all(r.alive for r in status.rows)
        assert (status.rows[1].subject, status.rows[1].waits_for) == ("input", ("driver",))
        text = str(status)
        assert "graph 'fresh': running; 0 executions submitted, 0 finished" in text
        assert f"{labels(graph)[1]} (pid {status.rows[1].pid}, alive) waits to read input of execution 0 from driver" in text


def test_computing_and_waiting_to_read(workers: list[Any], gate: Gate) -> None:
    with raycomm.compile(held(*workers, gate)) as graph:
        assert raycomm.wait([graph.execute(0)], timeout=0)[0] == []
        gate.wait_entered()
        until(lambda: row(graph, 1).state is State.READING, "the first actor is done")
        names = labels(graph)
        status = graph.status()
        assert (status.submitted, status.finished) == (1, 0)
        _, one, two, three = status.rows
        assert (one.state, one.subject, one.waits_for) == (State.READING, "input", ("driver",))
        assert (two.state, two.subject, two.execution, two.waits_for) == (State.COMPUTING, f"{names[2]}.hold#1", 0, ())
        assert (three.state, three.subject, three.waits_for) == (State.READING, f"{names[2]}.hold#1", (names[2],))
        until(lambda: row(graph, 2).seconds >= 0.2, "time passes")
        assert f"computes {names[2]}.hold#1, execution 0, for 0." in str(graph.status())
        gate.open()
        until(lambda: graph.status().finished == 1, "it is finished")
        until(lambda: row(graph, 3).state is State.READING, "the last actor waits again")
        ref = graph.execute(5)
        assert ref.get() == 5
        until(lambda: row(graph, 2).execution == 2, "the next execution is number 2")


def test_a_plain_call_counts_as_no_state(workers: list[Any], gate: Gate) -> None:
    """What an actor does outside the graph is not shown as a computing node."""
    with raycomm.compile(chain(workers[0].echo)) as graph:
        until(lambda: row(graph, 1).state is State.READING, "the loop has begun")
        plain = workers[0].hold.remote(1, gate.path)
        gate.wait_entered()
        assert row(graph, 1).state is State.READING
        gate.open()
        assert ray.get(plain) == 1


def test_waiting_for_room_in_a_ring_of_one(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        made = raycomm.with_channel_options(bind(workers[0].echo, x), slots=1)
        node = bind(workers[1].hold, made, gate.path)
    with raycomm.compile(node, max_inflight=8) as graph:
        refs = [graph.execute(value) for value in range(4)]
        until(lambda: row(graph, 1).state is State.WRITING, "the first actor waits for room")
        names = labels(graph)
        one = row(graph, 1)
        assert (one.subject, one.waits_for) == (f"{names[1]}.echo#0", (names[2],))
        until(lambda: row(graph, 1).seconds >= 0.2, "time passes")
        text = str(row(graph, 1))
        assert f"waits for room to write {names[1]}.echo#0 of execution 2, which {names[2]} must take first for 0." in text
        with pytest.raises(ChannelTimeoutError) as caught:
            refs[3].get(timeout=0.02)
        assert f"{names[2]} (pid" in str(caught.value)
        assert "computes" in str(caught.value)
        gate.open()
        assert ray.get(refs) == [0, 1, 2, 3]


def test_waiting_for_memory(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        node = bind(workers[1].total, bind(workers[1].hold, bind(workers[0].zeros, x), gate.path))
    with raycomm.compile(node, shm_limit_bytes=8 << 20) as graph:
        refs = [graph.execute(3 << 20) for _ in range(4)]
        until(lambda: row(graph, 1).state is State.MEMORY, "the first actor waits for memory")
        names = labels(graph)
        assert row(graph, 1).waits_for == (names[2],)
        until(lambda: row(graph, 1).seconds >= 0.2, "time passes")
        assert f"waits for shared memory, which {names[2]} holds for 0." in str(row(graph, 1))
        gate.open()
        assert ray.get(refs, timeout=PATIENCE_S) == [0] * 4


def test_dead_and_left(workers: list[Any], gate: Gate) -> None:
    victim = start(1)[0]
    pid = ray.get(victim.pid.remote())
    graph = raycomm.compile(held(workers[0], victim, workers[1], gate), name="g")
    graph.execute(1)
    gate.wait_entered()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        graph.execute(2).get(PATIENCE_S)
    until(lambda: all(row(graph, process).state is State.LEFT for process in (1, 3)), "the others leave")
    status = graph.status()
    names = labels(graph)
    assert status.state == "closed"
    assert [r.state for r in status.rows[1:]] == [State.LEFT, State.DEAD, State.LEFT]
    assert not status.rows[2].alive
    text = str(status)
    assert f"{names[2]} (pid {pid}, dead), last seen at {names[2]}.hold#1, execution 0" in text
    assert f"{names[1]} (pid {status.rows[1].pid}, alive) has left its loop" in text
    assert (
        status.reason.replace(" (signal SIGKILL)", "") == f"actor {names[2]} (pid {pid}) died in {names[2]}.hold#1, execution 0"
    )
    assert f"graph 'g': closed ({status.reason}); 2 executions submitted" in text
    graph.teardown()
    assert graph.status().state == "torn down"
    assert str(graph.status())


def test_after_teardown(workers: list[Any]) -> None:
    graph = raycomm.compile(chain(workers[0].echo, workers[1].echo), name="over")
    assert graph.execute(1).get() == 1
    graph.teardown()
    status = graph.status()
    assert (status.state, status.submitted, status.finished) == ("torn down", 1, 1)
    assert [r.state for r in status.rows[1:]] == [State.LEFT, State.LEFT]
    assert "graph 'over': torn down" in str(status)


def test_the_driver_is_not_said_to_wait_once_it_has_stopped(workers: list[Any], gate: Gate) -> None:
    with raycomm.compile(held(*workers, gate), max_inflight=1) as graph:
        ref = graph.execute(0)
        gate.wait_entered()
        waiter = threading.Thread(target=ref.get)
        waiter.start()
        until(lambda: row(graph, 0).state is State.READING, "the driver waits")
        assert row(graph, 0).waits_for == (labels(graph)[3],)
        gate.open()
        waiter.join()
        until(lambda: row(graph, 0).state is State.IDLE, "the driver has its result", limit_s=5)
        assert "is in other code" in str(row(graph, 0))


def test_the_chain_of_a_time_out(workers: list[Any], gate: Gate) -> None:
    """From the one that would write the result back to the one that computes, and no further."""
    with raycomm.compile(held(workers[2], workers[0], workers[1], gate), name="g") as graph:
        ref = graph.execute(0)
        gate.wait_entered()
        with pytest.raises(ChannelTimeoutError) as caught:
            ref.get(timeout=0.2)
        names = labels(graph)
        assert caught.value.waits_for is not None
        clauses = caught.value.waits_for.split("; ")
        assert len(clauses) == 2
        assert clauses[0].startswith(
            f"{names[3]} (pid {row(graph, 3).pid}, alive) waits to read {names[2]}.hold#1 of execution 0 from {names[2]}"
        )
        assert clauses[1].startswith(f"{names[2]} (pid {row(graph, 2).pid}, alive) computes {names[2]}.hold#1, execution 0")
        gate.open()
        assert ref.get() == 0


def test_a_time_out_of_one_output_names_its_own_branch(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        node = MultiOutputNode([bind(workers[0].echo, x), bind(workers[2].echo, bind(workers[1].hold, x, gate.path))])
    with raycomm.compile(node) as graph:
        quick, slow = graph.execute(1)
        gate.wait_entered()
        assert quick.get() == 1
        with pytest.raises(ChannelTimeoutError) as caught:
            slow.get(timeout=0.05)
        names = labels(graph)
        said = str(caught.value)
        branch = {process.label for process in graph.plan.processes if process.label in said}
        assert branch == set(names[1:]) - {graph.plan.processes[1].label}
        gate.open()
        assert slow.get() == 1


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, a tenth of a second is long."""
    return lambda: monkeypatch.setattr(notice, "FIRST_NOTICE_S", 0.1)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "raycomm" and record.levelno == logging.WARNING]


def test_a_long_get_is_told_once(workers: list[Any], gate: Gate, caplog: pytest.LogCaptureFixture, impatient: Any) -> None:
    with raycomm.compile(held(*workers, gate), name="slow") as graph:
        impatient()
        ref = graph.execute(0)
        waiter = threading.Thread(target=ref.get)
        waiter.start()
        until(lambda: said(caplog), "a line in the log")
        waited = row(graph, 2).seconds
        gate.open()
        waiter.join()
        assert waited < PATIENCE_S
        (line,) = said(caplog)  # the next one is due a minute later
        assert "execution 0 of graph 'slow'" in line
        for part in (f"{labels(graph)[2]}.hold#1, execution 0", "alive", "waits to read", "waiting for "):
            assert part in line


def test_a_long_execute_is_told(workers: list[Any], gate: Gate, caplog: pytest.LogCaptureFixture, impatient: Any) -> None:
    with raycomm.compile(held(*workers, gate), name="slow", max_inflight=1) as graph:
        impatient()
        first = graph.execute(0)
        got: list[Any] = []
        waiter = threading.Thread(target=lambda: got.append(graph.execute(1)))
        waiter.start()
        until(lambda: said(caplog), "a line in the log")
        gate.open()
        waiter.join()
        assert (first.get(), got[0].get()) == (0, 1)
        (line,) = said(caplog)
        assert "execute of graph 'slow' waits for room" in line
        assert all(name in line for name in labels(graph)[1:])
        assert f"computes {labels(graph)[2]}.hold#1" in line


def test_a_long_compile_is_told(gate: Gate, workers: list[Any], caplog: pytest.LogCaptureFixture, impatient: Any) -> None:
    impatient()
    busy = start(1)[0]
    plain = busy.hold.remote(1, gate.path)
    gate.wait_entered()
    opener = threading.Thread(target=lambda: (until(lambda: said(caplog), "a line in the log"), gate.open()))
    opener.start()
    with raycomm.compile(chain(workers[0].echo, busy.echo), name="starting") as graph:
        opener.join()
        assert graph.execute(1).get() == 1
        assert ray.get(plain) == 1
        line = said(caplog)[0]
        assert "'starting'" in line
        assert labels(graph)[2] in line
        assert labels(graph)[1] not in line


def test_recent_operations(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].add, workers[1].echo)) as graph:
        begin = time.monotonic()
        for value in range(20):
            assert graph.execute(value).get() == value + 1
        until(lambda: graph.status().recent[2][-1].kind == "write", "the last write is recorded")
        names = labels(graph)
        driver, first, second = graph.status().recent
        assert len(first) == 8
        assert [(op.kind, op.subject, op.execution) for op in first[-3:]] == [
            ("read", "input", 19),
            ("compute", f"{names[1]}.add#0", 19),
            ("write", f"{names[1]}.add#0", 19),
        ]
        assert [(op.kind, op.subject, op.execution) for op in second[-2:]] == [
            ("compute", f"{names[2]}.echo#1", 19),
            ("write", f"{names[2]}.echo#1", 19),
        ]
        assert {(op.kind, op.subject) for op in driver} == {("write", "input"), ("read", f"{names[2]}.echo#1")}
        for operations in (driver, first, second):
            assert [op.start_s for op in operations] == sorted(op.start_s for op in operations)
            for op in operations:
                assert 0 <= op.duration_s < PATIENCE_S
                assert begin - 1 <= op.start_s <= time.monotonic() + 1
                assert (op.bytes > 0) is (op.kind != "compute")
        assert f"compute {names[1]}.add#0 of execution 19" in str(graph.status())


def test_operations_survive_their_process(workers: list[Any]) -> None:
    victim = start(1)[0]
    with raycomm.compile(chain(victim.echo, workers[0].echo)) as graph:
        for value in range(5):
            assert graph.execute(np.full(1 << 16, value, np.uint8)).get()[0] == value
        os.kill(ray.get(victim.pid.remote()), signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            while True:
                graph.execute(0).get(PATIENCE_S)
        name = labels(graph)[1]
        operations = [op for op in graph.status().recent[1] if op.execution == 4]
        assert [(op.kind, op.subject) for op in operations] == [
            ("read", "input"),
            ("compute", f"{name}.echo#0"),
            ("write", f"{name}.echo#0"),
        ]
        assert operations[2].bytes > 1 << 16
    after = [op for op in graph.status().recent[1] if op.execution == 4]
    assert [(op.kind, op.subject, op.bytes) for op in after] == [(op.kind, op.subject, op.bytes) for op in operations]


def test_status_from_any_thread_while_the_graph_runs(workers: list[Any]) -> None:
    problems: list[BaseException] = []
    stop = threading.Event()

    def look(graph: Any) -> None:
        try:
            while not stop.is_set():
                assert str(graph.status())
                assert str(graph.stats())
        except BaseException as error:
            problems.append(error)

    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        threads = [threading.Thread(target=look, args=(graph,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        refs = []
        for value in range(300):
            refs.append(graph.execute(value))
            if len(refs) > 5:
                assert refs.pop(0).get() == value - 5
        stop.set()
        for thread in threads:
            thread.join()
    assert not problems
