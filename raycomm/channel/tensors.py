"""Takes the tensors of a device out of a value, and puts received ones in their places.

    structure, tensors, leaves = take_apart({"x": t, "names": ["a", "b"]}, device.holds)
    value = put_together(structure, tensors, leaves)

Looked for in dicts, lists and tuples of exactly these types; other objects stay whole and travel as on any channel. A tensor that
is there twice is one tensor at the reader too. The structure is plain tuples, so it can be compared with that of the last value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from raycomm.errors import SerializationError

# (kind, ...): the number of a tensor or leaf; the parts of a list or tuple; keys, or the number of the leaf that has them, and
# parts of a dict.
Structure: TypeAlias = tuple[Any, ...]

_TENSOR: Final = 0
_LEAF: Final = 1
_LIST: Final = 2
_TUPLE: Final = 3
_DICT: Final = 4
_KEYED: Final = 5

ONE_TENSOR: Final = (_TENSOR, 0)  # the structure of a value that is a tensor itself


def take_apart(value: Any, is_ours: Callable[[Any], bool]) -> tuple[Structure, list[Any], list[Any]]:
    """The structure of `value`, the tensors for which `is_ours` is true, and whatever else there is; both in order of number.

    Raises:
        SerializationError: it is nested too deeply, or contains itself.
    """
    parts = _Parts(is_ours)
    try:
        return parts.structure_of(value), parts.tensors, parts.leaves
    except RecursionError:
        text = "a value that moves between devices is nested too deeply, or contains itself"
        raise SerializationError(text, path="value", type_name=type(value).__name__) from None


class _Parts:
    """What has been found so far. No closure: one that calls itself is a cycle, and would keep the tensors until a collection."""

    __slots__ = ("_is_ours", "_numbers", "leaves", "tensors")

    def __init__(self, is_ours: Callable[[Any], bool]) -> None:
        self._is_ours = is_ours
        self._numbers: dict[int, int] = {}
        self.tensors: list[Any] = []
        self.leaves: list[Any] = []

    def structure_of(self, part: Any) -> Structure:
        """The structure of a part; what is in it is added."""
        kind = type(part)
        if kind is list or kind is tuple or kind is dict:
            first_leaf = len(self.leaves)
            parts = tuple([self.structure_of(item) for item in (part.values() if kind is dict else part)])
            if any(inner[0] != _LEAF for inner in parts):
                if kind is not dict:
                    return (_LIST if kind is list else _TUPLE, parts)
                keys = tuple(part)
                if all(type(key) is str for key in keys):
                    return (_DICT, keys, parts)
                self.leaves.append(keys)
                return (_KEYED, len(self.leaves) - 1, parts)
            del self.leaves[first_leaf:]  # nothing of ours in it: it stays whole
        elif self._is_ours(part):
            number = self._numbers.setdefault(id(part), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(part)
            return (_TENSOR, number)
        self.leaves.append(part)
        return (_LEAF, len(self.leaves) - 1)


def put_together(structure: Structure, tensors: Sequence[Any], leaves: Sequence[Any]) -> Any:
    """The value again. Containers are new; tensors and leaves are those given."""
    kind = structure[0]
    if kind == _TENSOR:
        return tensors[structure[1]]
    if kind == _LEAF:
        return leaves[structure[1]]
    if kind in (_DICT, _KEYED):
        keys = structure[1] if kind == _DICT else leaves[structure[1]]
        return dict(zip(keys, [put_together(part, tensors, leaves) for part in structure[2]], strict=True))
    parts = [put_together(part, tensors, leaves) for part in structure[1]]
    return parts if kind == _LIST else tuple(parts)
