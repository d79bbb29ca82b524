"""`allow_pickle`, `share_tensors` and `raycomm.empty`, for a whole graph and for one edge."""

from __future__ import annotations

from fractions import Fraction  # has to be pickled
from typing import Any

import numpy as np
import pytest
import ray
import torch

import raycomm
from raycomm import InputNode, MultiOutputNode, RaycommError, SerializationError, SharedMemoryError, bind
from tests.ray.fillers import BIG, Filler
from tests.ray.workers import PATIENCE_S, chain, start, until

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return start(2)


@pytest.fixture(scope="module")
def fillers(cluster: None) -> list[Any]:
    made = [Filler.remote() for _ in range(3)]
    ray.get([actor.up.remote() for actor in made])
    return made


# allow_pickle


def test_what_would_be_pickled_is_refused(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].echo), allow_pickle=False, name="strict") as graph:
        for value, path in ((Fraction(1, 3), "value"), ({"a": [1, 2, 3, Fraction(1, 3)]}, "value['a'][3]")):
            with pytest.raises(SerializationError) as caught:
                graph.execute(value)
            assert caught.value.path == path
            assert "Fraction" in str(caught.value.type_name)
            assert path in str(caught.value)
            assert "allow_pickle" in str(caught.value)
        plain = {"a": (1, 2.5, None, "x", b"y"), "b": [np.arange(5), True]}
        got = graph.execute(plain).get()
        assert (got["a"], got["b"][1], list(got["b"][0])) == (plain["a"], True, [0, 1, 2, 3, 4])
        tensor = torch.arange(BIG)
        assert torch.equal(graph.execute(tensor).get(), tensor)
        assert graph.status().submitted == 2
        assert [edge.pickles for edge in graph.stats().edges] == [0, 0]


def test_a_result_that_would_be_pickled_fails_its_execution(fillers: list[Any], workers: list[Any]) -> None:
    with raycomm.compile(chain(fillers[0].wrap, workers[0].echo), allow_pickle=False, name="strict") as graph:
        for _ in range(2):
            with pytest.raises(SerializationError) as caught:
                graph.execute(1).get()
            assert "strict" in str(caught.value)
            assert ".wrap#0" in str(caught.value.channel)
    with raycomm.compile(chain(fillers[0].wrap, workers[0].echo)) as graph:
        assert graph.execute(1).get() == Fraction(1, 3)


def test_failures_still_cross_where_pickling_is_refused(workers: list[Any]) -> None:
    with raycomm.compile(chain(workers[0].fail_if_odd, workers[1].echo), allow_pickle=False) as graph:
        with pytest.raises(Exception, match="bad 1"):
            graph.execute(1).get()
        assert graph.execute(2).get() == 2


def test_pickling_refused_on_one_edge(fillers: list[Any], workers: list[Any]) -> None:
    with InputNode() as x:
        wrapped = bind(fillers[0].wrap, x)
        strict = raycomm.with_channel_options(bind(workers[0].echo, wrapped), allow_pickle=False)
    with raycomm.compile(strict) as graph:
        with pytest.raises(SerializationError, match="allow_pickle") as caught:
            graph.execute(1).get()
        assert ".echo#1" in str(caught.value.channel)
        assert graph.stats().edges[1].pickles == 1  # the edge before it may
    with InputNode() as x:
        free = raycomm.with_channel_options(bind(fillers[0].wrap, x), allow_pickle=True)
    with raycomm.compile(free, allow_pickle=False) as graph:
        with pytest.raises(SerializationError):
            graph.execute(Fraction(1, 3))
        assert graph.execute(1).get() == Fraction(1, 3)


# share_tensors


def reader_sees(fillers: list[Any], **options: Any) -> list[float]:
    """What the second actor sees at the place to which the first one wrote, after it wrote."""
    with InputNode() as x:
        wrote = bind(fillers[0].write, x, 5)
        node = MultiOutputNode([wrote, bind(fillers[1].first, x, wrote)])
    with raycomm.compile(node, **options) as graph:
        return [ref.get() for ref in graph.execute(torch.ones(BIG))]


def test_tensors_of_several_readers_are_private(fillers: list[Any]) -> None:
    assert reader_sees(fillers) == [1, 1]


def test_shared_tensors_are_one(fillers: list[Any]) -> None:
    assert reader_sees(fillers, share_tensors=True) == [1, 5]


def test_shared_tensors_lie_where_they_arrived(fillers: list[Any]) -> None:
    """Both readers hold the writer's block, instead of a copy of their own."""
    for options, holders in (({}, 0), ({"share_tensors": True}, 2)):
        keepers = start(2)
        with InputNode() as x:
            node = MultiOutputNode([bind(keeper.keep, x) for keeper in keepers])
        with raycomm.compile(node, **options) as graph:
            assert ray.get(graph.execute(torch.ones(BIG))) == [1, 1]
            until(lambda holders=holders, graph=graph: len(graph.stats().pools[0].held_by) == holders, f"{holders} hold it")
            ray.get([keeper.let_go.remote() for keeper in keepers])
            until(lambda graph=graph: not graph.stats().pools[0].held_by, "nobody holds it")


def test_tensors_shared_on_one_edge(fillers: list[Any]) -> None:
    keepers = start(3)
    with InputNode() as x:
        shared = raycomm.with_channel_options(bind(fillers[0].filled_tensor, x), share_tensors=True)
        private = bind(fillers[1].filled_tensor, x)
        node = MultiOutputNode([bind(keeper.keep, value) for keeper in keepers[:2] for value in (shared, private)])
    with raycomm.compile(node) as graph:
        ray.get(graph.execute(3))
        until(lambda: len(graph.stats().pools[1].held_by) == 2, "two hold the shared one")
        until(lambda: not graph.stats().pools[2].held_by, "nobody holds the other one")
        ray.get([keeper.let_go.remote() for keeper in keepers])


@pytest.mark.parametrize("share", [False, True])
def test_arrays_of_several_readers_are_read_only(fillers: list[Any], share: bool) -> None:
    with InputNode() as x:
        node = MultiOutputNode([bind(filler.writable, x) for filler in fillers[:2]])
    with raycomm.compile(node, share_tensors=share) as graph:
        assert ray.get(graph.execute(np.zeros(BIG))) == [False, False]
    with raycomm.compile(chain(fillers[0].writable), share_tensors=share) as graph:
        assert graph.execute(np.zeros(BIG)).get() is True  # handed over


# raycomm.empty


@pytest.mark.parametrize(
    ("method", "kind", "dtype", "shape"),
    [
        ("filled", "ndarray", "int32", (16, BIG // 16)),
        ("filled_tensor", "Tensor", "torch.float32", (BIG,)),
        ("filled_part", "ndarray", "int32", (4, BIG // 16)),
    ],
)
def test_memory_filled_in_place(fillers: list[Any], method: str, kind: str, dtype: str, shape: tuple[int, ...]) -> None:
    with raycomm.compile(chain(getattr(fillers[0], method), fillers[1].describe)) as graph:
        for value in (3, 4, 5):
            assert graph.execute(value).get() == (kind, dtype, shape, value, value)
    with raycomm.compile(chain(getattr(fillers[0], method))) as graph:
        views = [graph.execute(value).get() for value in range(10)]
        assert [float(view.reshape(-1)[-1]) for view in views] == list(range(10))


def test_it_is_sent_without_a_copy(fillers: list[Any]) -> None:
    """One block, held by the receiver alone, however large the value."""
    with raycomm.compile(chain(fillers[0].exact), shm_limit_bytes=8 << 20) as graph:
        size = 6 << 20  # a copy would not fit beside it
        for _ in range(5):
            got = graph.execute(size).get(PATIENCE_S)
            assert (got.nbytes, int(got[0]), int(got[-1])) == (size, 7, 7)
            until(lambda: set(graph.stats().pools[1].held_by) == {"driver"}, "only the driver holds it")
            del got
        assert not graph.stats().pools[1].held_by


@pytest.mark.parametrize("size", [0, 1, 100, (32 << 10) - 1, 32 << 10, 1 << 20])
def test_sizes(fillers: list[Any], size: int) -> None:
    with raycomm.compile(chain(fillers[0].exact)) as graph:
        for _ in range(3):
            got = graph.execute(size).get()
            assert got.tolist() == [7] * size
        del got
        until(lambda: not graph.stats().pools[1].held_by, "nobody holds blocks")


def test_kept_memory_is_copied_the_second_time(fillers: list[Any]) -> None:
    with raycomm.compile(chain(fillers[2].filled_twice)) as graph:
        first = graph.execute(1).get()
        second = graph.execute(2).get()
        third = graph.execute(3).get()
        assert (int(second[0]), int(third[-1])) == (2, 3)  # of their own; the first one was lent, and shows what came later
        assert int(first[0]) == 3


def test_an_input_filled_in_place(fillers: list[Any]) -> None:
    with raycomm.compile(chain(fillers[0].describe), shm_limit_bytes=8 << 20) as graph:
        for value in range(5):
            array = graph.empty((6 << 20,), np.uint8)  # a copy would not fit beside it
            array[:] = value
            assert graph.execute(array).get() == ("ndarray", "uint8", (6 << 20,), value, value)
            del array
        tensor = graph.empty((2, 3), torch.int64)
        tensor.fill_(9)
        assert graph.execute(tensor).get() == ("Tensor", "torch.int64", (2, 3), 9, 9)
        with pytest.raises(SharedMemoryError, match=r"for raycomm\.empty"):
            graph.empty(9 << 20, np.uint8)
        with pytest.raises(RaycommError, match="Python objects"):
            graph.empty(3, object)
    with pytest.raises(raycomm.ChannelClosedError):
        graph.empty(3, np.uint8)


def test_where_there_is_no_graph(fillers: list[Any]) -> None:
    with pytest.raises(RaycommError, match=r"inside a method that a graph runs; in the driver use graph\.empty"):
        raycomm.empty(3, np.uint8)
    with raycomm.compile(chain(fillers[0].object_dtype)) as graph:
        with pytest.raises(RaycommError, match="Python objects"):
            graph.execute(1).get()
        with pytest.raises(RaycommError, match="inside a method that a graph runs"):
            ray.get(fillers[0].plain_call.remote())  # beside the loop, on the same actor
