"""Two processes, real messages of every size, and every byte checked at the other end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.net import Net
from tests.conformance.peer import Agent, Remote


@pytest.fixture(scope="module")
def peer() -> Iterator[Remote]:
    remote = Remote()
    yield remote
    remote.stop()


def stress(peer: Remote, count: int, top: int, seed: int, slots: int, limit_s: float) -> None:
    net = Net([peer.become], slots=slots)
    peer.begin("read_bytes", count, seed, top)
    net.writer.write_bytes(count, seed, top)
    assert peer.end(limit_s) == count
    assert net.writer.published() == count
    assert net.writer.in_use() == 0
    net.end()


@pytest.mark.parametrize(("count", "top", "slots"), [(12_000, 2000, 16), (6000, 1 << 17, 4), (2000, 1 << 20, 2)])
def test_every_byte_arrives(peer: Remote, seed: int, count: int, top: int, slots: int) -> None:
    stress(peer, count, top, seed, slots, 60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("count", "top", "slots"), [(2_000_000, 200, 16), (100_000, 1 << 20, 8)])
def test_every_byte_arrives_of_many(peer: Remote, seed: int, count: int, top: int, slots: int) -> None:
    stress(peer, count, top, seed, slots, 600)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_millions_of_numbers_arrive_in_order(peer: Remote) -> None:
    net = Net([peer.become], slots=2)
    count = 5_000_000
    peer.begin("read_numbers", count)
    net.writer.write_numbers(count)
    assert peer.end(600) == count
    net.end()


def test_a_wrong_byte_would_be_seen(peer: Remote) -> None:
    net = Net([peer.become])
    net.writer.write_bytes(3, 1, 1000)
    with pytest.raises(RuntimeError, match="is not what was written"):
        peer.read_bytes(3, 2, 1000)
    net.writer.close()
    net.end()


def test_the_writer_frees_what_the_reader_dropped_while_it_holds_the_rest() -> None:
    net = Net([Agent])
    net.writer.write_bytes(4, 3, 1 << 20)
    net.reader.keep(4)
    held = net.writer.in_use()
    del net.reader.kept[::2]
    assert net.writer.in_use() <= held
    net.reader.drop()
    assert net.writer.in_use() == 0
