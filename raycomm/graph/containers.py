"""Finds nodes hidden inside a constant argument."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator

# Constants can be huge; a node beyond this many objects is found later, when the actor refuses to unpickle it.
MAX_OBJECTS = 10_000


def nested_nodes(value: object, is_node: Callable[[object], bool]) -> Iterator[tuple[object, str]]:
    """Each node inside `value` with its path, such as ``['a'][3].field``; nothing where `value` itself is a node.

    Looks into lists, tuples, dicts (keys too), sets, deques and dataclasses, each object once, at most `MAX_OBJECTS` of them.
    """
    pending: deque[tuple[object, str]] = deque([(value, "")])
    # Objects on the queue are alive through `value`, except for those a property makes; so the walk keeps what it has seen.
    seen: dict[int, object] = {}
    while pending:
        item, path = pending.popleft()
        if path and is_node(item):
            yield item, path
            continue
        if is_node(item):
            return
        for child, step in _children(item):
            if len(seen) >= MAX_OBJECTS:
                break
            if id(child) not in seen:
                seen[id(child)] = child
                pending.append((child, path + step))


def _children(item: object) -> Iterator[tuple[object, str]]:
    if isinstance(item, dict):
        for key, entry in item.items():
            yield key, f" key {key!r:.40}" if isinstance(key, (str, int, float)) else " key"
            yield entry, f"[{key!r:.40}]" if isinstance(key, (str, int, float)) else "[...]"
    elif isinstance(item, (list, tuple, deque)):
        for index, entry in enumerate(item):
            yield entry, f"[{index}]"
    elif isinstance(item, (set, frozenset)):
        for entry in item:
            yield entry, "{...}"
    elif dataclasses.is_dataclass(item) and not isinstance(item, type):
        for field in dataclasses.fields(item):
            if hasattr(item, field.name):
                yield getattr(item, field.name), f".{field.name}"
