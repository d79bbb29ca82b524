"""What travels through shared memory: sizes, growth, views, writability, sharing inside an actor, dtypes, buffers used again."""

from __future__ import annotations

import gc
import random
import warnings
from typing import Any

import numpy as np
import pytest
import ray
import ray.exceptions
import torch

import raycomm
from raycomm import InputNode, MultiOutputNode, SharedMemoryError, bind
from tests.ray.row_actors import Odd, shm_kib
from tests.ray.workers import PATIENCE_S, chain, start

pytestmark = pytest.mark.usefixtures("cluster")

MIB = 1 << 20


@pytest.fixture(scope="module")
def odds(cluster: None) -> list[Any]:
    return [Odd.remote() for _ in range(3)]


@pytest.mark.parametrize("inline", [64, 1024, 65_536])
def test_sizes_around_every_threshold(workers: list[Any], inline: int) -> None:
    """Interleaved with tiny ones, all in flight at once: order and every byte are right on both sides of each threshold."""
    edges = {64, 256, 1024, 4096, 32_768, 65_536, 131_072, MIB, inline}
    sizes = sorted({max(0, edge + d) for edge in edges for d in range(-24, 25, 3)} | {edge - 1 for edge in edges})
    random.Random(inline).shuffle(sizes)
    with raycomm.compile(chain(workers[0].echo, workers[1].echo), inline_bytes=inline, max_inflight=8) as graph:
        pending: list[Any] = []

        def check() -> None:
            number, size, ref = pending.pop(0)
            got = ref.get(timeout=PATIENCE_S)
            assert got[0] == number
            assert got[1] == bytes([number % 251]) * size
            assert got[2].tobytes() == got[1]
            assert int(got[3]) == number

        for number, size in enumerate(sizes):
            body = bytes([number % 251]) * size
            value = (number, body, np.frombuffer(body, np.uint8), torch.tensor(number))
            pending.append((number, size, graph.execute(value, timeout=PATIENCE_S)))
            if len(pending) > 6:
                check()
        while pending:
            check()


@pytest.mark.parametrize("size", [0, 1, 100, 999, 1000, 1024, MIB])
def test_a_small_tensor_beside_many_bytes(workers: list[Any], size: int) -> None:
    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        for extra in range(-2, 3):
            body = b"x" * max(0, size + extra)
            tensor, got = graph.execute([torch.arange(4), body]).get()
            assert type(tensor) is torch.Tensor
            assert tensor.tolist() == [0, 1, 2, 3]
            assert got == body


def test_messages_that_double_then_alternate(workers: list[Any]) -> None:
    """What a graph holds stays near what is live at once, whatever went before."""
    with raycomm.compile(chain(workers[0].echo), shm_limit_bytes=400 * MIB) as graph:
        before = shm_kib()
        for power in range(6):
            value = np.full(MIB << power, power, np.uint8)
            assert np.array_equal(graph.execute(value).get(), value)
        grown = shm_kib() - before
        for number in range(300):
            value = np.full(7 if number % 2 else 32 * MIB, number % 251, np.uint8)
            if number % 2 == 0 and number % 20:
                continue
            got = graph.execute(value).get()
            assert (int(got[0]), int(got[-1]), got.nbytes) == (number % 251, number % 251, value.nbytes)
        del got
        assert shm_kib() - before <= grown + 40 * 1024  # one message in each direction, and one on its way
        assert grown < 150 * 1024


@pytest.mark.parametrize("mib", [8, 64])
def test_payloads_beyond_any_message_limit(workers: list[Any], mib: int) -> None:
    value = np.random.default_rng(1).integers(0, 255, mib * MIB, np.uint8)
    with raycomm.compile(chain(workers[0].echo, workers[1].echo), shm_limit_bytes=8 * mib * MIB) as graph:
        assert np.array_equal(graph.execute(value).get(), value)
        got = graph.execute(value.tobytes()).get()
        assert type(got) is bytes
        assert got == value.tobytes()


def test_memory_that_nobody_holds_is_no_reason_to_fail(workers: list[Any]) -> None:
    """Never more than one message is alive, on three edges, and the limit is seven times as much."""
    with raycomm.compile(chain(workers[0].echo, workers[1].echo), shm_limit_bytes=7 * 64 * MIB) as graph:
        for size in (64 * MIB, 64 * MIB + 4096):
            assert graph.execute(np.zeros(size, np.uint8)).get().nbytes == size


def test_messages_that_grow_within_the_limit(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo, workers[1].echo), shm_limit_bytes=80 * MIB) as graph:
        for size in range(16 * MIB, 24 * MIB, MIB):
            assert graph.execute(np.zeros(size, np.uint8)).get().nbytes == size


@pytest.mark.slow
def test_a_payload_of_600_megabytes(workers: list[Any]) -> None:
    value = np.random.default_rng(1).integers(0, 255, 600_000_000, np.uint8)
    with raycomm.compile(chain(workers[0].echo), shm_limit_bytes=3 << 30) as graph:
        assert np.array_equal(graph.execute(value).get(), value)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("size", [3, 100_000])
def test_a_buffer_that_its_method_uses_again(odds: list[Any], kind: str, size: int) -> None:
    """The actor fills the same array for each execution while slow consumers still have earlier ones."""
    source, slow, _ = odds
    with InputNode() as x:
        value = bind(source.reuse, x, kind, size)
        out = bind(slow.same_bytes, bind(slow.slow, value, 0.002))
    with raycomm.compile(MultiOutputNode([value, out]), max_inflight=10) as graph:
        rows = [graph.execute(number, timeout=PATIENCE_S) for number in range(60)]
        for number, (first, second) in enumerate(rows):
            got = first.get(timeout=PATIENCE_S)
            assert bool((got == number).all())
            assert second.get(timeout=PATIENCE_S)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_in_place_maths_on_what_was_received(workers: list[Any], kind: str) -> None:
    """One receiver: its own, writable, with warnings as errors."""
    value: Any = np.ones(100_000) if kind == "numpy" else torch.ones(100_000)
    strict = Odd.remote()
    ray.get(strict.__ray_call__.remote(lambda _: warnings.simplefilter("error")))
    with InputNode() as x:
        out = bind(strict.write_to, x, 2)
    with raycomm.compile(out) as graph:
        assert [graph.execute(value).get() for _ in range(3)] == [300_000] * 3
        assert float(value.sum()) == 100_000
    with raycomm.compile(chain(workers[0].echo)) as graph:
        got = graph.execute(value).get()
        got += 1
        assert float(got.sum()) == 200_000


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_write_never_reaches_another_process(odds: list[Any], size: int) -> None:
    first, second, third = odds
    with InputNode() as x:
        outs = [bind(first.write_to, x, 1), bind(second.write_to, x, 10), bind(third.sum_of, x)]
    with raycomm.compile(MultiOutputNode(outs)) as graph:
        for _ in range(5):
            assert ray.get(graph.execute(torch.zeros(size, dtype=torch.int64))) == [size, 10 * size, 0]
    # Arrays for several processes come read-only: the write is refused there, and nothing else is disturbed.
    with raycomm.compile(MultiOutputNode(outs)) as graph:
        refs = graph.execute(np.zeros(100_000, np.int64))
        for ref in refs[:2]:
            with pytest.raises(ValueError, match="read-only"):
                ref.get()
        assert refs[2].get() == 0


def test_consumers_in_one_actor_share_one_object(odds: list[Any]) -> None:
    """By reference, as between plain calls on one object: a write of the first bound is seen by the second."""
    one = odds[0]
    with InputNode() as x:
        local = bind(one.step, x, "n")
        outs = [bind(one.write_to, local, 1), bind(one.sum_of, local), bind(one.is_one, local, x)]
    with raycomm.compile(MultiOutputNode(outs)) as graph:
        for _ in range(3):
            assert ray.get(graph.execute(torch.zeros(10, dtype=torch.int64))) == [10, 10, [True, True]]


def test_what_a_local_consumer_writes_does_not_reach_other_processes(odds: list[Any]) -> None:
    """A value's writes to other processes come before its local consumers run."""
    one, two, _ = odds
    with InputNode() as x:
        local = bind(one.reuse, x, "torch", 50_000)
        outs = [local, bind(two.sum_of, local), bind(one.write_to, local, 1000)]
    with raycomm.compile(MultiOutputNode(outs)) as graph:
        for number in range(20):
            value, total, _ = ray.get(graph.execute(number))
            assert int(value.sum()) == total == number * 50_000


def dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    skipped = ("quint", "qint", "bits")
    return sorted((dtype for dtype in found if not any(word in str(dtype) for word in skipped)), key=str)


def test_every_dtype_and_shape_between_actors(workers: list[Any]) -> None:
    """Alone and in a dict, 0-d, empty and large, in one graph: kept to the bit."""
    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        for dtype in dtypes():
            for shape in ((), (0,), (1,), (3, 0, 2), (2, 3), (40_000,)):
                width = max(1, dtype.itemsize)
                count = int(np.prod(shape, dtype=np.int64))
                raw = torch.from_numpy(np.random.default_rng(3).integers(0, 2, (max(1, count), width), np.uint8))
                value = raw.reshape(-1)[: count * width].view(dtype).reshape(shape)
                alone = graph.execute(value).get()
                inside = graph.execute({"t": [value, 1]}).get()["t"][0]
                for got in (alone, inside):
                    assert (got.dtype, got.shape) == (value.dtype, value.shape), (dtype, shape)
                    if count:
                        sent = value.reshape(-1).contiguous().view(torch.uint8)
                        assert torch.equal(got.reshape(-1).contiguous().view(torch.uint8), sent), (dtype, shape)


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(2 * 3 * 40 * 50, dtype=torch.float32).reshape(2, 3, 40, 50)
    return {
        "transposed": base[0, 0].T,
        "strided": base[..., ::2],
        "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 10_000),
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "flipped": base.flip(0, 3),
        "permuted": base.permute(3, 1, 0, 2),
        "offset": base.reshape(-1)[100:7000:3],
        "conj": torch.complex(base[0, 0], base[0, 1]).conj(),
        "one row of many": base[1, 2],
        "size-1 dims": base[:, :1, :, :1],
    }


@pytest.mark.parametrize("name", list(views()))
def test_views_of_every_kind_between_actors(workers: list[Any], name: str) -> None:
    value = views()[name]
    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        graph.execute(value).get()
        # Only what is viewed travels, and a header.
        assert all(edge.bytes <= value.nbytes + 256 for edge in graph.stats().edges)
        for sent in (value, {"a": [value, value]}):
            got = graph.execute(sent).get()
            tensors = [got] if isinstance(got, torch.Tensor) else got["a"]
            assert all(torch.equal(tensor, value.resolve_conj()) for tensor in tensors)
            if len(tensors) == 2:
                assert tensors[0] is tensors[1]  # identity inside one message
        array = value.resolve_conj().numpy()
        assert np.array_equal(graph.execute(array).get(), array)


def test_grad_flags_and_parameters_between_actors(workers: list[Any]) -> None:
    leaf = torch.ones(3, requires_grad=True)
    computed = (leaf * 2).sum()
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    with torch.inference_mode():
        inferred = torch.ones(3) * 2
    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        got = graph.execute([leaf, computed, parameter, frozen, inferred]).get()
        assert [tensor.requires_grad for tensor in got] == [True, True, True, False, False]
        assert all(tensor.is_leaf for tensor in got)  # no autograd graph crosses
        assert [type(tensor) for tensor in got] == [torch.Tensor] * 2 + [torch.nn.Parameter] * 2 + [torch.Tensor]
        assert float(got[1].detach()) == 6
        got[0].sum().backward()
        assert leaf.grad is None


def test_the_number_of_tensors_may_change_each_time(workers: list[Any], rng: random.Random) -> None:
    """0, 1, 20 tensors at any depth, of mixed size; overlapping lists and the same tensor twice."""
    pool = [torch.full((rng.choice([0, 1, 5, 20_000]),), float(n)) for n in range(25)]
    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        for count in (0, 1, 20, 2, 0, 7, 20, 1):
            chosen = [rng.choice(pool) for _ in range(count)]
            nested: Any = {"deep": [{"er": tuple(chosen)}, "text", dict(enumerate(chosen))], "n": count}
            got = graph.execute(nested).get()
            flat = got["deep"][0]["er"]
            assert len(flat) == len(got["deep"][2]) == got["n"] == count
            assert all(torch.equal(a, b) for a, b in zip(flat, chosen, strict=True))
            assert all(got["deep"][2][n] is tensor for n, tensor in enumerate(flat))


def test_a_view_outlives_everything(workers: list[Any]) -> None:
    """A small slice of a large result after teardown, and after the graph, its refs and the array itself are gone."""

    def slice_of() -> Any:
        with raycomm.compile(chain(workers[0].zeros)) as graph:
            array = graph.execute(3 * MIB).get()
            array[5] = 7
            return torch.from_numpy(array)[4:7]

    view = slice_of()
    gc.collect()
    assert view.tolist() == [0, 7, 0]
    view.fill_(1)
    assert view.sum() == 3


def test_a_full_pool_goes_on_when_views_are_let_go(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].zeros), shm_limit_bytes=16 * MIB, max_inflight=1) as graph:
        for _ in range(5):
            views: list[Any] = []
            with pytest.raises(SharedMemoryError, match="driver"):
                while len(views) < 100:
                    views.append(graph.execute(3 * MIB).get())
            assert len(views) >= 3
            views.pop(random.randrange(len(views)))
            assert graph.execute(2 * MIB).get().nbytes == 2 * MIB


def test_tiny_and_odd_values(workers: list[Any]) -> None:
    values: list[Any] = ["", b"", [], (), {}, set(), frozenset(), 0, -1, 2**63, 2**64, -(2**63) - 1, 0.0, -0.0, 1e-320, "\ud800"]
    values += [[[]], {(): []}, {None: None}, (None,), [float("inf"), -float("inf")], bytearray(), np.zeros(0), np.array(5)]
    values += [{1: 2, "1": 3, (1,): 4}, [True, 1, 1.0], Ellipsis, NotImplemented, int, len, range(0), complex("nan")]
    with raycomm.compile(chain(workers[0].echo, workers[1].echo)) as graph:
        for value in values:
            for sent in (value, [value], {"k": value}):
                got = graph.execute(sent).get()
                assert type(got) is type(sent)
                assert repr(got) == repr(sent)


def test_actor_handles_travel(workers: list[Any]) -> None:
    """As a constant and as a value."""
    with InputNode() as x:
        out = bind(workers[0].pair, x, workers[1])
    with raycomm.compile(out) as graph:
        _, given, constant = graph.execute(workers[2]).get()
        assert ray.get([given.add.remote(1), constant.add.remote(2)]) == [2, 3]


def test_an_object_ref_in_a_message_keeps_its_object(cluster: None) -> None:
    """Or it is refused when it is sent; but it never waits for ever for an object that is gone."""
    worker = start(1)[0]
    with raycomm.compile(chain(worker.keep)) as graph:
        ref = ray.put(np.zeros(1_000_000))
        try:
            graph.execute([ref]).get()
        except TypeError:
            return
        del ref
        gc.collect()
        kept = worker.__ray_call__.remote(lambda self: ray.get(self.kept[0][0], timeout=3).shape)
        assert ray.get(kept, timeout=PATIENCE_S) == (1_000_000,)


def test_slots_are_part_of_the_memory_limit(workers: list[Any]) -> None:
    """Large slots, many of them, and a small limit: refused before anything is allocated, with the sum and the largest."""
    before = shm_kib()
    with pytest.raises(raycomm.CompileError, match=r"rings take \d+\.\d MiB, more than shm_limit_bytes \(8\.0 MiB\)") as caught:
        raycomm.compile(chain(workers[0].echo), max_inflight=200, inline_bytes=MIB, shm_limit_bytes=8 * MIB)
    assert "256 slots" in str(caught.value)
    assert caught.value.argument == "shm_limit_bytes"
    assert shm_kib() - before < 1024
    with raycomm.compile(chain(workers[0].echo), max_inflight=200, shm_limit_bytes=8 * MIB) as graph:
        assert graph.execute(1).get() == 1


@pytest.mark.parametrize("limit", [16, 32])
def test_a_burst_of_inputs_leaves_memory_for_the_results(workers: list[Any], limit: int) -> None:
    """Ten inputs of 3 MiB before the first get. Results may fail while inputs take all there is, but each input that was used
    up leaves room; and when nothing is left on its way, all of the memory is there again.
    """
    with raycomm.compile(chain(workers[0].echo), shm_limit_bytes=limit * MIB) as graph:
        refs = []
        for number in range(10):
            try:
                refs.append(graph.execute(np.full(3 * MIB, number, np.uint8), timeout=PATIENCE_S))
            except SharedMemoryError:
                break
        right = 0
        for number, ref in enumerate(refs):
            try:
                got = ref.get(timeout=PATIENCE_S)
            except SharedMemoryError:
                continue
            assert int(got[0]) == int(got[-1]) == number
            right += 1
            del got
        del refs, ref
        for size in (1, 2, 3, 4):
            got = graph.execute(np.full(size * MIB, size, np.uint8), timeout=PATIENCE_S).get(timeout=PATIENCE_S)
            assert int(got[-1]) == size
            del got
        assert right >= limit // 4  # as many as fit at a time: what is moved aside waits for its ref there


def test_a_result_of_two_blocks_of_which_one_has_room(workers: list[Any]) -> None:
    """It fails as a result of one block does; it does not wait without end for what nobody will let go."""
    with raycomm.compile(chain(workers[0].echo), shm_limit_bytes=5 * MIB, name="two") as graph:
        ref = graph.execute([np.zeros(3 * MIB // 2, np.uint8), np.ones(3 * MIB // 2, np.uint8)])
        with pytest.raises(SharedMemoryError, match="'two'"):
            ref.get(timeout=10)
        assert graph.execute(1).get(timeout=PATIENCE_S) == 1
