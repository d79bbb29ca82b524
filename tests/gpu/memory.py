"""Nothing is freed, read or overwritten too early. Each step makes sure that what must be waited for has not come yet."""

from __future__ import annotations

from typing import Any

import torch

from raycomm.channel.device import Arriving, DeviceReader, DeviceWriter
from tests.gpu import ranks
from tests.gpu.channel import channels
from tests.gpu.ranks import PATIENCE_S, Meeting
from tests.gpu.setting import Figures, Setting, StepFailed

_POISON = -7.0
_LARGE = 17 << 20  # floats: the channel copies up to 64 MiB
_AT_ONCE = 8  # transfers under way while memory is freed, read or overwritten


def early_free(setting: Setting) -> Figures:
    """The sender drops the last reference to what it sends, takes memory of that size again and fills it, before the receiver
    has begun to receive."""
    rounds, count = (3, 10_000) if setting.stand_in else (25, 1 << 20)

    def sender(place: Any) -> None:
        link, out, compute, meeting = _place(place)
        _warm_allocator(place.device, (count,), compute)
        for number in range(rounds):
            for each in range(_AT_ONCE):
                tensor = _filled(place.device, count, float(number * _AT_ONCE + each), compute)
                out.wait(compute.record())
                link.send(tensor, 1, stream=out)
                del tensor
                for _ in range(2):
                    _filled(place.device, count, _POISON, compute)
            compute.synchronize(PATIENCE_S)
            meeting.wait()
            meeting.wait()
        out.synchronize(PATIENCE_S)

    def receiver(place: Any) -> list[int]:
        link, into, _, meeting = _place(place)
        wrong = []
        for number in range(rounds):
            meeting.wait()
            for each in range(_AT_ONCE):
                want = float(number * _AT_ONCE + each)
                tensor = link.recv((count,), torch.float32, 0, stream=into).tensor
                if not bool((place.device.to_host(tensor, into, PATIENCE_S) == want).all()):
                    wrong.append(number * _AT_ONCE + each)
            meeting.wait()
        return wrong

    _, wrong = ranks.pair(setting, sender, receiver, setting.limit_s - 5.0)
    return _verdict(
        setting, wrong, rounds * _AT_ONCE, f"tensors of {4 * count} bytes, dropped and overwritten before they were sent"
    )


def early_read(setting: Setting) -> Figures:
    """The receiver's computation waits for a receive on the device only. It is launched before the sender has begun to send, into
    poisoned memory."""
    sizes = [1, 17, 1000, 65_537] if setting.stand_in else [1, 17, 1000, 4096, 65_537, 1 << 20, (1 << 20) + 3, 8 << 20]
    rounds = 2 if setting.stand_in else 10

    def sender(place: Any) -> None:
        link, out, compute, meeting = _place(place)
        for number in range(rounds):
            meeting.wait()
            for size in sizes:
                tensor = _filled(place.device, size, float(number * 100 + size % 97), compute)
                out.wait(compute.record())
                link.send(tensor, 1, stream=out)
            out.synchronize(PATIENCE_S)
            meeting.wait()

    def receiver(place: Any) -> list[int]:
        link, into, compute, meeting = _place(place)
        device = place.device
        wrong = []
        for number in range(rounds):
            buffers = [device.allocate((size,), torch.float32, into) for size in sizes]
            results = [device.allocate((size,), torch.float32, compute) for size in sizes]
            for buffer in buffers:
                device.run(into, lambda buffer=buffer: buffer.fill_(_POISON))
            for size, buffer, result in zip(sizes, buffers, results, strict=True):
                came = link.recv((size,), torch.float32, 0, stream=into, into=buffer)
                compute.wait(came.event)
                device.run(compute, lambda result=result, buffer=buffer: result.copy_(buffer))
            meeting.wait()
            for size, result in zip(sizes, results, strict=True):
                if not bool((device.to_host(result, compute, PATIENCE_S) == float(number * 100 + size % 97)).all()):
                    wrong.append(number * len(sizes) + sizes.index(size))
            meeting.wait()
        return wrong

    _, wrong = ranks.pair(setting, sender, receiver, setting.limit_s - 5.0)
    return _verdict(setting, wrong, rounds * len(sizes), "receives, read behind their event alone")


def overwrite(setting: Setting) -> Figures:
    """A method returns the same buffer in every execution, and overwrites it in the next one, which runs before the receiver
    has taken the last. Through the channel between devices, with its control records in shared memory.

    What is sent is a copy, or, if it is large, the buffer itself, and then the next execution waits for the send on the device.
    """
    # Floats, and rounds. No large one with the stand-in: its computations would wait on the host.
    plans = [(10_000, 3)] if setting.stand_in else [(1 << 20, 20), (_LARGE, 3)]

    def writer(place: Any) -> None:
        link, out, compute, meeting = _place(place)
        records, _ = channels(place, meeting)
        channel = DeviceWriter(records, link, 1, out, name="the buffer")
        for count, rounds in plans:
            _warm_allocator(place.device, (count,), compute)
            with ranks.on(compute):
                buffer = torch.empty((count,), dtype=torch.float32, device=place.device.torch)
            for number in range(rounds):
                for value in [*_values(number), _POISON]:
                    with ranks.on(compute):
                        buffer.fill_(value)
                        if value != _POISON:
                            channel.write(buffer, PATIENCE_S)
                    for sent in channel.lent:  # as the loop does before a call
                        compute.wait(sent)
                if not channel.lent:
                    compute.synchronize(PATIENCE_S)
                meeting.wait()
                meeting.wait()
        out.synchronize(PATIENCE_S)

    def reader(place: Any) -> list[int]:
        link, into, compute, meeting = _place(place)
        _, records = channels(place, meeting)
        read = DeviceReader(records, link, 0, into, name="the buffer").read
        wrong = []
        for _, rounds in plans:
            for number in range(rounds):
                meeting.wait()
                for want in _values(number):
                    arriving = read(PATIENCE_S)
                    assert isinstance(arriving, Arriving)
                    arriving.join(compute)
                    if not bool((place.device.to_host(arriving.value(), compute, PATIENCE_S) == want).all()):
                        wrong.append(int(want))
                meeting.wait()
        return wrong

    _, wrong = ranks.pair(setting, writer, reader, setting.limit_s - 5.0)
    total = sum(rounds for _, rounds in plans) * _AT_ONCE
    return _verdict(setting, wrong, total, "values of one buffer that the next execution overwrites")


def _values(number: int) -> list[float]:
    """Those of a round."""
    return [float(number * _AT_ONCE + each) for each in range(_AT_ONCE)]


def _place(place: Any) -> tuple[Any, Any, Any, Meeting]:
    """A warm link, the stream of its transfers, the one of computations, and where the hosts meet."""
    link = place.link("link")
    link.warm_up(PATIENCE_S)
    device = place.device
    streams = device.stream("transfers"), device.stream("compute")
    for stream in streams:  # kernels are loaded when they are first used, which waits for what runs: not while a transfer waits
        with ranks.on(stream):
            torch.empty(64, device=device.torch).fill_(1.0).clone()
        device.to_host(device.to_device(torch.ones(64), stream), stream, PATIENCE_S)
    return link, *streams, Meeting(place)


def _warm_allocator(device: Any, shape: tuple[int, ...], stream: Any) -> None:
    """More memory than is then used, taken and given back: a call to the driver for more may wait for all that runs."""
    held = [device.allocate(shape, torch.float32, stream) for _ in range(2 * _AT_ONCE + 4)]
    held.clear()


def _filled(device: Any, count: int, value: float, stream: Any) -> Any:
    tensor = device.allocate((count,), torch.float32, stream)
    device.run(stream, lambda: tensor.fill_(value))
    return tensor


def _verdict(setting: Setting, wrong: list[int], count: int, what: str) -> Figures:
    figures: Figures = {"ranks": setting.sharing, "transfers": count, "wrong": wrong[:100]}
    if wrong:
        raise StepFailed(f"{len(wrong)} of {count} {what} are wrong: {wrong[:10]}", figures)
    return {**figures, "summary": f"{count} {what}: all right"}
