"""From compile to teardown: slow, stopped, dying and busy actors, signals at odd moments."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.exceptions

import raycomm
from raycomm import ActorDiedError, ChannelClosedError, ChannelTimeoutError, InputNode, MultiOutputNode, bind
from raycomm.testing import Fault, Point, Stall, inject
from tests.ray.row_actors import Odd
from tests.ray.workers import PATIENCE_S, Gate, Worker, chain, start, until

pytestmark = pytest.mark.usefixtures("cluster")


def loops(worker: Any) -> int:
    return int(ray.get(worker.vitals.remote())["loops"])


@contextmanager
def interrupted_once(ready: Callable[[], bool]) -> Iterator[None]:
    """Sends this process SIGINT, once, as soon as the body runs and `ready()`: the body must end with it, within 10 s."""
    sent: list[float] = []
    begun = threading.Event()

    def strike() -> None:
        begun.wait(PATIENCE_S)
        until(ready, "ready to be interrupted")
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            begun.set()
            yield
            time.sleep(5)  # the strike may come a little after what it was meant for
        assert time.monotonic() - sent[0] < 10  # a second is promised
    finally:
        thread.join(PATIENCE_S)


# Ctrl-C.


@pytest.mark.parametrize("blocked_in", ["get", "ray.get", "get with a limit", "execute", "execute with a limit"])
def test_an_interrupt_ends_a_wait_and_nothing_else(workers: list[Any], gate: Gate, blocked_in: str) -> None:
    with raycomm.compile(chain(workers[1].echo)) as other:
        with InputNode() as x:
            out = bind(workers[0].hold, x, gate.path)
        with raycomm.compile(out, max_inflight=1) as graph:
            ref = graph.execute(1)
            calls: dict[str, Callable[[], Any]] = {
                "get": ref.get,
                "ray.get": lambda: ray.get(ref),
                "get with a limit": lambda: ref.get(timeout=100),
                "execute": lambda: graph.execute(2),
                "execute with a limit": lambda: graph.execute(2, timeout=100),
            }
            with interrupted_once(gate.entered):
                calls[blocked_in]()
            assert other.execute(5).get() == 5
            gate.open()
            assert ref.get(timeout=PATIENCE_S) == 1
            assert graph.execute(3, timeout=PATIENCE_S).get() == 3


def test_an_interrupt_during_compile_leaves_nothing(workers: list[Any], gate: Gate) -> None:
    """One actor has its loop, the other is stuck in its set-up: what was begun is taken back, and both can be compiled again."""
    busy = Worker.remote("busy")
    with (
        interrupted_once(lambda: loops(workers[0]) == 1),
        inject(Fault(actor=busy, point=Point.SETUP_BEGIN, action=Stall(gate.path))),
    ):
        raycomm.compile(chain(workers[0].echo, busy.echo))
    until(lambda: loops(workers[0]) == 0, "the loop that had begun leaves")
    gate.open()
    assert ray.get(busy.add.remote(1)) == 2
    until(lambda: loops(busy) == 0, "the loop that came late leaves")
    with raycomm.compile(chain(workers[0].echo, busy.echo)) as graph:
        assert graph.execute(1).get() == 1


def test_an_interrupt_during_teardown(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        out = bind(workers[0].hold, x, gate.path)
    graph = raycomm.compile(out)
    graph.execute(1)
    gate.wait_entered()
    begin = time.monotonic()
    with interrupted_once(lambda: time.monotonic() > begin + 0.3):
        graph.teardown(timeout=100)
    with pytest.raises(ChannelClosedError):
        graph.execute(2)
    gate.open()
    graph.teardown()
    assert loops(workers[0]) == 0


def test_teardown_from_a_signal_handler(workers: list[Any], gate: Gate) -> None:
    """In the middle of a get and of an execute of the same thread."""
    for blocked_in in ("get", "execute"):
        with InputNode() as x:
            out = bind(workers[0].hold, x, gate.path)
        graph = raycomm.compile(out, max_inflight=1)
        ref = graph.execute(1)
        before = signal.signal(signal.SIGUSR1, lambda *_, graph=graph: graph.teardown(timeout=0))
        striker = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGUSR1])
        striker.start()
        try:
            with pytest.raises(ChannelClosedError):
                if blocked_in == "get":
                    ref.get(timeout=PATIENCE_S)
                else:
                    graph.execute(2, timeout=PATIENCE_S)
        finally:
            striker.join()
            signal.signal(signal.SIGUSR1, before)
    gate.open()
    until(lambda: loops(workers[0]) == 0, "the loops leave")


# Slow, stopped, busy.


def stop(pid: int) -> None:
    """Returns once no thread of the process runs any more."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    until(lambda: all(" T " in (t / "stat").read_text() for t in tasks.iterdir()), "all its threads stop")


def test_a_slow_actor_is_waited_for_and_named(workers: list[Any]) -> None:
    """Stopped by the system, like a machine that swaps: alive, and not at fault for ever."""
    stopped = start(1)[0]
    pid = ray.get(stopped.pid.remote())
    with raycomm.compile(chain(workers[0].echo, stopped.echo, workers[1].echo), max_inflight=2) as graph:
        assert graph.execute(0).get() == 0
        stop(pid)
        try:
            refs = [graph.execute(value) for value in range(2)]
            with pytest.raises(ChannelTimeoutError, match=rf"WorkerBody#\w+ \(pid {pid}, stopped: state T\)"):
                refs[0].get(timeout=0.3)
            with pytest.raises(ChannelTimeoutError, match=rf"pid {pid}, stopped: state T"):
                graph.execute(2, timeout=0.3)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert [ref.get(timeout=PATIENCE_S) for ref in refs] == [0, 1]


def test_teardown_does_not_wait_for_ever_for_a_stopped_actor(workers: list[Any]) -> None:
    stopped = start(1)[0]
    pid = ray.get(stopped.pid.remote())
    graph = raycomm.compile(chain(workers[0].echo, stopped.echo))
    stop(pid)
    try:
        begin = time.monotonic()
        graph.teardown(timeout=0.3)
        assert 0.3 <= time.monotonic() - begin < 10
        assert loops(workers[0]) == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: loops(stopped) == 0, "it leaves once it runs again")


def test_teardown_has_one_budget_for_all_actors(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        out = MultiOutputNode([bind(worker.hold, x, gate.path) for worker in workers])
    graph = raycomm.compile(out, teardown_timeout=1)
    graph.execute(1)
    gate.wait_entered(3)
    begin = time.monotonic()
    graph.teardown()
    assert 1 <= time.monotonic() - begin < 2
    gate.open()
    until(lambda: all(loops(worker) == 0 for worker in workers), "they leave")


def test_teardown_does_not_need_the_actors_main_thread(workers: list[Any], gate: Gate) -> None:
    """A plain call that runs for long keeps no graph from ending, nor the next from working."""
    busy = Worker.options(max_concurrency=1).remote("busy")
    with raycomm.compile(chain(busy.echo, workers[0].echo)) as graph:
        call = busy.hold.remote(1, gate.path)
        gate.wait_entered()
        assert [graph.execute(value).get(timeout=PATIENCE_S) for value in range(5)] == list(range(5))
        begin = time.monotonic()
        graph.teardown()
        assert time.monotonic() - begin < 10
    gate.open()
    assert ray.get(call) == 1


def test_a_constructor_that_takes_its_time_is_waited_for(cluster: None, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    class Slow:
        def __init__(self, path: str) -> None:
            Gate(path).pass_through()

        def echo(self, x: Any) -> Any:
            return x

    slow = ray.remote(num_cpus=0)(Slow).remote(gate.path)
    opener = threading.Timer(0.5, gate.open)
    opener.start()
    with raycomm.compile(chain(slow.echo)) as graph:
        assert graph.execute(1).get() == 1
    opener.join()
    ray.kill(slow)


@pytest.mark.parametrize("how", ["raises", "exits", "killed"])
def test_an_actor_that_ends_in_its_constructor(workers: list[Any], gate: Gate, how: str) -> None:
    class Fails:
        def __init__(self, how: str, path: str) -> None:
            if how == "killed":
                Gate(path).pass_through()
            elif how == "exits":
                os._exit(3)
            else:
                raise OSError("no model")

        def echo(self, x: Any) -> Any:
            return x

    actor = ray.remote(num_cpus=0)(Fails).remote(how, gate.path)
    if how == "killed":
        killer = threading.Thread(target=lambda: (gate.wait_entered(), ray.kill(actor)))
        killer.start()
    with pytest.raises(ActorDiedError, match="Fails") as caught:
        raycomm.compile(chain(workers[0].echo, actor.echo, workers[1].echo))
    assert caught.value.actor_id == actor._actor_id.hex()
    if how == "killed":
        killer.join()
    until(lambda: loops(workers[0]) == loops(workers[1]) == 0, "nothing is left")
    with raycomm.compile(chain(workers[0].echo, start(1)[0].echo, workers[1].echo)) as graph:
        assert graph.execute(1).get() == 1


@pytest.mark.parametrize("readers", [2])
def test_a_reader_dies_while_the_writer_fills_its_ring(workers: list[Any], gate: Gate, readers: int) -> None:
    """The other reader does not read either; teardown comes from another thread."""
    doomed = start(1)[0]
    pid = ray.get(doomed.pid.remote())
    with InputNode() as x:
        a = bind(workers[0].echo, x)
        outs = [bind(doomed.hold, a, gate.path), bind(workers[1].hold, a, gate.path)]
    graph = raycomm.compile(MultiOutputNode(outs), max_inflight=3)
    rows = [graph.execute(value) for value in range(3)]
    gate.wait_entered(2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDiedError, match=f"pid {pid}"):
        while True:
            rows.append(graph.execute(9, timeout=PATIENCE_S))
    tearing = threading.Thread(target=graph.teardown, args=[0])
    tearing.start()
    tearing.join(PATIENCE_S)
    assert not tearing.is_alive()
    gate.open()
    until(lambda: loops(workers[0]) == loops(workers[1]) == 0, "the survivors leave")
    assert ray.get(workers[0].add.remote(1)) == 2


def test_get_after_the_actor_was_killed_or_the_graph_torn_down(workers: list[Any], gate: Gate) -> None:
    doomed = start(1)[0]
    with InputNode() as x:
        out = bind(workers[0].echo, bind(doomed.hold, x, gate.path))
    graph = raycomm.compile(out)
    refs = [graph.execute(np.arange(50_000)) for _ in range(3)]
    gate.wait_entered()
    ray.kill(doomed)
    for ref in reversed(refs):
        with pytest.raises(ActorDiedError):
            ref.get(timeout=PATIENCE_S)
    graph.teardown()
    for ref in refs:
        for limit in (None, 0, 1):
            with pytest.raises((ChannelClosedError, ActorDiedError)):
                ref.get(timeout=limit)


def test_first_message_after_idling(workers: list[Any]) -> None:
    """Long enough for every waiter to have parked."""
    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        for pause in (0, 0.01, 0.3, 1.5, 0):
            time.sleep(pause)
            begin = time.monotonic()
            assert graph.execute(pause).get(timeout=PATIENCE_S) == pause
            assert time.monotonic() - begin < 5


@pytest.mark.slow
def test_first_message_after_a_long_idle(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        for value in range(2):
            assert [graph.execute(value).get(timeout=5) for _ in range(100)] == [value] * 100
            time.sleep(45)
        assert graph.execute(9).get(timeout=5) == 9


def test_a_requested_stop_is_silent(workers: list[Any], gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    """Also with results outstanding; later calls say that it was stopped, not that something failed."""
    with InputNode() as x:
        out = bind(workers[1].echo, bind(workers[0].note, x))
    graph = raycomm.compile(out, name="asked")
    refs = [graph.execute(value) for value in range(5)]
    graph.teardown()
    for call in (lambda: graph.execute(1), refs[0].get, refs[4].get):
        with pytest.raises(ChannelClosedError, match="'asked' was torn down"):
            call()
    time.sleep(0.3)
    assert not [record for record in caplog.records if record.name.startswith("raycomm")]


def test_an_actor_restarts_and_joins_again(cluster: None) -> None:
    """Three times over: after each death the graph is compiled anew with the same handles."""
    steady, fragile = start(1)[0], Worker.options(max_restarts=3, max_task_retries=-1).remote("f")
    for round_number in range(3):
        with raycomm.compile(chain(steady.add, fragile.add), name=f"round {round_number}") as graph:
            assert [graph.execute(value).get() for value in range(5)] == list(range(2, 7))
            pid = ray.get(fragile.pid.remote())
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ActorDiedError):
                while True:
                    graph.execute(1).get(timeout=PATIENCE_S)
        until(lambda pid=pid: ray.get(fragile.pid.remote(), timeout=PATIENCE_S) != pid, "it is up again")


def test_an_actor_that_restarts_is_waited_for(workers: list[Any]) -> None:
    fragile = Worker.options(max_restarts=-1).remote("f")
    pid = ray.get(fragile.pid.remote())
    with raycomm.compile(chain(workers[0].add, fragile.add)) as graph:
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            while True:
                graph.execute(1).get(timeout=PATIENCE_S)
    with raycomm.compile(chain(workers[0].add, fragile.add)) as graph:  # at once, while Ray starts it anew
        assert graph.execute(1).get() == 3


def test_a_stateful_pair_runs_in_bind_order_with_plain_calls_beside(cluster: None) -> None:
    odd = Odd.remote()
    with InputNode() as x:
        first = bind(odd.step, x, "first")
        second = bind(odd.step, x, "second")
    with raycomm.compile(MultiOutputNode([second, first])) as graph:
        refs = []
        for value in range(10):
            refs.append(graph.execute(value))
            assert ray.get(odd.nothing.remote(1)) is None
        assert [ray.get(pair) for pair in refs] == [[value, value] for value in range(10)]
    assert ray.get(odd.trail_so_far.remote()) == ["first", "second"] * 10


def test_teardown_kills_what_does_not_return_when_asked(workers: list[Any], gate: Gate) -> None:
    """Only that actor; the others are free."""
    stuck = start(1)[0]
    with InputNode() as x:
        out = bind(workers[0].echo, bind(stuck.hold, x, gate.path))
    graph = raycomm.compile(out)
    graph.execute(1)
    gate.wait_entered()
    graph.teardown(timeout=0.2, kill_actors=True)
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(stuck.pid.remote(), timeout=PATIENCE_S)
    assert loops(workers[0]) == 0
    assert ray.get(workers[0].add.remote(1)) == 2


def test_rays_other_names_of_a_graph(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo)) as graph:
        compiled: Any = graph
        assert not compiled.is_teardown
        assert str(compiled.get_id()) in str(compiled)
    assert compiled.is_teardown
