"""The nodes of one graph while it is compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from raycomm.graph.model import Actor
from raycomm.graph.views import Adapter, CallView, ElementView, View


class Component:
    """The connected nodes of one graph while it is compiled, as views, by identity of the node."""

    root: View

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._adapters = adapters
        self._views: dict[int, View] = {}
        self._names: dict[int, str] = {}

    def is_node(self, value: object) -> bool:
        """Whether some adapter recognises `value`."""
        return any(adapter.recognises(value) for adapter in self._adapters)

    def has(self, node: object) -> bool:
        """Whether `node` was added."""
        return id(node) in self._views

    def describe(self, node: object) -> View:
        """The view of `node` as it is now."""
        return next(adapter for adapter in self._adapters if adapter.recognises(node)).describe(node)

    def add(self, node: object) -> View:
        """Describe `node` and keep the view, and through it the node, alive."""
        view = self.describe(node)
        self._views[id(node)] = view
        return view

    def view(self, node: object) -> View:
        """The view of a node that was added."""
        return self._views[id(node)]

    def views(self) -> Iterator[View]:
        """All views, in the order in which they were added."""
        return iter(self._views.values())

    def call_of(self, argument: object) -> CallView | None:
        """The call that produces `argument`, or None where it is no call's value."""
        view = self._views.get(id(argument))
        if isinstance(view, ElementView):
            view = self._views.get(id(view.call))
        return view if isinstance(view, CallView) else None

    def name_calls(self, calls: Sequence[CallView], actors: Mapping[str, Actor]) -> None:
        """Give each call its final name; `calls` are in the order of their ids."""
        names = [f"{actors[view.actor.key].label}.{view.method}" for view in calls]
        uses = Counter(names)
        for index, (view, name) in enumerate(zip(calls, names, strict=True)):
            self._names[id(view.node)] = name if uses[name] == 1 else f"{name}#{index}"

    def name(self, view: View) -> str:
        """The name of a node in messages."""
        if isinstance(view, ElementView):
            call = self.view(view.call)
            several = isinstance(call, CallView) and call.num_returns > 1
            return f"{self.name(call)}[{view.index}]" if several else self.name(call)
        return self._names.get(id(view.node), view.label)
