"""`graph.stats()`: every number against what was sent."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import ray
import torch

import raycomm
from raycomm import ActorDiedError, InputNode, MultiOutputNode, bind
from raycomm.observe.stats import CallStats, EdgeStats, GraphStats
from tests.ray.workers import PATIENCE_S, Gate, Opaque, chain, start, until

pytestmark = pytest.mark.usefixtures("cluster")

_INLINE = 1024  # the default of `inline_bytes`


def edge(graph: Any, ending: str) -> EdgeStats:
    """The edge whose value ends so."""
    (found,) = [edge for edge in graph.stats().edges if edge.value.endswith(ending)]
    return found


def call(graph: Any, ending: str) -> CallStats:
    """The call whose name ends so."""
    (found,) = [call for call in graph.stats().calls if call.call.endswith(ending)]
    return found


def held_by(graph: Any, process: int) -> Mapping[str, int]:
    stats: GraphStats = graph.stats()
    return stats.pools[process].held_by


def settled(graph: Any, calls: int) -> None:
    """Calls are counted when the next thing begins, just after their result can be seen."""
    until(lambda: all(each.calls == calls for each in graph.stats().calls), f"{calls} calls are counted")


def test_a_graph_that_has_not_run(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo, workers[1].echo), name="fresh") as graph:
        stats = graph.stats()
        names = [process.label for process in graph.plan.processes]
        assert stats.graph == "fresh"
        assert [(e.channel, e.writer, e.messages, e.bytes, e.failures, e.pickles) for e in stats.edges] == [
            (0, "driver", 0, 0, 0, 0),
            (1, names[1], 0, 0, 0, 0),
            (2, names[2], 0, 0, 0, 0),
        ]
        assert [[(r.process, r.messages) for r in e.readers] for e in stats.edges] == [
            [(names[1], 0)],
            [(names[2], 0)],
            [("driver", 0)],
        ]
        assert [(c.call, c.calls, c.total_s, c.longest_s) for c in stats.calls] == [
            (f"{names[1]}.echo#0", 0, 0, 0),
            (f"{names[2]}.echo#1", 0, 0, 0),
        ]
        assert [(p.process, p.committed_bytes, dict(p.held_by)) for p in stats.pools] == [(name, 0, {}) for name in names]
        assert stats.budget_used == 0
        assert stats.budget_limit > 1 << 20


def test_messages_and_calls(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        for value in range(25):
            assert graph.execute(value).get() == value
        settled(graph, 25)
        for e in graph.stats().edges:
            assert (e.messages, e.inline, e.in_blocks, e.pickles, e.failures) == (25, 25, 0, 0, 0)
            assert [reader.messages for reader in e.readers] == [25]
            assert 25 < e.bytes < 25 * 64
            assert 0 <= e.waits <= 25
        sizes = {e.bytes for e in graph.stats().edges}
        assert len(sizes) == 1  # the same messages on all three
        for c in graph.stats().calls:
            assert 0 < c.longest_s <= c.total_s < PATIENCE_S


def test_bytes_are_those_of_the_messages(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo)) as graph:
        graph.execute(b"").get()
        empty = edge(graph, "input").bytes
        graph.execute(b"x" * 200).get()
        assert edge(graph, "input").bytes == 2 * empty + 200
        before = edge(graph, ".echo#0").bytes
        graph.execute(np.zeros(1 << 20, np.uint8)).get()
        assert 1 << 20 <= edge(graph, ".echo#0").bytes - before < (1 << 20) + 256


def test_inline_and_blocks_at_the_threshold(workers: list[Any]) -> None:
    """A frame that fits its slot stays inline, a longer one takes a block; a big buffer takes one of its own."""
    with raycomm.compile(chain(workers[0].echo)) as graph:
        inline: dict[int, bool] = {}  # by bytes of the message
        for size in range(_INLINE - 100, _INLINE + 100):
            before = edge(graph, "input")
            assert len(graph.execute(b"x" * size).get()) == size
            after = edge(graph, "input")
            assert after.messages == before.messages + 1 == after.inline + after.in_blocks
            inline[after.bytes - before.bytes] = after.inline > before.inline
        assert len(inline) == 200
        longest = max(size for size, fits in inline.items() if fits)
        assert _INLINE <= longest < _INLINE + 64  # slots are whole cache lines
        assert all(fits is (size <= longest) for size, fits in inline.items())
        assert edge(graph, ".echo#0").in_blocks == edge(graph, "input").in_blocks
        before = edge(graph, ".echo#0")
        graph.execute(torch.zeros(1 << 16)).get()
        assert edge(graph, ".echo#0").in_blocks == before.in_blocks + 1


def test_inline_bytes_of_one_edge(workers: list[Any]) -> None:
    with InputNode() as x:
        roomy = raycomm.with_channel_options(bind(workers[0].echo, x), inline_bytes=8192)
        node = bind(workers[1].echo, roomy)
    with raycomm.compile(node) as graph:
        assert graph.execute(b"x" * 4000).get() == b"x" * 4000
        counts = {e.value.rpartition(".")[2]: (e.inline, e.in_blocks) for e in graph.stats().edges}
        assert counts == {"input": (0, 1), "echo#0": (1, 0), "echo#1": (0, 1)}


def test_pickles(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo)) as graph:
        graph.execute({"plain": [1, 2.0, "three", (4,), {5}]}).get()
        assert (edge(graph, "input").pickles, edge(graph, ".echo#0").pickles) == (0, 0)
        graph.execute(ValueError("one object")).get()
        assert (edge(graph, "input").pickles, edge(graph, ".echo#0").pickles) == (1, 1)
        graph.execute([complex, slice(1, 2), 3]).get()
        assert edge(graph, "input").pickles >= 2
        assert edge(graph, "input").pickles == edge(graph, ".echo#0").pickles


def test_failures(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].fail_if_odd, workers[1].echo)) as graph:
        for value in range(10):
            try:
                assert graph.execute(value).get() % 2 == 0
            except ValueError:
                assert value % 2
        for _ in range(3):
            with pytest.raises(TypeError):
                graph.execute(Opaque())  # nothing was published
        assert [(e.messages, e.failures) for e in graph.stats().edges] == [(10, 0), (10, 5), (10, 5)]
        until(lambda: call(graph, ".fail_if_odd#0").calls == 10, "all calls are counted")


def test_several_readers(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        a = bind(workers[0].echo, x)
        node = MultiOutputNode([bind(workers[1].hold, a, gate.path), bind(workers[2].echo, a), a])
    with raycomm.compile(node) as graph:
        rows = [graph.execute(value) for value in range(3)]
        assert [rows[index][1].get() for index in range(3)] == [0, 1, 2]
        gate.wait_entered()
        names = [process.label for process in graph.plan.processes]
        shared = edge(graph, ".echo#0")
        assert shared.messages == 3
        assert {reader.process: reader.messages for reader in shared.readers} == {
            names[2]: 1,  # the message it is at was taken before the call
            names[3]: 3,
            "driver": 0,
        }
        gate.open()
        assert [ray.get(row) for row in rows] == [[value] * 3 for value in range(3)]
        assert [reader.messages for reader in edge(graph, ".echo#0").readers] == [3, 3, 3]


def test_waits(workers: list[Any], gate: Gate) -> None:
    with InputNode() as x:
        made = raycomm.with_channel_options(bind(workers[0].echo, x), slots=1)
        node = bind(workers[1].hold, made, gate.path)
    with raycomm.compile(node, max_inflight=8) as graph:
        refs = [graph.execute(value) for value in range(4)]
        until(lambda: graph.status().rows[1].seconds > 0.1 and "room" in str(graph.status().rows[1]), "it waits for room")
        gate.open()
        assert ray.get(refs) == [0, 1, 2, 3]
        narrow = edge(graph, ".echo#0")
        assert 1 <= narrow.waits <= 4
        assert 0.1 < narrow.waited_s < PATIENCE_S
        assert edge(graph, ".hold#1").readers[0].waits >= 1
        assert edge(graph, ".hold#1").readers[0].waited_s > 0
        assert call(graph, ".hold#1").longest_s > 0.1
        assert call(graph, ".echo#0").total_s < call(graph, ".hold#1").total_s


def test_blocks_and_who_holds_them(workers: list[Any]) -> None:
    keeper = start(1)[0]
    with InputNode() as x:
        node = MultiOutputNode([bind(keeper.keep, x), bind(workers[0].echo, x)])
    with raycomm.compile(node, shm_limit_bytes=64 << 20) as graph:
        names = [process.label for process in graph.plan.processes]
        keeping, view = graph.execute(np.ones(1 << 20, np.uint8))
        assert keeping.get() == 1
        got = view.get()
        del view
        until(lambda: set(held_by(graph, 0)) == {names[1]}, "the other reader has let go")
        assert held_by(graph, 0) == {names[1]: 1 << 20}
        assert held_by(graph, 2) == {"driver": 1 << 20}
        part = got[5:6]
        del got
        assert held_by(graph, 2) == {"driver": 1 << 20}  # a slice holds the whole
        assert part[0] == 1
        del part
        assert held_by(graph, 2) == {}
        ray.get(keeper.let_go.remote())
        until(lambda: held_by(graph, 0) == {}, "the actor holds nothing")
        stats = graph.stats()
        assert [pool.committed_bytes >= 1 << 20 for pool in stats.pools] == [True, False, True]
        assert stats.budget_used == sum(pool.committed_bytes for pool in stats.pools)
        assert stats.budget_limit == 64 << 20
        kept = graph.execute(np.ones(1 << 20, np.uint8))
        assert ray.get(kept[0]) == 1
        assert graph.stats().budget_used == stats.budget_used  # blocks are used again
        text = str(graph.stats())
        for part_of_text in (
            "of 67108864 bytes of shared memory taken",
            "input: 2 messages",
            f"blocks of {names[1]}: 0 bytes taken",
        ):
            assert part_of_text in text
        ray.get(keeper.let_go.remote())


def test_after_teardown_and_death(workers: list[Any]) -> None:
    victim = start(1)[0]
    with raycomm.compile(chain(victim.echo, workers[0].echo)) as graph:
        for value in range(5):
            assert graph.execute(value).get() == value
        os.kill(ray.get(victim.pid.remote()), signal.SIGKILL)
        with pytest.raises(ActorDiedError):
            while True:
                graph.execute(0).get(PATIENCE_S)
        dead = graph.stats()
        assert [e.messages for e in dead.edges[1:]] == [5, 5]
        assert dead.calls[0].calls == 5
    over = graph.stats()
    assert [e.messages for e in over.edges] == [e.messages for e in dead.edges]
    assert str(over).startswith("graph ")


def test_graphs_count_for_themselves(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo)) as first, raycomm.compile(chain(workers[0].echo)) as second:
        for value in range(3):
            first.execute(value).get()
        second.execute(0).get()
        assert [edge(graph, "input").messages for graph in (first, second)] == [3, 1]
        settled(first, 3)
        settled(second, 1)
