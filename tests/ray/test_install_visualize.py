"""`install()`: pictures of graphs, as characters and for Graphviz."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import raycomm
from tests.ray.install_fixtures import compiled
from tests.ray.workers import start

pytestmark = pytest.mark.usefixtures("cluster", "installed")


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    raycomm.install()
    yield
    raycomm.uninstall()


@pytest.fixture(scope="module")
def workers(cluster: None) -> list[Any]:
    return start(2)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be drawn by Graphviz, which need not be installed: (text, format, filename, view)."""
    calls: list[Any] = []

    class Source:
        def __init__(self, source: str, format: str) -> None:
            self.made = (source, format)

        def render(self, filename: str, view: bool) -> None:
            calls.append((*self.made, filename, view))

    module = ModuleType("graphviz")
    module.Source = Source  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "graphviz", module)
    return calls


def echo(workers: list[Any]) -> Any:
    return lambda inp: workers[0].echo.bind(inp)


def split(workers: list[Any]) -> Any:
    return lambda inp: list(workers[0].split.bind(inp))


def split_and_echo(workers: list[Any]) -> Any:
    return lambda inp: [workers[1].echo.bind(part) for part in workers[0].split.bind(inp)]


def parts(workers: list[Any]) -> Any:
    return lambda inp: workers[1].join.bind(workers[0].echo.bind(inp.x), inp[0])


CASES = [
    (echo, 3, {(0, 1), (1, 2)}),
    (split, 5, {(0, 1), (1, 2), (1, 3), (2, 4), (3, 4)}),
    (split_and_echo, 7, None),
    (parts, 6, None),
]


def edges_of(text: str, arrow: str) -> set[tuple[int, int]]:
    return {(int(a), int(b)) for a, b in re.findall(rf"^\s*(\d+) {arrow} (\d+)", text, re.MULTILINE)}


@pytest.mark.parametrize(("shape", "count", "edges"), CASES)
def test_characters(workers: list[Any], shape: Any, count: int, edges: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with compiled(shape(workers)) as graph:
        text = graph.visualize(format="ascii")
        assert graph.visualize(format="ascii", view=True) == text
        assert text in capsys.readouterr().out
        with pytest.raises(ValueError, match="Parameters 'channel_details' are not compatible with 'ascii' format."):
            graph.visualize(format="ascii", channel_details=True)
    sections = dict(re.findall(r"(?ms)^([A-Z]\w+ \w+|Legend):\n(.*?)(?=\n\n[A-Z]|\Z)", text))
    assert list(sections) == ["Nodes Information", "Edges Information", "Legend", "Graph Built"]
    nodes = {
        int(number): label for number, label in re.findall(r'^(\d+) \[label="Task \1  (.*)"\]', sections["Nodes Information"], 8)
    }
    assert set(nodes) == set(range(count))
    found = edges_of(sections["Edges Information"], "--->")
    assert edges is None or found == edges
    assert {number for edge in found for number in edge} == set(nodes), "no node is alone"
    assert all(nodes[start] != "MultiOutputNode" for start, _ in found)
    assert "+++> : " in sections["Legend"]
    assert "---> : " in sections["Legend"]
    rows = sections["Graph Built"].splitlines()
    for number in nodes:
        assert any(re.search(rf"(?<!\d){number}:\w", row) for row in rows), f"node {number} is drawn"
    assert rows[0] == "0:InputNode"
    assert "MultiOutputNode" in rows[-1]


def test_the_drawing_of_two_branches(workers: list[Any]) -> None:
    ids = [worker._actor_id.hex()[:6] for worker in workers]
    with compiled(split(workers)) as graph:
        drawing = graph.visualize(format="ascii").split("Graph Built:\n")[1].splitlines()
    assert drawing == [
        "0:InputNode",
        "|",
        f"1:Actor_{ids[0]}:split",
        "|---------------------------->|",
        "2:Output[0]                   3:Output[1]",
        "|<----------------------------|",
        "4:MultiOutputNode",
    ]


@pytest.mark.parametrize(("shape", "count", "edges"), CASES)
def test_graphviz(workers: list[Any], shape: Any, count: int, edges: Any, drawn: list[Any]) -> None:
    with compiled(shape(workers)) as graph:
        text = graph.visualize()
        detailed = graph.visualize("other", "pdf", view=True, channel_details=True)
    assert drawn == [(text, "png", "compiled_graph", False), (detailed, "pdf", "other", True)]
    assert text.startswith("digraph compiled_graph {")
    assert {int(number) for number in re.findall(r'^\t(\d+) \[label="Task \1\\n', text, re.MULTILINE)} == set(range(count))
    found = edges_of(text, "->")
    assert edges is None or found == edges
    assert edges_of(detailed, "->") == found
    assert detailed.count("shared memory") + detailed.count("same process") == len(found)
    assert "shared memory" not in text


def test_without_graphviz(workers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "graphviz", None)  # importing it fails
    with (
        compiled(echo(workers)) as graph,
        pytest.raises(ImportError, match="Please install graphviz to visualize the compiled graph"),
    ):
        graph.visualize()
