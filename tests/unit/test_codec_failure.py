"""Exceptions as values: type, text and traceback always arrive; the exception itself where it can."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycomm.codec import Failure, decode_failure, encode_failure
from raycomm.errors import ChannelTimeoutError, SerializationError


def captured(exception: BaseException) -> Failure:
    try:
        raise exception
    except BaseException as error:
        return Failure.capture(error, "Worker.step#3", 12)


def carried(failure: Failure) -> Failure:
    payload, buffers = encode_failure(failure)
    return decode_failure(payload, [bytearray(buffer) for buffer in buffers])


class NeedsTwo(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


class HoldsLock(ValueError):
    def __init__(self, text: str) -> None:
        super().__init__(text, threading.Lock())
        self.lock, self.number = threading.Lock(), 7


class KeywordOnly(OSError):
    def __init__(self, *, name: str) -> None:
        super().__init__(f"name {name}")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class PrintsLock(Exception):
    def __init__(self) -> None:
        super().__init__("x")
        self.lock = threading.Lock()

    def __str__(self) -> str:
        return f"locked {self.lock.locked()}"


class ReducesToOther(Exception):
    def __reduce__(self) -> Any:
        return ValueError, ("not me",)


class RaisesInConstructor(Exception):
    def __init__(self, *args: Any) -> None:
        if args == ("again",):
            raise KeyboardInterrupt2("again")
        super().__init__("again")


class KeyboardInterrupt2(Exception):
    pass


@pytest.mark.parametrize(
    "exception",
    [
        ValueError("bad", 3),
        KeyError("k"),
        OSError(2, "gone", "file"),
        StopIteration(5),
        SystemExit(3),
        KeyboardInterrupt(),
        RecursionError("deep"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "why"),
        ExceptionGroup("many", [ValueError("a"), KeyError("b")]),
        AssertionError(),
        ChannelTimeoutError("late", limit_s=1.5),
    ],
    ids=lambda exception: type(exception).__name__,
)
def test_an_exception_that_pickles_arrives_itself(exception: BaseException) -> None:
    failure = captured(exception)
    arrived = carried(failure)
    assert type(arrived.exception) is type(exception)
    assert str(arrived.exception) == str(exception)
    if not isinstance(exception, ExceptionGroup):
        assert arrived.exception.args == exception.args  # type: ignore[union-attr]
    assert dataclasses.replace(arrived, exception=None) == dataclasses.replace(failure, exception=None)
    assert (arrived.origin, arrived.execution, arrived.message) == ("Worker.step#3", 12, str(exception))
    assert type(exception).__name__ in arrived.traceback
    assert "in captured" in arrived.traceback


@pytest.mark.parametrize(
    "exception",
    [NeedsTwo(4, "x"), HoldsLock("text"), KeywordOnly(name="n"), ReducesToOther("me"), RaisesInConstructor()],
    ids=lambda exception: type(exception).__name__,
)
def test_a_stand_in_keeps_the_type(exception: BaseException) -> None:
    arrived = carried(captured(exception))
    assert type(arrived.exception) is type(exception)
    assert arrived.type_name == f"{__name__}.{type(exception).__name__}"
    assert arrived.message == str(exception)
    str(arrived.exception)


def test_a_stand_in_keeps_text_and_attributes() -> None:
    needs_two = carried(captured(NeedsTwo(4, "x"))).exception
    assert isinstance(needs_two, NeedsTwo)
    assert (str(needs_two), needs_two.code, needs_two.detail) == ("4: x", 4, "x")
    holds_lock = carried(captured(HoldsLock("text"))).exception
    assert isinstance(holds_lock, HoldsLock)
    assert holds_lock.number == 7
    assert not hasattr(holds_lock, "lock")
    assert "text" in str(holds_lock)


def test_what_cannot_travel_leaves_its_texts() -> None:
    for exception in (Unprintable(), PrintsLock()):
        arrived = carried(captured(exception))
        assert arrived.exception is None
        assert arrived.type_name.endswith(type(exception).__name__)
        assert type(exception).__name__ in arrived.traceback
        assert arrived.message


def test_causes_and_contexts_are_in_the_text() -> None:
    try:
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("outer") from error
    except ValueError as error:
        failure = Failure.capture(error, "n", 0)
    arrived = carried(failure)
    assert "KeyError: 'missing'" in arrived.traceback
    assert "direct cause" in arrived.traceback
    noted = ValueError("a")
    noted.add_note("a note")
    arrived = carried(captured(noted))
    assert "a note" in arrived.traceback
    assert arrived.exception.__notes__ == ["a note"]  # type: ignore[union-attr]


def test_local_classes_and_arrays() -> None:
    class Local(Exception):
        pass

    arrived = carried(captured(Local("x", np.arange(3)))).exception
    assert type(arrived) is Local
    assert arrived.args[1].tolist() == [0, 1, 2]


def test_odd_texts_arrive() -> None:
    arrived = carried(captured(ValueError("lone \ud800 surrogate")))
    assert arrived.message == "lone \\ud800 surrogate"
    assert carried(Failure(None, "", "", "", "", -1)) == Failure(None, "", "", "", "", -1)


def test_a_class_unknown_to_the_receiver(monkeypatch: pytest.MonkeyPatch) -> None:
    payload, buffers = encode_failure(captured(KeyboardInterrupt2("x")))
    monkeypatch.delitem(globals(), "KeyboardInterrupt2")
    arrived = decode_failure(payload, buffers)
    assert arrived.exception is None
    assert (arrived.message, arrived.type_name) == ("x", f"{__name__}.KeyboardInterrupt2")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_noise_is_an_error(noise: bytes) -> None:
    for payload in (noise, b"\x01" + noise):
        with pytest.raises(SerializationError):
            decode_failure(payload)


def test_damage_is_an_error() -> None:
    payload, buffers = encode_failure(Failure(None, "T", "message", "trace", "origin", 3))
    for end in range(len(payload)):
        with pytest.raises(SerializationError):
            decode_failure(payload[:end], buffers)
    for position in range(8 * len(payload)):
        changed = bytearray(payload)
        changed[position // 8] ^= 1 << position % 8
        try:
            decode_failure(changed, buffers)
        except SerializationError:
            pass
    with pytest.raises(SerializationError):
        decode_failure(payload + b"\xc0", buffers)
    with pytest.raises(SerializationError):
        encode_failure(Failure(None, "T", "m", "t", "o", 2**70))
