"""Values are taken apart and put together again: what is a tensor, what stays whole, and where it belongs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycomm.channel.tensors import ONE_TENSOR, put_together, take_apart
from raycomm.errors import SerializationError


class Ours:
    """Stands for a tensor: nothing here looks into one."""


class Other:
    """An object that stays whole."""


OURS = [Ours() for _ in range(3)]
LEAVES = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.sampled_from([Other(), Other()]), st.just(()), st.just({}))
KEYS = st.one_of(st.text(max_size=2), st.integers(0, 3), st.booleans(), st.none())
VALUES = st.recursive(
    st.one_of(LEAVES, st.sampled_from(OURS)),
    lambda part: st.one_of(
        st.lists(part, max_size=3), st.lists(part, max_size=3).map(tuple), st.dictionaries(KEYS, part, max_size=3)
    ),
    max_leaves=12,
)


def is_ours(value: object) -> bool:
    return type(value) is Ours


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and all(map(same, one.values(), other.values()))
    return one is other or (isinstance(one, (int, str)) and one == other)


def tensors_in(value: Any) -> list[Ours]:
    if isinstance(value, (list, tuple)):
        return [found for part in value for found in tensors_in(part)]
    if isinstance(value, dict):
        return [found for part in value.values() for found in tensors_in(part)]
    return [value] if is_ours(value) else []


@given(VALUES)
def test_what_was_taken_apart_is_put_together(value: Any) -> None:
    structure, tensors, leaves = take_apart(value, is_ours)
    assert tensors == list(dict.fromkeys(tensors_in(value)))
    assert not any(tensors_in(leaf) for leaf in leaves)
    assert hash(structure) is not None
    assert same(put_together(structure, tensors, leaves), value)


@given(VALUES, VALUES)
def test_equal_structures_without_leaves_are_of_equal_values(one: Any, other: Any) -> None:
    """So the reader may put other tensors into the structure that it has."""
    first, second = take_apart(one, is_ours), take_apart(other, is_ours)
    if first[0] == second[0] and not first[2] and not second[2]:
        assert same(put_together(second[0], first[1], []), one)


def test_the_same_tensor_twice_is_one() -> None:
    structure, tensors, leaves = take_apart([OURS[0], {"x": OURS[0]}], is_ours)
    assert (tensors, leaves) == ([OURS[0]], [])
    again = put_together(structure, [OURS[1]], leaves)
    assert again[0] is again[1]["x"] is OURS[1]


def test_a_tensor_alone_has_the_structure_that_is_promised() -> None:
    assert take_apart(OURS[0], is_ours)[0] == ONE_TENSOR
    assert take_apart([OURS[0]], is_ours)[0] != ONE_TENSOR
    assert take_apart(1, is_ours)[0] != ONE_TENSOR


def test_subclasses_of_containers_stay_whole() -> None:
    class Named(dict):  # type: ignore[type-arg]
        pass

    value = Named(x=OURS[0])
    assert take_apart(value, is_ours) == ((1, 0), [], [value])


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(SerializationError, match="contains itself"):
        take_apart(value, is_ours)


@pytest.mark.parametrize("value", [OURS[0], [OURS[0], {"x": (OURS[1], 5)}], {"x": [OURS[2]], 3: "text"}])
def test_nothing_is_left_to_a_collection(value: Any) -> None:
    """What was taken apart lives as long as its parts, and no longer."""
    while gc.collect():  # what is freed by one may leave more to the next
        pass
    gc.disable()
    try:
        structure, tensors, leaves = take_apart(value, is_ours)
        put_together(structure, tensors, leaves)
        before = {id(thing) for thing in (structure, tensors, leaves)}
        del structure, tensors, leaves
        assert gc.collect() == 0
        assert before
    finally:
        gc.enable()
