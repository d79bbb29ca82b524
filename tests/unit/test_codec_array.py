"""numpy arrays and scalars: every dtype, layout and lifetime."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from raycomm.codec import decode, encode
from raycomm.codec.array import describe, rebuild
from raycomm.errors import SerializationError
from tests.unit.strategies import NUMPY_DTYPES, arrays, equal, numpy_scalars


def carried(value: Any) -> Any:
    payload, buffers = encode(value)
    return decode(payload, [bytearray(buffer) for buffer in buffers])


def ext_code(payload: bytes) -> int:
    return payload[{0xC7: 3, 0xC8: 4, 0xC9: 6}.get(payload[1], 2)]


@settings(max_examples=300, deadline=None)
@given(arrays())
def test_any_array_arrives_equal(value: np.ndarray[Any, Any]) -> None:
    payload, buffers = encode(value)
    assert sum(len(buffer) for buffer in buffers) == value.size * value.itemsize
    assert ext_code(payload) == 10
    assert equal(value, decode(payload, [bytearray(buffer) for buffer in buffers]))


@settings(max_examples=200, deadline=None)
@given(numpy_scalars())
def test_any_scalar_arrives_equal(value: Any) -> None:
    payload, _ = encode(value)
    assert ext_code(payload) == 11
    assert equal(value, decode(payload))


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=repr)
def test_every_dtype(dtype: np.dtype[Any]) -> None:
    value = np.zeros((2, 3, 4), dtype)
    for view in (value, value.T, value[:, ::2], value[0], value[0, 0, :1].reshape(()), value[:0], value[::-1]):
        assert equal(view, carried(view))
    assert equal(np.zeros((), dtype), carried(np.zeros((), dtype)))


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=repr)
def test_descriptions_are_exact(dtype: np.dtype[Any]) -> None:
    description = describe(dtype)
    assert description is not None
    again = rebuild(description)
    assert again == dtype
    assert (again.num, again.itemsize) == (dtype.num, dtype.itemsize)
    assert (again.isalignedstruct, again.fields) == (dtype.isalignedstruct, dtype.fields)


@pytest.mark.parametrize(
    "description",
    [
        "O",
        "i4,i4",
        "a5",
        "(2,)i4",
        "",
        "T",
        5,
        None,
        [],
        [0],
        [0, "i4", [-1]],
        [0, "i4", 3],
        [1, 8, False, [["a", None, "O", 0]]],
        [1, 2, False, [["a", None, "i4", 0]]],
        [1, -1, False, []],
        [1, 8, 1, []],
        [2, 8, False, []],
        [1, 8, False, [["a", None, "i4"]]],
        [1, 2**80, False, []],
        [1, 8, False, [["a", None, "i4", -4]]],
        [1, 8, False, [["a", None, "i4", 0], ["a", None, "i4", 4]]],
    ],
)
def test_bad_descriptions(description: Any) -> None:
    with pytest.raises(SerializationError):
        rebuild(description)


def test_layouts() -> None:
    value = np.arange(24.0).reshape(2, 3, 4)
    for view in (value.T, np.asfortranarray(value), value.transpose(1, 0, 2)):
        assert carried(view).strides == view.strides
    for view in (value[::-1], value[..., ::2], value[:, ::-1], np.broadcast_to(value, (5, 2, 3, 4)), value[:, None][::2]):
        arrived = carried(view)
        assert arrived.flags.c_contiguous
        assert equal(view, arrived)
    odd = np.lib.stride_tricks.as_strided(np.arange(4, dtype="i4"), (2, 1, 2), (4, 7, 8))
    payload, buffers = encode(odd)
    assert payload[5] == 1
    assert equal(odd, decode(payload, [bytearray(buffer) for buffer in buffers]))
    fields = np.zeros(4, [("a", "i2"), ("b", "i4")])
    assert equal(fields["b"], carried(fields["b"]))


def test_only_viewed_elements_travel() -> None:
    large = np.zeros((1000, 1000), "u1")
    for view, count in (
        (large[5], 1000),
        (large[:, 3], 1000),
        (large[::100, ::100], 100),
        (np.broadcast_to(large[0, 0], (50, 2)), 100),
    ):
        _, (buffer,) = encode(view)
        assert len(buffer) == count


def test_writability_follows_the_buffer_not_the_sender() -> None:
    value = np.arange(4)
    value.flags.writeable = False
    payload, (buffer,) = encode(value)
    assert decode(payload, [bytearray(buffer)]).flags.writeable
    arrived = decode(payload, [bytes(buffer)])
    assert not arrived.flags.writeable
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        arrived.flags.writeable = True


def test_buffers_are_shared_and_kept_alive() -> None:
    class Block(bytearray):
        pass

    payload, (buffer,) = encode(np.arange(4))
    block = Block(buffer)
    gone = weakref.ref(block)
    arrived = decode(payload, [block])
    block[0] = 9
    assert arrived[0] == 9
    view = arrived[1:].reshape(3, 1)
    del block, arrived
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_identity_inside_one_message() -> None:
    shared = np.arange(5)
    payload, buffers = encode([shared, shared.copy(), (shared,)])
    assert len(buffers) == 2
    arrived = decode(payload, [bytearray(buffer) for buffer in buffers])
    assert arrived[0] is arrived[2][0]
    assert arrived[0] is not arrived[1]


class Special(np.ndarray[Any, Any]):
    pass


class MyFloat(np.float64):
    pass


@pytest.mark.parametrize(
    "value",
    [
        np.array([1, "a", None], object),
        np.zeros(2, [("a", object), ("b", "i4")]),
        np.arange(4).view(Special),
        np.ma.masked_array([1, 2], [0, 1]),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array([1.5], np.dtype("f8", metadata={"unit": "m"})),
        np.zeros(2, np.dtype([("a", np.dtype("i4", metadata={"k": 1}))])),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.dtype}",
)
def test_others_go_by_pickle_and_keep_their_type(value: Any) -> None:
    payload, buffers = encode(value)
    assert ext_code(payload) == 12
    arrived = decode(payload, [bytearray(buffer) for buffer in buffers])
    assert type(arrived) is type(value)
    assert arrived.dtype == value.dtype
    assert arrived.dtype.metadata == value.dtype.metadata
    assert arrived.tolist() == value.tolist()


def test_scalars_keep_their_type_or_are_refused() -> None:
    with pytest.raises(SerializationError, match="same type") as caught:  # numpy's own reducer makes it a float64
        encode([MyFloat(2.5)])
    assert caught.value.path == "value[0]"
    assert type(carried(np.longlong(5))) is np.longlong
    record = np.rec.array([(1, 2.0)])[0]
    assert type(carried(record)) is np.record


def test_trailing_zeros_of_text_scalars() -> None:
    for value in (np.str_("a\0\0"), np.bytes_(b"a\0\0"), np.str_(""), np.bytes_(b""), np.str_("\ud800")):
        arrived = carried(value)
        assert type(arrived) is type(value)
        assert len(arrived) == len(value)
        assert equal(value, arrived)


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="numpy 1 has no StringDType")
def test_variable_width_strings() -> None:
    value = np.array(["a", "a longer text than fits inline"], np.dtypes.StringDType())
    assert carried(value).dtype == value.dtype
    assert carried(value).tolist() == value.tolist()
