"""What is launched on a device whose code runs on streams, in which order: a log of it, without any device.

The stand-in for a GPU runs code at once, so there a wait that is left out does no harm; here it does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raycomm import InputNode, MultiOutputNode, bind
from raycomm.channel.device import COPIED_UP_TO, Arriving, DeviceReader, DeviceWriter
from raycomm.device import Received
from raycomm.errors import CommunicatorClosedError
from raycomm.graph.build import build
from raycomm.graph.collective import allreduce
from raycomm.options import Options
from raycomm.plan.actions import Plan
from raycomm.plan.devices import on_devices
from raycomm.plan.lowering import lower
from raycomm.plan.places import Place
from raycomm.plan.transfer import Recv, Send
from raycomm.runtime.transfers import Transfers
from tests.unit.stub_actors import actor

Log = list[tuple[Any, ...]]


class Event:
    def __init__(self, name: str, *, complete: bool = False, failure: Exception | None = None) -> None:
        self.name = name
        self.complete = complete
        self.failure = failure

    def synchronize(self, limit_s: float | None = None) -> None:
        self.complete = True
        if self.failure is not None:
            raise self.failure


class Stream:
    def __init__(self, log: Log, name: str, device: Any) -> None:
        self._log = log
        self.name = name
        self.device = device
        self._records = 0

    def record(self) -> Event:
        self._records += 1
        self._log.append(("record", self.name))
        return Event(f"{self.name} {self._records}")

    def wait(self, event: Event) -> None:
        self._log.append(("wait", self.name, event.name))


class Device:
    name = "gpu"

    def __init__(self, log: Log) -> None:
        self._log = log
        self.computing = Stream(log, "compute", self)
        self._streams: dict[str, Stream] = {}

    def stream(self, name: str) -> Stream:
        return self._streams.setdefault(name, Stream(self._log, name, self))

    def current_stream(self) -> Stream:
        return self.computing

    def allocate(self, shape: Any, dtype: Any, stream: Stream) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._log.append(("keep", tensor.data_ptr(), stream.name))

    def holds(self, tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor)


class Link:
    """One end; what arrives is zeros, once somebody waits for it."""

    def __init__(self, log: Log, device: Device, rank: int = 0, size: int = 2, name: str = "link") -> None:
        self._log = log
        self.device = device
        self.rank = rank
        self.size = size
        self.name = name
        self._count = 0
        self.sent: list[torch.Tensor] = []
        self.aborted = False

    def poll(self) -> None:
        pass

    def abort(self, limit_s: float) -> None:
        self.aborted = True

    def _event(self, what: str, stream: Stream) -> Event:
        self._count += 1
        self._log.append((what, stream.name))
        return Event(f"{self.name} {what} {self._count}")

    def send(self, tensor: torch.Tensor, peer: int, *, stream: Stream) -> Event:
        self.sent.append(tensor)
        return self._event("send", stream)

    def recv(self, shape: Any, dtype: Any, peer: int, *, stream: Stream) -> Received:
        return Received(torch.zeros(shape, dtype=dtype), self._event("recv", stream))

    def broadcast(self, tensor: torch.Tensor, root: int, *, stream: Stream) -> Received:
        self.sent.append(tensor)
        return Received(tensor, self._event("broadcast", stream))

    def allreduce(self, tensor: torch.Tensor, op: str, *, stream: Stream) -> Received:
        self.sent.append(tensor)
        return Received(torch.zeros_like(tensor), self._event("allreduce", stream))


class Records:
    def __init__(self) -> None:
        self.messages: deque[Any] = deque()

    def write(self, value: Any, timeout: float = -1.0) -> None:
        self.messages.append(value)

    def read(self, timeout: float = -1.0) -> Any:
        return self.messages.popleft()


@pytest.fixture
def log() -> Log:
    return []


def written(log: Log, tensor: Any, **options: Any) -> tuple[DeviceWriter, Link]:
    device = Device(log)
    link = Link(log, device)
    writer = DeviceWriter(Records(), link, 1, device.stream("out"), name="W1.forward#0", **options)  # type: ignore[arg-type]
    writer.write(tensor)
    return writer, link


def test_a_send_waits_for_what_makes_the_value(log: Log) -> None:
    _, link = written(log, {"a": torch.ones(3), "b": [torch.ones(2)]})
    assert log == [("record", "compute"), ("wait", "out", "compute 1"), ("send", "out"), ("send", "out")]
    assert len(link.sent) == 2


def test_a_value_without_tensors_launches_nothing(log: Log) -> None:
    written(log, [1, "text"])
    assert log == []


def test_what_is_sent_is_a_copy_up_to_a_size(log: Log) -> None:
    tensor = torch.ones(10)
    writer, link = written(log, tensor)
    assert link.sent[0].data_ptr() != tensor.data_ptr()
    assert writer.lent == []


@pytest.mark.parametrize("keeps", [True, False])
def test_large_memory_is_lent_unless_its_maker_keeps_it(log: Log, keeps: bool) -> None:
    large = torch.empty(COPIED_UP_TO + 1, dtype=torch.uint8)
    writer, link = written(log, [large, torch.ones(1)], keeps=keeps)
    assert link.sent[0].data_ptr() == large.data_ptr()
    assert [event.name for event in writer.lent] == ([] if keeps else ["link send 1"])  # type: ignore[attr-defined]


def test_what_still_arrives_is_sent_behind_it_and_not_copied(log: Log) -> None:
    device = Device(log)
    link = Link(log, device)
    writer = DeviceWriter(Records(), link, 1, device.stream("out"), name="W1.allreduce#0")  # type: ignore[arg-type]
    tensor = torch.ones(10)
    writer.write(tensor, after=[Event("collective")])  # type: ignore[list-item]
    assert log[:3] == [("wait", "out", "collective"), ("record", "compute"), ("wait", "out", "compute 1")]
    assert link.sent[0].data_ptr() == tensor.data_ptr()
    assert [event.name for event in writer.lent] == ["link send 1"]  # type: ignore[attr-defined]


def test_a_value_is_joined_by_waits_and_kept_for_who_uses_it(log: Log) -> None:
    records = Records()
    device = Device(log)
    writer = DeviceWriter(records, Link([], Device([])), 1, Device([]).stream("out"), name="v")  # type: ignore[arg-type]
    writer.write([torch.ones(3), torch.ones(2)])
    value = DeviceReader(records, Link(log, device, 1), 0, device.stream("in"), name="v").read()  # type: ignore[arg-type]
    assert isinstance(value, Arriving)
    assert log == [("recv", "in"), ("recv", "in")]
    value.join(device.computing)  # type: ignore[arg-type]
    tensors = value.value()
    assert log[2:] == [
        ("wait", "compute", "link recv 1"),
        ("wait", "compute", "link recv 2"),
        *(("keep", tensor.data_ptr(), "compute") for tensor in tensors),
    ]


class Arena:
    """As much of one as transfers use."""

    def __init__(self, log: Log) -> None:
        self.records: dict[int, Records] = {}
        self.closed = (0, 0)
        self.at_driver = (0, 0)
        self.core = SimpleNamespace(
            await_transfer=lambda channel, writer: log.append(("told", channel)),
            look_for_dead=lambda: False,
            closed_at=lambda process: self.at_driver,
            mark=lambda place: None,
        )

    def writer(self, channels: Any) -> Records:
        return self.records.setdefault(channels[0], Records())

    def reader(self, writer: int, channel: int, place: int, *, drain: bool, first: bool = False) -> Records:
        return self.records.setdefault(channel, Records())


class Steps:
    """Transfers of one actor of a plan, whose other end is this test."""

    def __init__(self, log: Log, plan: Plan, label: str) -> None:
        self.device = Device(log)
        self.arena = Arena(log)
        self.actor = next(entry for entry in plan.actors if entry.process.label == label)
        process = self.actor.process.index
        ends = {link.id: Link(log, self.device, int(process != link.writer), name=f"link{link.id}") for link in plan.links}
        group = Link(log, self.device, 0, name="group0")
        links = SimpleNamespace(
            end=lambda link: (ends[link], 1 - ends[link].rank), member=lambda _: group, on_streams=True, late=None
        )
        self.registers: list[Any] = [None] * self.actor.registers
        rest: Any = (self.arena, Options(), links, self.registers)
        failed: Callable[..., Any] = lambda *_: pytest.fail("nothing fails here")  # noqa: E731
        self.transfers = Transfers(plan, self.actor, *rest, failed, failed, lambda: 0)

    def before(self, kind: str) -> None:
        """Run what comes before the first action of a kind."""
        place = next(place for place, action in enumerate(self.actor.actions) if type(action).__name__ == kind)
        for step in self.transfers.before(place):
            step()

    def action(self, kind: type) -> Any:
        return next(action for action in self.actor.actions if isinstance(action, kind))


def hinted(*, keeps: bool = False) -> Plan:
    with InputNode() as x:
        value = bind(actor("A").forward, x).with_tensor_transport("nccl")
        if keeps:
            value.with_channel_options(sender_keeps=True)
        last = bind(actor("B").forward, value)
    graph = build(MultiOutputNode([last]))
    return on_devices(lower(graph, "hinted"), graph, {1: Place.gpu("cuda:0", "one"), 2: Place.gpu("cuda:0", "two")})


@pytest.mark.parametrize("keeps", [True, False])
def test_the_next_call_waits_for_the_sends_of_what_it_may_write_to(log: Log, keeps: bool) -> None:
    steps = Steps(log, hinted(keeps=keeps), "A")
    send = steps.action(Send)
    steps.registers[send.register] = torch.empty(COPIED_UP_TO + 1, dtype=torch.uint8)
    steps.transfers.send(send)()
    log.clear()
    steps.before("Compute")
    assert log == ([] if keeps else [("wait", "compute", "link0 send 1")])
    log.clear()
    steps.before("Compute")
    assert log == []


def received(log: Log) -> tuple[Steps, Any]:
    """An actor whose call is about to be launched on what it receives."""
    steps = Steps(log, hinted(), "B")
    recv = steps.action(Recv)
    origin = Steps([], hinted(), "A")
    send = origin.action(Send)
    origin.registers[send.register] = torch.ones(4)
    origin.transfers.send(send)()
    take = steps.transfers.recv(recv)
    steps.arena.records[recv.channel].messages += origin.arena.records[send.channel].messages
    take()
    arriving = steps.registers[recv.register]
    log.clear()
    steps.before("Compute")
    return steps, arriving.events[0]


def test_a_call_is_launched_behind_its_receives_and_no_host_waits(log: Log) -> None:
    steps, event = received(log)
    assert ("wait", "compute", "link0 recv 1") in log
    assert not event.complete
    assert type(steps.registers[steps.action(Recv).register]) is torch.Tensor


def test_before_anything_leaves_the_host_waits_for_what_arrived(log: Log) -> None:
    steps, event = received(log)
    log.clear()
    steps.before("Write")
    assert event.complete
    assert log == [("told", steps.action(Recv).channel)]


def test_nothing_leaves_after_a_link_has_failed(log: Log) -> None:
    steps, event = received(log)
    event.failure = CommunicatorClosedError("aborted")
    steps.arena.closed = (4, 1)
    with pytest.raises(Exception, match="4") as caught:
        steps.before("Write")
    assert type(caught.value).__name__ == "Closed"


def test_nothing_leaves_after_the_graph_has_ended_at_the_driver(log: Log) -> None:
    """What arrived, from an actor whose own link failed, may be made of memory that nothing had come into."""
    steps, _ = received(log)
    steps.arena.at_driver = (4, 1)
    with pytest.raises(Exception, match="4") as caught:
        steps.before("Write")
    assert type(caught.value).__name__ == "Closed"


def test_a_collective_is_launched_behind_what_makes_its_tensors(log: Log) -> None:
    with InputNode() as x:
        both = allreduce([bind(actor(name).forward, x) for name in ("A", "B")], communicator="nccl")
    graph = build(MultiOutputNode(both))
    plan = on_devices(lower(graph, "reduced"), graph, {1: Place.gpu("cuda:0", "one"), 2: Place.gpu("cuda:0", "two")})
    steps = Steps(log, plan, "A")
    action = next(action for action in steps.actor.actions if type(action).__name__ == "Collective")
    tensor = steps.registers[action.args[0]] = torch.ones(5)
    theirs = steps.arena.records.setdefault(action.parts[1], Records())
    theirs.messages.append(((("device", "float32", (5,)),),))
    place = steps.actor.actions.index(action)
    steps.transfers.exchange(action, place)()
    on = f"stream {action.stream}"
    assert log == [("record", "compute"), ("wait", on, "compute 1"), ("allreduce", on)]
    assert type(steps.registers[action.outputs[0]]) is Arriving
    (sent,) = steps.transfers._links.member(0).sent
    assert sent.data_ptr() != tensor.data_ptr()


class Host(Device):
    """Where code runs on the host, beside the GPU."""

    name = "host"

    def current_stream(self) -> Any:
        return None

    def holds(self, tensor: object) -> bool:
        return False


@pytest.mark.parametrize("apart", [True, False])
def test_the_host_waits_for_a_result_that_is_sent_on_over_another_device(log: Log, apart: bool) -> None:
    with InputNode() as x:
        one, other = allreduce([bind(actor(name).forward, x) for name in ("A", "B")], communicator="nccl")
        last = bind(actor("C").forward, one.with_tensor_transport("gloo" if apart else "nccl"))
    graph = build(MultiOutputNode([last, other]))
    plan = on_devices(lower(graph, "on"), graph, {process: Place.gpu("cuda:0", f"GPU-{process}") for process in (1, 2, 3)})
    steps = Steps(log, plan, "A")
    send = steps.action(Send)
    link = steps.transfers._links.end(send.link)[0]
    if apart:
        link.device = Host(log)  # type: ignore[assignment]
    group: Any = steps.transfers._links.member(0)
    came = group.allreduce(torch.ones(5), "sum", stream=steps.device.stream("stream 1"))
    steps.registers[send.register] = Arriving(lambda: came.tensor, [came], steps.device)  # type: ignore[arg-type]
    log.clear()
    steps.before("Send")
    assert came.event.complete is apart
    assert (type(steps.registers[send.register]) is torch.Tensor) is apart
    steps.transfers.send(send)()
    assert [sent.data_ptr() for sent in link.sent] == ([] if apart else [came.tensor.data_ptr()])
