"""The nodes of a `ray.dag` graph, checked the way `experimental_compile` checks them: same rules, same errors, same words.

Where Ray's rule only stands for something it could not do and nobody can rely on its error (a node twice among the outputs, the
input as an output), the graph passes here and raycomm's own rules decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import NoneType
from typing import Any, Final

from ray.dag import ClassMethodNode, CollectiveOutputNode, DAGNode, FunctionNode, InputAttributeNode, InputNode, MultiOutputNode
from ray.dag.py_obj_scanner import _PyObjScanner

from raycomm.errors import ArgumentError, CompileError
from raycomm.graph.nodes import is_own
from raycomm.graph.views import AttributeView, View
from raycomm.ray_dag.read import RayDagAdapter

# `CompiledGraph.execute` has an argument `timeout`, Ray's has none: an input key of that name goes by another one underneath.
_OWN_NAMES: Final = {"timeout": "timeout (input)"}


class CompatAdapter(RayDagAdapter):
    """Reads `ray.dag` nodes for a graph in which every name may be an input key.

    Args:
        communicator: for edges that ask for an accelerator and name none, and for collectives that name none.
    """

    def describe(self, node: object) -> View:
        """The view of a `ray.dag` node."""
        view = super().describe(node)
        if self._communicator is not None and view.hint is not None and view.hint.transport == "accelerator":
            view = dataclasses.replace(view, hint=dataclasses.replace(view.hint, transport=self._communicator))
        if isinstance(view, AttributeView) and isinstance(view.key, str) and view.key in _OWN_NAMES:
            return dataclasses.replace(view, key=_OWN_NAMES[view.key])
        return view


class CompatNodes:
    """The connected nodes around one output, numbered as Ray numbers its tasks, and the inputs they ask for.

    Args:
        output: the node that is compiled.

    Raises:
        ValueError, NotImplementedError: the graph breaks one of Ray's rules; with Ray's text.
    """

    def __init__(self, output: Any) -> None:
        self.output = output
        self.nodes: list[Any] = []
        _check_families(output)
        output._find_root().traverse_and_apply(self.nodes.append)
        self.returns_list = isinstance(output, MultiOutputNode)
        _check_kinds(self.nodes)
        _check_keywords(self.nodes)
        _check_nested(self.nodes)
        self.positions, self.keys = _inputs(self.nodes)
        _check_unused_inputs(self)
        _check_leaves(self)
        _check_triggers(self.nodes)

    @property
    def outputs(self) -> list[Any]:
        """The nodes whose values an execution returns."""
        return list(self.output._bound_args) if self.returns_list else [self.output]

    @property
    def handles(self) -> list[Any]:
        """A handle of each actor, once per actor."""
        found: list[Any] = [node._get_actor_handle() for node in self._calls]
        return list({handle._actor_id: handle for handle in found}.values())

    @property
    def bind_indexes(self) -> dict[str, list[int]]:
        """By actor id, the bind indexes of its calls in the order in which they run."""
        indexes: dict[str, list[int]] = {}
        for node in self._calls:
            indexes.setdefault(node._get_actor_handle()._actor_id.hex(), []).append(node._get_bind_index())
        return {actor: sorted(found) for actor, found in indexes.items()}

    @property
    def _calls(self) -> list[Any]:
        return [node for node in self.nodes if isinstance(node, ClassMethodNode) and node.is_class_method_call]

    def check_communicators(self) -> None:
        """As where there is no default: edges that ask for an accelerator, and collectives, name a communicator.

        Raises:
            ValueError: one does not.
        """
        for node in self.nodes:
            hint = node._type_hint
            if isinstance(node, CollectiveOutputNode):
                hint = None if node._is_class_method_output else node._collective_op._type_hint
            needs = hint is not None and hint.requires_accelerator()
            if needs and hint.get_custom_communicator() is None:
                raise ValueError(
                    f"DAGNode {node} has no custom communicator specified. Please specify a custom communicator for the DAGNode "
                    "using `with_tensor_transport()`, or specify a communicator or 'create' for _default_communicator when "
                    "calling experimental_compile()."
                )

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments under the names the graph was compiled with.

        Raises:
            ValueError: a wrong count, a missing or a surplus keyword argument.
        """
        if len(args) != self.positions:
            raise ArgumentError(
                f"dag.execute() or dag.execute_async() must be called with {self.positions} positional args, got {len(args)}",
                expected=f"{self.positions} positional args",
                given=f"{len(args)} positional args",
            )
        for key in self.keys:
            if key not in kwargs:
                raise ArgumentError(
                    f"dag.execute() or dag.execute_async() must be called with kwarg `{key}`",
                    expected=f"kwarg {key!r}",
                    given=f"kwargs {sorted(kwargs)}",
                )
        if len(kwargs) != len(self.keys):
            surplus = sorted(set(kwargs) - set(self.keys))
            raise ArgumentError(
                f"dag.execute() or dag.execute_async() must be called without kwargs {', '.join(f'`{key}`' for key in surplus)}: "
                f"the graph has no such input; it takes {', '.join(f'`{key}`' for key in self.keys) or 'no kwargs'}",
                expected=f"kwargs {sorted(self.keys)}",
                given=f"kwargs {sorted(kwargs)}",
            )
        if kwargs.keys().isdisjoint(_OWN_NAMES):
            return kwargs
        return {_OWN_NAMES.get(key, key): value for key, value in kwargs.items()}


def _check_families(output: Any) -> None:
    """No node of raycomm's own: Ray's nodes do not lead on from there. What is found is what the results depend on."""
    seen: set[Any] = set()
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting.extend(node._upstream_nodes)
        for place, argument in (*enumerate(node._bound_args), *node._bound_kwargs.items()):
            if is_own(argument):
                user = node.get_method_name() if isinstance(node, ClassMethodNode) else type(node).__name__
                remedy = "build it with ray.dag.InputNode and .bind only, or compile it with raycomm.compile(node)"
                raise CompileError(
                    f"argument {place} of {user} is {argument!r}, a node of raycomm's own, and experimental_compile reads graphs "
                    f"of ray.dag alone, also under raycomm.install(); {remedy}",
                    node=user,
                    argument=str(place),
                    remedy=remedy,
                )


def _check_kinds(nodes: list[Any]) -> None:
    for node in nodes:
        if not isinstance(node, (InputNode, InputAttributeNode, MultiOutputNode, ClassMethodNode)):
            if isinstance(node, FunctionNode):
                raise NotImplementedError("Compiled DAGs currently only support actor method nodes")
            raise ValueError(f"Found unsupported node of type {type(node)}")
        if isinstance(node, ClassMethodNode) and node.is_class_method_call:
            if node._get_actor_handle() is None:
                raise ValueError("Compiled DAGs can only bind methods to an actor that is already created with Actor.remote()")
        elif isinstance(node, (InputNode, InputAttributeNode)) and node.type_hint.requires_accelerator():
            raise ValueError(
                "DAG inputs cannot be transferred via accelerator because the driver cannot participate in the communicator group"
            )


def _check_nested(nodes: list[Any]) -> None:
    """No node inside another argument. Ray only looks at the last argument of a call."""
    for node in nodes:
        for argument in (*node._bound_args, *node._bound_kwargs.values()):
            if isinstance(argument, (DAGNode, int, float, str, bytes, NoneType)):
                continue
            scanner: Any = _PyObjScanner()
            found = len(scanner.find_nodes([argument]))
            scanner.clear()
            if found:
                raise ValueError(
                    f"Found {found} DAGNodes from the arg {argument} in {node}. Please ensure that the argument is a single "
                    "DAGNode and that a DAGNode is not allowed to be placed inside any type of container."
                )


def _check_keywords(nodes: list[Any]) -> None:
    if any(isinstance(value, DAGNode) for node in nodes for value in node._bound_kwargs.values()):
        raise ValueError("Compiled DAG currently does not support binding to other DAG nodes as kwargs")


def _inputs(nodes: list[Any]) -> tuple[int, tuple[str, ...]]:
    """How many positional arguments an execution takes, and which keyword arguments."""
    whole = False
    positions: set[int] = set()
    keys: dict[str, None] = {}
    for _, argument in _edges(nodes):
        if isinstance(argument, InputNode):
            whole = True
        elif isinstance(argument, InputAttributeNode):
            key = argument.key
            if isinstance(key, int):
                positions.add(key)
            elif isinstance(key, str):
                keys.setdefault(key)
            else:
                raise ValueError("InputNode() can only be indexed using int for positional args or str for kwargs.")
    if whole and (positions or keys):
        raise ValueError("All tasks must either use InputNode() directly, or they must index to specific args or kwargs.")
    return (1 if whole else max(positions, default=-1) + 1), tuple(keys)


def _check_unused_inputs(graph: CompatNodes) -> None:
    """Each part of the input that is bound to something leads to an output.

    Parts that were only touched (`hasattr`, a debugger, `zip`) do not count here, in Ray they do.
    """
    reached: set[Any] = set()
    waiting = [graph.output]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting.extend(node._upstream_nodes)
    inputs = [node for node in graph.nodes if isinstance(node, InputNode)]
    parts = {key: part for node in inputs for key, part in node.input_attribute_nodes.items()}
    unused = [str(key) for key, part in parts.items() if part._downstream_nodes and part not in reached]
    if unused:
        raise ValueError(
            f"Compiled Graph expects input to be accessed using all of attributes {', '.join(map(str, parts))}, but "
            f"{', '.join(unused)} {'is' if len(unused) == 1 else 'are'} unused. Ensure all input attributes are used and "
            "contribute to the computation of the Compiled Graph output."
        )


def _check_leaves(graph: CompatNodes) -> None:
    used = {argument for _, argument in _edges(graph.nodes)}
    calls = [node for node in graph.nodes if isinstance(node, ClassMethodNode)]
    leaves: list[Any] = [node for node in calls if node not in used and node is not graph.output]
    if leaves:
        raise ValueError(
            "Compiled DAG doesn't support leaf nodes, i.e., nodes that don't have downstream nodes and are not output nodes. "
            f"There are {len(leaves)} leaf nodes in the DAG. Please add the outputs of "
            f"{[leaf.get_method_name() for leaf in leaves]} to the the MultiOutputNode."
        )


def _check_triggers(nodes: list[Any]) -> None:
    for node in nodes:
        if isinstance(node, ClassMethodNode) and not any(isinstance(argument, DAGNode) for argument in node._bound_args):
            raise ValueError(
                "Compiled DAGs require each task to take a ray.dag.InputNode or at least one other DAGNode as an input. "
                f"Invalid task node:\n{node}\nPlease bind the task to proper DAG nodes."
            )


def _edges(nodes: list[Any]) -> Iterator[tuple[Any, Any]]:
    for node in nodes:
        for argument in node._bound_args:
            if isinstance(argument, DAGNode):
                yield node, argument
