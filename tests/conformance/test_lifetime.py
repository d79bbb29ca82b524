"""Who owns what a channel brought, for how long, and who may write into it."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raycomm import _core
from raycomm.channel import RingLayout
from tests.conformance.net import KINDS, Net, Nets
from tests.conformance.peer import Agent, digest

kinds = pytest.mark.parametrize("kind", KINDS)
BIG = 100_000


def values() -> list[Any]:
    noise = np.random.default_rng(1).integers(0, 256, BIG, np.uint8)
    return [
        noise,
        torch.from_numpy(noise[::-1].copy()),
        [noise[: BIG // 2], {"k": torch.from_numpy(noise)}][0],
        torch.arange(20_000.0),
    ]


@kinds
def test_held_values_keep_their_blocks_while_thousands_pass(net_of: Nets, kind: str) -> None:
    with net_of(kind, slots=4) as net:
        sent = values()
        for value in sent:
            net.writer.write(value)
            came = [reader.keep() for reader in net.readers]
            assert came == [[digest(value)]] * len(net.readers)
        held = net.writer.in_use()
        for reader in net.readers:
            if hasattr(reader, "begin"):
                reader.begin("read_bytes", 3000, 7, 1 << 17)
        if kind == "one process":
            from tests.conformance.peer import message

            for number in range(3000):
                expected = message(number, 7, 1 << 17)
                net.writer.write(expected)
                assert digest(net.reader.read()) == digest(expected)
        else:
            net.writer.write_bytes(3000, 7, 1 << 17)
            assert [reader.end() for reader in net.readers] == [3000] * len(net.readers)
        for reader in net.readers:
            assert reader.kept_now() == [digest(value) for value in sent]
        assert net.writer.in_use() == held
        for reader in net.readers:
            reader.drop()
        gc.collect()
        assert net.writer.in_use() == 0


@pytest.mark.parametrize("kind", ["one process", "two processes"])
def test_the_only_reader_may_write(net_of: Nets, kind: str) -> None:
    with net_of(kind) as net:
        for value in (*values(), np.zeros(10), torch.zeros(10)):
            net.writer.write(value)
            net.reader.keep()
        assert net.reader.scribble() == [True] * 6
        net.writer.write(values()[0])
        assert digest(net.reader.read()) == digest(values()[0])


@pytest.mark.parametrize("kind", ["two readers", "three readers"])
def test_one_readers_writes_are_seen_by_no_other(net_of: Nets, kind: str) -> None:
    with net_of(kind) as net:
        sent = [np.full(BIG, 3, np.uint8), torch.full((BIG,), 4, dtype=torch.uint8), np.full(10, 5), torch.full((10,), 6)]
        for value in sent:
            net.writer.write(value)
            for reader in net.readers:
                reader.keep()
        first, *others = net.readers
        assert first.scribble() == [False, True, True, True]  # a large array is read-only, a large tensor a copy
        for reader in others:
            assert reader.kept_now() == [digest(value) for value in sent]
        assert net.writer.in_use() >= BIG
        for reader in net.readers:
            reader.drop()
        assert net.writer.in_use() == 0


def pair() -> tuple[Any, Any]:
    net = Net([Agent])
    return net.writer, net.reader


def test_every_kind_of_view_holds_the_block() -> None:
    writer, reader = pair()
    writer.write([torch.arange(BIG), np.arange(BIG)])
    tensor, array = reader.read()
    views = [
        tensor[5:10],
        tensor.reshape(-1, 2),
        tensor.view(torch.uint8),
        tensor.numpy(),
        memoryview(array),
        array[3:4],
        torch.from_numpy(array),
    ]
    del tensor, array
    while views:
        assert writer.in_use() > 0
        view = views.pop(0)
        if len(views) == 3:  # the last view of the tensor is in `view`
            assert view[-1] == BIG - 1
    del view
    assert writer.in_use() == 0


def test_views_outlive_close_and_every_endpoint() -> None:
    writer, reader = pair()
    writer.write([torch.arange(BIG), np.arange(BIG)])
    tensor, array = reader.read()
    writer.close()
    writer.let_go()
    reader.let_go()
    gc.collect()
    assert "memfd:raycomm" in Path("/proc/self/maps").read_text()
    assert torch.equal(tensor, torch.arange(BIG))
    assert (array == np.arange(BIG)).all()
    tensor += 1
    view = array[7:9]
    del tensor, array
    assert view.tolist() == [7, 8]
    assert "memfd:raycomm" in Path("/proc/self/maps").read_text()
    del view
    assert "memfd:raycomm" not in Path("/proc/self/maps").read_text()


def test_many_graphs_leave_no_mapping() -> None:
    for _ in range(50):
        writer, reader = pair()
        writer.write(np.arange(BIG))
        assert reader.read()[5] == 5
    del writer, reader
    assert "memfd:raycomm" not in Path("/proc/self/maps").read_text()


def in_fork(what: Any) -> None:
    """Runs `what` in a forked child; fails if it raised or crashed."""
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        code = 1
        try:
            what()
            code = 0
        except BaseException as error:
            os.write(2, f"in the fork: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_use_after_fork_is_misuse() -> None:
    writer, reader = pair()
    writer.write(1)

    def use() -> None:
        for call in (lambda: reader.read(0), lambda: reader.skip(0), lambda: writer.write(2, 0)):
            with pytest.raises(_core.Misuse, match="fork"):
                call()

    in_fork(use)
    assert writer.published() == 1
    assert reader.read() == 1


def flood(writer: Any, reader: Any, count: int = 300) -> None:
    """Messages enough to use every free block again and again."""
    for number in range(count):
        writer.write([np.full(size, number % 251, np.uint8) for size in (40_000, BIG, 200_000)])
        assert all((part == number % 251).all() for part in reader.read())


def test_a_forked_child_that_drops_values_frees_nothing() -> None:
    writer, reader = pair()
    held = []
    for number in range(6):
        writer.write([torch.full((BIG,), number, dtype=torch.uint8), np.full(BIG, number, np.uint8)])
        held.append(reader.read())
    before = writer.in_use()

    def drop() -> None:
        assert all(
            (part[-100:] == number).all() for number, parts in enumerate(held) for part in parts
        )  # torch's threads are not here
        held.clear()
        reader.let_go()
        writer.let_go()
        gc.collect()

    in_fork(drop)
    assert writer.in_use() == before
    flood(writer, reader)
    for number, parts in enumerate(held):
        assert all((part == number).all() for part in parts)
    del parts
    held.clear()
    gc.collect()
    assert writer.in_use() == 0


class Received(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tensors[index][:100].clone()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_data_loader_workers_free_nothing() -> None:
    writer, reader = pair()
    tensors = []
    for number in range(4):
        writer.write(torch.full((BIG,), number, dtype=torch.uint8))
        tensors.append(reader.read())
    loader = torch.utils.data.DataLoader(Received(tensors), batch_size=1, num_workers=2, multiprocessing_context="fork")
    assert [int(batch[0, 0]) for batch in loader] == [0, 1, 2, 3]
    del loader
    flood(writer, reader, 100)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
    assert writer.in_use() >= 4 * BIG


def test_a_dead_readers_blocks_do_not_stop_the_writer(net_of: Nets) -> None:
    """A killed reader's holds stay until teardown; the writer goes on with what is left."""
    from tests.conformance.peer import Remote

    victim = Remote()
    try:
        net = Net([Agent, victim.become], drain=True)
        net.writer.write(np.zeros(BIG, np.uint8))
        net.readers[1].keep()
        assert net.reader.read().sum() == 0
        victim.popen.send_signal(signal.SIGKILL)
        victim.popen.wait()
        assert net.writer.in_use() >= BIG
        assert net.writer.arena.core.look_for_dead()
        assert net.writer.is_closed() == (_core.CLOSED_PEER_DIED, 2)
    finally:
        victim.stop()


def test_releases_from_many_threads() -> None:
    import threading

    writer, reader = pair()
    queue: list[Any] = []
    over = threading.Event()

    def release() -> None:
        while not over.is_set() or queue:
            try:
                queue.pop()
            except IndexError:
                over.wait(0.0001)

    threads = [threading.Thread(target=release) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(2000):
        writer.write([np.full(40_000, number % 251, np.uint8), torch.full((50_000,), number % 251, dtype=torch.uint8)])
        parts = reader.read()
        assert all((part == number % 251).all() for part in parts)
        queue.extend(parts)
        del parts
    over.set()
    for thread in threads:
        thread.join()
    assert writer.in_use() == 0


def test_ring_layouts_are_checked() -> None:
    for slots, inline in ((3, 100), (0, 100)):
        with pytest.raises(OSError, match="power of two"):
            Agent(0, [RingLayout(1, slots, inline, (1,))])
