"""Coroutine methods of an asynchronous actor: they run on the actor's own event loop while the graph's loop thread waits.

    loop thread                          event loop of the actor
    read a value
    call_soon_threadsafe  ───────────►   a task awaits the coroutine, among those of plain calls
    wait, looking at the graph  ◄─────   result or error
    write the value

So what a coroutine shares with plain calls (locks, connections, queues of asyncio) belongs to one event loop, as it must. One
execution at a time: the loop thread waits for the result before it goes on. The coroutines of a graph do not count towards the
actor's `max_concurrency`.

A private event loop on a thread of its own lost: an asyncio lock or connection made in the constructor would not work there.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import ray.exceptions
from ray import _raylet
from ray._private import worker as ray_worker

from raycomm import _core
from raycomm.channel import ShmArena

_LOOK_EVERY_S = 0.2


def event_loop_of(method: Callable[..., Any]) -> asyncio.AbstractEventLoop | None:
    """The event loop on which Ray runs `method` when it is called plainly; None where the actor has none.

    An asynchronous actor has one event loop per concurrency group, each on a thread of its own, from before its constructor
    runs. Ray's worker hands it out by the method's group.
    """
    this: Any = ray_worker.global_worker
    raylet: Any = _raylet
    worker = this.core_worker
    if not worker.current_actor_is_asyncio():
        return None
    group = getattr(method, "__ray_concurrency_group__", None)
    event_loop, _ = worker.get_event_loop(raylet.PythonFunctionDescriptor("", "", ""), group)
    assert isinstance(event_loop, asyncio.AbstractEventLoop)
    return event_loop


def on_event_loop() -> bool:
    """Whether the calling thread is in the event loop that runs an asynchronous actor's calls, those of Ray included."""
    running = asyncio._get_running_loop()
    try:
        return running is not None and running is event_loop_of(on_event_loop)
    except (AttributeError, TypeError, AssertionError):  # another version of Ray: not known
        return False


def problem_of(method: Callable[..., Any]) -> str | None:
    """Why an asynchronous `method` cannot be a node; None if it can, as every plain one."""
    if inspect.isasyncgenfunction(method):
        return "is an asynchronous generator, and a node has one result per execution; return a list, or a plain value per call"
    if not inspect.iscoroutinefunction(method):
        return None
    try:
        event_loop = event_loop_of(method)
    except (AttributeError, TypeError, AssertionError) as error:
        return f"is a coroutine function, and the actor's event loop cannot be had from this version of Ray ({error!r})"
    if event_loop is None:
        return "is a coroutine function, but the actor has no event loop: its class has no 'async def' method; declare it there"
    return None


class CoroutineMethod:
    """Called like a plain method, from the loop thread: returns what the coroutine returns, or raises what it raises.

    Blocks while the coroutine runs, but not after the graph has been closed or a process of it has died: then the coroutine is
    cancelled, and nobody waits for it to obey.

    Args:
        method: the coroutine function, bound to the actor's object.
        arena: this process's memory in the graph.
        origin: the node's label, for messages.

    Raises (when called):
        raycomm._core.Closed: the graph was closed meanwhile.
        ray.exceptions.TaskCancelledError: the coroutine was cancelled, by itself or by others on its event loop.
        RuntimeError: it raised `GeneratorExit`, as a coroutine does that was closed.
    """

    __slots__ = ("_arena", "_event_loop", "_method", "_origin")

    def __init__(self, method: Callable[..., Coroutine[Any, Any, Any]], arena: ShmArena, origin: str) -> None:
        event_loop = event_loop_of(method)
        assert event_loop is not None  # looked at during set-up
        self._event_loop = event_loop
        self._method = method
        self._arena = arena
        self._origin = origin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = _Call(self._method(*args, **kwargs))
        self._event_loop.call_soon_threadsafe(call.start)
        while not call.finished.acquire(timeout=_LOOK_EVERY_S):
            self._arena.core.look_for_dead()  # the driver among them: nobody else may be left to close the graph
            if self._arena.closed[0]:
                self._event_loop.call_soon_threadsafe(call.abandon)
                raise _core.Closed(*self._arena.closed)
        error = call.error
        if error is None:
            return call.result
        try:
            if isinstance(error, asyncio.CancelledError):
                # As Ray has it for plain calls. Left as it is, it would go past every `except Exception` on its way.
                raise ray.exceptions.TaskCancelledError(error_message=f"the coroutine of {self._origin} was cancelled") from error
            if isinstance(error, GeneratorExit):  # likewise; Python itself turns what only ends a generator into this error
                raise RuntimeError(f"the coroutine of {self._origin} raised GeneratorExit") from error
            raise error
        finally:
            # An error holds its frames, and those this frame: cut here, arguments and their blocks go with the last user.
            del error
            call.error = None


class _Call:
    """One call of a coroutine method. `start` and `abandon` run on the event loop."""

    __slots__ = ("_coroutine", "_task", "error", "finished", "result")

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[None] | None = None
        self.finished = threading.Lock()
        self.finished.acquire()
        self.result: Any = None
        self.error: BaseException | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def abandon(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            self.result = await self._coroutine
        except BaseException as error:
            # All of them: SystemExit would end the event loop, and is raised on the loop thread instead, as for plain methods.
            self.error = error
        finally:
            self._task = None
            self.finished.release()
