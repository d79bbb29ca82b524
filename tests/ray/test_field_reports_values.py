"""What users of such systems ran into, driven from one process: who is stuck, idle cost, order, forms of input, late imports."""

from __future__ import annotations

import gc
import importlib
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

import raycomm
from raycomm import ArgumentError, ChannelTimeoutError, CompileError, InputNode, MultiOutputNode, bind
from tests.ray.row_actors import Odd
from tests.ray.workers import PATIENCE_S, Gate, chain, start, until

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return start(4)


def test_the_reader_that_is_behind_is_named(workers: list[Any], gate: Gate) -> None:
    """One writer, two readers; one of them is in a long call. The message names it, what it does, and that it lives."""
    with InputNode() as x:
        a = bind(workers[0].echo, x)
        outs = [bind(workers[1].hold, a, gate.path), bind(workers[2].echo, a)]
    with raycomm.compile(MultiOutputNode(outs), max_inflight=2, name="behind") as graph:
        rows = [graph.execute(value) for value in range(2)]
        gate.wait_entered()
        pid = ray.get(workers[1].pid.remote())
        label = next(process.label for process in graph.plan.processes if workers[1]._actor_id.hex()[:6] in process.label)
        for call in (lambda: graph.execute(9, timeout=0.05), lambda: rows[0][0].get(timeout=0.05)):
            with pytest.raises(ChannelTimeoutError) as caught:
                call()
            assert re.search(rf"{re.escape(label)} \(pid {pid}, alive\) computes \S*hold", str(caught.value))
            assert "'behind'" in str(caught.value)
        assert rows[1][1].get(timeout=PATIENCE_S) == 1  # the other one is not kept
        gate.open()
        assert [ray.get(row) for row in rows] == [[0, 0], [1, 1]]


def test_the_log_says_who_is_waited_for(
    workers: list[Any], gate: Gate, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    from raycomm.observe import notice

    monkeypatch.setattr(notice, "FIRST_NOTICE_S", 0.2)
    with raycomm.compile(chain(workers[0].echo), max_inflight=1, name="told") as graph:
        with InputNode() as x:
            held = bind(workers[1].echo, bind(workers[0].hold, x, gate.path))
        with raycomm.compile(held, max_inflight=1, name="waits") as slow:
            opener = threading.Timer(3, gate.open)
            opener.start()
            ref = slow.execute(1)
            assert ref.get() == 1
            opener.join()
        assert graph.execute(1).get() == 1
    said = [record.getMessage() for record in caplog.records if record.name == "raycomm"]
    assert len(said) == 1  # and not each second
    for part in ("'waits'", "execution 0", "computes", "hold", "alive", "waiting for"):
        assert part in said[0]


def test_an_idle_graph_costs_next_to_nothing(cluster: None) -> None:
    """And a message now and then is not paid for by spinning in between. Ten times the promised few percent."""
    actors = [Odd.remote() for _ in range(3)]
    with raycomm.compile(chain(*[actor.nothing for actor in actors])) as graph:
        assert graph.execute(1).get() is None

        def spent(work: Any) -> float:
            before = [time.process_time(), *ray.get([actor.cpu_s.remote() for actor in actors])]
            begin = time.monotonic()
            work()
            wall = time.monotonic() - begin
            after = [time.process_time(), *ray.get([actor.cpu_s.remote() for actor in actors])]
            return max(late - early for late, early in zip(after, before, strict=True)) / wall

        def now_and_then() -> None:
            for _ in range(100):
                time.sleep(0.01)
                graph.execute(1).get()

        assert spent(lambda: time.sleep(1)) < 0.4
        assert spent(now_and_then) < 0.5


@pytest.mark.parametrize("max_inflight", [1, 2, 3])
def test_thousands_of_numbered_messages_with_a_slow_reader(workers: list[Any], rng: random.Random, max_inflight: int) -> None:
    """Strict order, none lost, none doubled, at rings of one and two slots; sizes on both sides of the slot's."""
    counting = start(1)[0]
    with InputNode() as x:
        a = bind(workers[0].echo, x)
        outs = MultiOutputNode([bind(counting.note, a), bind(workers[1].echo, a)])
    sizes = [rng.choice([0, 10, 2000]) for _ in range(1500)]
    with raycomm.compile(outs, max_inflight=max_inflight) as graph:
        rows = []
        for number, size in enumerate(sizes):
            rows.append(graph.execute((number, b"x" * size), timeout=PATIENCE_S))
            if rng.random() < 0.01:
                time.sleep(rng.random() * 0.003)
            if len(rows) > 900 or rng.random() < 0.002:
                for done in rows:
                    assert ray.get(done)[0] == ray.get(done)[1]
                rows.clear()
        for position in (0, 1):
            assert [ray.get(row[position])[0] for row in rows] == list(range(len(sizes) - len(rows), len(sizes)))
    seen = ray.get(counting.seen_so_far.remote())
    assert [number for number, _ in seen] == list(range(len(sizes)))
    assert [len(body) for _, body in seen] == sizes


def test_forms_of_input(workers: list[Any]) -> None:
    """Keyword binds, several arguments, lists as arguments; one field of several."""
    with InputNode() as x:
        by_keyword = bind(workers[0].add, x=x)
    with raycomm.compile(by_keyword) as graph:
        assert graph.execute(1).get() == 2
        assert graph.execute(np.arange(3)).get().tolist() == [1, 2, 3]
    with InputNode() as inp:
        several = bind(workers[0].join, inp[0], b=inp.b, c=inp.c)
    with raycomm.compile(several) as graph:
        assert graph.execute([1, 2], b={"k": (3,)}, c=None).get() == (([1, 2],), {"b": {"k": (3,)}, "c": None})
    with raycomm.compile(chain(workers[0].echo)) as graph:
        assert graph.execute([1, 2]).get() == [1, 2]
        for wrong in (lambda: graph.execute(), lambda: graph.execute(1, 2), lambda: graph.execute(a=1)):
            with pytest.raises(ArgumentError, match="one positional argument"):
                wrong()


def test_only_the_first_field_is_used(workers: list[Any]) -> None:
    with InputNode() as inp:
        out = bind(workers[0].echo, inp[0])
    with raycomm.compile(out) as graph:
        assert graph.execute((1, 2)).get() == (1, 2)  # one argument, which is a tuple
        assert graph.execute(1).get() == 1
        with pytest.raises(ArgumentError, match="was given 2 positional arguments") as caught:
            graph.execute(1, 2)
        assert "1 positional argument" in str(caught.value.expected)


def test_a_branch_that_is_no_output_is_refused_by_name(workers: list[Any]) -> None:
    with InputNode() as x:
        good = bind(workers[0].echo, x)
        lost = bind(workers[1].fail, x)
    with pytest.raises(CompileError, match=r"WorkerBody.*\.fail"):
        raycomm.compile(good)
    with raycomm.compile(MultiOutputNode([good, lost])) as graph:
        first, second = graph.execute(1)
        assert first.get() == 1
        with pytest.raises(ValueError, match="bad 1"):
            second.get()


def test_a_source_that_takes_nothing_is_refused_with_the_way_round(workers: list[Any]) -> None:
    with InputNode() as x:
        source = bind(workers[0].seen_so_far)
        out = bind(workers[1].pair, source, x)
    with pytest.raises(CompileError, match="seen_so_far.*bind it to the InputNode"):
        raycomm.compile(out)


def test_extensions_that_are_loaded_late(cluster: None, workers: list[Any]) -> None:
    """An actor whose loop has idled imports torch in a method, then works under load."""
    late = start(1)[0]
    with raycomm.compile(chain(workers[0].echo, late.echo, workers[1].echo)) as graph:
        assert graph.execute(1).get() == 1
        assert "torch" not in ray.get(late.modules.remote())
        time.sleep(0.3)
        refs = [graph.execute(torch.full((n,), float(n))) for n in (1, 10, 50_000)]
        assert [float(ref.get(timeout=PATIENCE_S).sum()) for ref in refs] == [1, 100, 50_000.0**2]
        assert "torch" in ray.get(late.modules.remote())
        assert [graph.execute(value).get(timeout=PATIENCE_S) for value in range(200)] == list(range(200))


def test_the_plan_as_text(workers: list[Any]) -> None:
    """What was compiled: actors, calls in order, edges and their kind, slots."""
    with InputNode() as inp:
        a = bind(workers[0].echo, inp[0])
        b = bind(workers[0].add, a)
        out = bind(workers[1].pair, b, inp.k)
    with raycomm.compile(MultiOutputNode([out, a]), name="shown") as graph:
        text = str(graph.plan)
        for part in ("shown", "echo", "add", "pair", "read", "write", *[process.label for process in graph.plan.processes[1:]]):
            assert part in text
        assert text.index(":echo(") < text.index(":add(")


def test_where_a_graph_cannot_be_used(workers: list[Any]) -> None:
    """Not in a task, not in another process: refused when it is sent there, not a hang when it is used."""
    with raycomm.compile(chain(workers[0].echo)) as graph:
        ref = graph.execute(1)
        with pytest.raises(TypeError, match="belongs to the process that compiled it"):
            ray.put(graph)
        with pytest.raises((TypeError, ValueError)):
            graph.execute({"in": graph})
        assert ref.get() == 1


def test_a_closed_reader_gives_the_writer_an_error_and_others_nothing(cluster: None, workers: list[Any], gate: Gate) -> None:
    """A large message is on its way to an actor that is killed; another graph on the same machine and actors goes on."""
    doomed = start(1)[0]
    pid = ray.get(doomed.pid.remote())
    with InputNode() as x:
        out = bind(workers[1].echo, bind(doomed.hold, bind(workers[0].echo, x), gate.path))
    with raycomm.compile(chain(workers[0].add, workers[1].add)) as other:
        graph = raycomm.compile(out)
        refs = [graph.execute(np.zeros(2 << 20)) for _ in range(5)]
        gate.wait_entered()
        os.kill(pid, signal.SIGKILL)
        for ref in refs:
            with pytest.raises(raycomm.ActorDiedError, match=f"pid {pid}"):
                ref.get(timeout=PATIENCE_S)
        assert [other.execute(value).get(timeout=PATIENCE_S) for value in range(100)] == list(range(2, 102))
        graph.teardown()
        assert other.execute(1).get() == 3


def test_a_lost_wake_up_costs_time_not_the_message(workers: list[Any]) -> None:
    """Waiters that are stopped while they are woken look again by themselves: each tenth message."""
    sleeper = start(1)[0]
    pid = ray.get(sleeper.pid.remote())
    with raycomm.compile(chain(workers[0].echo, sleeper.echo)) as graph:
        for value in range(40):
            if value % 10 == 5:
                time.sleep(0.05)  # parked by now
                os.kill(pid, signal.SIGSTOP)
                ref = graph.execute(value)
                time.sleep(0.01)
                os.kill(pid, signal.SIGCONT)
            else:
                ref = graph.execute(value)
            assert ref.get(timeout=PATIENCE_S) == value


def test_a_missing_module_of_a_value_is_a_named_error(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver sends an object of a class that the actor cannot import: that execution fails, and says so."""
    (tmp_path / "only_at_the_driver.py").write_text("class Thing:\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    thing = importlib.import_module("only_at_the_driver").Thing()
    worker = start(1)[0]
    with raycomm.compile(chain(worker.echo)) as graph:
        bad, good = graph.execute(thing), graph.execute(1)
        with pytest.raises(Exception, match="only_at_the_driver"):
            bad.get(timeout=PATIENCE_S)
        assert good.get(timeout=PATIENCE_S) == 1


def test_graphs_in_threads_at_once(workers: list[Any]) -> None:
    """Compile, use and tear down in several threads, on the same actors."""
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for number in range(4):
                with raycomm.compile(chain(workers[index % 4].add, workers[(index + 1) % 4].add)) as graph:
                    refs = [graph.execute(value) for value in range(10)]
                    assert [ref.get(timeout=PATIENCE_S) for ref in refs] == list(range(2, 12)), number
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[index]) for index in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
        assert not thread.is_alive()
    assert errors == []
    gc.collect()
    until(lambda: all(count["loops"] == 0 for count in ray.get([w.vitals.remote() for w in workers])), "loops leave")
