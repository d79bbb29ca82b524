"""What belongs to a thread and not to the process, carried from the constructor's thread to the loop's.

A plain actor runs its constructor and its calls on one thread, so what the constructor set there (grad mode, a default device, a
context variable) holds for every call. The loop has a thread of its own, where it would not hold. So the set-up call, which runs
on the actor's thread, takes a snapshot, and the loop's thread applies it once, before the first execution. Later changes on
either thread stay there. Nothing that the process shares is touched.

| carried | how |
|---|---|
| context variables, numpy's error state (since numpy 2), decimal's context | the loop runs in a copy of the context |
| numpy's error state before numpy 2 | `seterr`, `seterrcall` |
| torch: grad mode, inference mode, default device | their setters |
| torch: autocast for cpu and cuda (enabled, dtype), its cache | their setters, and one level of nesting if any is enabled |
| torch: current CUDA device and its current stream | if the process uses CUDA |

Not carried: `threading.local` objects, which are anyone's; torch function modes other than the default device, and flushing of
denormals, which torch cannot tell. For those there is ``loop_thread="actor"``: the loop then runs on the actor's thread itself.
A threaded actor (`max_concurrency` over 1, concurrency groups) and an asynchronous one have no such one thread: their calls run
on any of several, none of which the constructor can prepare. There nothing is carried but the context of the set-up call; a
method sets what it needs, or the state is passed as an argument.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import ray

_AUTOCAST = ("cpu", "cuda")


class ThreadState:
    """A snapshot, made on the thread that has the state; `run` applies it to another."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._settings: list[Callable[[ExitStack], object]] = []
        if not on_actor_thread():
            return
        # Not imported for this: what is not loaded has no state. It may be half loaded, by another thread.
        for name, snapshot in (("numpy", _numpy), ("torch", _torch)):
            module = sys.modules.get(name)
            if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
                self._settings += snapshot(module)

    def run(self, body: Callable[[], None]) -> None:
        """Apply the state to this thread, then call `body` in the carried context."""
        self._context.run(self._run, body)

    def _run(self, body: Callable[[], None]) -> None:
        if "decimal" in sys.modules:
            # The copied context holds the same decimal context, which both threads would then change.
            sys.modules["decimal"].setcontext(sys.modules["decimal"].getcontext().copy())
        with ExitStack() as until_the_thread_ends:
            for apply in self._settings:
                apply(until_the_thread_ends)
            body()


def on_actor_thread() -> bool:
    """Whether this is the one thread on which a plain actor runs everything, its constructor included."""
    worker: Any = ray._private.worker.global_worker
    core = worker.core_worker
    return (
        threading.current_thread() is threading.main_thread()
        and not core.current_actor_is_asyncio()
        and core.current_actor_max_concurrency() == 1
    )


def _numpy(numpy: ModuleType) -> list[Callable[[ExitStack], object]]:
    if int(numpy.__version__.split(".")[0]) >= 2:
        return []  # it lies in a context variable
    errors, callback = numpy.geterr(), numpy.geterrcall()
    return [lambda _: numpy.seterr(**errors), lambda _: numpy.seterrcall(callback)]


def _torch(torch: Any) -> list[Callable[[ExitStack], object]]:
    settings: list[Callable[[ExitStack], object]] = []
    if torch.is_inference_mode_enabled():
        # Its setter is a context; entered first, for it changes the grad mode.
        settings.append(lambda stack: stack.enter_context(torch.inference_mode()))
    grad = torch.is_grad_enabled()
    settings.append(lambda _: torch.set_grad_enabled(grad))
    device = torch.get_default_device()
    if device != torch.device("cpu"):
        # Not undone at the end: the setting is the thread's and ends with it, and undoing touches what other threads see.
        settings.append(lambda _: torch.set_default_device(device))
    settings += _autocast(torch)
    if torch.cuda.is_initialized():  # asking for more would start CUDA in an actor that does not use it
        current, stream = torch.cuda.current_device(), torch.cuda.current_stream()
        settings += [lambda _: torch.cuda.set_device(current), lambda _: torch.cuda.set_stream(stream)]
    return settings


def _autocast(torch: Any) -> list[Callable[[ExitStack], object]]:
    state = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST}
    cache = torch.is_autocast_cache_enabled()

    def apply(_: ExitStack) -> None:
        for kind, (enabled, dtype) in state.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cache)
        if any(enabled for enabled, _ in state.values()):
            # Else an autocast block inside a method would be the outermost, and empty the cache at its end.
            torch.autocast_increment_nesting()

    return [apply]
