"""Hints for GPUs where there are none: refused by name, run on what stands in for them, or on CPU tensors over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import ray
import torch

import raycomm
from raycomm import CompileError, InputNode, MultiOutputNode, bind
from tests.ray.tensor_actors import AsyncTensors, Tensors
from tests.ray.workers import PATIENCE_S

pytestmark = [
    pytest.mark.usefixtures("cluster"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
]


@pytest.fixture(scope="module")
def actors(cluster: None) -> list[Any]:
    actors = [Tensors.remote() for _ in range(3)]
    ray.get([actor.pid.remote() for actor in actors])
    return actors


@pytest.mark.parametrize("hint", [{"transport": "nccl"}, {"transport": "accelerator"}, {"device": "gpu"}])
def test_a_gpu_is_asked_for_and_there_is_none(actors: list[Any], hint: dict[str, str]) -> None:
    """By actor and value, with what to do; nothing is left, so the same graph can be compiled at once."""
    with InputNode() as x:
        node = bind(actors[1].sum, bind(actors[0].make, x).with_tensor_transport(**hint))
    with pytest.raises(CompileError, match=r"of node .*make#0: actor .*it has no GPU.*num_gpus=1") as caught:
        raycomm.compile(node)
    assert caught.value.argument == next(iter(hint))
    with raycomm.compile(node, device="simulated") as graph:
        assert graph.execute(2).get(PATIENCE_S) == 2000


def test_auto_says_why_it_stays_in_shared_memory(actors: list[Any]) -> None:
    with InputNode() as x:
        made = bind(actors[0].make, x).with_tensor_transport("auto")
        node = MultiOutputNode([bind(actors[1].sum, made), made])
    with raycomm.compile(node) as graph:
        assert "it has no GPU" in str(graph.plan)
        total, tensor = (ref.get(PATIENCE_S) for ref in graph.execute(3))
        assert (total, int(tensor[0])) == (3000, 3)


@ray.remote(num_cpus=0)
class Slow:
    def __init__(self, path: str) -> None:
        import time
        from pathlib import Path

        while not Path(path).exists():
            time.sleep(0.01)

    def make(self, number: int) -> Any:
        return torch.full((10,), number)


def test_asking_what_actors_have_ends_in_time(actors: list[Any], tmp_path: Any) -> None:
    gate = tmp_path / "gate"
    late = Slow.remote(str(gate))
    with InputNode() as x:
        node = bind(actors[1].sum, bind(late.make, x).with_tensor_transport("auto"))
    with pytest.raises(raycomm.ChannelTimeoutError, match=r"not ready within 0\.5 s: set-up waits for .*Slow"):
        raycomm.compile(node, compile_timeout=0.5)
    gate.touch()
    with raycomm.compile(node, compile_timeout=PATIENCE_S) as graph:
        assert graph.execute(3).get(PATIENCE_S) == 30


def test_async_actors(cluster: None) -> None:
    two = [AsyncTensors.remote() for _ in range(2)]
    with InputNode() as x:
        node = bind(two[1].sum, bind(two[0].make, x).with_tensor_transport("gloo"))
    with raycomm.compile(node) as graph:
        refs = [graph.execute(number) for number in range(6)]
        assert [ref.get(PATIENCE_S) for ref in refs] == [1000 * number for number in range(6)]


def test_more_links_than_a_device_has_queues(actors: list[Any]) -> None:
    with InputNode() as x:
        made = [bind(actor.make, x).with_tensor_transport("nccl") for actor in actors]
        node = MultiOutputNode(
            [bind(actors[0].sum, made[1], made[2]), bind(actors[1].sum, made[0]), bind(actors[2].sum, made[1])]
        )
    with raycomm.compile(node, device="simulated", max_links=2) as graph:
        assert "instead of link 3 links limit 2" in str(graph.plan)
        assert [ref.get(PATIENCE_S) for ref in graph.execute(2)] == [4000, 2000, 2000]


@pytest.mark.parametrize("policy", ["link", "direction", "shared"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_graph_for_gpus_without_one(actors: list[Any], policy: str, overlap: bool) -> None:
    """Diamond and skip connection; every hint that asks for a GPU is met by what stands in for one."""
    with InputNode() as x:
        made = bind(actors[0].make, x).with_tensor_transport("nccl", device="gpu")
        left = bind(actors[1].twice, made).with_tensor_transport("accelerator", _static_shape=True)
        right = bind(actors[2].twice, made).with_tensor_transport("auto", _direct_return=True)
        node = bind(actors[0].sum, left, right, made)
    with raycomm.compile(node, device="simulated", stream_policy=policy, overlap=overlap) as graph:
        assert "over simulated" in str(graph.plan)
        assert f"streams 1 {policy}" in str(graph.plan)
        refs = [graph.execute(number) for number in range(6)]
        assert [ref.get(PATIENCE_S) for ref in refs] == [5000 * number for number in range(6)]
