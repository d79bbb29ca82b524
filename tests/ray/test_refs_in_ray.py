"""Refs of raycomm's own graphs where Ray's functions meet them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import ray
from ray.experimental.compiled_dag_ref import CompiledDAGRef

import raycomm
from raycomm import InputNode, MultiOutputNode, bind
from tests.ray.workers import Gate, start

pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return start(2)


def both(workers: list[Any]) -> Any:
    with InputNode() as inp:
        return raycomm.compile(MultiOutputNode([bind(worker.echo, inp) for worker in workers]))


def test_ray_get_takes_refs_and_lists_of_refs(workers: list[Any]) -> None:
    with both(workers) as graph:
        refs = graph.execute(5)
        assert isinstance(refs[0], raycomm.Ref)
        assert str(refs[0]) == repr(refs[0])
        assert graph.name in str(refs[0])
        assert isinstance(refs[0], CompiledDAGRef)
        assert ray.get(refs[0]) == 5
        assert ray.get(refs) == [5, 5]
        assert ray.get(refs, timeout=10) == [5, 5], "a ref may be fetched again"
        assert ray.get([refs[1], graph.execute(6)[0]]) == [5, 6]


def test_ray_get_with_a_limit(workers: list[Any], gate: Gate) -> None:
    with InputNode() as inp:
        node = bind(workers[0].hold, inp, gate.path)
    with raycomm.compile(node) as graph:
        ref = graph.execute(1)
        for get in (lambda: ray.get(ref, timeout=0.1), lambda: ray.get([ref], timeout=0)):
            with pytest.raises(ray.exceptions.RayChannelTimeoutError):
                get()
        gate.open()
        assert ray.get(ref, timeout=60) == 1


def test_ray_get_refuses_a_mixed_list(workers: list[Any]) -> None:
    with both(workers) as graph:
        refs = graph.execute(5)
        other = ray.put(1)
        for mixed in ([*refs, None], [refs[0], other], [other, refs[0]]):
            with pytest.raises(ValueError, match="must be a list of CompiledDAGRefs if there is any CompiledDAGRef within it"):
                ray.get(mixed)
        assert ray.get(refs) == [5, 5]


def test_ray_wait_refuses_and_says_what_to_use(workers: list[Any]) -> None:
    with both(workers) as graph:
        refs = graph.execute(5)
        for wrong in (refs, refs[0], [ray.put(1), refs[0]]):
            with pytest.raises(TypeError, match=r"got .*raycomm\.Ref.*raycomm\.wait"):
                ray.wait(wrong)
        assert ray.get(refs) == [5, 5]


def test_ray_put_and_arguments_refuse(workers: list[Any]) -> None:
    with both(workers) as graph:
        refs = graph.execute(5)
        for value in (refs, refs[0], {"inside": (refs[0],)}):
            with pytest.raises(TypeError, match=r"(?s)non-serializable.*|.*Send ref\.get\(\)"):
                ray.put(value)
        with pytest.raises(TypeError, match="cannot be used as Ray task/actor argument"):
            workers[0].echo.remote(refs[0])
        with pytest.raises(TypeError, match="Could not serialize the argument"):
            workers[0].echo.remote(refs)
        assert ray.get(refs) == [5, 5]


def test_refs_are_neither_copied_nor_pickled(workers: list[Any]) -> None:
    with both(workers) as graph:
        ref = graph.execute(5)[0]
        for refused in (
            lambda: copy.copy(ref),
            lambda: copy.deepcopy(ref),
            lambda: pickle.dumps(ref),
            lambda: pickle.dumps([ref]),
        ):
            with pytest.raises(ValueError, match=r"ref itself|Send ref\.get\(\)"):
                refused()
        with pytest.raises(TypeError):
            graph.execute({"a ref": ref})
        assert ray.get(ref) == 5
