"""Pictures of a graph as `visualize` of Ray's compiled graphs gives them: nodes by number, edges between numbers.

drawing of characters                           Graphviz
0:InputNode                                     0 [label="Task 0\\nInputNode" ...]
|                                               0 -> 1
1:Actor_54777d:echo
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from ray.dag import DAGNode, InputAttributeNode, InputNode, MultiOutputNode

from raycomm.ray_dag.compat_nodes import CompatNodes

_COLUMN: Final = 30  # characters from one drawn node to the next
_COLORS: Final = ("#B3CDE3", "#CCEBC5", "#DECBE4", "#FED9A6", "#FDDAEC", "#E5D8BD", "#8DD3C7", "#BEBADA")


@dataclass(frozen=True, slots=True)
class _Shown:
    """A node as it is shown in lists, drawings and Graphviz. `actor` is the id of the actor that makes its value; "": driver."""

    lines: tuple[str, ...]
    short: str
    shape: str
    color: str
    actor: str


@dataclass(frozen=True, slots=True)
class _Edge:
    start: int
    end: int
    accelerator: bool


class _Picture:
    """Numbered nodes and edges. A graph with one output gets the `MultiOutputNode` that Ray adds, under the last number."""

    def __init__(self, graph: CompatNodes) -> None:
        numbers = {node: number for number, node in enumerate(graph.nodes)}
        colors: dict[str, str] = {}
        self.nodes = [_shown(node, colors) for node in graph.nodes]
        self.edges = [
            _Edge(numbers[start], number, bool(start.type_hint.requires_accelerator()))
            for number, node in enumerate(graph.nodes)
            for start in _sources(node)
        ]
        if not graph.returns_list:
            last = len(self.nodes)
            self.nodes.append(_Shown(("MultiOutputNode",), "MultiOutputNode", "rectangle", "yellow", ""))
            accelerator = bool(graph.output.type_hint.requires_accelerator())
            self.edges.append(_Edge(numbers[graph.output], last, accelerator))

    def layers(self) -> list[list[int]]:
        """Numbers by layer: each node below all that it needs."""
        waiting = [0] * len(self.nodes)
        for edge in self.edges:
            waiting[edge.end] += 1
        layers = [[number for number, count in enumerate(waiting) if not count]]
        while layers[-1]:
            following = []
            for number in layers[-1]:
                for edge in self.edges:
                    if edge.start == number:
                        waiting[edge.end] -= 1
                        if not waiting[edge.end]:
                            following.append(edge.end)
            layers.append(following)
        return layers[:-1]


def write_picture(graph: CompatNodes, filename: str, format: str, view: bool, channel_details: bool) -> str:
    """Draw the graph to `filename` with Graphviz and return what it was drawn from.

    Raises:
        ImportError: the package graphviz is not installed.
    """
    try:
        import graphviz  # type: ignore[import-not-found]
    except ImportError:
        raise ImportError(
            "Please install graphviz to visualize the compiled graph. You can install it by running `pip install graphviz`."
        ) from None
    source = dot_text(graph, channel_details)
    graphviz.Source(source, format=format).render(filename, view=view)
    return source


def dot_text(graph: CompatNodes, channel_details: bool) -> str:
    """The graph in Graphviz's language."""
    picture = _Picture(graph)
    lines = ["digraph compiled_graph {"]
    for number, node in enumerate(picture.nodes):
        label = _quoted("\\n".join((f"Task {number}", *node.lines)))
        lines.append(f'\t{number} [label={label} fillcolor="{node.color}" shape={node.shape} style=filled]')
    for edge in picture.edges:
        label = f" [label={_quoted(_carrier(picture, edge))}]" if channel_details else ""
        lines.append(f"\t{edge.start} -> {edge.end}{label}")
    return "\n".join([*lines, "}", ""])


def ascii_text(graph: CompatNodes) -> str:
    """Lists of nodes and edges, a legend, and a drawing. Good for some twenty nodes; edges may cross in it."""
    picture = _Picture(graph)
    nodes = [f'{number} [label="Task {number}  {" ".join(node.lines)}"] ' for number, node in enumerate(picture.nodes)]
    edges = [f"{edge.start} {'+++' if edge.accelerator else '---'}> {edge.end}" for edge in picture.edges]
    legend = ["+++> : Represents Accelerator-type data channels", "---> : Represents Shared Memory data channels"]
    sections = [
        ("Nodes Information:", nodes),
        ("Edges Information:", edges),
        ("Legend:", legend),
        ("Graph Built:", _drawing(picture)),
    ]
    return "\n\n".join("\n".join([title, *lines]) for title, lines in sections)


def _drawing(picture: _Picture) -> list[str]:
    place: dict[int, tuple[int, int]] = {}
    for depth, layer in enumerate(picture.layers()):
        taken = -1
        for number in layer:
            parents = [edge.start for edge in picture.edges if edge.end == number]
            children = [edge.end for edge in picture.edges if parents and edge.start == parents[0]]
            wanted = place[parents[0]][1] + (children.index(number) if len(parents) == 1 else 0) if parents else 0
            taken = max(wanted, taken + 1)
            place[number] = (2 * depth, taken)
    width = max(column for _, column in place.values()) * _COLUMN + max(len(node.short) for node in picture.nodes) + 8
    rows = [[" "] * width for _ in range(max(row for row, _ in place.values()) + 1)]
    for number, (row, column) in place.items():
        text = f"{number}:{picture.nodes[number].short}"
        rows[row][column * _COLUMN : column * _COLUMN + len(text)] = text
    for edge in picture.edges:
        _connect(rows, place[edge.start], place[edge.end])
    return ["".join(row).rstrip() for row in rows]


def _connect(rows: list[list[str]], start: tuple[int, int], end: tuple[int, int]) -> None:
    (top, left), (bottom, right) = (start[0], start[1] * _COLUMN), (end[0], end[1] * _COLUMN)
    for row in range(top + 1, bottom):
        if rows[row][left] == " ":
            rows[row][left] = "|"
    across = rows[bottom - 1]
    if left != right:
        for column in range(min(left, right) + 1, max(left, right)):
            if across[column] == " ":
                across[column] = "-"
        across[right + (-1 if right > left else 1)] = ">" if right > left else "<"
    across[right] = "|"


def _sources(node: Any) -> Iterator[Any]:
    if isinstance(node, InputAttributeNode):
        yield node._dag_input_node
    for argument in node._bound_args:
        if isinstance(argument, DAGNode):
            yield argument


def _shown(node: Any, colors: dict[str, str]) -> _Shown:
    if isinstance(node, InputNode):
        return _Shown(("InputNode",), "InputNode", "rectangle", "lightblue", "")
    if isinstance(node, InputAttributeNode):
        return _Shown((f"InputAttributeNode[{node.key}]",), f"Input[{node.key}]", "rectangle", "lightblue", "")
    if isinstance(node, MultiOutputNode):
        return _Shown(("MultiOutputNode",), "MultiOutputNode", "rectangle", "yellow", "")
    call: Any = node if node.is_class_method_call else node._class_method_output.class_method_call
    actor = call._get_actor_handle()._actor_id.hex()
    if node.is_class_method_output:
        return _Shown((f"ClassMethodOutputNode[{node.output_idx}]",), f"Output[{node.output_idx}]", "rectangle", "orange", actor)
    method = node.get_method_name()
    color = colors.setdefault(actor, _COLORS[len(colors) % len(_COLORS)])
    return _Shown((f"Actor: {actor[:6]}...", f"Method: {method}"), f"Actor_{actor[:6]}:{method}", "oval", color, actor)


def _carrier(picture: _Picture, edge: _Edge) -> str:
    if edge.accelerator:
        return "accelerator"
    start, end = picture.nodes[edge.start], picture.nodes[edge.end]
    return "same process" if start.actor == end.actor else "shared memory"


def _quoted(text: str) -> str:
    return '"' + text.replace('"', '\\"') + '"'
