"""Every failure says in its first line, too, where it happened: in which process, actor, call, execution and graph."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

import raycomm
from raycomm import CollectiveError, InputNode, MultiOutputNode, SerializationError, SharedMemoryError, allreduce, bind
from tests.ray.place_actors import AsyncPlace, Place


@pytest.fixture(scope="module")
def places(cluster: None) -> list[Any]:
    return [Place.remote(), Place.remote(), AsyncPlace.remote()]


def raised(ref: Any) -> BaseException:
    with pytest.raises(Exception) as caught:
        ray.get(ref)
    return caught.value


def check_place(text: str, actor: Any, call: str, execution: int, graph: str) -> None:
    first = text.splitlines()[0]
    assert f"ray::{call}()" in first
    pid = ray.get(actor.pid.remote())
    for part in (f"(pid={pid}, ip=", f", actor_id={actor._actor_id.hex()}, ", f"execution={execution}, ", f"graph='{graph}')"):
        assert part in first
    assert str(os.getpid()) not in text.replace(graph, "")


@pytest.mark.parametrize(
    ("method", "kind"), [("boom", ValueError), ("chained", KeyError), ("group", ExceptionGroup), ("none", StopIteration)]
)
def test_what_a_method_raises(places: list[Any], method: str, kind: type[Exception]) -> None:
    failing, other, _ = places
    for wrap in (
        lambda node: node,
        lambda node: bind(other.echo, node),
        lambda node: MultiOutputNode([node, bind(other.echo, node)]),
    ):
        with InputNode() as inp:
            node = wrap(bind(getattr(failing, method), inp))
        with raycomm.compile(node, name="placed") as graph:
            for execution in range(2):
                refs = graph.execute(7)
                for ref in refs if isinstance(refs, list) else [refs]:
                    error = raised(ref)
                    assert isinstance(error, RayTaskError)
                    assert isinstance(error, kind)
                    check_place(str(error), failing, f"PlaceBody.{method}", execution, "placed")
                    # As Ray does it: the same type and arguments, in another process too.
                    plain = raised(getattr(failing, method).remote(7))
                    assert type(error).__name__ == type(plain).__name__
                    assert str(error.args) == str(plain.args)
                    assert str(ray.get(ray.put([error]))[0]) == str(error)


def test_coroutines_and_wrong_numbers_of_returns(places: list[Any]) -> None:
    failing, _, coroutine = places
    with InputNode() as inp:
        node = bind(coroutine.boom, inp)
    with raycomm.compile(node, name="placed") as graph:
        check_place(str(raised(graph.execute(1))), coroutine, "AsyncPlaceBody.boom", 0, "placed")
    with InputNode() as inp:
        first, _second = bind(failing.two.options(num_returns=2), inp)
    with raycomm.compile(first, name="placed") as graph:
        error = raised(graph.execute(1))
        check_place(str(error), failing, "PlaceBody.two", 0, "placed")
        assert "is declared to return 2 values" in str(error)


def test_two_actors_of_a_class_are_told_apart(places: list[Any]) -> None:
    a, b, _ = places
    with InputNode() as inp:
        nodes = [bind(a.boom, inp), bind(b.boom, inp)]
    with raycomm.compile(MultiOutputNode(nodes), name="placed") as graph:
        for actor, ref in zip((a, b), graph.execute(1), strict=True):
            error = raised(ref)
            check_place(str(error), actor, "PlaceBody.boom", 0, "placed")
            assert f"repr=PlaceBody#{actor._actor_id.hex()[:6]}, " in str(error)


def test_installed(places: list[Any]) -> None:
    from ray.dag import InputNode as RayInputNode

    failing, other, _ = places
    raycomm.install()
    try:
        with RayInputNode() as inp:
            node = other.echo.bind(failing.boom.bind(inp))
        graph = node.experimental_compile()
        for execution in range(2):
            error = raised(graph.execute(1))
            assert isinstance(error, ValueError)
            check_place(str(error), failing, "PlaceBody.boom", execution, graph.graph.name)
        graph.teardown()
    finally:
        raycomm.uninstall()


@pytest.mark.parametrize("method", ["lock", "ours", "ours_chained"])
def test_our_own_errors_are_told_once(places: list[Any], method: str) -> None:
    with InputNode() as inp:
        node = bind(getattr(places[0], method), inp)
    with raycomm.compile(node, name="placed") as graph:
        for execution in range(2):
            ref = graph.execute(5)
            for _ in range(2):  # fetched again it says no more
                error = raised(ref)
                shown = "\n".join([str(error), *error.__notes__])
                assert shown.count(str(error)) == 1
                assert "PlaceBody" in shown
                assert f"execution {execution} of graph 'placed'" in shown
                assert len(error.__notes__) == 1
                if method == "lock":
                    assert isinstance(error, SerializationError)
                    assert f"of graph 'placed', execution {execution}: cannot send value" in str(error)
                else:
                    assert "in ours" in shown, "the remote line"
                    assert "CollectiveError: (as above)" in shown
                    assert ("ValueError: bad 5" in shown) == (method == "ours_chained")


def test_no_memory_is_told_once(places: list[Any]) -> None:
    with InputNode() as inp:
        node = bind(places[0].big, inp)
    with raycomm.compile(node, name="placed", shm_limit_bytes=1 << 20) as graph:
        error = raised(graph.execute(1))
        assert isinstance(error, SharedMemoryError)
        shown = "\n".join([str(error), *error.__notes__])
        assert shown.count(str(error)) == 1
        assert "execution 0 of graph 'placed'" in shown


def test_collectives_are_told_once(places: list[Any]) -> None:
    with InputNode() as inp:
        summed = allreduce([bind(actor.echo, inp) for actor in places[:2]])
    with raycomm.compile(MultiOutputNode(summed), name="placed") as graph:
        error = raised(graph.execute("text")[0])
        assert isinstance(error, CollectiveError)
        shown = "\n".join([str(error), *error.__notes__])
        assert shown.count(str(error)) == 1
        assert "execution 0 of graph 'placed'" in shown
