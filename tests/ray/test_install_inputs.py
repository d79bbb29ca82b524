"""`install()`: what `execute` takes, and what graphs of every shape compute."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

import raycomm
from tests.ray.install_fixtures import compiled
from tests.ray.workers import Opaque

pytestmark = pytest.mark.usefixtures("cluster", "installed")


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    raycomm.install()
    yield
    raycomm.uninstall()


def called_with(text: str) -> Any:
    return pytest.raises(ValueError, match=re.escape(f"dag.execute() or dag.execute_async() must be called with{text}"))


def test_positional_parts(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].join.bind(inp[0], inp[1], inp[0])) as graph:
        assert ray.get(graph.execute(1, 2)) == ((1, 2, 1), {})
        with called_with(" 2 positional args, got 1"):
            graph.execute((2, 3))
        with called_with(" 2 positional args, got 0"):
            graph.execute()
        with called_with(" 2 positional args, got 0"):
            graph.execute(args=(2, 3))
        with called_with(" 2 positional args, got 3"):
            graph.execute(1, 2, 3)
        assert ray.get(graph.execute(3, 4)) == ((3, 4, 3), {})


def test_the_highest_position_counts(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].echo.bind(inp[2])) as graph:
        with called_with(" 3 positional args, got 1"):
            graph.execute(1)
        assert ray.get(graph.execute("unused", "unused", 3)) == 3


def test_parts_by_name(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].join.bind(inp.y, inp["x"])) as graph:
        assert ray.get(graph.execute(x=1, y=2)) == ((2, 1), {})
        with called_with(" kwarg `x`"):
            graph.execute(y=3)
        with called_with(" kwarg `y`"):
            graph.execute(x=3)
        with called_with("out kwargs `z`"):
            graph.execute(x=1, y=2, z=3)


def test_parts_of_both_kinds(workers: list[Any]) -> None:
    a, b, c = workers
    with compiled(lambda inp: c.join.bind(b.echo.bind(inp.y), inp.z, a.echo.bind(inp[0]))) as graph:
        assert ray.get(graph.execute(2, y=3, z=4)) == ((3, 4, 2), {})


def test_whole_input(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].echo.bind(inp)) as graph:
        assert ray.get(graph.execute({"a": [1]})) == {"a": [1]}
        for arguments, keywords in (((), {}), ((1, 2), {}), ((), {"x": 1})):
            with called_with(" 1 positional args"):
                graph.execute(*arguments, **keywords)
        with called_with("out kwargs `x`"):
            graph.execute(1, x=1)


def test_an_input_named_timeout_is_an_input(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].join.bind(inp.timeout, inp.x)) as graph:
        assert ray.get(graph.execute(timeout=-5, x="x")) == ((-5, "x"), {})
        with called_with(" kwarg `timeout`"):
            graph.execute(x=1)
    with compiled(lambda inp: workers[0].echo.bind(inp)) as graph, called_with("out kwargs `timeout`"):
        graph.execute(1, timeout=3)


def test_a_value_that_cannot_be_sent(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].echo.bind(inp)) as graph:
        with pytest.raises(TypeError, match="Opaque"):
            graph.execute({"inside": Opaque()})
        ref = graph.execute(1)
        assert str(ref).startswith(f"CompiledDAGRef({graph.get_id()}, execution_index=0,")
        assert ray.get(ref) == 1


@pytest.mark.parametrize("together", [True, False])
def test_shapes(workers: list[Any], together: bool) -> None:
    a, b, c = workers

    def got(refs: Any) -> Any:
        assert isinstance(refs, list)
        return ray.get(refs) if together else [ray.get(ref) for ref in refs]

    def split_and_echo(inp: Any) -> Any:
        one, two = a.split.bind(inp)
        return [b.echo.bind(one), c.echo.bind(two), one]

    def diamond(inp: Any) -> Any:
        x = a.add.bind(inp)
        return [x, a.add.bind(x), b.add.bind(x), b.add.bind(x, by=5)]

    for build, expected in (
        (split_and_echo, lambda x: [x, x + 1, x]),
        (diamond, lambda x: [x + 1, x + 2, x + 2, x + 6]),
        (lambda inp: [w.add.bind(inp) for w in workers], lambda x: [x + 1] * 3),
        (lambda inp: [a.add.bind(inp)], lambda x: [x + 1]),
        (lambda inp: [a.add.bind(inp, by=x) for x in (1, 1, 2)], lambda x: [x + 1, x + 1, x + 2]),
    ):
        with compiled(build) as graph:
            for value in range(12):
                assert got(graph.execute(value)) == expected(value)


def test_outputs_that_ray_does_not_allow(workers: list[Any]) -> None:
    """A node twice among the outputs hangs in Ray, an input as an output fails an assertion."""

    def build(inp: Any) -> Any:
        x = workers[0].add.bind(inp)
        return [x, inp, x]

    with compiled(build) as graph:
        for value in range(30):
            assert ray.get(graph.execute(value)) == [value + 1, value, value + 1]
        assert graph._result_buffer == {}


def test_calls_of_one_actor_run_in_bind_order(workers: list[Any]) -> None:
    a, b, _ = workers
    start_at = len(ray.get(a.seen_so_far.remote()))

    def build(inp: Any) -> Any:
        first = [a.note.bind(inp[index]) for index in range(3)]
        middle = [b.echo.bind(node) for node in first]
        return [a.note.bind(node) for node in middle]

    with compiled(build) as graph:
        assert ray.get(graph.execute(1, 2, 3)) == [1, 2, 3]
    assert ray.get(a.seen_so_far.remote())[start_at:] == [1, 2, 3, 1, 2, 3]


def test_constants_and_tuples(workers: list[Any]) -> None:
    with compiled(lambda inp: workers[0].join.bind(2, inp, (3, [4]), key=None)) as graph:
        assert ray.get(graph.execute(1)) == ((2, 1, (3, [4])), {"key": None})


def test_large_values_cross_and_come_back(workers: list[Any]) -> None:
    a, b, _ = workers
    with compiled(lambda inp: b.echo.bind(a.echo.bind(inp))) as graph:
        for size in (1, 1000, 2_000_000):
            value = np.arange(size)
            result = ray.get(graph.execute(value))
            assert (result == value).all()
            del result
            assert ray.get(graph.execute(b"x" * size)) == b"x" * size
