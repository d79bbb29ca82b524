"""`install()`: Ray's CPU communicator on edges and in collectives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from ray.dag import InputNode, MultiOutputNode
from ray.experimental import collective
from ray.experimental.channel.cpu_communicator import CPUCommunicator

import raycomm
from tests.ray.install_actors import TensorWorker
from tests.ray.install_fixtures import compiled

pytestmark = pytest.mark.usefixtures("cluster", "installed")


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    raycomm.install()
    yield
    raycomm.uninstall()


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    workers = [TensorWorker.remote() for _ in range(2)]
    ray.get([worker.make.remote((1,), torch.float16, 0) for worker in workers])  # they load torch, which may take 10 s
    return workers


def test_an_edge_with_a_communicator(workers: list[Any]) -> None:
    sender, receiver = workers
    group = CPUCommunicator(2, workers)

    def build(inp: Any) -> Any:
        return receiver.describe.bind(sender.make.bind(inp.shape, inp.dtype, inp[0]).with_tensor_transport(transport=group))

    with compiled(build) as graph:
        for value in range(3):
            assert ray.get(graph.execute(value, shape=(10,), dtype=torch.float16)) == (value, (10,), torch.float16)


def test_allreduce(workers: list[Any]) -> None:
    group = CPUCommunicator(2, workers)

    def build(inp: Any) -> Any:
        made = [worker.make.bind(inp.shape, torch.float16, inp[index]) for index, worker in enumerate(workers)]
        first, second = collective.allreduce.bind(made, transport=group)
        return [workers[0].describe.bind(first), workers[1].describe.bind(first), second]

    with compiled(build) as graph:
        for value in range(1, 4):
            shape = (10 * value,)
            one, two, tensor = ray.get(graph.execute(value, value + 1, shape=shape))
            assert one == two == (2 * value + 1, shape, torch.float16)
            assert torch.equal(tensor, torch.full(shape, 2 * value + 1, dtype=torch.float16))


def test_an_edge_beside_an_allreduce_does_not_block_it(workers: list[Any]) -> None:
    group = CPUCommunicator(2, workers)
    with InputNode() as inp:
        x, y, t = (workers[place].make.bind((10,), torch.float32, inp) for place in (0, 1, 0))
        t = t.with_tensor_transport(transport=group)
        reduced = collective.allreduce.bind([x, y], transport=group)
        node = MultiOutputNode([*reduced, workers[1].describe.bind(t)])
    graph = node.experimental_compile()
    for value in range(10):
        first, second, described = ray.get(graph.execute(value))
        assert torch.equal(first, torch.full((10,), 2.0 * value))
        assert torch.equal(second, first)
        assert described == (value, (10,), torch.float32)
    graph.teardown()


def test_shapes_that_do_not_fit_fail_one_execution(workers: list[Any]) -> None:
    """In Ray the graph is dead afterwards."""
    group = CPUCommunicator(2, workers)

    def build(inp: Any) -> Any:
        made = [worker.make.bind(inp[index], torch.float32, 1) for index, worker in enumerate(workers)]
        return collective.allreduce.bind(made, transport=group)

    with compiled(build) as graph:
        for shapes, fit in (((2,), (2,)), True), (((2,), (3,)), False), (((4,), (4,)), True):
            refs = graph.execute(*shapes)
            if fit:
                assert all(torch.equal(tensor, torch.full(shapes[0], 2.0)) for tensor in ray.get(refs))
            else:
                with pytest.raises(raycomm.RaycommError, match=r"\(2,\).*\(3,\)"):
                    ray.get(refs)
