"""Refs and what they give: fetching, dropping, buffering, refusing, and how failures reach them."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.exceptions

import raycomm
from raycomm import CapacityExceededError, ChannelTimeoutError, InputNode, MultiOutputNode, bind
from tests.ray.row_actors import Odd, shm_kib
from tests.ray.workers import PATIENCE_S, Gate

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def odd(cluster: None) -> Any:
    return Odd.remote()


def echo(worker: Any, **options: Any) -> Any:
    with InputNode() as x:
        out = bind(worker.echo, x)
    return raycomm.compile(out, **options)


def test_refs_and_lists_of_refs(workers: list[Any]) -> None:
    with echo(workers[0]) as graph:
        refs = [graph.execute(value) for value in range(5)]
        assert ray.get(refs[0]) == 0
        assert ray.get(refs) == ray.get(refs, timeout=PATIENCE_S) == list(range(5))
        assert ray.get([]) == []
        for wrong in ([refs[0], 5], [refs[0], ray.put(1)], [ray.put(1), refs[0]]):
            with pytest.raises(ValueError):
                ray.get(wrong)
        assert ray.get(refs[1]) == 1


def test_where_a_ref_cannot_go(workers: list[Any]) -> None:
    with echo(workers[0]) as graph:
        ref = graph.execute([1])
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps, lambda ref: pickle.dumps({"in": [ref]})):
            with pytest.raises(ValueError, match=r"(?i)ref"):
                attempt(ref)
        for refuse in (
            lambda: ray.wait(ref),
            lambda: ray.wait([ref]),
            lambda: workers[1].echo.remote(ref),
            lambda: graph.execute(ref),
            lambda: graph.execute([1, ref]),
        ):
            with pytest.raises((TypeError, ValueError)):
                refuse()
        assert ref.get() == [1]


@pytest.mark.parametrize(
    "refuse", [ray.put, lambda ref: ray.put([ref]), lambda ref: ray.wait([ref])], ids=["put", "list", "wait"]
)
def test_ray_refuses_refs_with_a_type_error(workers: list[Any], refuse: Any) -> None:
    with echo(workers[0]) as graph:
        ref = graph.execute(1)
        with pytest.raises(TypeError):
            refuse(ref)
        assert ref.get() == 1


def test_a_ref_as_text(workers: list[Any]) -> None:
    with echo(workers[0], name="named") as graph:
        ref = graph.execute(1)
        for text in (str(ref), repr(ref), f"{ref}", f"{ref!s:>3}"):
            assert "0" in text
        assert len({ref, graph.execute(2), ref}) == 2
        assert ref == ref
        assert ref != graph.execute(1)


def test_a_dropped_value_is_never_decoded(odd: Any, workers: list[Any], tmp_path: Path) -> None:
    with InputNode() as x:
        value = bind(odd.counted, x, str(tmp_path))
        beside = bind(workers[0].echo, x)
    with raycomm.compile(MultiOutputNode([value, beside]), max_inflight=3) as graph:
        for number in range(40):
            kept, other = graph.execute(number)
            if number % 4 == 0:
                assert kept.get().x == number
            assert other.get() == number  # one handle per output
            del kept, other
        assert graph.execute(99)[1].get() == 99
    gc.collect()
    assert sorted(int(file.name) for file in tmp_path.iterdir()) == list(range(0, 40, 4))
    assert all(file.read_bytes() == b"." for file in tmp_path.iterdir())  # once each


def test_one_output_of_several_while_another_is_slow(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        slow = bind(workers[0].hold, x, gate.path)
        quick = bind(workers[1].echo, x)
    with raycomm.compile(MultiOutputNode([slow, quick])) as graph:
        rows = [graph.execute(value) for value in range(4)]
        assert [second.get(timeout=PATIENCE_S) for _, second in rows] == list(range(4))
        assert not gate.entered(2)
        gate.open()
        assert [first.get(timeout=PATIENCE_S) for first, _ in rows] == list(range(4))


def test_a_failed_sibling_does_not_spoil_an_output(workers: list[Any]) -> None:
    with InputNode() as x:
        bad = bind(workers[0].fail_if_odd, x)
        good = bind(workers[1].echo, x)
        both = bind(workers[2].pair, bad, good)
    with raycomm.compile(MultiOutputNode([bad, good, both])) as graph:
        rows = [graph.execute(value) for value in range(20)]
        random.Random(3).shuffle(rows)
        for first, second, third in rows:
            value = second.get()
            for ref in (third, first):
                if value % 2:
                    for _ in range(2):
                        with pytest.raises(ValueError, match=f"bad {value}"):
                            ref.get()
            if value % 2 == 0:
                assert (first.get(), third.get()) == (value, ("w2", value, value))


def test_a_failure_does_not_wait_for_a_slow_sibling(workers: list[Any], gate: Gate) -> None:
    """An error on one input is not delivered early at the price of the next execution: order and values stay right."""
    with InputNode() as inp:
        slow = bind(workers[0].hold, inp[0], gate.path)
        bad = bind(workers[1].fail_if_odd, inp[1])
        joined = bind(workers[2].pair, slow, bad)
    with raycomm.compile(MultiOutputNode([joined, bad])) as graph:
        rows = [graph.execute(value, value) for value in range(1, 5)]
        with pytest.raises(ValueError, match="bad 1"):
            rows[0][1].get(timeout=PATIENCE_S)  # while the slow one holds
        assert rows[1][1].get(timeout=PATIENCE_S) == 2  # nor does the next execution wait for it
        gate.open()
        for value, (first, _) in enumerate(rows, 1):
            if value % 2:
                with pytest.raises(ValueError, match=f"bad {value}"):
                    first.get(timeout=PATIENCE_S)
            else:
                assert first.get(timeout=PATIENCE_S) == ("w2", value, value)


def test_buffering_counts_executions_not_outputs(workers: list[Any]) -> None:
    with InputNode() as x:
        a = bind(workers[0].echo, x)
        b = bind(workers[1].echo, x)
    with raycomm.compile(MultiOutputNode([a, b]), max_inflight=2, max_buffered_results=6) as graph:
        rows = []
        with pytest.raises(CapacityExceededError) as caught:
            for value in range(50):
                rows.append(graph.execute(value, timeout=PATIENCE_S))
        assert 6 <= len(rows) <= 8
        assert (caught.value.limit, caught.value.count) == (6, 6)
        # Fetching one output of each does not free the execution's other place, fetching the other does.
        assert [first.get() for first, _ in rows] == list(range(len(rows)))
        with pytest.raises(CapacityExceededError):
            graph.execute(0, timeout=PATIENCE_S)
        assert [second.get() for _, second in rows] == list(range(len(rows)))
        assert ray.get(graph.execute(5, timeout=PATIENCE_S)) == [5, 5]


def test_results_are_right_after_the_limit_was_met(workers: list[Any]) -> None:
    with echo(workers[0], max_inflight=4, max_buffered_results=4) as graph:
        for _ in range(10):
            refs = []
            with pytest.raises(CapacityExceededError):
                for value in range(40):
                    refs.append(graph.execute(value))
            if len(refs) % 2:
                refs.reverse()
            assert sorted(ref.get() for ref in refs) == list(range(len(refs)))


def test_held_results_never_block_nor_change(odd: Any) -> None:
    """As many as one likes within the memory of the graph, also in the hands of one variable that is assigned again."""
    with InputNode() as x:
        out = bind(odd.reuse, x, "numpy", 50_000)
    with raycomm.compile(out, max_inflight=1, shm_limit_bytes=256 << 20) as graph:
        held = []
        for value in range(200):
            last = graph.execute(value).get(timeout=PATIENCE_S)
            assert int(last[0]) == int(last[-1]) == value
            if value % 2:
                held.append((value, last))
        assert all(bool((array == value).all()) for value, array in held)


def test_a_result_may_be_changed_and_is_the_refs_own(cluster: None) -> None:
    with InputNode() as x:
        out = bind(Odd.remote().reuse, x, "torch", 40_000)
    with raycomm.compile(out) as graph:
        one, other = graph.execute(1), graph.execute(1)
        one.get().fill_(9)
        assert int(one.get()[0]) == 9
        assert int(other.get()[0]) == 1


def test_a_value_that_fails_to_decode_at_the_driver(odd: Any, workers: list[Any]) -> None:
    """And one that fails in an actor: that execution fails with the cause, the others do not."""
    with InputNode() as x:
        value = bind(workers[0].echo, bind(odd.unpickles_only_at_the_driver, x))
    with raycomm.compile(value) as graph:
        refs = [graph.execute(x) for x in ("plain", "homesick", "plain")]
        assert refs[2].get() == "plain"
        for _ in range(2):
            with pytest.raises(Exception, match="homesick") as caught:
                refs[1].get()
            assert not isinstance(caught.value, ray.exceptions.RayActorError)
        assert refs[0].get() == "plain"
        assert graph.execute("after").get() == "after"
    with InputNode() as x:
        direct = bind(odd.unpickles_only_at_the_driver, x)
    with raycomm.compile(direct) as graph:
        refs = [graph.execute(x) for x in ("plain", "homesick", "plain")]
        assert refs[2].get() == "plain"
        for _ in range(2):
            with pytest.raises(Exception, match="homesick"):
                refs[1].get()
        assert refs[0].get() == "plain"


def test_an_exception_that_is_a_value_for_several_consumers(workers: list[Any]) -> None:
    with InputNode() as x:
        error = bind(workers[0].return_exception, x)
        outs = [bind(workers[0].echo, error), bind(workers[1].echo, error), bind(workers[2].pair, 1, error), error]
    with raycomm.compile(MultiOutputNode(outs)) as graph:
        for _ in range(3):
            a, b, (_, one, c), d = ray.get(graph.execute(1))
            assert one == 1
            assert [(type(e), e.args) for e in (a, b, c, d)] == [(ValueError, ("only a value: 1",))] * 4


@pytest.mark.parametrize("size", [0, 900, 1024, 5000, 200_000, 8_000_000])
def test_errors_of_every_size_arrive_whole(odd: Any, workers: list[Any], size: int) -> None:
    with InputNode() as x:
        out = bind(workers[0].echo, bind(odd.long_text, x))
    with raycomm.compile(out) as graph:
        with pytest.raises(ValueError) as caught:
            graph.execute(size).get()
        assert "long " + "x" * size in str(caught.value)
        assert str(caught.value.__cause__ or caught.value.cause) == "long " + "x" * size
        with pytest.raises(ValueError):
            graph.execute(size).get()


def test_an_error_larger_than_the_memory_is_cut_not_lost(odd: Any, workers: list[Any]) -> None:
    with InputNode() as x:
        out = bind(workers[0].echo, bind(odd.long_text, x))
    with raycomm.compile(out, shm_limit_bytes=1 << 20) as graph:
        for _ in range(3):
            with pytest.raises(Exception, match="long xxx") as caught:
                graph.execute(4 << 20).get()
            assert "ValueError" in str(caught.value)
        with pytest.raises(ValueError, match="long x"):
            graph.execute(5).get()


def test_teardown_frees_whatever_references_remain(workers: list[Any]) -> None:
    """The graph, its refs, and an exception with its traceback are kept; the memory goes all the same."""
    with InputNode() as x:
        failing = bind(workers[1].fail_if_odd, bind(workers[0].total, x))
    before = shm_kib()
    kept: list[Any] = []
    with raycomm.compile(failing, name="kept") as graph:
        kept += [graph.execute(np.ones(size, np.uint8)) for size in (16 << 20, (16 << 20) + 1)]
        assert kept[0].get() == 16 << 20
        with pytest.raises(ValueError, match="bad") as caught:
            kept[1].get()
        kept.append(caught)
    assert shm_kib() - before < 1024
    del kept[:]


def test_threads_drop_and_fetch_the_same_refs(workers: list[Any]) -> None:
    with echo(workers[0], max_inflight=5) as graph:
        for _ in range(20):
            refs = [graph.execute(value) for value in range(12)]
            got: list[list[int]] = [[] for _ in range(4)]

            def fetch(index: int, mine: list[Any], got: Any = got) -> None:
                random.Random(index).shuffle(mine)
                while mine:
                    got[index].append(mine.pop().get(timeout=PATIENCE_S))

            threads = [threading.Thread(target=fetch, args=(index, refs.copy())) for index in range(4)]
            del refs
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE_S)
            assert [sorted(values) for values in got] == [list(range(12))] * 4


def test_a_ref_dies_while_another_thread_waits_for_a_later_one(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        out = bind(workers[0].hold, x, gate.path)
    with raycomm.compile(out) as graph:
        refs = [graph.execute(value) for value in range(5)]
        got: list[Any] = []
        last = refs[4]
        waiting = threading.Thread(target=lambda: got.append(last.get(timeout=PATIENCE_S)))
        waiting.start()
        gate.wait_entered()
        del refs[1:3]
        gate.open()
        waiting.join(PATIENCE_S)
        assert got == [4]
        assert [ref.get() for ref in refs] == [0, 3, 4]


def test_a_timed_out_get_among_many(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        out = bind(workers[0].hold, x, gate.path)
    with raycomm.compile(out) as graph:
        refs = [graph.execute(value) for value in range(6)]
        for ref in refs:
            with pytest.raises(ChannelTimeoutError):
                ref.get(timeout=0)
        gate.open()
        order = [5, 0, 3, 1, 2, 4]
        assert [refs[place].get(timeout=PATIENCE_S) for place in order] == order
        assert [ref.get(timeout=0) for ref in refs] == list(range(6))


def test_refs_after_teardown_go_quietly(workers: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    graph = echo(workers[0])
    refs = [graph.execute(np.zeros(100_000)) for _ in range(5)]
    graph.teardown()
    del refs, graph
    gc.collect()
    assert not [record for record in caplog.records if record.name.startswith("raycomm")]


def test_the_writer_waits_for_the_last_reader_and_no_longer(workers: list[Any], gate: Gate) -> None:
    """One value for two readers, one of them slow: nothing is lost or overwritten, the quick one is not slowed by more."""
    with InputNode() as x:
        a = bind(workers[0].note, x)
        slow = bind(workers[1].hold, a, gate.path)
        quick = bind(workers[2].note, a)
    with raycomm.compile(MultiOutputNode([slow, quick]), max_inflight=4) as graph:
        rows = [graph.execute(np.full(30_000, value)) for value in range(4)]
        assert [int(second.get(timeout=PATIENCE_S)[7]) for _, second in rows] == [0, 1, 2, 3]
        gate.open()
        assert [int(first.get(timeout=PATIENCE_S)[7]) for first, _ in rows] == [0, 1, 2, 3]
