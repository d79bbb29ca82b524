"""What an actor can take part in, from what it finds; and what this process finds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from raycomm.device import found as found_here
from raycomm.device.found import Found, look_around
from raycomm.errors import CompileError
from raycomm.graph.build import build
from raycomm.graph.calls import bind
from raycomm.graph.nodes import InputNode
from raycomm.plan.actions import Plan
from raycomm.plan.devices import on_devices
from raycomm.plan.lowering import lower
from raycomm.plan.places import Missing, Place
from raycomm.plan.transfer import Backend
from raycomm.runtime.places import place_of
from tests.unit.stub_actors import actor

WHOLE = Found(cuda=13, device="cuda:1", hardware="GPU-7", driver=True, cupy_cuda=13, nccl=23203, nccl_files=("/a",), pid=5)


def test_all_there_is() -> None:
    place = place_of(WHOLE)
    assert (place.device, place.hardware, place.accelerator, place.gloo) == ("cuda:1", "GPU-7", Backend.NCCL, Backend.GLOO)


@pytest.mark.parametrize(
    ("lack", "what", "remedy"),
    [
        ({"device": None}, "it has no GPU", "num_gpus=1"),
        ({"device": None, "cuda": None}, "its torch is built without CUDA", "install torch for CUDA"),
        ({"device": None, "cuda": None, "driver": False}, "it has no GPU", "num_gpus=1"),
        ({"cuda": None}, "its torch is built for something other than CUDA", "install torch for CUDA"),
        ({"cuda": None, "driver": False}, "its torch is built for something other than CUDA", "or use 'auto' or 'shm'"),
        ({"cupy": "No module named 'cupy'", "cupy_cuda": 0}, "cupy, which NCCL is used through", "pip install cupy-cuda13x"),
        ({"cupy_cuda": 12}, "its torch is built for CUDA 13 and its cupy for CUDA 12", "pip install cupy-cuda13x"),
        ({"nccl": 0}, "cupy finds no NCCL there", "pip install nvidia-nccl-cu13"),
        ({"nccl_files": ("/a", "/b")}, "two NCCL libraries there, /a and /b", "pip install nvidia-nccl-cu13"),
    ],
)
def test_what_is_lacking_is_said_with_what_to_do(lack: dict[str, object], what: str, remedy: str) -> None:
    place = place_of(replace(WHOLE, **lack))  # type: ignore[arg-type]
    assert isinstance(place.accelerator, Missing)
    assert what in place.accelerator.what
    assert remedy in place.accelerator.remedy
    assert place.gloo is Backend.GLOO  # which needs none of that


def test_auto_is_shared_memory_where_torch_is_for_other_gpus_than_those_of_nccl() -> None:
    """What asks for an accelerator is refused there. The GPU is one all the same, for tensors that a hint wants on it."""
    places = {1: place_of(WHOLE), 2: place_of(replace(WHOLE, hardware="GPU-8", cuda=None, driver=False))}
    with pytest.raises(CompileError, match=r"actor W2: its torch is built for something other than CUDA.*install torch for CUDA"):
        planned("accelerator", places)
    plan = planned("auto", places, "gpu")
    assert not plan.links
    because = "actor W2: its torch is built for something other than CUDA, and NCCL is used through cupy for CUDA"
    assert [channel.tensors.because for channel in plan.channels if channel.tensors is not None] == [because]


def planned(transport: str, places: dict[int, Place], device: str = "default") -> Plan:
    value = bind(actor("W1").forward, InputNode()).with_tensor_transport(transport, device)
    graph = build(bind(actor("W2").forward, value))
    return on_devices(lower(graph, "hinted"), graph, places)


def test_without_torch_there_is_shared_memory_only() -> None:
    place = place_of(Found(torch="No module named 'torch'"))
    assert isinstance(place.gloo, Missing)
    assert "torch cannot be imported there (No module named 'torch')" in place.gloo.what
    assert place.accelerator == place.gloo


def test_without_gloo() -> None:
    place = place_of(replace(WHOLE, gloo=False))
    assert isinstance(place.gloo, Missing)
    assert place.accelerator is Backend.NCCL


@pytest.mark.parametrize(("version", "alike"), [(22900, True), (23000, False)])
def test_processes_that_share_a_gpu_have_ranks_of_their_own_where_nccl_takes_that(version: int, alike: bool) -> None:
    one, other = (place_of(replace(WHOLE, shares_gpu=True, nccl=version, pid=pid)) for pid in (5, 6))
    assert (one.hardware == other.hardware) is alike


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_this_process() -> None:
    found = look_around()
    assert (found.torch, found.gloo, found.device) == (None, True, None)
    assert place_of(found).gloo is Backend.GLOO


def test_a_torch_for_other_gpus_than_those_of_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of cupy, which would look for libraries of CUDA."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-9"))
    monkeypatch.setattr(found_here, "_of_cupy", lambda: pytest.fail("asked cupy"))
    found = look_around()
    assert (found.device, found.hardware, found.cuda) == ("cuda:0", "GPU-9", None)
    assert isinstance(place_of(found).accelerator, Missing)
