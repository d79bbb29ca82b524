"""Submitting executions: room, limits, order, inputs that cannot be sent, drivers that are actors, combinations of everything."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import ray
import torch

import raycomm
from raycomm import ChannelTimeoutError, InputNode, MultiOutputNode, SerializationError, bind
from tests.ray.row_actors import Driver, Odd
from tests.ray.workers import PATIENCE_S, Gate, Opaque, start

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return start(4)


def test_sequential_use_never_meets_the_limit(workers: list[Any]) -> None:
    with InputNode() as x:
        out = bind(workers[0].echo, x)
    with raycomm.compile(out, max_inflight=1, max_buffered_results=1) as graph:
        assert [graph.execute(value, timeout=PATIENCE_S).get() for value in range(1000)] == list(range(1000))


@pytest.mark.parametrize("limit", [1, 2, 10])
def test_exactly_the_limit_may_be_under_way(workers: list[Any], gate: Gate, limit: int) -> None:
    with InputNode() as x:
        out = bind(workers[1].echo, bind(workers[0].hold, x, gate.path))
    with raycomm.compile(out, max_inflight=limit) as graph:
        refs = [graph.execute(value, timeout=0) for value in range(limit)]
        for _ in range(2):
            with pytest.raises(ChannelTimeoutError, match=f"{limit} executions under way"):
                graph.execute(99, timeout=0)
        gate.open()
        assert [ref.get(timeout=PATIENCE_S) for ref in refs] == list(range(limit))
        assert graph.execute(5, timeout=PATIENCE_S).get() == 5


@pytest.mark.parametrize("outputs", [1, 3])
def test_submits_do_not_wait_for_methods(workers: list[Any], gate: Gate, outputs: int) -> None:
    """Ten submits while the first still computes, with and without dropped refs among them."""
    with InputNode() as x:
        a = bind(workers[0].hold, x, gate.path)
        out = a if outputs == 1 else MultiOutputNode([a, bind(workers[1].echo, a), x])
    with raycomm.compile(out, max_inflight=10) as graph:
        kept = []
        for value in range(10):
            refs = graph.execute(value, timeout=0)
            if value % 2:
                kept.append((value, refs))
            del refs  # unread, unfinished: dropping does not wait either
        assert not gate.entered(2)
        gate.open()
        for value, refs in kept:
            assert ray.get(refs) == (value if outputs == 1 else [value] * 3)
        assert ray.get(graph.execute(77)) == (77 if outputs == 1 else [77] * 3)


def test_an_execute_that_times_out_leaves_no_trace(workers: list[Any], gate: Gate) -> None:
    """Several inputs to several actors, one of which is stuck: none of them sees anything of what was refused."""
    with InputNode() as inp:
        a = bind(workers[0].hold, inp[0], gate.path)
        b = bind(workers[1].echo, inp[1])
        c = bind(workers[2].pair, inp.k, inp[1])
    with raycomm.compile(MultiOutputNode([a, b, c]), max_inflight=3) as graph:
        rows = [graph.execute(value, [value], k=(value,), timeout=0) for value in range(3)]
        gate.wait_entered()
        assert rows[2][1].get(timeout=PATIENCE_S) == [2]  # the quick ones have run
        for limit in (0, 0.01, 0.05):
            with pytest.raises(ChannelTimeoutError):
                graph.execute("refused", ["refused"], k="refused", timeout=limit)
        for place in range(2):
            bad = [Opaque() if place == other else 1 for other in range(2)]
            with pytest.raises((SerializationError, ChannelTimeoutError)):
                graph.execute(*bad, k=Opaque(), timeout=0)
        gate.open()
        rows += [graph.execute(value, [value], k=(value,), timeout=PATIENCE_S) for value in range(3, 9)]
        for value, refs in enumerate(rows):
            assert ray.get(refs) == [value, [value], ("w2", (value,), [value])]


def test_limits_of_every_kind_on_submit_and_get(workers: list[Any]) -> None:
    with InputNode() as x:
        out = bind(workers[0].echo, x)
    with raycomm.compile(out) as graph:
        for limit in (None, -1, -1.0, 1e9, 10**12, float("inf"), np.float64(60), 60):
            assert graph.execute(1, timeout=limit).get(timeout=limit) == 1
        ref = graph.execute(1)
        assert ref.get() == 1
        for limit in (0, 0.0, -1, None):
            assert ref.get(timeout=limit) == 1  # there already
        for limit in (-0.001, -2, float("nan"), float("-inf"), "1", True, [], 1j):
            with pytest.raises(ValueError, match="time limit"):
                graph.execute(2, timeout=limit)
            with pytest.raises(ValueError, match="time limit"):
                graph.execute(2).get(timeout=limit)
        assert graph.execute(3).get() == 3


@pytest.mark.parametrize("name", ["execute", "get"])
def test_a_limit_is_kept(workers: list[Any], gate: Gate, name: str) -> None:
    """Neither less than asked for, nor the ten seconds of other systems more."""
    with InputNode() as x:
        out = bind(workers[0].hold, x, gate.path)
    with raycomm.compile(out, max_inflight=1) as graph:
        ref = graph.execute(0)
        for limit in (0.1, 0.5, 1.2):
            begin = time.monotonic()
            with pytest.raises(ChannelTimeoutError, match=f"within {limit} s"):
                if name == "get":
                    ref.get(timeout=limit)
                else:
                    graph.execute(1, timeout=limit)
            assert limit <= time.monotonic() - begin < limit + 5
        gate.open()
        assert ref.get(timeout=PATIENCE_S) == 0


def test_the_time_limit_counts_from_the_get(cluster: None, gate: Gate) -> None:
    """Not from the submit: a get that begins long after it still waits for all of its limit. And ten that are submitted at once
    run one behind the other, without a limit passing for the last."""
    first, second = Odd.remote(), Odd.remote()
    with InputNode() as x:
        out = bind(second.slow, bind(first.hold, x, gate.path), 0.15)
    with raycomm.compile(out, max_inflight=10) as graph:
        refs = [graph.execute(value, timeout=0) for value in range(10)]
        time.sleep(0.5)
        for ref in (refs[0], refs[9]):
            begin = time.monotonic()
            with pytest.raises(ChannelTimeoutError):
                ref.get(timeout=0.3)
            assert time.monotonic() - begin >= 0.3
        gate.open()
        assert [ref.get(timeout=10) for ref in refs] == list(range(10))


def test_results_do_not_depend_on_who_else_reads(workers: list[Any]) -> None:
    """A value for the driver and another actor, and for the driver and its own actor, often."""
    with InputNode() as x:
        a = bind(workers[0].add, x)
        b = bind(workers[1].add, a)
        c = bind(workers[0].add, b)
        d = bind(workers[0].add, a, 10)
    with raycomm.compile(MultiOutputNode([a, b, c, d, a, d])) as graph:
        rows = [graph.execute(value) for value in range(300)]
        for value, refs in enumerate(rows):
            want = [value + 1, value + 2, value + 3, value + 11]
            assert ray.get(refs) == [*want, value + 1, value + 11]


def test_two_fields_of_one_input_in_one_actor(workers: list[Any]) -> None:
    with InputNode() as inp:
        a = bind(workers[0].add, inp[0])
        b = bind(workers[0].add, inp[1])
        c = bind(workers[0].pair, inp[0], inp[0])
    with raycomm.compile(MultiOutputNode([a, b, c])) as graph:
        for value in range(50):
            assert ray.get(graph.execute(value, -value)) == [value + 1, 1 - value, ("w0", value, value)]
        fields = [edge for edge in graph.stats().edges if edge.value.startswith("input")]
        assert [[reader.messages for reader in edge.readers] for edge in fields] == [[50], [50]]  # once per process


# The driver may itself be an actor.


@pytest.mark.parametrize("options", [{}, {"max_concurrency": 3}])
def test_a_driver_that_is_an_actor(cluster: None, options: dict[str, Any]) -> None:
    workers = start(2)
    driver = Driver.options(**options).remote()
    ray.get(driver.compile.remote(workers))
    assert ray.get(driver.run.remote(1, 50)) == list(range(3, 53))
    if options:  # from several of its threads
        got = ray.get([driver.run.remote(100 * n, 20) for n in range(3)])
        assert got == [list(range(100 * n + 2, 100 * n + 22)) for n in range(3)]
    ray.get(driver.teardown.remote())
    ray.get(driver.compile.remote(workers))
    assert ray.get(driver.run.remote(1)) == [3]
    ray.get(driver.teardown.remote())


def test_a_driver_of_a_graph_that_runs_through_itself(cluster: None) -> None:
    worker = start(1)[0]
    driver = Driver.options(max_concurrency=2).remote()
    ray.get(driver.compile.remote([worker, driver, worker]), timeout=PATIENCE_S)
    assert ray.get(driver.run.remote(0, 20), timeout=PATIENCE_S) == list(range(3, 23))
    ray.get(driver.teardown.remote(), timeout=PATIENCE_S)


def test_drivers_of_several_graphs_share_workers(cluster: None) -> None:
    workers = start(2)
    drivers = [Driver.remote() for _ in range(3)]
    ray.get([driver.compile.remote(workers) for driver in drivers])
    for _ in range(3):
        got = ray.get([driver.run.remote(10 * n, 10) for n, driver in enumerate(drivers)])
        assert got == [list(range(10 * n + 2, 10 * n + 12)) for n in range(3)]
    with InputNode() as x:
        out = bind(workers[0].add, x)
    with raycomm.compile(out) as graph:
        assert graph.execute(1).get() == 2
        ray.get([driver.teardown.remote() for driver in drivers])
        assert graph.execute(2).get() == 3


def test_a_graph_inside_a_method_of_a_graph(cluster: None) -> None:
    """A node's method drives a graph of its own."""
    outer, inner = Driver.remote(), start(1)[0]
    ray.get(outer.compile.remote([inner]))
    with InputNode() as x:
        out = bind(outer.run, x, 3)
    with raycomm.compile(out) as graph:
        assert [graph.execute(value).get() for value in (1, 5)] == [[2, 3, 4], [6, 7, 8]]
    ray.get(outer.teardown.remote())


def test_an_execute_from_a_ray_task_or_another_process_is_refused(workers: list[Any]) -> None:
    with InputNode() as x:
        out = bind(workers[0].echo, x)
    with raycomm.compile(out) as graph:

        @ray.remote
        def use(given: Any) -> Any:
            return given

        ref = graph.execute(1)
        with pytest.raises((TypeError, ValueError)):
            use.remote(graph)
        with pytest.raises((TypeError, ValueError)):
            use.remote(ref)
        with pytest.raises((TypeError, ValueError)):
            workers[0].echo.remote(ref)
        with pytest.raises((TypeError, ValueError)):
            workers[0].echo.remote([ref])
        assert ref.get() == 1


# Everything at once.


def random_value(rng: random.Random) -> Any:
    kind = rng.randrange(9)
    size = rng.choice([0, 1, 2, 17, 300, 1023, 1024, 1025, 4000, 32_767, 32_768, 40_000, 200_000])
    if kind == 0:
        return rng.randrange(-(1 << 70), 1 << 70)
    if kind == 1:
        return bytes([rng.randrange(256)]) * size
    if kind == 2:
        return "\N{SNOWMAN}x" * (size // 2)
    if kind == 3:
        return np.arange(size, dtype=rng.choice([np.int8, np.float32, np.int64]))[:: rng.choice([1, 2, -1])]
    if kind == 4:
        return torch.arange(size, dtype=rng.choice([torch.int16, torch.float64, torch.bfloat16]))
    if kind == 5:
        return [random_value(rng) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {f"k{n}": random_value(rng) for n in range(rng.randrange(4))}
    if kind == 7:
        return (random_value(rng), {1, 2}, frozenset("ab"))
    return None


def equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


@pytest.mark.parametrize("max_inflight", [1, 2, 7])
def test_everything_at_once(workers: list[Any], rng: random.Random, max_inflight: int) -> None:
    """Keyword nodes, several returns, constants, shared outputs, input passed through, failures, drops, held results."""
    constant = {"c": [1, (2,)]}
    with InputNode() as inp:
        low, high = bind(workers[0].as_two, inp.pair)
        joined = bind(workers[1].join, low, 5, constant, high=high, whole=inp[0])
        local = bind(workers[1].join, joined, low, again=joined)
        maybe = bind(workers[2].fail_if_odd, inp.number)
        last = bind(workers[3].join, maybe, inp.number, local=local)
    outputs = MultiOutputNode([last, low, low, inp[0], maybe, joined])
    with raycomm.compile(outputs, max_inflight=max_inflight) as graph:
        waiting: list[Any] = []
        held: list[Any] = []

        def check(entry: Any) -> None:
            number, value, left, right, refs = entry
            order = list(range(6))
            rng.shuffle(order)
            want_joined = ((left, 5, constant), {"high": right, "whole": value})
            want_local = ((want_joined, left), {"again": want_joined})
            want = [((number, number), {"local": want_local}), left, left, value, number, want_joined]
            for place in order[: rng.randrange(1, 7)]:
                if number % 2 and place in (0, 4):
                    with pytest.raises(ValueError, match=f"bad {number}"):
                        refs[place].get(timeout=PATIENCE_S)
                    continue
                got = refs[place].get(timeout=PATIENCE_S)
                assert equal(got, want[place]), (number, place)
                if rng.random() < 0.2:
                    held.append((got, want[place]))

        for number in range(60):
            value, left, right = (random_value(rng) for _ in range(3))
            pair = rng.choice([list, tuple])([left, right])
            refs = graph.execute(value, pair=pair, number=number, timeout=PATIENCE_S)
            if rng.random() < 0.7:
                waiting.append((number, value, left, right, refs))
            del refs
            while waiting and rng.random() < 0.5:
                check(waiting.pop(rng.randrange(len(waiting))))
        while waiting:
            check(waiting.pop())
        assert all(equal(got, want) for got, want in held)


def test_a_busy_interpreter_does_not_stop_the_others(cluster: None, gate: Gate, workers: list[Any]) -> None:
    """An actor that computes in pure Python beside its loop: another thread waits in it without holding the interpreter."""
    odd = Odd.options(max_concurrency=2).remote()
    busy = odd.spin_then.remote(1, gate.path)
    gate.wait_entered()
    with InputNode() as x:
        out = bind(workers[0].echo, bind(odd.nothing, x))
    with raycomm.compile(out) as graph:
        assert [graph.execute(value).get(timeout=PATIENCE_S) for value in range(20)] == [None] * 20
        gate.open()
        assert ray.get(busy, timeout=PATIENCE_S) == 1


def test_a_waiting_get_leaves_the_interpreter_to_others(workers: list[Any], gate: Gate) -> None:
    """One process, two threads: one waits for a result, the other must run Python to bring it about."""
    with InputNode() as x:
        out = bind(workers[0].hold, x, gate.path)
    with raycomm.compile(out) as graph:
        ref = graph.execute(1)
        counted = 0

        def work() -> None:
            nonlocal counted
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                counted += 1
            gate.open()

        def alone() -> int:
            count, end = 0, time.monotonic() + 0.3
            while time.monotonic() < end:
                count += 1
            return count

        reference = alone()
        thread = threading.Thread(target=work)
        thread.start()
        assert ref.get(timeout=PATIENCE_S) == 1
        thread.join()
        assert counted > reference / 20  # near full speed, on a machine that others use too
