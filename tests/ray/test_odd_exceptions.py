"""Exceptions that are no ordinary ones: each fails the execution it belongs to, and nothing else."""

from __future__ import annotations

import asyncio
import gc
import signal
from typing import Any

import pytest
import ray

import raycomm
from raycomm import InputNode, MultiOutputNode, RaycommError, SerializationError, bind
from tests.ray.odd_actors import Leaves, OddWorker
from tests.ray.workers import PATIENCE_S, Opaque, start, until

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return [OddWorker.remote(), *start(1)]


@pytest.mark.parametrize(
    ("kind", "says"),
    [("frozen", "Frozen"), ("stubborn", "Stubborn"), ("generator", "GeneratorExit"), ("cancelled", "CancelledError")],
)
def test_they_fail_one_execution(workers: list[Any], kind: str, says: str) -> None:
    """In the commonest loop (read, call, write) and in a longer one."""
    with InputNode() as x:
        first = bind(workers[0].raises, x)
        root = MultiOutputNode([bind(workers[1].echo, first), bind(workers[0].raises, first)])
    with InputNode() as x:
        relay = bind(workers[1].echo, bind(workers[0].raises, x))
    with raycomm.compile(relay) as short, raycomm.compile(root) as long:
        for graph in (short, long):
            before, failed, after = (graph.execute(value) for value in (1, kind, 2))
            for ref, value in ((before, 1), (after, 2)):
                got = [one.get(timeout=PATIENCE_S) for one in (ref if isinstance(ref, list) else [ref])]
                assert set(got) == {value}
            for ref in failed if isinstance(failed, list) else [failed]:
                with pytest.raises(Exception, match=says) as caught:
                    ref.get(timeout=PATIENCE_S)
                assert isinstance(caught.value, ray.exceptions.RayTaskError)


def test_an_error_that_was_got_holds_nothing(workers: list[Any]) -> None:
    """Neither the graph nor the frames of who got it; without a garbage collection, its loops end with its last holder."""
    with InputNode() as x:
        out = bind(workers[1].echo, bind(workers[1].opaque_if_odd, x))
    gc.collect()
    gc.disable()
    try:
        graph = raycomm.compile(out)
        ref = graph.execute(1)
        texts = set()
        for _ in range(3):
            try:
                ref.get(timeout=PATIENCE_S)
            except SerializationError as error:
                texts.add(f"{error} {error.__notes__}")
                depth = 0
                trace = error.__traceback__
                while trace is not None:
                    depth, trace = depth + 1, trace.tb_next
                assert depth < 6  # of this get alone
        assert len(texts) == 1
        with pytest.warns(ResourceWarning, match="without teardown"):
            del graph, ref
        until(lambda: ray.get(workers[1].vitals.remote())["loops"] == 0, "the loops leave")
    finally:
        gc.enable()


def test_what_a_reducer_raises_ends_only_its_own_wait(workers: list[Any]) -> None:
    """While it stands in line for room; those behind it have their turn."""
    with InputNode() as x:
        out = bind(workers[1].echo, x)

    async def main() -> None:
        with raycomm.compile(out, max_inflight=1) as graph:
            async with asyncio.timeout(PATIENCE_S):
                calls = [asyncio.create_task(graph.execute_async(value)) for value in (0, 1, Leaves(), 3)]
                done = await asyncio.gather(*calls, return_exceptions=True)
                assert isinstance(done[2], (RuntimeError, TypeError, RaycommError, GeneratorExit))
                assert [await done[index] for index in (0, 1, 3)] == [0, 1, 3]
            with pytest.raises((GeneratorExit, RaycommError)):
                graph.execute(Leaves())
            assert graph.execute(5).get(timeout=PATIENCE_S) == 5

    asyncio.run(main())


def test_a_handler_that_exits_while_a_result_is_decoded(workers: list[Any]) -> None:
    """The exit goes through, and the result is still there for the next get."""

    class Leave(SystemExit):
        pass

    def leave(*_: Any) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise Leave

    with InputNode() as x:
        out = bind(workers[0].interrupts, x)
    with raycomm.compile(out) as graph:
        before = signal.signal(signal.SIGUSR1, leave)
        try:
            ref = graph.execute(1)
            with pytest.raises(Leave):
                ref.get(timeout=PATIENCE_S)
            assert ref.get(timeout=PATIENCE_S) == "unpickled"
            assert graph.execute(2).get(timeout=PATIENCE_S) == "unpickled"
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_opaque_inputs_take_no_place(workers: list[Any]) -> None:
    with InputNode() as x:
        out = bind(workers[1].echo, x)

    async def main() -> None:
        with raycomm.compile(out, max_inflight=2) as graph:
            for _ in range(5):
                with pytest.raises(SerializationError, match="input of graph"):
                    await graph.execute_async(Opaque())
            assert await (await graph.execute_async(1)) == 1

    asyncio.run(main())
