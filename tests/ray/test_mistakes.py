"""Mistakes that newcomers make, each answered with what to write instead."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.dag import InputNode as RayInputNode

import raycomm
from raycomm import ArgumentError, CompileError, InputNode, MultiOutputNode, SerializationError, bind
from raycomm.observe import notice
from raycomm.testing import stand_in
from tests.ray.install_fixtures import compiled
from tests.ray.workers import Gate, chain

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture
def installed() -> Iterator[None]:
    raycomm.install()
    yield
    raycomm.uninstall()


MIXES: list[Callable[[list[Any], InputNode], Any]] = [
    lambda w, i: w[0].echo.bind(i),
    lambda w, i: w[0].echo.bind(i[0]),
    lambda w, i: w[1].echo.bind(w[0].echo.bind(i.x)),
    lambda w, i: w[1].echo.bind(bind(w[0].echo, i)),
]


@pytest.mark.filterwarnings("ignore:DAGNode.execute:DeprecationWarning")
@pytest.mark.parametrize("mix", MIXES)
def test_a_graph_of_both_families_runs_with_raycomm_compile_only(workers: list[Any], mix: Any) -> None:
    node = mix(workers, InputNode())
    with pytest.raises(TypeError) as caught:
        node.execute(3)
    for part in ("is a node of a raycomm graph", "with raycomm.compile(node)", "need ray.dag.InputNode"):
        assert part in str(caught.value)
    with raycomm.compile(node) as graph:
        keys = graph.plan.signature.keys
        assert graph.execute(*([] if keys else [3]), **dict.fromkeys(keys, 3)).get() == 3


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("mix", [*MIXES, lambda w, i: w[0].add.bind(RayInputNode(), by=i)])
def test_experimental_compile_names_a_node_of_the_other_family(workers: list[Any], mix: Any) -> None:
    node = mix(workers, InputNode())
    message = r"argument (0|by) of (echo|add) is (InputNode|MethodNode)\(.*a node of raycomm's own"
    with pytest.raises(CompileError, match=message) as caught:
        node.experimental_compile()
    assert "ray.dag.InputNode" in str(caught.value)
    assert "raycomm.compile(node)" in str(caught.value)


def test_what_remote_gives_is_no_node(workers: list[Any]) -> None:
    ref = workers[0].echo.remote(1)
    for use in (raycomm.compile, lambda ref: MultiOutputNode([ref]), lambda ref: raycomm.after(ref, InputNode())):
        with pytest.raises(CompileError, match=r"a value of type ObjectRef \(did you call .remote instead of .bind\?\)"):
            use(ref)
    assert ray.get(ref) == 1


@pytest.mark.parametrize("wrap", [lambda ref: ref, lambda ref: [1, ref], lambda ref: {"a": (ref,)}])
def test_a_ref_is_not_sent(workers: list[Any], wrap: Any) -> None:
    with raycomm.compile(chain(workers[0].echo), name="g") as graph:
        ref = graph.execute(1)
        with pytest.raises(SerializationError) as caught:
            graph.execute(wrap(ref))
        text = str(caught.value)
        assert "): a Ref cannot be pickled: results are fetched in the process that compiled the graph. Send ref.get()" in text
        assert text.endswith("Send ref.get(). Nothing was submitted")
        assert "_core" not in text
        assert "__reduce__" not in text
        with pytest.raises(SerializationError, match="belongs to the process that compiled it. Nothing was submitted"):
            graph.execute(wrap(graph))
        assert ref.get() == 1


@pytest.mark.parametrize("allow_pickle", [True, False])
def test_sentences_end_once(workers: list[Any], allow_pickle: bool) -> None:
    with raycomm.compile(chain(workers[0].echo), allow_pickle=allow_pickle) as graph:
        for value in (threading.Lock(), [threading.Lock()], (number for number in range(3))):
            with pytest.raises(SerializationError) as caught:
                graph.execute(value)
            assert str(caught.value).endswith(". Nothing was submitted")
            assert ".." not in str(caught.value)


@pytest.mark.usefixtures("installed")
def test_installed_options(workers: list[Any]) -> None:
    with RayInputNode() as inp:
        node = workers[0].echo.bind(inp)
    for name in ("max_inflight_executions", "max_buffered_results", "buffer_size_bytes"):
        for bad in ("4", 4.0, True, 0, -1):
            with pytest.raises(ValueError, match=f"`{name}` must be a positive integer, found {bad!r}"):
                node.experimental_compile(**{f"_{name}": bad})
    with pytest.raises(
        TypeError, match=r"^experimental_compile\(\) got an unexpected keyword argument 'foo'; it takes "
    ) as caught:
        node.experimental_compile(foo=1)
    for name in ("_submit_timeout", "enable_asyncio", "_max_inflight_executions", "_default_communicator"):
        assert name in str(caught.value)
    with pytest.raises(TypeError, match=r"^experimental_compile\(\) takes from 1 to 8 positional arguments"):
        node.experimental_compile(*[None] * 9)
    node.experimental_compile().teardown()


@pytest.mark.usefixtures("installed")
def test_wait_says_that_it_takes_no_installed_refs(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].echo.bind(inp)) as graph:
        ref = graph.execute(1)
        with pytest.raises(TypeError, match="got a CompiledDAGRef of one that experimental_compile made; .*raycomm.compile"):
            raycomm.wait([ref])
        assert ray.get(ref) == 1
    with pytest.raises(TypeError, match="got ObjectRef; use ray.wait"):
        raycomm.wait([workers[0].echo.remote(1)])


def test_memory_of_no_size(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo)) as graph:
        for shape in ("x", (2.5,), None, True):
            with pytest.raises(TypeError, match="is no shape"):
                graph.empty(shape, np.uint8)
        for shape in (-1, (3, -1), 1 << 63):
            for dtype in (np.uint8, torch.float32):
                with pytest.raises(ArgumentError, match="raycomm.empty: shape"):
                    graph.empty(shape, dtype)
        with pytest.raises(TypeError, match="is no dtype"):
            graph.empty(3, "nope")
        for size in (1 << 62, 1 << 50):
            with pytest.raises(raycomm.SharedMemoryError, match="larger than the limit"):
                graph.empty(size, np.uint8)
        memory = graph.empty(np.int64(100_000), np.uint8)
        memory[:] = 3
        assert int(graph.execute(memory).get().sum()) == 300_000


def test_a_get_that_blocks_an_event_loop_says_so(
    workers: list[Any], gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notice, "FIRST_NOTICE_S", 0.0)
    with InputNode() as inp:
        node = MultiOutputNode([bind(workers[0].hold, inp, gate.path), bind(workers[1].echo, inp)])

    async def wrong(ref: Any) -> None:
        with pytest.raises(raycomm.ChannelTimeoutError):
            ref.get(timeout=1.0)

    with raycomm.compile(node) as graph, caplog.at_level(logging.INFO, "raycomm"):
        held, _ = graph.execute(1)
        with pytest.raises(raycomm.ChannelTimeoutError):
            held.get(timeout=1.0)
        assert caplog.messages
        assert "event loop" not in caplog.text
        caplog.clear()
        asyncio.run(wrong(held))
        assert "This get blocks the event loop that it was called in: write 'await ref' there" in caplog.text
        gate.open()
        assert held.get() == 1


async def _where_asyncio_wants_futures(graph: Any) -> None:
    refs = [graph.execute(number) for number in range(3)]
    done, pending = await asyncio.wait([asyncio.ensure_future(ref) for ref in refs])
    assert sorted(task.result() for task in done) == [0, 1, 2]
    assert not pending


def test_refs_where_asyncio_wants_futures(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo)) as graph:
        asyncio.run(_where_asyncio_wants_futures(graph))


def test_a_stand_in_is_planned_and_not_run() -> None:
    node = bind(stand_in(Gate, "W").entered, InputNode())
    with pytest.raises(CompileError, match=r"StandIn\(W\) stands in for an actor: it can be planned and not be run") as caught:
        raycomm.compile(node)
    assert caught.value.node == "W"
