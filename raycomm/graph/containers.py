"""Finds nodes hidden inside a constant argument."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeAlias

# Constants can be huge; a node beyond this many objects is found later, when the actor refuses to unpickle it.
MAX_OBJECTS = 10_000

# The slots of classes met on a walk.
_Slots: TypeAlias = dict[type, list[tuple[str, types.MemberDescriptorType]]]


def nested_nodes(value: object, is_node: Callable[[object], bool]) -> Iterator[tuple[object, str]]:
    """Each node inside `value` with its path, such as ``['a'][3].field``; nothing where `value` itself is a node.

    Looks into lists, tuples, dicts (keys too), sets, deques, arrays of objects, attributes of objects, partial functions and
    closures, each object once, at most `MAX_OBJECTS` of them, the nearest first.
    """
    pending: deque[tuple[object, str]] = deque([(value, "")])
    # Objects on the queue are alive through `value`, except for those a property makes; so the walk keeps what it has seen.
    seen: dict[int, object] = {}
    slots: _Slots = {}
    while pending:
        item, path = pending.popleft()
        if path and is_node(item):
            yield item, path
            continue
        if is_node(item):
            return
        for child, step in _children(item, slots):
            if len(seen) >= MAX_OBJECTS:
                break
            if id(child) not in seen:
                seen[id(child)] = child
                pending.append((child, path + step))


def _children(item: object, slots: _Slots) -> Iterator[tuple[object, str]]:
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
    elif isinstance(item, functools.partial):
        yield item.args, ".args"
        yield item.keywords, ".keywords"
    elif isinstance(item, types.FunctionType):
        for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=False):
            with contextlib.suppress(ValueError):  # a variable that was not set yet
                yield cell.cell_contents, f" variable {name}"
    elif isinstance(item, types.MethodType):
        yield item.__self__, ".__self__"
    elif type(item).__module__ == "numpy" and getattr(getattr(item, "dtype", None), "hasobject", False):
        yield item.tolist(), ""  # type: ignore[attr-defined]
    elif not isinstance(item, (type, types.ModuleType)):
        for name, value in _attributes(item, slots):
            yield value, f".{name}"


def _attributes(item: object, slots: _Slots) -> Iterator[tuple[str, object]]:
    """Attributes that an object holds itself, in its dict or in slots; read without running code of its class."""
    with contextlib.suppress(AttributeError):
        yield from tuple(object.__getattribute__(item, "__dict__").items())
    cls = type(item)
    if cls not in slots:
        found = (pair for base in cls.__mro__ for pair in vars(base).items())
        slots[cls] = [(name, slot) for name, slot in found if isinstance(slot, types.MemberDescriptorType)]
    for name, slot in slots[cls]:
        with contextlib.suppress(AttributeError):
            yield name, slot.__get__(item)
