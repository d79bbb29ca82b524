"""Pickle: what goes by it, out of band, from `__main__`, and what is said where it fails."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import enum
import fractions
import gc
import pathlib
import pickle
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest
import torch

from raycomm.codec import decode, encode
from raycomm.codec.fallback import explain
from raycomm.errors import SerializationError
from tests.unit.strategies import equal


def carried(value: Any) -> Any:
    payload, buffers = encode(value)
    return decode(payload, [bytearray(buffer) for buffer in buffers])


class Point(NamedTuple):
    x: int
    y: Any


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Batch:
    name: str
    data: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    left: Any
    right: Any = None


class MyInt(int):
    pass


class MyList(list):  # type: ignore[type-arg]
    pass


class MyDict(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "value",
    [
        Point(1, (2,)),
        Colour.RED,
        Level.HIGH,
        Batch("a", [1]),
        Slotted(1, "x"),
        MyInt(5),
        MyList([1]),
        MyDict(a=1),
        1 + 2j,
        range(5),
        ...,
        NotImplemented,
        int,
        len,
        datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        fractions.Fraction(1, 3),
        pathlib.PurePosixPath("a/b"),
        collections.OrderedDict(b=1, a=2),
        collections.Counter("aab"),
        collections.deque([1], 3),
        collections.defaultdict(list, a=[1]),
        msgpack.ExtType(9, b"abc"),
        msgpack.Timestamp(5, 6),
        slice(1, 2),
        b"x".__class__,
        Point,
    ],
    ids=lambda value: str(value)[:40],
)
def test_kept_exactly(value: Any) -> None:
    for whole in (value, [value], {"k": (value, 1)}):
        arrived = carried(whole)
        assert arrived == whole
    assert type(carried(value)) is type(value)


def test_as_dict_keys_and_in_sets() -> None:
    for value in ({Colour.RED: 1, Point(1, 2): 2, MyInt(3): 3}, {Colour.RED, Point(1, 2)}, frozenset({Level.HIGH})):
        assert carried(value) == value


def test_buffers_go_out_of_band() -> None:
    data = np.arange(1000)
    payload, buffers = encode([Batch("a", data), torch.ones(3), Batch("b", np.asfortranarray(np.ones((2, 3))))])
    assert [len(buffer) for buffer in buffers] == [8000, 12, 48]
    assert len(payload) < 1000
    arrived = decode(payload, [bytearray(buffer) for buffer in buffers])
    assert equal(data, arrived[0].data)
    assert arrived[2].data.flags.f_contiguous
    assert not decode(payload, [bytes(buffer) for buffer in buffers])[0].data.flags.writeable
    assert carried(Batch("c", pickle.PickleBuffer(b"raw"))).data == b"raw"


def test_identity_inside_one_object() -> None:
    shared = torch.arange(3)
    arrived = carried(Batch("x", [shared, {"again": shared}]))
    assert arrived.data[0] is arrived.data[1]["again"]


def test_modules_and_models() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    arrived = carried(model)
    assert all(equal(a, b) for a, b in zip(model.parameters(), arrived.parameters(), strict=True))
    assert type(arrived[0].weight) is torch.nn.Parameter
    state = carried(model.state_dict())
    assert type(state) is collections.OrderedDict
    assert equal(dict(model.state_dict()), dict(state))


def test_lambdas_and_local_classes_go_by_cloudpickle() -> None:
    class Local:
        def __init__(self, number: int) -> None:
            self.number = number

    offset = 10
    arrived = carried([lambda number: number + offset, Local(4)])
    assert arrived[0](5) == 15
    assert arrived[1].number == 4


def test_classes_of_main_travel_by_value(tmp_path: pathlib.Path) -> None:
    sender = tmp_path / "sender.py"
    sender.write_text(
        textwrap.dedent("""
        import sys
        from raycomm.codec import encode
        class Config:
            def __init__(self, size): self.size = size
            def area(self): return self.size ** 2
        payload, buffers = encode([Config(7), Config])
        assert not buffers
        sys.stdout.buffer.write(payload)
        """)
    )
    run = subprocess.run([sys.executable, "-W", "error", str(sender)], check=True, capture_output=True, timeout=60)
    config, cls = decode(run.stdout)
    assert config.area() == 49
    assert config.__class__.__name__ == cls.__name__ == "Config"


def test_the_word_main_as_data() -> None:
    value = Batch("__main__", "__main__")
    assert carried(value) == value


@dataclasses.dataclass
class Locked:
    cfg: Any
    lock: Any = dataclasses.field(default_factory=threading.Lock)


class SlottedLock:
    __slots__ = ("fine", "lock")

    def __init__(self) -> None:
        self.fine, self.lock = 1, threading.Lock()


class HidesOne:
    """`hidden` is left out of the pickle, so it is not to blame."""

    def __init__(self) -> None:
        self.hidden, self.bad = threading.Lock(), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"bad": self.bad}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (threading.Lock(), "value"),
        ({"cfg": Locked(1)}, "value['cfg'].lock"),
        ([1, (2, {"a": Locked({"deep": [0, threading.Lock()]}, lock=None)})], "value[1][1]['a'].cfg['deep'][1]"),
        ([SlottedLock()], "value[0].lock"),
        ([HidesOne()], "value[0].bad"),
        (MyList([1, threading.Lock()]), "value[1]"),
        ({Slotted(threading.Lock()): 1}, "value.<key <Slotted>>.left"),
        (Point(1, [threading.Lock()]), "value[1][0]"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_the_smallest_offender_is_named(value: Any, path: str) -> None:
    with pytest.raises(SerializationError) as caught:
        encode(value)
    error = caught.value
    assert error.path == path
    assert error.type_name == "_thread.lock"
    assert error.path in str(error)
    assert "Leave it out" in str(error)
    assert error.__cause__ is not None
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_lock_in_a_closure_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(SerializationError) as caught:
        encode([lambda: lock])
    assert caught.value.path == "value[0].<closure lock>"


class Raises:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize(
    "error", [ValueError("no"), RecursionError(), MemoryError(), OverflowError(), KeyError("k"), SerializationError("s")]
)
def test_a_raising_reducer_is_a_serialization_error(error: Exception) -> None:
    with pytest.raises(SerializationError) as caught:
        encode({"x": Raises(error)})
    assert caught.value.path == "value['x']"


def explode() -> None:
    raise OverflowError("at the receiver")


class Explodes:
    def __reduce__(self) -> Any:
        return explode, ()


def test_a_raising_constructor_is_a_serialization_error() -> None:
    payload, _ = encode([Explodes()])
    with pytest.raises(SerializationError, match="at the receiver"):
        decode(payload)


@pytest.mark.parametrize("value", [MyInt(3), [1, {"a": 1j}], [[[Point(1, 2)]]]], ids=str)
def test_pickle_can_be_refused(value: Any) -> None:
    with pytest.raises(SerializationError, match="allow_pickle=False") as caught:
        encode(value, allow_pickle=False)
    assert caught.value.path in ("value", "value[1]['a']", "value[0][0][0]")
    assert caught.value.type_name in (f"{__name__}.MyInt", "complex", f"{__name__}.Point")


def test_refused_pickle_for_deep_values() -> None:
    value: list[Any] = []
    for _ in range(600):
        value = [value]
    with pytest.raises(SerializationError, match="500 levels"):
        encode(value, allow_pickle=False)
    fine = {"a": [torch.ones(2), np.ones(2), (1, {2})]}
    payload, buffers = encode(fine, allow_pickle=False)
    assert equal(fine, decode(payload, [bytearray(buffer) for buffer in buffers]))


class Refusing:
    """Holds what cannot be pickled, and refuses to be pickled with words of its own."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.lock = threading.Lock()

    def __reduce__(self) -> Any:
        raise self.error


@pytest.mark.parametrize("kind", [TypeError, ValueError, pickle.PicklingError])
@pytest.mark.parametrize(
    ("wrap", "path"),
    [(lambda x: x, "value"), (lambda x: {"a": [1, x]}, "value['a'][1]"), (lambda x: (x, threading.Lock()), "value[0]")],
)
def test_what_a_class_says_of_not_being_pickled_leads(kind: type[Exception], wrap: Any, path: str) -> None:
    refused = wrap(Refusing(kind("it goes nowhere. Send its text instead.")))
    with pytest.raises(SerializationError) as caught:
        encode(refused)
    assert str(caught.value) == f"cannot send {path} ({__name__}.Refusing): it goes nowhere. Send its text instead"
    assert caught.value.path == path


class Counting:
    """Refuses to be pickled, and counts how often it was asked."""

    asked = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.asked += 1
        raise TypeError("it goes nowhere")


def test_to_explain_a_refusal_the_class_is_asked_once() -> None:
    """Its reducer may do more than to refuse."""
    refused = Counting()
    error = explain(refused, "value", TypeError("pickling failed"))
    assert str(error) == f"cannot send value ({__name__}.Counting): it goes nowhere"
    assert refused.asked == 1


class Careless:
    """Pickles what it holds itself, and has not thought of everything."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __reduce__(self) -> Any:
        return bytes, (pickle.dumps(self.held), len(self.held))


@pytest.mark.parametrize(
    ("held", "path", "text"),
    [
        ([1, threading.Lock()], "value['a'].held[1]", r"cannot pickle '_thread.lock' object"),
        (7, "value['a']", r"object of type 'int' has no len\(\)"),
    ],
)
def test_a_reducer_that_fails_is_no_refusal(held: Any, path: str, text: str) -> None:
    with pytest.raises(
        SerializationError, match=rf"cannot be pickled \(TypeError: {text}\).*Leave it out of what is sent"
    ) as caught:
        encode({"a": Careless(held)})
    assert caught.value.path == path


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("x"), TypeError()])
def test_other_errors_of_a_reducer_are_named(error: Exception) -> None:
    with pytest.raises(
        SerializationError, match=rf"cannot be pickled \({type(error).__name__}: .*Leave it out of what is sent"
    ) as caught:
        encode([Refusing(error)])
    assert caught.value.path == "value[0]"


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: [1, {"x": value}], lambda value: lambda: value])
@pytest.mark.parametrize("reducer", ["refuses", "is wrong", "is there"])
def test_what_cannot_be_sent_is_free_when_its_error_is(wrap: Any, reducer: str) -> None:
    """Not at the next garbage collection: until then its memory would count as in use."""

    class Member:
        def __reduce__(self) -> Any:
            if reducer == "refuses":
                raise TypeError("not to be pickled")
            if reducer == "is wrong":
                return self.missing  # type: ignore[attr-defined]
            return Member, (threading.Lock(),)

    gc.collect()
    gc.disable()
    try:
        member = Member()
        gone = weakref.ref(member)
        with contextlib.suppress(SerializationError):
            encode(wrap(member))
        del member
        assert gone() is None
    finally:
        gc.enable()
