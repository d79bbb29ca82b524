"""Where hints put tensors: the device "meta" stands for the other one, since copies to it need no hardware."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raycomm import InputNode, bind
from raycomm.channel.moving import move
from raycomm.codec import Failure
from raycomm.codec import tensor as codec_tensor
from raycomm.graph.build import build
from raycomm.options import Options
from raycomm.plan.actions import Plan, Read, Write
from raycomm.plan.devices import on_devices
from raycomm.plan.lowering import lower
from raycomm.plan.places import Place
from raycomm.runtime import hinted_devices
from raycomm.runtime.hinted_devices import HintedDevices
from tests.unit.stub_actors import actor


def plan_with(device: str) -> Plan:
    with InputNode() as x:
        node = bind(actor("W1").forward, x).with_tensor_transport("shm", device=device)
        node = bind(actor("W2").forward, node)
    graph = build(node)
    places = {process: Place.gpu("cuda:0", str(process)) for process in (1, 2)}
    return on_devices(lower(graph, "hinted"), graph, places)


def of(plan: Plan, process: int, registers: list[Any], options: Options | None = None) -> HintedDevices:
    return HintedDevices(plan, options or Options(), registers, f"W{process}", lambda: 7)


def only(plan: Plan, process: int, kind: type) -> Any:
    return next(action for action in plan.actors[process - 1].actions if isinstance(action, kind))


def test_what_moves_keeps_its_kind_and_its_place() -> None:
    tensor = torch.ones(2, requires_grad=True)
    value = {"a": [tensor, tensor], "p": torch.nn.Parameter(torch.ones(3)), "n": 3, "there": torch.ones(1, device="meta")}
    moved = move("meta", "cpu")(value)
    assert list(moved) == ["a", "p", "n", "there"]
    assert moved["a"][0] is moved["a"][1]
    assert (moved["a"][0].device.type, moved["a"][0].requires_grad, moved["a"][0].is_leaf) == ("meta", True, True)
    assert (type(moved["p"]), moved["p"].device.type) == (torch.nn.Parameter, "meta")
    assert moved["there"] is value["there"]
    plain = {"n": [1, 2]}
    assert move("meta", "cpu")(plain) is plain


def test_a_reader_that_wants_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_tensor, "has_gpu", lambda: True)
    monkeypatch.setattr(hinted_devices, "_GPU", "meta")
    plan = plan_with("gpu")
    read = only(plan, 2, Read)
    registers: list[Any] = [None] * 4
    devices = of(plan, 2, registers)
    assert devices.any_of(plan.actors[1])
    assert not of(plan, 1, []).any_of(plan.actors[0])
    (step,) = devices.after(read)
    registers[read.register] = [torch.ones(2)]
    step()
    assert registers[read.register][0].device.type == "meta"
    failure = registers[read.register] = Failure.capture(ValueError("before"), "W1.forward", 7)
    step()
    assert registers[read.register] is failure


def test_readers_that_want_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get copies; the value stays as it is for calls of the actor that made it, and nothing keeps the copy."""
    monkeypatch.setattr(codec_tensor, "has_gpu", lambda: True)
    monkeypatch.setattr(hinted_devices, "_GPU", "cpu")
    monkeypatch.setattr(hinted_devices, "_HOST", "meta")
    plan = plan_with("cpu")
    write = only(plan, 1, Write)
    registers: list[Any] = [None] * 4
    tensor = registers[write.registers[0]] = torch.ones(2)
    written: list[Any] = []
    steps = of(plan, 1, registers).around(write, lambda action: lambda: written.append(registers[action.registers[0]]))
    for step in steps:
        step()
    assert written[0].device.type == "meta"
    assert registers == [tensor if place == write.registers[0] else None for place in range(5)]


def test_a_copy_that_fails_fails_the_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_tensor, "has_gpu", lambda: True)
    plan = plan_with("gpu")
    read = only(plan, 2, Read)
    registers: list[Any] = [None] * 4
    (step,) = of(plan, 2, registers).after(read)
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)  # cannot be walked through
    registers[read.register] = loop
    step()
    assert type(registers[read.register]) is Failure
    assert registers[read.register].origin == "W2 moving W1.forward#0 to the device of its hint"


@pytest.mark.parametrize("options", [Options(), Options(device="simulated")])
def test_without_a_gpu_nothing_is_done(options: Options) -> None:
    if torch.cuda.is_available() and options.device == "auto":
        pytest.skip("there is a GPU")
    plan = plan_with("gpu")
    assert of(plan, 2, [], options).after(only(plan, 2, Read)) == []
