"""What `ray.dag` graphs say beside their calls: collectives, channel options, transports, devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from ray.dag import InputNode as RayInputNode
from ray.dag import MultiOutputNode as RayMultiOutputNode
from ray.experimental import collective
from ray.experimental.channel.cpu_communicator import CPUCommunicator
from ray.experimental.util.types import ReduceOp as RayReduceOp

from raycomm.errors import CompileError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.collective import allgather, allreduce, reducescatter
from raycomm.graph.edges import with_channel_options
from raycomm.graph.model import CallValue, Collective, CollectiveKind, ReduceOp
from raycomm.graph.nodes import InputNode, MultiOutputNode
from raycomm.graph.tensor_hint import TensorHint
from raycomm.graph.tensor_transport import TensorDevice, TensorTransport
from raycomm.plan.lowering import lower
from raycomm.plan.verify import verify
from raycomm.ray_dag.read import ADAPTER
from tests.ray.read_actors import refused, two_actors


@pytest.fixture(scope="module")
def handles(cluster: None) -> Iterator[tuple[Any, Any]]:
    with two_actors() as both:
        yield both


@pytest.fixture
def communicator(handles: tuple[Any, Any]) -> Any:
    """Ray's communicator of both actors for host memory."""
    return CPUCommunicator(2, list(handles))


@pytest.mark.parametrize("kind", ["allreduce", "allgather", "reducescatter"])
@pytest.mark.parametrize("transport", ["default", "accelerator", "cpu communicator"])
def test_collective(handles: tuple[Any, Any], kind: str, transport: str, communicator: Any) -> None:
    """Ray's own word for the default is an accelerator, so that means the default here too."""
    w, v = handles
    inp = RayInputNode()
    values = [v.forward.bind(inp), w.forward.bind(inp)]
    given: list[Any] = {"default": [], "accelerator": ["accelerator"], "cpu communicator": [communicator]}[transport]
    args = given if kind == "allgather" or not given else [RayReduceOp.MAX, *given]
    results = getattr(collective, kind).bind(values, *args)
    graph = build(RayMultiOutputNode(results), ADAPTER)
    op = None if kind == "allgather" else ReduceOp.MAX if given else ReduceOp.SUM
    by = TensorTransport.SHM if transport == "cpu communicator" else TensorTransport.AUTO
    assert graph.collectives == (Collective(CollectiveKind(kind), op, None, (2, 3), by),)
    own = build(MultiOutputNode(own_collective(kind, op, by, [bind(v.forward, i := InputNode()), bind(w.forward, i)])), ADAPTER)
    assert graph == own
    verify(lower(graph, "collective"))


def own_collective(kind: str, op: ReduceOp | None, by: TensorTransport, nodes: list[Any]) -> list[Any]:
    make = {"allreduce": allreduce, "allgather": allgather, "reducescatter": reducescatter}[kind]
    return make(nodes, communicator=str(by)) if op is None else make(nodes, op, communicator=str(by))  # type: ignore[operator]


def test_collective_of_several_tensors_used_in_part(handles: tuple[Any, Any]) -> None:
    w, v = handles
    inp = RayInputNode()
    (a, b), (c, d) = w.split.bind(inp), v.split.bind(inp)
    results = collective.allreduce.bind([[a, c], [b, d]], RayReduceOp.AVG)
    graph = build(w.join.bind(results[0][1], d), ADAPTER)
    assert graph.collectives == (Collective(CollectiveKind.ALLREDUCE, ReduceOp.AVG, None, (2, 3)),)
    assert graph.nodes[2].args == (CallValue(0, 0), CallValue(0, 1))
    assert graph.nodes[4].args == (CallValue(2, 1), CallValue(1, 1))
    verify(lower(graph, "part"))


def test_own_collective_of_ray_nodes(handles: tuple[Any, Any]) -> None:
    w, v = handles
    inp = RayInputNode()
    first, _ = allreduce([w.forward.bind(inp), bind(v.forward, inp)])
    graph = build(v.forward.bind(first), ADAPTER)
    assert [node.method for node in graph.nodes] == ["forward", "forward", "allreduce", "allreduce", "forward"]
    with pytest.raises(CompileError, match="place 1 holds a value of type InputNode, which is no value that an actor makes"):
        allreduce([w.forward.bind(inp), inp])


class Accelerator(CPUCommunicator):  # type: ignore[misc]
    def get_transport_name(self) -> str:
        return "accelerator"


def test_collective_over_an_object_of_the_users(handles: tuple[Any, Any]) -> None:
    w, v = handles
    inp = RayInputNode()
    given = Accelerator(2, list(handles))
    results = collective.allreduce.bind([w.forward.bind(inp), v.forward.bind(inp)], transport=given)
    (whole,) = build(RayMultiOutputNode(results), ADAPTER).collectives
    assert whole.transport is TensorTransport.OWN
    assert whole.own is not None
    assert (whole.own.made, len(whole.own.members or ())) == (given, 2)


def test_collective_that_lacks_an_actor(handles: tuple[Any, Any]) -> None:
    """Ray's nodes do not know the raycomm nodes that use them, so nothing leads from the one to the other."""
    w, v = handles
    one, other = InputNode(), InputNode()
    results = collective.allreduce.bind([w.forward.bind(one), v.forward.bind(other)])
    message = r"collective Worker.allreduce joins 2 actors, but nothing leads to its nodes of Other#\w{6}; add their results"
    refused(results[0], message, "Worker.allreduce")
    with pytest.raises(CompileError, match="2 InputNodes"):
        build(RayMultiOutputNode(results), ADAPTER)


def test_channel_options(handles: tuple[Any, Any]) -> None:
    w, v = handles
    with RayInputNode() as inp:
        x = w.forward.bind(with_channel_options(inp.key, allow_pickle=False))
        assert with_channel_options(x, inline_bytes=4096) is x
        with_channel_options(x, slots=2)
        left, right = v.split.bind(x)
        with_channel_options(right, share_tensors=True)
    with_channel_options(inp, slots=64)
    assert not hasattr(type(inp), "_raycomm_channel_options")
    plan = lower(build(RayMultiOutputNode([left, right]), ADAPTER), "options")
    assert [str(channel) for channel in plan.channels] == [
        'channel 0 "input.key" 0 -> 1 slots 64 allow_pickle no',
        'channel 1 "Worker.forward#0" 1 -> 2 inline_bytes 4096 slots 2',
        'channel 2 "Other.split#1[0]" 2 -> 0',
        'channel 3 "Other.split#1[1]" 2 -> 0 share_tensors yes',
    ]
    with pytest.raises(CompileError, match="channel option slots=3 of node ClassMethodNode: give a power of two"):
        with_channel_options(x, slots=3)


@pytest.mark.parametrize("transport", ["nccl", "accelerator"])
def test_gpu_transport(handles: tuple[Any, Any], transport: str) -> None:
    w, v = handles
    inp = RayInputNode()
    x = w.forward.bind(inp).with_tensor_transport(transport)
    last = v.forward.bind(x)
    assert build(last, ADAPTER).hints == ((CallValue(0), TensorHint(TensorTransport.NCCL)),)
    x.with_tensor_transport(transport, _static_shape=True, _direct_return=True)
    promised = TensorHint(TensorTransport.NCCL, static_shape=True, direct_return=True)
    assert build(last, ADAPTER).hints == ((CallValue(0), promised),)


def test_device(handles: tuple[Any, Any]) -> None:
    w, _ = handles
    graph = build(w.forward.bind(RayInputNode()).with_tensor_transport("auto", device="cuda"), ADAPTER)
    assert graph.hints == ((CallValue(0), TensorHint(device=TensorDevice.GPU)),)


@pytest.mark.parametrize("transport", ["auto", "shm"])
def test_host_transport(handles: tuple[Any, Any], transport: str) -> None:
    w, _ = handles
    inp = RayInputNode().with_tensor_transport(transport)
    assert build(w.forward.bind(inp).with_tensor_transport(transport), ADAPTER)
