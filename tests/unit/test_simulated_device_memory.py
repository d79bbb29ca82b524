"""Memory of the simulated device: reads too early, writes and frees too early, and every way to wait in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raycomm.testing.simulated import Delays, Device, Group, Hazard, Poison, Queue, Tensor, World
from tests.unit.simulated_tensors import INSTANT, filled


def received(world: World, *, wait: bool, keep: bool, reuse: bool) -> tuple[Any, Device, Device]:
    """A value sent, its memory dropped and used again at once; what the consumer computes from what it received."""
    a, b = Device(world, "A"), Device(world, "B")
    link = Group(world, "link", [a, b])
    compute, out, into, consumer = a.stream("compute"), a.stream("out"), b.stream("in"), b.stream("compute")
    tensor = filled(compute, "value")
    out.wait(compute.record())
    link.post_send(0, 1, tensor, out)
    if keep:
        tensor.record_stream(out)
    if reuse:
        tensor.free()
        filled(compute, "other")
    came, result = b.allocate((), "term", into, "came"), b.allocate((), "term", consumer, "result")
    event = link.post_recv(1, 0, came, into)
    if wait:
        consumer.wait(event)
    consumer.compute("use", (came,), (result,), lambda given: [("used", *given)])
    b.synchronize()
    a.synchronize()
    return (result.block.content, a, b)


@pytest.mark.parametrize("seed", range(20))
def test_with_event_and_keep_alive_the_value_is_right(seed: int) -> None:
    content, a, b = received(World(seed), wait=True, keep=True, reuse=True)
    assert content == ("used", "value")
    assert a.faults == b.faults == []


def test_an_early_read_is_poison_and_a_fault() -> None:
    content, a, b = received(World(delays=INSTANT), wait=False, keep=True, reuse=False)
    assert isinstance(content, Poison)
    assert [fault.hazard for fault in b.faults] == [Hazard.EARLY_READ]
    assert "use on stream compute of B" in str(b.faults[0])
    assert a.faults == []


def test_memory_freed_before_it_was_sent_is_poison_and_a_fault() -> None:
    content, a, _ = received(World(delays=INSTANT), wait=True, keep=False, reuse=True)
    assert isinstance(content, Poison)
    assert {fault.hazard for fault in a.faults} == {Hazard.EARLY_FREE}
    assert "send to B on link on stream out of A" in str(a.faults[0])


@pytest.mark.parametrize("seed", range(50))
def test_leaving_out_a_duty_is_noticed_whatever_the_delays(seed: int) -> None:
    for wait, keep, hazard in ((False, True, Hazard.EARLY_READ), (True, False, Hazard.EARLY_FREE)):
        content, a, b = received(World(seed), wait=wait, keep=keep, reuse=True)
        assert content == ("used", "value") or isinstance(content, Poison)
        assert hazard in {fault.hazard for fault in a.faults + b.faults}


def test_what_happens_not_to_meet_but_is_not_ordered_is_a_fault() -> None:
    """Everything has long ended each time, but only by luck: nobody waited."""
    world = World(delays=INSTANT)
    device = Device(world, "A")
    left, right = device.stream("left"), device.stream("right")
    tensor = filled(left, 1)
    world.run(lambda: world.now > 50.0 or tensor.block.content == 1)
    right.compute("look", (tensor,))
    right.compute("overwrite", (), (tensor,), lambda _: [2])
    world.run()
    assert [(fault.hazard, fault.why) for fault in device.faults] == [
        (Hazard.EARLY_READ, "it does not wait for make on stream left of A, which writes to the memory"),
        (Hazard.OVERWRITE, "it does not wait for make on stream left of A, which uses the memory"),
    ]


@pytest.mark.parametrize("way", ["event on the device", "event on the host", "stream", "all", "message", "look"])
def test_every_way_of_waiting_orders(way: str) -> None:
    world = World(delays=INSTANT)
    device = Device(world, "A")
    left, right = device.stream("left"), device.stream("right")
    told = Queue(world, 1, "told")
    tensors: list[Tensor] = []

    def maker() -> Iterator[Any]:
        tensors.append(filled(left, 1))
        event = left.record()
        if way == "event on the device":
            right.wait(event)
        elif way == "look":
            while not event.complete:
                yield 0.5
        else:
            yield event
        yield told.room
        told.put(None)

    def taker() -> None:
        world.wait(told.message())
        told.take()
        if way == "stream":
            left.synchronize()
        elif way == "all":
            device.synchronize()
        right.compute("use", tensors, tensors, lambda given: [given[0] + 1])
        right.synchronize()
        assert tensors[0].content == 2

    world.start("maker", maker())
    world.start("taker", taker)
    world.results()
    assert device.faults == []


def test_a_buffer_overwritten_while_it_is_sent_is_torn() -> None:
    world = World(delays=Delays(compute=(0.5, 0.5), transfer=(2.0, 2.0)))
    a, b = Device(world, "A"), Device(world, "B")
    link = Group(world, "link", [a, b])
    compute, out, into = a.stream("compute"), a.stream("out"), b.stream("in")
    tensor = filled(compute, 1)
    compute.synchronize()
    link.post_send(0, 1, tensor, out)
    came = b.allocate((), "term", into)
    event = link.post_recv(1, 0, came, into)
    compute.compute("overwrite", (), (tensor,), lambda _: [2])
    event.synchronize()
    assert isinstance(came.block.content, Poison)
    assert {fault.hazard for fault in a.faults} == {Hazard.OVERWRITE}


def test_freed_memory_is_used_again_and_a_use_after_free_is_noticed_at_the_launch() -> None:
    world = World(delays=INSTANT)
    device = Device(world, "A")
    stream = device.stream("x")
    first = filled(stream, 1)
    block = first.block
    first.free()
    assert filled(stream, 2).block is block
    stream.compute("late", (first,))
    assert [fault.why for fault in device.faults] == ["it was freed before the launch"]


def test_a_tensor_that_nobody_refers_to_is_freed_after_the_streams_that_use_it() -> None:
    world = World(delays=INSTANT)
    a, b = Device(world, "A"), Device(world, "B")
    link = Group(world, "link", [a, b])
    compute, out, into = a.stream("compute"), a.stream("out"), b.stream("in")
    tensor = filled(compute, "value")
    compute.synchronize()
    block = tensor.block
    link.post_send(0, 1, tensor, out)
    tensor.record_stream(out)
    del tensor
    world.run(lambda: world.now >= 1.0)
    assert filled(compute, "other").block is not block
    came = b.allocate((), "term", into)
    link.post_recv(1, 0, came, into).synchronize()
    assert came.content == "value"
    out.synchronize()
    world.run()
    assert filled(compute, "third").block is block
