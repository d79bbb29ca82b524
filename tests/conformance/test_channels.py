"""What every channel does: order, flow, values on both sides of every threshold, time limits, and all or nothing."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from raycomm import _core
from raycomm.codec import Failure, encode_failure
from raycomm.errors import SerializationError
from tests.conformance.net import KINDS, Nets, all_at_once
from tests.conformance.peer import digest
from tests.unit.strategies import equal

kinds = pytest.mark.parametrize("kind", KINDS)
HEAD = 64  # of a message with one array: table and payload take less than this


@kinds
@pytest.mark.parametrize("slots", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("slow", ["nobody", "writer", "readers"])
def test_first_in_first_out(net_of: Nets, kind: str, slots: int, slow: str, seed: int) -> None:
    count = 1500
    with net_of(kind, slots=slots) as net:
        with all_at_once(net.readers, "read_numbers", count, seed if slow == "readers" else None) as results:
            net.writer.write_numbers(count, seed if slow == "writer" else None)
        assert [result.result() for result in results] == [count] * len(net.readers)
        assert not any(reader.ready() for reader in net.readers)
        with pytest.raises(_core.TimedOut):
            net.reader.read(0)


@kinds
def test_a_writer_runs_ahead_by_the_whole_ring_and_no_further(net_of: Nets, kind: str) -> None:
    with net_of(kind, slots=4) as net:
        for number in range(4):
            net.writer.write(number, 0)
        for reader in net.readers[1:]:  # the slowest one decides
            assert [reader.read() for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(_core.TimedOut):
            net.writer.write(4, 0)
        assert net.writer.published() == 4
        assert net.reader.read() == 0
        net.writer.write(4, 0)
        assert [net.reader.read() for _ in range(4)] == [1, 2, 3, 4]


def sizes() -> list[int]:
    """Around the inline room, the block threshold, and the sizes of blocks."""
    edges = [0, 1, 8, 1024 - HEAD, 1024, _core.BLOCK_THRESHOLD, 4096, 5120, 8192, 40960, 65536, 1 << 20]
    return sorted({max(0, edge + step) for edge in edges for step in (-33, -32, -8, -1, 0, 1, 8)})


@kinds
def test_size_does_not_change_meaning(net_of: Nets, kind: str) -> None:
    with net_of(kind, slots=2) as net:
        for size in sizes():
            noise = np.random.default_rng(size).integers(0, 256, size, np.uint8)
            for value in (noise, torch.from_numpy(noise), noise.tobytes(), [noise, (torch.from_numpy(noise), noise)]):
                net.writer.write(value)
                for reader in net.readers:
                    assert equal(value, reader.read()), size


@kinds
@pytest.mark.parametrize("inline", [0, 96, 1 << 16])
def test_inline_room_does_not_change_meaning(net_of: Nets, kind: str, inline: int) -> None:
    values: list[Any] = [None, "x" * 2000, [torch.arange(200), np.arange(9)], {"k": (1, 2.5, b"z" * 100)}, np.zeros((0, 3)), {7}]
    with net_of(kind, slots=2, inline=inline) as net:
        for value in values:
            net.writer.write(value)
            for reader in net.readers:
                assert equal(value, reader.read())


@kinds
def test_what_is_written_is_copied_before_write_returns(net_of: Nets, kind: str) -> None:
    with net_of(kind) as net:
        for size in (10, 100_000):
            value = np.ones(size)
            net.writer.write(value)
            value[:] = 7
            for reader in net.readers:
                assert (reader.read() == 1).all()


@kinds
def test_values_to_several_channels_go_together_or_not_at_all(net_of: Nets, kind: str) -> None:
    with net_of(kind, channels=3) as net:
        net.writer.write_all((1, np.zeros(50_000), "c"))
        before = net.writer.in_use()
        for refused in (threading.Lock(), memoryview(np.zeros(3, ">i4"))):
            with pytest.raises(SerializationError):
                net.writer.write_all((np.zeros(50_000), np.zeros(60_000), refused))
        with pytest.raises(_core.Misuse):
            net.writer.write_all((1, 2))
        assert net.writer.published() == 1
        assert net.writer.in_use() == before
        assert [reader.read() for reader in net.readers] == [1] * len(net.readers)
        with pytest.raises(_core.TimedOut):
            net.reader.read(0)
        net.writer.write_all((2, 2, 2))
        assert [reader.read() for reader in net.readers] == [2] * len(net.readers)


@kinds
def test_no_room_in_one_of_several_channels_publishes_in_none(net_of: Nets, kind: str) -> None:
    with net_of(kind, channels=2, slots=2) as net:  # nobody reads channel 2
        for number in range(2):
            net.writer.write_all((number, number))
            assert [reader.read() for reader in net.readers] == [number] * len(net.readers)
        with pytest.raises(_core.TimedOut):
            net.writer.write_all((2, 2), 0.01)
        assert not net.reader.ready()


@kinds
def test_a_full_pool_leaves_channel_and_value_usable(net_of: Nets, kind: str) -> None:
    with net_of(kind, limit=4 << 20) as net:
        value = np.full(1 << 20, 3, np.uint8)
        net.writer.write(value)
        for reader in net.readers:
            reader.keep()
        held = net.writer.in_use()
        assert held >= 1 << 20
        with pytest.raises(_core.PoolFull) as caught:
            net.writer.write([value, value[1:], value[2:], value[3:]])
        wanted, free, limit, errno, holders, shortage, others = caught.value.args
        assert wanted >= (1 << 20) - 3
        assert free < 2 << 20
        assert (limit, errno, shortage, others) == (4 << 20, 0, _core.SHORTAGE_PINNED, 0)
        assert holders == {index + 1: held for index in range(len(net.readers))}
        assert net.writer.in_use() == held
        assert net.writer.published() == 1
        for number in range(20):
            net.writer.write([number, value])
            for reader in net.readers:
                assert equal([number, value], reader.read())
        assert {digest(value)} == {seen for reader in net.readers for seen in reader.kept_now()}


@kinds
def test_failures_travel_as_failures(net_of: Nets, kind: str) -> None:
    with net_of(kind, channels=2) as net:
        payload, buffers = encode_failure(Failure.capture(ValueError("no"), "here", 7))
        net.writer._write.write_failure(payload, buffers, 1.0)
        net.writer.write_all((1, 2))
        for reader in net.readers:
            failure = reader.read()
            assert isinstance(failure, Failure)
            assert (failure.message, failure.origin, failure.execution) == ("no", "here", 7)
            assert reader.read() == 1


@kinds
def test_skipping_frees_slot_and_blocks(net_of: Nets, kind: str) -> None:
    with net_of(kind, slots=2) as net:
        for number in range(200):
            net.writer.write([number, np.zeros(100_000, np.uint8), b"x" * 5000])
            for reader in net.readers:
                reader.skip()
        assert net.writer.in_use() == 0
        net.writer.write("next")
        assert [reader.read() for reader in net.readers] == ["next"] * len(net.readers)


@kinds
def test_time_limits(net_of: Nets, kind: str) -> None:
    with net_of(kind, slots=2) as net:
        for call in (net.reader.read, net.reader.skip):
            with pytest.raises(_core.TimedOut):
                call(0)
            begin = time.monotonic()
            with pytest.raises(_core.TimedOut):
                call(0.05)
            assert time.monotonic() - begin >= 0.05
        net.writer.write(1, 0)
        net.writer.write(2, -1.0)
        begin = time.monotonic()
        with pytest.raises(_core.TimedOut):
            net.writer.write(3, 0.05)
        assert time.monotonic() - begin >= 0.05
        for reader in net.readers:
            assert [reader.read(0), reader.read(-1.0)] == [1, 2]


@kinds
def test_a_parked_reader_without_a_limit_is_woken(net_of: Nets, kind: str) -> None:
    with net_of(kind) as net, all_at_once(net.readers, "read", -1.0) as results:
        time.sleep(0.3)  # longer than every spin, so that they are parked, and longer than one slice
        net.writer.write("late")
        assert [result.result(20) for result in results] == ["late"] * len(net.readers)
