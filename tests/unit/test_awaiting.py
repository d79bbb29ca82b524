"""Interrupts while tasks are served: Ctrl-C strikes as a call returns, and the tasks that wait are served all the same."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from raycomm.runtime import awaiting
from raycomm.runtime.awaiting import Waker


@pytest.fixture
def waker() -> Iterator[Waker]:
    """Of a driver for which nothing is ever published."""
    reading, writing = os.pipe2(os.O_NONBLOCK)
    core = SimpleNamespace(waker=reading, arm=nothing, disarm=nothing, look_for_dead=nothing)
    yield Waker(SimpleNamespace(core=core, closed=(0, 0)))  # type: ignore[arg-type]
    os.close(reading)
    os.close(writing)


def nothing() -> None:
    pass


def interrupted_at(number: int, call: Callable[[], Any]) -> bool:
    """Interrupt `call` as the native call of that number returns to the code under test; False: there are not so many."""
    left = number

    def strike(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event == "c_return" and frame.f_code.co_filename == awaiting.__file__:
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(strike)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.parametrize("what", ["serving", "withdrawing"])
def test_who_is_interrupted_at_any_call_leaves_the_others_served(waker: Waker, what: str) -> None:
    attempts: list[int] = []

    async def waits() -> None:
        def attempt() -> None:
            attempts.append(1)

        await waker.until(attempt, lambda: True, None, AssertionError, str, nothing)

    async def main() -> int:
        task = asyncio.create_task(waits())
        while not attempts:
            await asyncio.sleep(0)
        other = awaiting._Waiter[None](nothing, lambda: True, nothing)  # one whose limit has passed
        call = waker.look if what == "serving" else lambda: waker._withdraw(other)
        number = 0
        while interrupted_at(number, call):
            before = len(attempts)
            waker.look()
            assert len(attempts) == before + 1, number
            number += 1
        task.cancel()
        await asyncio.wait([task])
        return number

    assert asyncio.run(main()) > 0


def test_who_serves_is_asked_for_one_more_round_and_nobody_waits(waker: Waker) -> None:
    """What comes from another thread, or from the attempt itself, while somebody serves."""
    attempts: list[int] = []

    async def main() -> None:
        def attempt() -> str | None:
            attempts.append(1)
            if len(attempts) < 3:
                waker.look()
                assert not waker._withdraw(waker._waiters[0])
            return "done" if len(attempts) == 3 else None

        assert await waker.until(attempt, lambda: True, None, AssertionError, str, nothing) == "done"

    asyncio.run(main())
    assert len(attempts) == 3
