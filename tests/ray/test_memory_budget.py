"""A budget of shared memory: who waits for it, what fails when it is used up, and what goes on all the same."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
import ray
import torch

import raycomm
from raycomm import InputNode, MultiOutputNode, SharedMemoryError, bind
from tests.ray.workers import PATIENCE_S, chain, start, until

pytestmark = pytest.mark.usefixtures("cluster")


async def awaited(ref: Any) -> Any:
    return await ref


def test_dropped_results_release_their_memory(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].zeros), shm_limit_bytes=16 << 20, max_inflight=2) as graph:
        for _ in range(50):
            graph.execute(2 << 20)
        assert graph.execute(2 << 20).get().nbytes == 2 << 20


def test_memory_held_by_messages_on_their_way_is_waited_for(workers: list[Any]) -> None:
    worker = start(1)[0]
    with raycomm.compile(chain(worker.note, worker.zeros), shm_limit_bytes=8 << 20, max_inflight=10) as graph:
        refs = [graph.execute(2 << 20) for _ in range(10)]
        # Nothing is fetched yet. A writer that does not wait runs through all ten in this time; one that does stays in the fifth.
        end = time.monotonic() + 1
        while time.monotonic() < end and len(ray.get(worker.seen_so_far.remote())) < 10:
            pass
        while refs:
            assert refs.pop(0).get(timeout=PATIENCE_S).nbytes == 2 << 20


@pytest.mark.parametrize("how", ["get", "await", "wait", "done"])
def test_results_of_one_output_do_not_stop_another(workers: list[Any], how: str) -> None:
    """All memory holds results of the first output that nobody has asked for; the second one comes all the same."""
    size = 2 << 20
    with InputNode() as n:
        root = MultiOutputNode([bind(workers[0].zeros, n), bind(workers[1].echo, bind(workers[0].echo, n))])
    with raycomm.compile(root, shm_limit_bytes=4 * size, max_inflight=8) as graph:
        refs = [graph.execute(size, timeout=PATIENCE_S) for _ in range(8)]
        last = refs[-1][1]
        if how == "wait":
            assert raycomm.wait([last], timeout=PATIENCE_S) == ([last], [])
        elif how == "done":
            until(last.done, "the last result")
        assert (asyncio.run(awaited(last)) if how == "await" else last.get(timeout=PATIENCE_S)) == size
        kept = 0
        for large, small in refs:  # what found no memory failed, and nothing but that
            assert small.get(timeout=PATIENCE_S) == size
            try:
                assert large.get(timeout=PATIENCE_S).nbytes == size
                kept += 1
            except SharedMemoryError:
                continue
        assert 1 <= kept <= 4


def test_no_memory_for_the_input(workers: list[Any]) -> None:
    """The actor holds every array it is sent until the pool is full."""
    worker = start(1)[0]
    with raycomm.compile(chain(worker.keep), shm_limit_bytes=16 << 20, name="g") as graph:
        sent = 0
        with pytest.raises(SharedMemoryError) as caught:
            for _ in range(100):
                assert graph.execute(np.zeros(3 << 20, np.uint8), timeout=PATIENCE_S).get() == sent + 1
                sent += 1
        assert 3 <= sent <= 5
        error = caught.value
        assert isinstance(error, MemoryError)
        assert (error.graph, error.limit_bytes, error.wanted_bytes >= 3 << 20) == ("g", 16 << 20, True)
        assert 0 <= error.free_bytes <= (16 << 20) - sent * (3 << 20)
        assert f"{error.free_bytes / (1 << 20):.1f} MiB free of 16.0 MiB" in str(error)
        assert "WorkerBody" in str(error.holders)
        for part in ("'g'", "the input", "WorkerBody", "shm_limit_bytes", "Let go"):
            assert part in str(error)
        assert graph.execute(5).get() == sent + 1  # a small one still passes
        ray.get(worker.let_go.remote())
        assert graph.execute(np.zeros(3 << 20, np.uint8)).get() == 1
        ray.get(worker.let_go.remote())


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_no_memory_for_a_result(workers: list[Any], kind: str) -> None:
    """The driver holds every result until the actor's pool is full: that execution fails, the graph goes on."""
    method = workers[0].zeros if kind == "numpy" else workers[0].echo
    argument: Any = 3 << 20 if kind == "numpy" else torch.zeros(3 << 20, dtype=torch.uint8)
    views: list[Any] = []
    with raycomm.compile(chain(method), shm_limit_bytes=24 << 20, name="g") as graph:
        with pytest.raises(SharedMemoryError) as caught:
            for _ in range(100):
                views.append(graph.execute(argument).get())
        assert 3 <= len(views) <= 8
        assert "driver" in str(caught.value.holders)
        assert "shm_limit_bytes" in str(caught.value)
        del caught
        assert all(int(view.sum()) == 0 for view in views)
        views.clear()
        for _ in range(20):
            assert graph.execute(argument).get().nbytes == 3 << 20


def test_a_small_view_of_a_big_array_holds_it(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].zeros), shm_limit_bytes=8 << 20) as graph:
        slices = []
        with pytest.raises(SharedMemoryError):
            for _ in range(20):
                slices.append(graph.execute(2 << 20).get()[:1])
        slices.clear()
        assert graph.execute(2 << 20).get().nbytes == 2 << 20


def test_a_result_larger_than_the_pool(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].zeros), shm_limit_bytes=4 << 20) as graph:
        with pytest.raises(SharedMemoryError, match=r"no 8\.0 MiB of shared memory.*of 4.0 MiB"):
            graph.execute(8 << 20).get()
        assert graph.execute(10).get().nbytes == 10


def test_a_forked_data_loader_does_no_harm(workers: list[Any]) -> None:
    """Worker processes inherit received tensors, index them and exit; the parent's memory stays as it was."""
    with raycomm.compile(chain(workers[0].echo), shm_limit_bytes=32 << 20) as graph:
        sent = torch.arange(1 << 20, dtype=torch.int32)
        got = graph.execute(sent).get()
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(got.view(64, -1)), batch_size=4, num_workers=2, multiprocessing_context="fork"
        )
        for _ in range(2):
            assert sum(int(batch[0][:, 0].to(torch.int64).sum()) for batch in loader) == int(sent.view(64, -1)[:, 0].sum())
        # The block is still this tensor's: what comes now lies elsewhere.
        for value in range(5):
            other = graph.execute(torch.full((1 << 20,), value, dtype=torch.int32)).get()
            assert int(other[-1]) == value
        assert torch.equal(got, sent)
        del got, other, loader
        views = []
        with pytest.raises(SharedMemoryError):
            for _ in range(20):
                views.append(graph.execute(sent).get())
        assert len(views) >= 2
