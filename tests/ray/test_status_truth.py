"""Reports on actors that do not run: what the board last heard of them is compared with what the rings hold and the kernel says.

Nothing false may be said: nobody is said to wait for what is there, least of all for the driver.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raycomm
from raycomm import ChannelTimeoutError, InputNode, MultiOutputNode, bind
from raycomm.observe import notice
from raycomm.observe.board import Row, State
from raycomm.observe.condition import Condition
from tests.ray.held_actors import Holder
from tests.ray.workers import PATIENCE_S, Gate, chain, until

pytestmark = pytest.mark.usefixtures("cluster")

STOPPED = "stopped: state T"
UNTIL_SIGCONT = ": it does not run before it gets SIGCONT"
STARVED = ": its thread does not get to run (another thread of it may hold the interpreter, or the processors are busy)"


def thread_state(task: Path) -> str:
    """The kernel's letter for a thread; "" for one that has just ended."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


class Stopper:
    """Stops processes, and lets all of them go on in the end."""

    def __init__(self) -> None:
        self.stopped: set[int] = set()

    def stop(self, pid: int) -> None:
        """Returns once every thread of the process is stopped."""
        self.stopped.add(pid)
        os.kill(pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{pid}/task")
        until(lambda: {thread_state(task) for task in tasks.iterdir()} == {"T"}, "it is stopped")

    def go_on(self) -> None:
        """All of them."""
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()


@pytest.fixture
def stopper() -> Iterator[Stopper]:
    stopper = Stopper()
    yield stopper
    stopper.go_on()


@pytest.fixture(scope="module")
def holder(cluster: None) -> Any:
    actor = Holder.remote("holder")
    ray.get(actor.pid.remote())
    return actor


def at_gate(method: Any, gate: Gate, before: Any = None, after: Any = None) -> Any:
    """input -> before -> a method that waits at the gate -> after."""
    with InputNode() as x:
        node = bind(method, x if before is None else bind(before, x), gate.path)
        return node if after is None else bind(after, node)


def since(row: Row) -> str:
    return " for T" if row.seconds >= 0.1 else ""


def row(graph: Any, process: int) -> Row:
    rows: tuple[Row, ...] = graph.status().rows
    return rows[process]


def who(graph: Any, process: int, condition: str = "alive") -> str:
    return f"{graph.plan.processes[process].label} (pid {graph.board.pid(process)}, {condition})"


def value(graph: Any, process: int) -> str:
    """The value that a process with one output writes."""
    (channel,) = [channel for channel in graph.plan.channels if channel.writer == process]
    return str(channel.value)


def settled(graph: Any, *processes: int) -> None:
    """Returns once these processes wait for what is not there."""
    until(lambda: all(row(graph, process).state is State.READING for process in processes), "they wait to read")


def waits_of(ref: Any, timeout: float) -> list[str]:
    """The clauses of a time-out."""
    with pytest.raises(ChannelTimeoutError) as caught:
        ref.get(timeout=timeout)
    assert caught.value.waits_for is not None
    assert caught.value.waits_for in str(caught.value)
    return str(caught.value.waits_for).split("; ")


def without_times(text: str) -> str:
    return re.sub(r" (wrote|begun|for) \d+\.\d s( ago)?", r" \1 T", text)


@pytest.mark.parametrize("stopped", [1, 2, 3])
@pytest.mark.parametrize("limit", [0.0, 0.3])
def test_a_stopped_reader(workers: list[Any], stopper: Stopper, stopped: int, limit: float) -> None:
    """The message was written: it is the stopped actor that is waited for, and those behind it wait for the one before them."""
    with raycomm.compile(chain(*[worker.echo for worker in workers])) as graph:
        assert graph.execute(0).get() == 0
        settled(graph, 1, 2, 3)
        stopper.stop(graph.board.pid(stopped))
        ref = graph.execute(1)
        until(lambda: row(graph, stopped).state is State.UNREAD, "the message is there, and unread")
        settled(graph, *[process for process in (1, 2, 3) if process != stopped])
        writer = "the driver" if stopped == 1 else graph.plan.processes[stopped - 1].label
        first_line = (
            f"{who(graph, stopped, STOPPED)} has not yet read {value(graph, stopped - 1)} of execution 1, which {writer} wrote"
        )
        clauses = waits_of(ref, limit)
        assert len(clauses) == 4 - stopped
        for process, clause in zip(range(3, stopped, -1), clauses, strict=False):
            before = graph.plan.processes[process - 1].label
            expected = f"{who(graph, process)} waits to read {value(graph, process - 1)} of execution 1 from {before}"
            assert clause.removesuffix(clause[len(expected) :]) == expected
        assert without_times(clauses[-1]) == f"{first_line} T{UNTIL_SIGCONT}"
        status = graph.status()
        stuck = status.rows[stopped]
        assert (stuck.execution, stuck.waits_for, stuck.condition, stuck.alive) == (1, (), Condition.STOPPED, True)
        assert first_line in str(status)
        assert "waits for the driver" not in str(clauses)
        stopper.go_on()
        assert ref.get(PATIENCE_S) == 1
        settled(graph, 1, 2, 3)
        assert row(graph, stopped).condition is Condition.ALIVE


def test_how_long_ago_it_was_written(workers: list[Any], stopper: Stopper) -> None:
    """The time is the message's own, not that of the wait, which began long before."""
    with raycomm.compile(chain(workers[0].echo)) as graph:
        settled(graph, 1)
        until(lambda: row(graph, 1).seconds >= 0.3, "it has waited a while")
        stopper.stop(graph.board.pid(1))
        before = time.monotonic()
        ref = graph.execute(1)
        at_first = row(graph, 1).written_s
        assert at_first is not None
        assert 0 <= at_first <= time.monotonic() - before
        until(lambda: (row(graph, 1).written_s or 0.0) > 0.25, "time passes")
        assert row(graph, 1).seconds > row(graph, 1).written_s
        stopper.go_on()
        assert ref.get(PATIENCE_S) == 1


def test_the_log_line_of_a_stopped_reader(
    workers: list[Any], stopper: Stopper, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raycomm.compile(chain(workers[0].echo, workers[1].echo), name="g") as graph:
        settled(graph, 1, 2)
        stopper.stop(graph.board.pid(2))
        monkeypatch.setattr(notice, "FIRST_NOTICE_S", 0.2)
        ref = graph.execute(1)
        waiter = threading.Thread(target=ref.get)
        waiter.start()
        said = [""]

        def line() -> bool:
            said[:] = [record.getMessage() for record in caplog.records if "execution 0 of graph 'g'" in record.getMessage()]
            return bool(said)

        until(line, "a line in the log")
        stopper.go_on()
        waiter.join()
        first = graph.plan.processes[1].label
        assert f"{who(graph, 2, STOPPED)} has not yet read {value(graph, 1)} of execution 0, which {first} wrote" in said[0]
        assert "driver" not in said[0]


def test_stopped_in_a_method(workers: list[Any], gate: Gate, stopper: Stopper) -> None:
    with raycomm.compile(at_gate(workers[1].hold, gate, workers[0].echo, workers[2].echo)) as graph:
        ref = graph.execute(1)
        gate.wait_entered()
        stopper.stop(graph.board.pid(2))
        gate.open()
        second = graph.plan.processes[2].label
        clauses = waits_of(ref, 0.2)
        assert clauses[0].startswith(f"{who(graph, 3)} waits to read {second}.hold#1 of execution 0 from {second}")
        expected = f"{who(graph, 2, STOPPED)} is in {second}.hold#1, execution 0, begun T{UNTIL_SIGCONT}"
        assert [without_times(clause) for clause in clauses[1:]] == [expected]
        stopper.go_on()
        assert ref.get(PATIENCE_S) == 1


def test_an_input_that_was_not_submitted(workers: list[Any], stopper: Stopper) -> None:
    """The one case in which the driver is waited for."""
    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        settled(graph, 1, 2)
        output = graph.plan.outputs[0].channel
        first = graph.plan.processes[1].label
        for execution in range(2):
            assert [without_times(clause) for clause in graph.board.blame(output, execution).split("; ")] == [
                f"{who(graph, 2)} waits to read {first}.echo#0 of execution {execution} from {first}{since(row(graph, 2))}",
                f"{who(graph, 1)} waits to read input of execution {execution} from driver{since(row(graph, 1))}",
                f"the driver has not submitted execution {execution}",
            ]
            assert f"waits to read input of execution {execution} from driver" in str(graph.status())
            assert graph.execute(execution).get() == execution
            settled(graph, 1, 2)
            until(lambda: row(graph, 1).seconds >= 0.2 and row(graph, 2).seconds >= 0.2, "time passes")
        assert graph.board.blame(output, 1) == f"it has come, from {graph.plan.processes[2].label}"


def test_a_writer_without_room_since_its_reader_is_stopped(workers: list[Any], stopper: Stopper) -> None:
    with InputNode() as x:
        made = raycomm.with_channel_options(bind(workers[0].echo, x), slots=1)
        node = MultiOutputNode([bind(workers[2].echo, made), bind(workers[1].echo, made)])
    with raycomm.compile(node, max_inflight=8) as graph:
        settled(graph, 1, 2, 3)
        names = [process.label for process in graph.plan.processes]
        first = names[1]
        slow = next(
            p.index for p in graph.plan.processes if p.index and graph.board.pid(p.index) == ray.get(workers[1].pid.remote())
        )
        other = 5 - slow
        stopper.stop(graph.board.pid(slow))
        refs = [graph.execute(number) for number in range(3)]
        until(lambda: row(graph, 1).waits_for == (names[slow],), "the first actor waits for room, which the other one has made")
        assert row(graph, 1).state is State.WRITING
        settled(graph, other)
        quick, held = refs[0]
        assert quick.get(PATIENCE_S) == 0
        stuck = who(graph, slow, STOPPED)
        unread = f"{stuck} has not yet read {first}.echo#0 of execution 0, which {first} wrote T{UNTIL_SIGCONT}"
        assert [without_times(clause) for clause in waits_of(held, 0.0)] == [unread]
        clauses = waits_of(refs[1][0], 0.2)
        assert [without_times(clause) for clause in clauses] == [
            f"{who(graph, other)} waits to read {first}.echo#0 of execution 1 from {first} for T",
            f"{who(graph, 1)} waits for room to write {first}.echo#0 of execution 1, which {names[slow]} must take first for T",
            unread,
        ]
        # Now the writer is stopped, too, and gets its room.
        stopper.stop(graph.board.pid(1))
        os.kill(graph.board.pid(slow), signal.SIGCONT)
        assert held.get(PATIENCE_S) == 0
        settled(graph, slow)
        clauses = waits_of(refs[1][1], 0.2)
        assert without_times(clauses[0]) == f"{who(graph, slow)} waits to read {first}.echo#0 of execution 1 from {first} for T"
        stuck = who(graph, 1, STOPPED)
        room = f"{stuck} has not yet written {first}.echo#0 of execution 1, for which there is room{UNTIL_SIGCONT}"
        assert clauses[1:] == [room]
        assert (row(graph, 1).state, row(graph, 1).waits_for) == (State.UNWRITTEN, ())
        stopper.go_on()
        assert [ref.get(PATIENCE_S) for pair in refs for ref in pair] == [0, 0, 1, 1, 2, 2]


def test_memory_that_a_stopped_actor_holds(workers: list[Any], gate: Gate, stopper: Stopper) -> None:
    with InputNode() as x:
        node = bind(workers[1].total, bind(workers[1].hold, bind(workers[0].zeros, x), gate.path))
    with raycomm.compile(node, shm_limit_bytes=8 << 20) as graph:
        refs = [graph.execute(3 << 20) for _ in range(4)]
        gate.wait_entered()
        stopper.stop(graph.board.pid(2))
        until(lambda: row(graph, 1).state is State.MEMORY, "the first actor waits for memory")
        names = [process.label for process in graph.plan.processes]
        text = graph.board.everyone()
        assert f"{who(graph, 1)} waits for shared memory, which {names[2]} holds" in text
        assert f"{who(graph, 2, STOPPED)} is in {names[2]}.hold#1, execution 0, begun" in text
        gate.open()
        stopper.go_on()
        assert [ref.get(PATIENCE_S) for ref in refs] == [0] * 4


def test_a_plain_call_holds_the_interpreter(holder: Any, gate: Gate) -> None:
    """Its loop has a message and cannot take it up; its process is not stopped."""
    with raycomm.compile(chain(holder.echo)) as graph:
        settled(graph, 1)
        plain = holder.hold_interpreter.remote(7, gate.path)
        gate.wait_entered()
        ref = graph.execute(1)
        (fresh,) = waits_of(ref, 0.0)
        unread = f"{who(graph, 1)} has not yet read input of execution 0, which the driver wrote T"
        assert without_times(fresh) in (unread, unread + STARVED)  # after a tenth of a second it says why
        clauses = waits_of(ref, 0.3)
        expected = f"{who(graph, 1)} has not yet read input of execution 0, which the driver wrote T{STARVED}"
        assert [without_times(clause) for clause in clauses] == [expected]
        assert row(graph, 1).condition.runs
        gate.open()
        assert (ray.get(plain), ref.get(PATIENCE_S)) == (7, 1)


def test_two_graphs_through_one_actor(holder: Any, workers: list[Any], gate: Gate, stopper: Stopper) -> None:
    """Each says what holds it: one is in the call, the other cannot take its message up."""
    with (
        raycomm.compile(at_gate(holder.hold_interpreter, gate), name="one") as one,
        raycomm.compile(chain(workers[0].echo, holder.echo), name="two") as two,
    ):
        settled(two, 1, 2)
        first = one.execute(1)
        gate.wait_entered()
        second = two.execute(2)
        label, before = two.plan.processes[2].label, two.plan.processes[1].label
        (clause,) = waits_of(first, 0.2)
        assert without_times(clause) == f"{who(one, 1)} computes {label}.hold_interpreter#0, execution 0, for T"
        unread = f"{who(two, 2)} has not yet read {before}.echo#0 of execution 0, which {before} wrote T{STARVED}"
        assert [without_times(clause) for clause in waits_of(second, 0.3)] == [unread]
        stopper.stop(one.board.pid(1))
        assert "is in" in waits_of(first, 0.0)[0]
        assert UNTIL_SIGCONT in waits_of(second, 0.0)[0]
        stopper.go_on()
        gate.open()
        assert (first.get(PATIENCE_S), second.get(PATIENCE_S)) == (1, 2)


def test_nothing_false_is_said_of_a_graph_that_runs(workers: list[Any]) -> None:
    """Actors move on while they are looked at. What is asked for was submitted before, so it never is the driver's fault."""
    problems: list[str] = []
    submitted, looks = [0], [0]
    stop = threading.Event()
    with raycomm.compile(chain(*[worker.echo for worker in workers]), max_inflight=8) as graph:

        def look() -> None:
            until(lambda: submitted[0], "the first one is submitted")
            while not stop.is_set():
                text = graph.board.blame(graph.plan.outputs[0].channel, submitted[0] - 1)
                looks[0] += 1
                if "has not submitted" in text:
                    problems.append(text)

        looker = threading.Thread(target=look)
        looker.start()
        refs: list[Any] = []
        for number in itertools.count():
            if number >= 3000 and looks[0] > 100:
                break
            refs.append(graph.execute(number))
            submitted[0] += 1
            if len(refs) == 8:
                assert refs.pop(0).get(PATIENCE_S) == number - 7
        stop.set()
        looker.join()
    assert not problems, problems[0]
