"""The rules of a graph, one function each. Every violation is a `CompileError` that names the node, the argument and a remedy.

`before_ordering` holds the rules that must pass before calls can be ordered and named; the others can use the final names, which
are those of the plan: ``Actor.method``, with ``#id`` where the graph calls the method more than once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NoReturn

from raycomm.errors import CompileError
from raycomm.graph.component import Component
from raycomm.graph.containers import nested_nodes
from raycomm.graph.kinds import RESULTS_REMEDY, kind_of
from raycomm.graph.nodes import projection_of
from raycomm.graph.views import AttributeView, CallView, InputView, OutputsView, RefusedView, View

_SHORT_ID = 6


def before_ordering(component: Component) -> None:
    """Rules about kinds of nodes and how they are put together."""
    no_refused_nodes(component)
    results_are_values(component)
    results_are_no_argument(component)
    only_values_are_waited_for(component)
    one_input(component)


def after_ordering(component: Component, calls: Sequence[CallView], reserved_keys: frozenset[str]) -> None:
    """Rules about calls and values."""
    some_call(component, calls)
    no_nested_nodes(component, calls)
    has_input(component)
    every_call_is_triggered(component, calls)
    returns_are_countable(component, calls)
    several_returns_are_taken_apart(component, calls)
    input_used_in_one_form(component, calls)
    input_keys_are_free(component, calls, reserved_keys)
    every_call_is_used(component, calls)
    hints_are_known(component)


def root_is_node(component: Component, root: object) -> None:
    """What is compiled is a node."""
    if component.is_node(root):
        return
    remedy = "pass the last node, or MultiOutputNode([...]) for several results"
    _refuse(f"compile takes a node, got {kind_of(root)}", node=None, argument="node", remedy=remedy)


def no_refused_nodes(component: Component) -> None:
    """Only calls of created actors, inputs and the list of results."""
    for view in component.views():
        if isinstance(view, RefusedView):
            _refuse(f"node {view.label}: {view.reason}", node=view.label, argument=None, remedy=view.remedy)


def results_are_values(component: Component) -> None:
    """The list of results is not empty and holds nodes that are values."""
    root = component.root
    if not isinstance(root, OutputsView):
        return
    if not root.items:
        _refuse(
            f"{root.label} is empty", node=root.label, argument="nodes", remedy="list at least one node in MultiOutputNode([...])"
        )
    for place, item in enumerate(root.items):
        where = f"{root.label}: result {place}"
        if not component.is_node(item):
            _refuse(f"{where} is {kind_of(item)}, not a node", node=root.label, argument=str(place), remedy=RESULTS_REMEDY)
        if isinstance(component.view(item), OutputsView):
            remedy = "list its nodes in the outer one"
            _refuse(f"{where} is itself a MultiOutputNode", node=root.label, argument=str(place), remedy=remedy)


def results_are_no_argument(component: Component) -> None:
    """The list of results is nobody's argument."""
    for view in component.views():
        if isinstance(view, CallView):
            for where, argument in _arguments(view):
                if component.is_node(argument) and isinstance(component.view(argument), OutputsView):
                    remedy = "pass its nodes one by one"
                    _refuse(
                        f"argument {where} of node {view.label} is a MultiOutputNode",
                        node=view.label,
                        argument=where,
                        remedy=remedy,
                    )


def only_values_are_waited_for(component: Component) -> None:
    """What a call runs after is a node that stands for a value."""
    for view in component.views():
        for awaited in view.after if isinstance(view, CallView) else ():
            if not component.is_node(awaited) or isinstance(component.view(awaited), OutputsView):
                text = f"node {view.label} runs after {kind_of(awaited)}, which is no node of a value"
                _refuse(text, node=view.label, argument="after", remedy="give nodes that bind made, or the InputNode")
            if component.call_of(awaited) is view:
                text = f"node {view.label} runs after itself"
                _refuse(text, node=view.label, argument="after", remedy="give other nodes")


def one_input(component: Component) -> None:
    """At most one input node."""
    inputs = [view for view in component.views() if isinstance(view, InputView)]
    if len(inputs) > 1:
        texts = [f"{view.label} (used by {_first_user(component, view)})" for view in inputs]
        remedy = "use one InputNode, and inp[0], inp[1] or inp.name for several values"
        _refuse(f"the graph has {len(inputs)} InputNodes: {', '.join(texts)}", node=inputs[1].label, argument=None, remedy=remedy)


def some_call(component: Component, calls: Sequence[CallView]) -> None:
    """An execution has something to do."""
    if not calls:
        label = component.root.label
        remedy = "bind the input to an actor method and compile the result"
        _refuse(f"node {label}: the graph calls no actor", node=label, argument=None, remedy=remedy)


def no_nested_nodes(component: Component, calls: Sequence[CallView]) -> None:
    """Nodes are arguments themselves, not parts of arguments."""
    for view in calls:
        for where, argument in _arguments(view):
            for node, path in nested_nodes(argument, component.is_node):
                inner = component.name(component.view(node) if component.has(node) else component.describe(node))
                remedy = "pass it as an argument of its own, not inside any container"
                name = component.name(view)
                text = f"argument {where} of node {name} contains node {inner} at {path.strip()}"
                _refuse(text, node=name, argument=where, remedy=remedy)


def has_input(component: Component) -> None:
    """The graph starts at an input."""
    if not any(isinstance(view, InputView) for view in component.views()):
        name = component.name(component.root)
        remedy = "bind the first calls to an InputNode"
        _refuse(f"no InputNode leads to node {name}", node=name, argument=None, remedy=remedy)


def every_call_is_triggered(component: Component, calls: Sequence[CallView]) -> None:
    """Each call waits for at least one node, or nothing would start it."""
    for view in calls:
        if not view.after and not any(component.is_node(argument) for _, argument in _arguments(view)):
            name = component.name(view)
            _refuse(
                f"node {name} has no node among its arguments",
                node=name,
                argument=None,
                remedy="bind it to the InputNode or another node, or let it run with raycomm.after(node, inp)",
            )


def collectives_are_whole(calls: Sequence[CallView]) -> None:
    """Each actor of a collective has one call in the graph. `calls` are in order; those of a collective next to each other."""
    for _, group in groupby(calls, key=lambda view: id(view if view.exchange is None else view.exchange.key)):
        first, *others = group
        if first.exchange is None:
            continue
        keys = [actor.key for actor in first.exchange.actors]
        found = [view.actor.key for view in (first, *others)]
        if len(set(keys)) < len(keys) or len(set(found)) < len(found):
            text = f"an actor stands twice among the {len(keys)} of collective {first.label}"
            _refuse(text, node=first.label, argument=None, remedy="list one node per actor")
        if missing := [actor for actor in first.exchange.actors if actor.key not in found]:
            names = ", ".join(f"{actor.class_name}#{actor.key[:_SHORT_ID]}" for actor in missing)
            remedy = "add their results to MultiOutputNode([...]) too"
            text = f"collective {first.label} joins {len(keys)} actors, but nothing leads to its nodes of {names}"
            _refuse(text, node=first.label, argument=None, remedy=remedy)


def returns_are_countable(component: Component, calls: Sequence[CallView]) -> None:
    """Each call returns at least one value, or there would be nothing to send."""
    for view in calls:
        if view.num_returns < 1:
            name = component.name(view)
            remedy = "set num_returns to at least 1 with method.options(num_returns=n)"
            _refuse(f"node {name} has num_returns={view.num_returns!r}", node=name, argument="num_returns", remedy=remedy)


def several_returns_are_taken_apart(component: Component, calls: Sequence[CallView]) -> None:
    """A call with several returns is used by element."""
    outputs = component.root.items if isinstance(component.root, OutputsView) else (component.root.node,)
    uses = [("the results", argument) for argument in outputs]
    uses += [(f"argument {where} of node {view.label}", argument) for view in calls for where, argument in _arguments(view)]
    for user, argument in uses:
        producer = component.view(argument) if component.is_node(argument) else None
        if isinstance(producer, CallView) and producer.num_returns > 1:
            name = component.name(producer)
            remedy = "use its elements, as bind returns them"
            text = f"{user} use node {name} as one value, but it returns {producer.num_returns}"
            _refuse(text, node=name, argument=user, remedy=remedy)


def input_used_in_one_form(component: Component, calls: Sequence[CallView]) -> None:
    """The input is used whole or in parts, not both; and each part is a position or a name."""
    whole: str | None = None
    part: tuple[str, str] | None = None
    for user, view in _input_uses(component, calls):
        if isinstance(view, AttributeView):
            projection_of(view.key, f"{user}: {component.name(view)}")
            part = part or (user, f"inp[{view.key!r}]")
        else:
            whole = whole or user
    if whole is not None and part is not None:
        remedy = "use parts everywhere, or the whole input everywhere"
        text = f"the input is used whole by {whole} and in parts ({part[1]}) by {part[0]}"
        _refuse(text, node=part[0], argument=part[1], remedy=remedy)


def input_keys_are_free(component: Component, calls: Sequence[CallView], reserved_keys: frozenset[str]) -> None:
    """No input key has the name of an argument of `execute`."""
    for user, view in _input_uses(component, calls):
        if isinstance(view, AttributeView) and view.key in reserved_keys:
            text = f"input key {view.key!r}, used by {user}, is an argument of execute itself"
            _refuse(text, node=user, argument=str(view.key), remedy="give the input key another name")


def every_call_is_used(component: Component, calls: Sequence[CallView]) -> None:
    """Each call leads to a result. One element of several is enough, and of a collective one actor's."""
    used = {id(call.node) for view in calls for _, argument in _arguments(view) if (call := component.call_of(argument))}
    outputs = component.root.items if isinstance(component.root, OutputsView) else (component.root.node,)
    used |= {id(call.node) for item in outputs if (call := component.call_of(item))}
    exchanged = {id(view.exchange.key) for view in calls if view.exchange is not None and id(view.node) in used}
    unused = [
        component.name(view)
        for view in calls
        if id(view.node) not in used and (view.exchange is None or id(view.exchange.key) not in exchanged)
    ]
    # By creation number, for a call is listed by each of its arguments.
    gone = {created: label for view in component.views() for created, label in view.dropped}
    unused += [f"{label} (its node is gone)" for label in gone.values()]
    if unused:
        lead, them = ("call leads", "it") if len(unused) == 1 else ("calls lead", "them")
        remedy = f"add {them} to MultiOutputNode([...]), or build the graph without {them}"
        text = f"{len(unused)} {lead} to no result: {', '.join(unused[:10])}{', ...' if len(unused) > 10 else ''}"
        _refuse(text, node=unused[0], argument=None, remedy=remedy)


def hints_are_known(component: Component) -> None:
    """Hints name transports and devices that there are. Whether an actor has them is known later."""
    for view in component.views():
        if view.hint is not None:
            view.hint.checked(component.name(view))


def _arguments(view: CallView) -> Iterator[tuple[str, object]]:
    for place, argument in enumerate(view.args):
        yield str(place), argument
    yield from view.kwargs


def _input_uses(component: Component, calls: Sequence[CallView]) -> Iterator[tuple[str, View]]:
    """Who uses which form of the input: calls, then results."""
    for view in calls:
        for _, argument in _arguments(view):
            if component.is_node(argument) and isinstance(used := component.view(argument), (InputView, AttributeView)):
                yield component.name(view), used
        for awaited in view.after:  # the whole input is only awaited here, and goes with its parts
            if isinstance(used := component.view(awaited), AttributeView):
                yield component.name(view), used
    root = component.root
    for item in root.items if isinstance(root, OutputsView) else (root.node,):
        if isinstance(used := component.view(item), (InputView, AttributeView)):
            yield "the results", used


def _first_user(component: Component, view: InputView) -> str:
    for other in component.views():
        if isinstance(other, CallView):
            for _, argument in _arguments(other):
                used = component.view(argument) if component.is_node(argument) else None
                if used is view or (isinstance(used, AttributeView) and used.source is view.node):
                    return other.label
    return "the results"


def _refuse(what: str, *, node: str | None, argument: str | None, remedy: str) -> NoReturn:
    raise CompileError(f"{what}; {remedy}", node=node, argument=argument, remedy=remedy)
