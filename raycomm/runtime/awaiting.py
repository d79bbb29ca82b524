"""asyncio without a thread: event loops wait at a pipe that an actor writes to when it publishes while somebody awaits.

    await ref ──► Waker.until ──► arm, look again, then sleep in the event loop ◄── pipe ◄── ring_bell in an actor

Any number of event loops, in any threads, may await on one graph: all watch the same pipe, and whichever wakes first serves all.
A timer of 50 ms looks for dead actors, passed limits and lost notices, as parked threads do at the end of a slice.

What lost: a thread per process that waits and calls back costs two more switches per result, and cannot wait for several graphs
at once on the kernels still in use; polling costs a core or milliseconds.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from raycomm.channel import Deadline, ShmArena
from raycomm.observe.notice import Notice

T = TypeVar("T")

_SLICE_S = 0.05
_BUSY_S = 0.001  # another thread is about to hand a result over
_SHORT_S = 0.02  # memory is short: what is let go of rings the bell, what another process returns to the budget does not


class _Waiter(Generic[T]):
    """One awaiting task: `attempt` gives its value, or None for not yet; it may run in any thread."""

    def __init__(self, attempt: Callable[[], T | None], due: Callable[[], bool], relieve: Callable[[], None]) -> None:
        self.attempt = attempt
        self.due = due
        self.relieve = relieve
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()
        self.settled = False  # no more attempts; changed only by who serves
        self.pause_s = _BUSY_S  # before the next attempt, where one has failed that was due

    def settle(self, value: T | None, error: BaseException | None) -> None:
        """Hand the outcome to the task, from any thread. A cancelled one does not want it; a closed loop cannot take it."""
        self.settled = True
        if self.loop is asyncio._get_running_loop():
            self._set(value, error)
            return
        try:
            self.loop.call_soon_threadsafe(self._set, value, error)
        except RuntimeError:
            return

    def _set(self, value: Any, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(value)


class Waker:
    """Lets tasks of any event loop wait for a graph. Holds no thread; costs nothing while nobody awaits.

    Args:
        arena: the driver's.
    """

    # Who serves; an attribute of the instance only while somebody does. Not a lock: an interrupt that strikes as `acquire`
    # returns, before anything shows that it did, would leave it taken for good. Here one native call takes the place and leaves
    # the mark of who took it, which is cleared in a `finally`. Python lets interrupts in after calls and at the end of loops, and
    # there is none in that `finally` before it is cleared. What remains: a round may end early; the next tick begins one.
    _server: object = None

    def __init__(self, arena: ShmArena) -> None:
        self._arena = arena
        self._waiters: list[_Waiter[Any]] = []
        self._watching: dict[asyncio.AbstractEventLoop, asyncio.TimerHandle] = {}
        self._wanted = False
        self._soon: set[asyncio.AbstractEventLoop] = set()  # those that look again in a moment

    async def until(
        self,
        attempt: Callable[[], T | None],
        due: Callable[[], bool],
        limit: float | None,
        late: Callable[[], BaseException],
        waits: Callable[[], str],
        relieve: Callable[[], None],
    ) -> T:
        """Wait in the event loop until `attempt` gives a value; cancelling the task only ends the wait.

        Args:
            attempt: tries once, without waiting; None: not yet. What it raises is raised here.
            due: cheap; whether an attempt may succeed now.
            limit: seconds; None or -1: no limit.
            late: the error to raise when the limit passes.
            waits: the log line for a long wait.
            relieve: called now and then; `CompiledGraph.relieve`.
        """
        waiter = _Waiter(attempt, due, relieve)
        deadline, notice = Deadline(limit), Notice()
        try:
            self._waiters.append(waiter)
            self._watch(waiter.loop)
            self._serve()
            while True:
                await asyncio.wait((waiter.future,), timeout=deadline.left(at_most=notice.left()))
                if waiter.future.done():
                    return waiter.future.result()
                if not deadline.over:
                    notice.give(waits)
                elif self._withdraw(waiter):
                    raise late()
        finally:
            self._forget(waiter)
            waiter.future.cancel()
            self._unwatch(waiter.loop)
            del waiter

    def look(self) -> None:
        """Let every waiter try now: something has changed that rings no bell."""
        self._serve()

    @property
    def waiting(self) -> int:
        """How many tasks wait now."""
        return len(self._waiters)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop not in self._watching:
            loop.add_reader(self._arena.core.waker, self._rung)
            self._watching[loop] = loop.call_later(_SLICE_S, self._tick, loop)

    def _unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        if any(waiter.loop is loop for waiter in tuple(self._waiters)):  # a copy: other threads' tasks come and go
            return
        self._soon.discard(loop)
        timer = self._watching.pop(loop, None)
        if timer is not None:
            timer.cancel()
        if not loop.is_closed():
            loop.remove_reader(self._arena.core.waker)
        if not self._waiters:
            self._arena.core.disarm()
            if self._waiters:  # in another thread, just now; it may have armed before
                self._serve()

    def _forget(self, waiter: _Waiter[Any]) -> None:
        try:
            self._waiters.remove(waiter)
        except ValueError:
            return  # its loop was closed under it, and another one has found that out

    def _withdraw(self, waiter: _Waiter[Any]) -> bool:
        """End the attempts of one whose limit has passed; False: one has succeeded or goes on, in another thread."""
        me = object()
        try:
            if self.__dict__.setdefault("_server", me) is not me or waiter.settled:
                return False
            waiter.settled = True
            return True
        finally:
            if self._server is me:
                del self._server
                if self._wanted:  # asked for meanwhile
                    self._serve()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop in self._watching:
            self._arena.core.look_for_dead()
            self._watching[loop] = loop.call_later(_SLICE_S, self._tick, loop)
            self._serve()
            for waiter in tuple(self._waiters[:1]):
                self._relieve(waiter)

    def _relieve(self, waiter: _Waiter[Any]) -> None:
        try:
            waiter.relieve()
        except Exception as error:  # nothing more can be moved aside: it would wait for ever
            if self._withdraw(waiter):
                waiter.settle(None, error)

    def _rung(self) -> None:
        try:
            os.read(self._arena.core.waker, 4096)
        except BlockingIOError:
            pass  # another loop was faster; what it did not see, this one serves
        self._serve()

    def _serve(self) -> None:
        """Let every waiter try. One thread at a time; another one that comes meanwhile only asks for one more round."""
        me = object()
        self._wanted = True
        while self._wanted:
            try:
                if self.__dict__.setdefault("_server", me) is not me:
                    return
                self._wanted = False
                if self._waiters:
                    self._arena.core.arm()  # first: what is published after the look below rings
                    self._look()
            finally:
                if self._server is me:
                    del self._server

    def _look(self) -> None:
        ended = self._arena.closed[0] != 0
        for waiter in tuple(self._waiters):
            if waiter.loop.is_closed():
                self._forget(waiter)
                continue
            if waiter.settled or waiter.future.done() or not (ended or waiter.due()):
                continue
            try:
                value = waiter.attempt()
            except Exception as error:
                # Without its traceback: that holds this frame, and with it the waiter, whose future holds the error.
                waiter.settle(None, error.with_traceback(None))
                continue
            except BaseException as error:  # an interrupt, or what a reducer of the input raised: the task must not wait for ever
                waiter.settle(None, RuntimeError(f"interrupted by {type(error).__name__} while it was being served"))
                if isinstance(error, (KeyboardInterrupt, SystemExit)):
                    raise
                continue
            if value is not None:
                waiter.settle(value, None)
            else:
                self._again_soon(waiter.loop, waiter.pause_s)
                waiter.pause_s = min(2 * waiter.pause_s, _SHORT_S)

    def _again_soon(self, loop: asyncio.AbstractEventLoop, pause_s: float) -> None:
        """Look once more in a moment: another thread is at that result, or memory is short."""
        if loop in self._soon:
            return
        self._soon.add(loop)
        if loop is asyncio._get_running_loop():
            loop.call_later(pause_s, self._look_again, loop)
            return
        try:
            loop.call_soon_threadsafe(loop.call_later, pause_s, self._look_again, loop)
        except RuntimeError:  # closed
            self._soon.discard(loop)

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._soon.discard(loop)
        self._serve()


class Line:
    """Tasks that wait for room, of any event loop, in the order in which they came."""

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        self._places: deque[_Place] = deque()

    def __len__(self) -> int:
        return len(self._places)

    async def until(
        self,
        attempt: Callable[[], T | None],
        due: Callable[[], bool],
        limit: float | None,
        late: Callable[[], BaseException],
        waits: Callable[[], str],
        relieve: Callable[[], None],
    ) -> T:
        """As `Waker.until`, in its turn: there is no attempt before all who came earlier have left."""
        place = _Place(asyncio.get_running_loop())
        self._places.append(place)

        def attempt_and_leave() -> T | None:
            value: T | None = None
            done = True
            try:
                value = attempt()
                done = value is not None
            finally:
                if done:  # here, and not when the task goes on: its loop may be busy, and the next one has its turn at once
                    self._leave(place)
            return value

        try:
            return await self._waker.until(
                lambda: attempt_and_leave() if self._is_next(place) else None,
                lambda: self._is_next(place) and due(),
                limit,
                late,
                waits,
                relieve,
            )
        finally:
            if self._leave(place) and self._places:
                self._waker.look()

    def _leave(self, place: _Place) -> bool:
        """Give a place up; False: it was given up before."""
        try:
            self._places.remove(place)
        except ValueError:
            return False
        return True

    def _is_next(self, place: _Place) -> bool:
        """Whether all that came before have left. Those whose loop was closed under them never come back to do so."""
        try:
            first = self._places[0]
            while first.loop.is_closed():
                self._leave(first)
                first = self._places[0]
        except IndexError:
            return False
        return first is place


class _Place:
    """Of one task in a line."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
