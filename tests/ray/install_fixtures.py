"""What the tests of `raycomm.install()` share: workers, and `ray.dag` graphs of them compiled the way Ray's users do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ray.dag import DAGContext, InputNode, MultiOutputNode

Build = Callable[[Any], Any]


@contextmanager
def compiled(build: Build, **options: Any) -> Iterator[Any]:
    """`experimental_compile` of what `build` makes of an InputNode; torn down afterwards. A list is a `MultiOutputNode`."""
    graph = dag(build).experimental_compile(**options)
    try:
        yield graph
    finally:
        graph.teardown()


def dag(build: Build) -> Any:
    """The node that `build` makes of an InputNode."""
    with InputNode() as inp:
        made = build(inp)
    return MultiOutputNode(made) if isinstance(made, list) else made


@contextmanager
def context(**values: Any) -> Iterator[None]:
    """`DAGContext` with other values."""
    current = DAGContext.get_current()
    before = {name: getattr(current, name) for name in values}
    try:
        for name, value in values.items():
            setattr(current, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(current, name, value)
