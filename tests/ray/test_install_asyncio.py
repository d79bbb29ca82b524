"""`install()` with `enable_asyncio=True`: futures that are awaited once, the same limits and failures."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError, RayCgraphCapacityExceeded, RayChannelError
from ray.experimental.compiled_dag_ref import CompiledDAGFuture

import raycomm
from tests.ray.install_actors import AsyncReplica
from tests.ray.install_fixtures import compiled, dag
from tests.ray.workers import Gate, start

pytestmark = pytest.mark.usefixtures("cluster", "installed")


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    raycomm.install()
    yield
    raycomm.uninstall()


def empty(graph: Any) -> bool:
    return not (graph._result_buffer or graph._destructed_ref_idxs or graph._got_ref_idxs)


async def one(graph: Any, *args: Any, **kwargs: Any) -> Any:
    return await (await graph.execute_async(*args, **kwargs))


async def all_of(graph: Any, *args: Any) -> Any:
    return await asyncio.gather(*(await graph.execute_async(*args)))


def test_enable_asyncio_selects_the_call(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].echo.bind(inp)) as graph:
        with pytest.raises(ValueError, match="Use execute if enable_asyncio=False"):
            asyncio.run(one(graph, 1))
        assert ray.get(graph.execute(1)) == 1
    with compiled(lambda inp: workers[0].echo.bind(inp), enable_asyncio=True) as graph:
        with pytest.raises(ValueError, match="Use execute_async if enable_asyncio=True"):
            graph.execute(1)
        assert asyncio.run(one(graph, 1)) == 1


def test_many_at_once(workers: list[Any]) -> None:
    async def main(graph: Any) -> None:
        for _ in range(5):
            values = [np.ones(100) * value for value in range(10)]
            results = await asyncio.gather(*[one(graph, value) for value in values])
            assert all((result == value).all() for result, value in zip(results, values, strict=True))

    with compiled(lambda inp: workers[0].echo.bind(inp), enable_asyncio=True) as graph:
        asyncio.run(main(graph))
        asyncio.run(main(graph))  # another event loop
        assert empty(graph)


def test_inputs(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].join.bind(inp[0], inp.y, inp.timeout), enable_asyncio=True) as graph:
        assert asyncio.run(one(graph, 2, y=3, timeout=4)) == ((2, 3, 4), {})
        with pytest.raises(
            ValueError, match=re.escape("dag.execute() or dag.execute_async() must be called with 1 positional args")
        ):
            asyncio.run(one(graph, y=3, timeout=4))


def test_a_future_is_awaited_once(workers: list[Any]) -> None:
    async def main(graph: Any) -> None:
        future = await graph.execute_async(1)
        assert isinstance(future, CompiledDAGFuture)
        assert str(future) == f"CompiledDAGFuture({graph.get_id()}, execution_index=0, channel_index=None)"
        for refused, text in ((copy.copy, "copied"), (copy.deepcopy, "deep copied"), (pickle.dumps, "pickled")):
            with pytest.raises(ValueError, match=f"CompiledDAGFuture cannot be {text}."):
                refused(future)
        assert await future == 1
        with pytest.raises(
            ValueError, match="CompiledDAGFuture can only be awaited upon once, and it has already been awaited upon."
        ):
            await future

    with compiled(lambda inp: workers[0].echo.bind(inp), enable_asyncio=True) as graph:
        asyncio.run(main(graph))


def test_in_any_order(workers: list[Any]) -> None:
    async def main(graph: Any) -> None:
        futures = [await graph.execute_async(value) for value in range(8)]
        for index in (3, 0, 7, 5, 6, 1, 4, 2):
            assert [await future for future in reversed(futures[index])] == [index + 1] * 2

    with compiled(lambda inp: [w.add.bind(inp) for w in workers[:2]], enable_asyncio=True) as graph:
        asyncio.run(main(graph))
        assert empty(graph)


def test_in_flight_limit(workers: list[Any], gate: Gate) -> None:
    async def main(graph: Any) -> None:
        futures = [await graph.execute_async(value) for value in range(2)]
        with pytest.raises(
            RayCgraphCapacityExceeded,
            match=re.escape("The compiled graph can't have more than 2 in-flight executions, and you currently have 2 in-flight"),
        ):
            await graph.execute_async(2)
        gate.open()
        assert [await future for future in futures] == [0, 1]

    with compiled(lambda inp: workers[0].hold.bind(inp, gate.path), enable_asyncio=True, _max_inflight_executions=2) as graph:
        asyncio.run(main(graph))


def test_two_outputs_awaited_together_count_once(workers: list[Any]) -> None:
    """In Ray they count twice, and the limit is passed by one more each time."""

    async def main(graph: Any) -> None:
        for value in range(20):
            assert await all_of(graph, value) == [value, value]
        futures = [await graph.execute_async(value) for value in range(3)]
        with pytest.raises(RayCgraphCapacityExceeded, match="currently have 3 in-flight"):
            await graph.execute_async(3)
        assert await asyncio.gather(*futures[0], *futures[2]) == [0, 0, 2, 2]
        futures.append(await graph.execute_async(3))
        assert await asyncio.gather(*futures[1], *futures[3]) == [1, 1, 3, 3]

    with compiled(lambda inp: [w.echo.bind(inp) for w in workers[:2]], enable_asyncio=True, _max_inflight_executions=3) as graph:
        asyncio.run(main(graph))
        assert empty(graph)


def test_dropped_futures_make_room(workers: list[Any]) -> None:
    async def main(graph: Any) -> None:
        for value in range(30):
            await graph.execute_async(value)
        for value in range(10):
            futures = await graph.execute_async(value)
            assert await futures[0] == value
            del futures

    with compiled(lambda inp: [w.echo.bind(inp) for w in workers[:2]], enable_asyncio=True, _max_inflight_executions=3) as graph:
        asyncio.run(main(graph))
        assert empty(graph)


def test_failures(workers: list[Any]) -> None:
    async def main(graph: Any) -> None:
        for value in range(6):
            futures = await graph.execute_async(value)
            if value % 2:
                for future in futures:
                    with pytest.raises(ValueError, match=f"bad {value}"):
                        await future
                    with pytest.raises(ValueError, match="only be awaited upon once"):
                        await future
            else:
                assert await asyncio.gather(*futures) == [value, value]

    with compiled(lambda inp: [workers[0].fail_if_odd.bind(inp), workers[1].echo.bind(inp)], enable_asyncio=True) as graph:
        asyncio.run(main(graph))
        assert empty(graph)


@pytest.mark.parametrize("asked", [0, 1, 2, None])
def test_the_first_failure_ends_the_wait(workers: list[Any], gate: Gate, asked: int | None) -> None:
    async def main(graph: Any) -> None:
        futures = await graph.execute_async(6)
        with pytest.raises(ValueError, match="bad 6"):
            await asyncio.wait_for(asyncio.gather(*futures) if asked is None else _awaited(futures[asked]), 60)

    def build(inp: Any) -> Any:
        return [workers[0].hold.bind(inp, gate.path), workers[1].fail.bind(inp), workers[2].hold.bind(inp, gate.path)]

    with compiled(build, enable_asyncio=True) as graph:
        asyncio.run(main(graph))
        gate.open()


async def _awaited(future: Any) -> Any:
    return await future


def test_a_cancelled_waiter_changes_nothing(workers: list[Any], gate: Gate) -> None:
    async def main(graph: Any) -> None:
        futures = [await graph.execute_async(value) for value in range(3)]
        waiting = [asyncio.ensure_future(_awaited(future)) for future in futures[1]]
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        assert all(isinstance(gone, asyncio.CancelledError) for gone in await asyncio.gather(*waiting, return_exceptions=True))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaited(futures[2][0]), 0.05)
        gate.open()
        results = [await future for pair in futures for future in pair]
        assert results == [0, 1, 1, 2, 2, 3]

    with compiled(lambda inp: [workers[0].hold.bind(inp, gate.path), workers[1].add.bind(inp)], enable_asyncio=True) as graph:
        asyncio.run(main(graph))
        assert empty(graph)


def test_tasks_that_come_and_go(workers: list[Any], seed: int) -> None:
    """Some are cancelled while they submit or wait, some drop a future; each value that is awaited is the right one."""
    rng = random.Random(seed)
    checked: list[int] = []

    async def task(graph: Any, value: int, outputs: int) -> None:
        while True:
            try:
                futures = await graph.execute_async(value)
                break
            except RayCgraphCapacityExceeded:
                await asyncio.sleep(0.002)
        for output in rng.sample([0, 1], outputs):
            if value % 2:
                with pytest.raises(ValueError, match=f"bad {value}"):
                    await futures[output]
            else:
                assert await futures[output] == value + output
            checked.append(value)

    async def main(graph: Any) -> None:
        tasks = [asyncio.ensure_future(task(graph, value, rng.randrange(3))) for value in range(300)]
        while not all(one.done() for one in tasks):
            await asyncio.sleep(rng.random() * 0.004)
            rng.choice(tasks).cancel()
        for one in tasks:
            assert one.cancelled() or one.exception() is None
        del tasks, one
        gc.collect()
        assert await all_of(graph, 2) == [2, 3]

    def build(inp: Any) -> Any:
        return [workers[0].fail_if_odd.bind(inp), workers[1].add.bind(inp)]

    with compiled(build, enable_asyncio=True, _max_inflight_executions=5) as graph:
        asyncio.run(main(graph))
        assert checked
        assert empty(graph)


def test_an_actor_that_dies(workers: list[Any]) -> None:
    mortal = start(1)[0]

    async def main(graph: Any) -> None:
        assert await all_of(graph, "stay") == ["stay", "stay"]
        with pytest.raises(ActorDiedError, match="The actor died unexpectedly before finishing this task."):
            await asyncio.wait_for(all_of(graph, "go"), 60)

    with compiled(lambda inp: [mortal.die.bind(inp, "_exit"), workers[0].echo.bind(inp)], enable_asyncio=True) as graph:
        asyncio.run(main(graph))


def test_after_teardown(workers: list[Any]) -> None:
    async def main() -> None:
        graph = dag(lambda inp: workers[0].echo.bind(inp)).experimental_compile(enable_asyncio=True)
        future = await graph.execute_async(1)
        graph.teardown()
        with pytest.raises(RayChannelError, match="Channel closed."):
            await future
        with pytest.raises(RayChannelError, match="Channel closed."):
            await graph.execute_async(1)

    asyncio.run(main())


def test_an_async_actor_as_the_driver(cluster: None) -> None:
    replica = AsyncReplica.remote()
    assert ray.get([replica.call.remote(value) for value in range(50)], timeout=60) == [value + 2 for value in range(50)]
    ray.get(replica.end.remote())
    ray.kill(replica)
