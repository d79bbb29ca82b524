"""Root node -> `Graph`: collect the connected component, order its calls, check it, number everything.

The order of calls follows what is known about the order in which they were made: data first, then calls on one actor in the order
they were bound, then the consumers of one value in the order they were added. Each of these agrees with time, so together they
have no cycle, and the result is the same for a graph written with raycomm's nodes and with `ray.dag`'s, which record no more. The
calls of a collective count as one and stand next to each other: so all actors have any two collectives in one order.

What calls only wait for (`after`) says nothing about time: it is said when both exist, in any order. So it moves calls within the
order by time, as little as it takes, against nothing but data and the order of binding on one actor.

Every step is a loop over the component (no recursion) and linear in its nodes and edges, but for one sort.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import count, pairwise
from typing import NoReturn

from raycomm.errors import DeadlockError
from raycomm.graph import validate
from raycomm.graph.actor import ActorIdentity
from raycomm.graph.channel_options import ChannelOptions
from raycomm.graph.component import Component
from raycomm.graph.model import (
    Actor,
    CallNode,
    CallValue,
    Collective,
    Const,
    Graph,
    InputValue,
    Key,
    Nothing,
    Operand,
    Position,
    Projection,
    ValueRef,
    Whole,
)
from raycomm.graph.nodes import OwnAdapter, projection_of
from raycomm.graph.tensor_hint import TensorHint
from raycomm.graph.views import Adapter, AttributeView, CallView, ElementView, InputView, OutputsView, View

_SHORT_ID = 6


def build(root: object, adapter: Adapter | None = None, *, reserved_keys: frozenset[str] = frozenset({"timeout"})) -> Graph:
    """The checked graph that ends in `root`.

    Args:
        root: the node whose value an execution returns, or the node that lists them.
        adapter: reads nodes that are not raycomm's own; without it they count as constants.
        reserved_keys: names that `execute` takes itself and that therefore cannot be input keys.

    Raises:
        CompileError: the graph breaks a rule; see `raycomm.graph.validate`.
        DeadlockError: calls depend on each other in a cycle.
    """
    adapters: tuple[Adapter, ...] = (OwnAdapter(),) if adapter is None else (OwnAdapter(), adapter)
    component = _collect(root, adapters)
    validate.before_ordering(component)
    calls = _order(component)
    validate.collectives_are_whole(calls)
    actors, labels = _name_actors(calls)
    component.name_calls(calls, labels)
    validate.after_ordering(component, calls, reserved_keys)
    return _number(component, calls, actors, labels)


def _collect(root: object, adapters: Sequence[Adapter]) -> Component:
    """Every node connected with `root`, upwards and downwards, in breadth-first order."""
    component = Component(adapters)
    validate.root_is_node(component, root)
    component.root = component.add(root)
    pending = deque([component.root])
    while pending:
        view = pending.popleft()
        for neighbour in (*_upstream(view), *view.consumers, *view.related):
            if component.is_node(neighbour) and not component.has(neighbour):
                added = component.add(neighbour)
                # Another list of results is no part of this graph: what only it uses is reported as unused.
                if not isinstance(added, OutputsView):
                    pending.append(added)
    return component


def _upstream(view: View) -> tuple[object, ...]:
    if isinstance(view, CallView):
        return (*_given(view), *view.after)
    if isinstance(view, ElementView):
        return (view.call,)
    if isinstance(view, AttributeView):
        return (view.source,)
    if isinstance(view, OutputsView):
        return view.items
    return ()


def _given(view: CallView) -> tuple[object, ...]:
    return (*view.args, *(value for _, value in view.kwargs))


def _order(component: Component) -> list[CallView]:
    """The calls of the component in the order the module's docstring gives."""
    calls = [view for view in component.views() if isinstance(view, CallView)]
    place = {id(view.node): index for index, view in enumerate(calls)}
    given = [(argument, index) for index, view in enumerate(calls) for argument in _given(view)]
    awaited = [(argument, index) for index, view in enumerate(calls) for argument in view.after]
    units, unit_of = _units(calls)

    def of_units(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        both = ((unit_of[first], unit_of[then]) for first, then in pairs)
        return [(first, then) for first, then in both if first != then]

    def made_before(uses: list[tuple[object, int]]) -> list[tuple[int, int]]:
        producers = ((component.call_of(argument), index) for argument, index in uses)
        return of_units((place[id(call.node)], index) for call, index in producers if call is not None)

    fixed = of_units(pair for run in _bind_runs(calls) for pair in pairwise(run)) + made_before(given)
    users = {(id(argument), index) for argument, index in given}
    recorded: list[tuple[int, int]] = []
    for view in component.views():
        consumers = (place[id(consumer)] for consumer in view.consumers if id(consumer) in place)
        # A call that only waits for the value is added when it is told to, which may be long after calls that were bound later.
        in_turn = dict.fromkeys(index for index in consumers if (id(view.node), index) in users)
        recorded += of_units(pairwise(in_turn))

    labels = [calls[unit[0]].label for unit in units]
    turn = count()
    order = _sort(labels, fixed + recorded, lambda _: next(turn), "bind calls in an order in which each one's arguments exist")
    if awaited:
        rank = {unit: number for number, unit in enumerate(order)}
        remedy = "let no call run after one that needs its value, or that is bound later on the same actor"
        order = _sort(labels, fixed + made_before(awaited), rank.__getitem__, remedy)
    return [calls[call] for unit in order for call in units[unit]]


def _sort(labels: list[str], edges: list[tuple[int, int]], rank: Callable[[int], int], remedy: str) -> list[int]:
    """The numbers of `labels`, ordered along `edges`. Of those that may come next, the one of the lowest rank does; its rank is
    asked for once, as soon as it may come."""
    successors: list[list[int]] = [[] for _ in labels]
    waiting = [0] * len(labels)
    for first, then in edges:
        successors[first].append(then)
        waiting[then] += 1
    ready: list[tuple[int, int]] = []
    for index, left in enumerate(waiting):
        if left == 0:
            heappush(ready, (rank(index), index))
    order: list[int] = []
    while ready:
        _, index = heappop(ready)
        order.append(index)
        for then in successors[index]:
            waiting[then] -= 1
            if waiting[then] == 0:
                heappush(ready, (rank(then), then))
    if len(order) < len(labels):
        _raise_cycle(labels, successors, waiting, remedy)
    return order


def _units(calls: list[CallView]) -> tuple[list[list[int]], list[int]]:
    """Calls that are ordered as one, and the unit of each: the calls of a collective by rank, and every other call alone."""
    units: list[list[int]] = []
    unit_of: list[int] = []
    exchanges: dict[int, int] = {}
    for index, view in enumerate(calls):
        unit = len(units) if view.exchange is None else exchanges.setdefault(id(view.exchange.key), len(units))
        if unit == len(units):
            units.append([])
        units[unit].append(index)
        unit_of.append(unit)
    for unit in exchanges.values():
        units[unit].sort(key=lambda index: rank_of(calls[index]))
    return units, unit_of


def rank_of(view: CallView) -> int:
    """The place of a collective's call among its actors."""
    assert view.exchange is not None
    return [actor.key for actor in view.exchange.actors].index(view.actor.key)


def _bind_runs(calls: list[CallView]) -> list[list[int]]:
    """Runs of call indices whose relative order `bind` recorded: per handle object, and per actor for raycomm's own nodes."""
    by_handle: dict[int, list[tuple[int, int]]] = {}
    by_actor: dict[str, list[tuple[int, int]]] = {}
    for index, view in enumerate(calls):
        if view.bind_index is not None:
            by_handle.setdefault(id(view.actor.handle), []).append((view.bind_index, index))
        if view.created is not None:
            by_actor.setdefault(view.actor.key, []).append((view.created, index))
    return [[index for _, index in sorted(run)] for run in (*by_handle.values(), *by_actor.values())]


def _raise_cycle(labels: list[str], successors: list[list[int]], waiting: list[int], remedy: str) -> NoReturn:
    stuck = {index for index, count in enumerate(waiting) if count > 0}
    predecessor = {then: first for first in stuck for then in successors[first] if then in stuck}
    trail: dict[int, None] = {}
    index = next(iter(predecessor))
    while index not in trail:
        trail[index] = None
        index = predecessor[index]
    path = list(trail)
    cycle = tuple(labels[step] for step in reversed(path[path.index(index) :]))
    raise DeadlockError(
        f"calls wait for each other: {' -> '.join((*cycle, cycle[0]))}; {remedy}", node=cycle[0], remedy=remedy, cycle=cycle
    )


def _name_actors(calls: list[CallView]) -> tuple[tuple[Actor, ...], dict[str, Actor]]:
    """Actors in order of their first call, and the same by key. A label is the class name, with part of the id if shared."""
    identities: dict[str, ActorIdentity] = {}
    for view in calls:
        identities.setdefault(view.actor.key, view.actor)
    sharing: dict[str, list[str]] = {}
    for key, identity in identities.items():
        sharing.setdefault(identity.class_name, []).append(key)
    actors: dict[str, Actor] = {}
    taken: set[str] = set()
    for index, (key, identity) in enumerate(identities.items()):
        keys = sharing[identity.class_name]
        label = identity.class_name if len(keys) == 1 else f"{identity.class_name}#{key[: _distinct_length(keys)]}"
        if label in taken:  # A class may be named like another one's label.
            label = f"{label}@{index}"
        taken.add(label)
        actors[key] = Actor(index=index, label=label, key=key, handle=identity.handle)
    return tuple(actors.values()), actors


def _distinct_length(keys: list[str]) -> int:
    length = _SHORT_ID
    longest = max(map(len, keys))
    while length < longest and len({key[:length] for key in keys}) < len(keys):
        length += 1
    return length


def _number(component: Component, calls: list[CallView], actors: tuple[Actor, ...], by_key: dict[str, Actor]) -> Graph:
    ids = {id(view.node): index for index, view in enumerate(calls)}
    inputs: dict[Projection, None] = {}
    constants: list[object] = []
    constant_places: dict[int, int] = {}
    options: dict[ValueRef, ChannelOptions] = {}
    hints: dict[ValueRef, TensorHint] = {}

    def value(node: object) -> ValueRef:
        view = component.view(node)
        given = view.options
        hint = view.hint
        made: ValueRef
        if isinstance(view, CallView):
            made = CallValue(ids[id(view.node)])
        elif isinstance(view, ElementView):
            made = CallValue(ids[id(view.call)], view.index)
        elif isinstance(view, AttributeView):
            made = InputValue(projection_of(view.key, view.label))
            # What is said of the whole input holds for its parts, where they say nothing themselves.
            whole = component.view(view.source)
            given = whole.options if given is None else given.over(whole.options)
            hint = hint or whole.hint
        else:
            made = InputValue(Whole())
        if isinstance(made, InputValue):
            inputs.setdefault(made.projection)
        if given is not None:
            options[made] = given.over(options.get(made))
        if hint is not None:
            hints[made] = hint.checked(component.name(view))
        return made

    def waited_for(node: object) -> ValueRef:
        if not isinstance(component.view(node), InputView):
            return value(node)
        inputs.setdefault(Nothing())
        return InputValue(Nothing())

    def operand(argument: object) -> Operand:
        if component.is_node(argument):
            return value(argument)
        # One object bound twice stays one object in the actor, so constants are told apart by identity, not by equality.
        if id(argument) not in constant_places:
            constant_places[id(argument)] = len(constants)
            constants.append(argument)
        return Const(constant_places[id(argument)])

    exchanges: dict[int, list[int]] = {}
    for index, view in enumerate(calls):
        if view.exchange is not None:
            exchanges.setdefault(id(view.exchange.key), []).append(index)
    numbers = {key: number for number, key in enumerate(exchanges)}
    nodes = tuple(
        CallNode(
            id=index,
            actor=by_key[view.actor.key].index,
            actor_label=by_key[view.actor.key].label,
            method=view.method,
            args=tuple(operand(argument) for argument in view.args),
            kwargs=tuple((name, operand(argument)) for name, argument in view.kwargs),
            num_returns=view.num_returns,
            after=tuple(map(waited_for, view.after)),
            collective=None if view.exchange is None else numbers[id(view.exchange.key)],
        )
        for index, view in enumerate(calls)
    )
    root = component.root
    single = not isinstance(root, OutputsView)
    outputs = tuple(value(item) for item in (root.items if isinstance(root, OutputsView) else (root.node,)))
    return Graph(
        nodes=nodes,
        actors=actors,
        inputs=tuple(inputs),
        outputs=outputs,
        single_output=single,
        input_arity=None
        if Whole() in inputs
        else max((part.index + 1 for part in inputs if isinstance(part, Position)), default=0),
        input_keys=tuple(sorted(part.name for part in inputs if isinstance(part, Key))),
        constants=tuple(constants),
        collectives=tuple(
            Collective(first.kind, first.op, first.root, tuple(ranks), first.transport, first.own)
            for ranks in exchanges.values()
            if (first := calls[ranks[0]].exchange) is not None
        ),
        channel_options=tuple(options.items()),
        hints=tuple(hints.items()),
    )


__all__ = ["Adapter", "build"]
