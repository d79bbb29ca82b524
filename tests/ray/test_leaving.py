"""Ways out of a graph whose methods still run: Ctrl-C and the like, teardown with words, the end of the program."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import ray.dag

import raycomm
from raycomm import ChannelClosedError, InputNode, bind
from tests.ray.workers import PATIENCE_S, Gate, start, until

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "raycomm"):
        yield caplog


def lines(log: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in log.records if record.name == "raycomm"]


def held(worker: Any, gate: Gate, other: Any = None) -> Any:
    """input -> worker holds at the gate -> other."""
    with InputNode() as x:
        out = bind(worker.hold, x, gate.path)
        return out if other is None else bind(other.echo, out)


def loops(worker: Any) -> int:
    return int(ray.get(worker.vitals.remote(), timeout=PATIENCE_S)["loops"])


class Interrupter(threading.Thread):
    """Sends this process Ctrl-C as soon as a condition holds."""

    def __init__(self, condition: Any) -> None:
        super().__init__()
        self._condition = condition

    def run(self) -> None:
        until(self._condition, "the moment for Ctrl-C")
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_a_block_that_is_left_in_a_hurry_waits_a_second(
    workers: list[Any], gate: Gate, log: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    holder, other = workers[:2]
    with pytest.raises(kind), raycomm.compile(held(holder, gate, other), name="g") as graph:
        ref = graph.execute(1)
        gate.wait_entered()
        begin = time.monotonic()
        raise kind
    assert 0.9 < time.monotonic() - begin < 10
    [line] = lines(log)
    pid = ray.get(holder.pid.remote())
    label = graph.plan.processes[1].label
    assert (
        f"graph 'g' is torn down, but after 1.0 s still in a method: {label} (pid {pid}, alive) computes {label}.hold#0" in line
    )
    assert "execution 0" in line
    assert "ray.kill ends them now, or raycomm's teardown(timeout=0, kill_actors=True)" in line
    assert graph.plan.processes[2].label not in line
    with pytest.raises(ChannelClosedError):
        ref.get()
    # The graph is over for good: the other actor is free, this one for plain calls and other graphs, and its loop leaves.
    assert (loops(other), loops(holder)) == (0, 1)
    with raycomm.compile(held(holder, gate)) as again:
        later = again.execute(2)
        gate.open()
        assert later.get(timeout=PATIENCE_S) == 2
    until(lambda: loops(holder) == 0, "the loop leaves")


def test_a_block_that_is_left_in_a_hurry_keeps_a_shorter_limit(workers: list[Any], gate: Gate) -> None:
    with pytest.raises(KeyboardInterrupt), raycomm.compile(held(workers[0], gate), teardown_timeout=0) as graph:
        graph.execute(1)
        gate.wait_entered()
        begin = time.monotonic()
        raise KeyboardInterrupt
    assert time.monotonic() - begin < 0.9
    gate.open()
    until(lambda: loops(workers[0]) == 0, "the loop leaves")


def test_a_block_that_is_left_in_a_hurry_waits_for_quick_methods(workers: list[Any], log: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt), raycomm.compile(raycomm.bind(workers[0].echo, InputNode())) as graph:
        assert graph.execute(1).get() == 1
        raise KeyboardInterrupt
    assert loops(workers[0]) == 0
    assert not lines(log)


def test_ctrl_c_in_a_get_ends_the_block(workers: list[Any], gate: Gate, log: pytest.LogCaptureFixture) -> None:
    with pytest.raises(KeyboardInterrupt), raycomm.compile(held(workers[0], gate)) as graph:
        ref = graph.execute(1)
        interrupter = Interrupter(gate.entered)
        interrupter.start()
        ref.get()
    interrupter.join()
    assert len(lines(log)) == 1
    assert graph.is_teardown
    gate.open()
    until(lambda: loops(workers[0]) == 0, "the loop leaves")


def test_a_second_ctrl_c_leaves_at_once_and_says_who_stays(workers: list[Any], gate: Gate, log: pytest.LogCaptureFixture) -> None:
    graph = raycomm.compile(held(workers[0], gate))
    graph.execute(1)
    gate.wait_entered()
    interrupter = Interrupter(lambda: graph.is_teardown)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        try:
            with graph:
                raise KeyboardInterrupt
        finally:
            interrupter.join()  # also strikes here, if it comes late
    [line] = lines(log)
    assert ".hold#0" in line
    gate.open()
    until(lambda: loops(workers[0]) == 0, "the loop leaves")


def test_an_error_in_a_block_waits_as_ever_with_words(workers: list[Any], gate: Gate, log: pytest.LogCaptureFixture) -> None:
    opener = threading.Thread(target=lambda: (until(lambda: "teardown of graph" in log.text, "words"), gate.open()))
    opener.start()
    with pytest.raises(KeyError), raycomm.compile(held(workers[0], gate), name="g", teardown_timeout=PATIENCE_S) as graph:
        graph.execute(1)
        gate.wait_entered()
        raise KeyError
    opener.join()
    assert loops(workers[0]) == 0
    [line] = lines(log)
    label, pid = graph.plan.processes[1].label, ray.get(workers[0].pid.remote())
    assert line.startswith(f"waiting for 1 s: teardown of graph 'g' waits for {label} (pid {pid}, alive) computes {label}.hold#0")
    for part in (
        "execution 0",
        f"at most {PATIENCE_S} s (teardown_timeout)",
        "ray.kill ends them now, or raycomm's teardown(timeout=0, kill_actors=True)",
        "Ctrl-C leaves at once",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("limit", "kill", "said"),
    [
        (-1, False, ["there is no limit", "kill_actors=True"]),
        (PATIENCE_S, True, [f"at most {PATIENCE_S} s (timeout)", "then their actors are killed"]),
    ],
)
def test_teardown_speaks_after_a_second(
    workers: list[Any], gate: Gate, log: pytest.LogCaptureFixture, limit: float, kill: bool, said: list[str]
) -> None:
    graph = raycomm.compile(held(workers[0], gate))
    graph.execute(1)
    gate.wait_entered()
    thread = threading.Thread(target=graph.teardown, args=[limit], kwargs={"kill_actors": kill})
    begin = time.monotonic()
    thread.start()
    until(lambda: lines(log), "words")
    assert 0.9 < time.monotonic() - begin < 10
    gate.open()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    [line] = lines(log)
    assert [part for part in said if part not in line] == []
    assert "Ctrl-C" not in line  # which this thread does not get
    assert loops(workers[0]) == 0


def test_ctrl_c_in_a_teardown_says_who_stays(workers: list[Any], gate: Gate, log: pytest.LogCaptureFixture) -> None:
    graph = raycomm.compile(held(workers[0], gate), name="g")
    graph.execute(1)
    gate.wait_entered()
    interrupter = Interrupter(lambda: "teardown of graph" in log.text)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        graph.teardown(timeout=-1)
    interrupter.join()
    assert "graph 'g' is torn down, its teardown was interrupted; still in a method: " in lines(log)[-1]
    assert ".hold#0" in lines(log)[-1]
    gate.open()
    graph.teardown(timeout=-1)
    assert loops(workers[0]) == 0


def test_the_end_of_the_program_waits_once_for_methods_that_hang(cluster: None, tmp_path: Any, log: Any) -> None:
    """Six graphs, one limit for all of them, and not a word."""
    gates = [Gate(str(tmp_path / str(number))) for number in range(6)]
    holders = start(6)
    graphs = [raycomm.compile(held(holder, gate)) for holder, gate in zip(holders, gates, strict=True)]
    refs = [graph.execute(1) for graph in graphs]
    for gate in gates:
        gate.wait_entered()
    begin = time.monotonic()
    for graph in graphs:
        graph.close_at_exit(2.0)
    assert time.monotonic() - begin < 6  # once two seconds; each time would be twelve
    for gate in gates:
        gate.open()
    for graph, holder in zip(graphs, holders, strict=True):
        until(lambda holder=holder: loops(holder) == 0, "the loop leaves")
        graph.teardown()
    del refs
    assert not lines(log)


def test_the_end_of_the_program_waits_for_methods_that_return(workers: list[Any], gate: Gate) -> None:
    graph = raycomm.compile(held(workers[0], gate))
    graph.execute(1)
    gate.wait_entered()
    opener = threading.Timer(0.05, gate.open)
    opener.start()
    graph.close_at_exit(PATIENCE_S)
    opener.join()
    assert loops(workers[0]) == 0


def test_a_second_teardown_of_an_installed_graph_waits_too(workers: list[Any], gate: Gate, log: pytest.LogCaptureFixture) -> None:
    raycomm.install()
    try:
        with ray.dag.InputNode() as x:
            node = workers[0].hold.bind(x, gate.path)
        graph = node.experimental_compile()
    finally:
        raycomm.uninstall()
    graph.execute(1)
    gate.wait_entered()
    ended: list[float] = []
    threads = [threading.Thread(target=lambda: (graph.teardown(), ended.append(time.monotonic()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: lines(log), "one of them waits")
    assert ended == []
    opened = time.monotonic()
    gate.open()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert min(ended) > opened
    graph.teardown()
    assert loops(workers[0]) == 0
