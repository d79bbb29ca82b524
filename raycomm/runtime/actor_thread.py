"""``loop_thread="actor"``: the loop runs on the thread on which the actor runs everything else.

An actor's thread is lent by a Ray call that does not return, so set-up takes two calls, sent together:

    driver                             actor's thread
    prepare ───────────────────────►   make the arena; a thread of ours keeps it: `Parked`
    lend_thread ───────────────────►   take it from there and loop until the graph is closed
    every further call                 waits

The parked arena watches the driver, so nothing stays if the second call never comes.

While the thread is lent, no Ray call tells anyone why it does not return, those of Ray's own concurrency groups included, for the
actor's thread hands out all of them. So the actor also binds a `Claim`: an abstract socket on which nobody listens and whose name
says which graph has which actor's thread. Other drivers on the machine find it in /proc/net/unix, and it is gone with the actor's
process, however that ends. A file would stay; Ray's key-value store too, and would have to be asked whether the writer lives.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from raycomm import _core
from raycomm.channel import ShmArena
from raycomm.runtime.blueprint import DRIVER
from raycomm.runtime.thread_state import on_actor_thread

_LOOK_EVERY_S = 0.2
_PREFIX = "raycomm-thread"
_NAME_LIMIT = 40  # of a graph's name; all of it must fit the 108 bytes of a socket's name
_NAME = re.compile(r"([0-9a-f]{32})/([0-9a-f]{8})/(.*)")
_TABLE = Path("/proc/net/unix")


class Claim:
    """Says to the drivers of this machine that a graph has the thread of this actor, or is about to."""

    def __init__(self, graph: str, nonce: bytes) -> None:
        actor = ray.get_runtime_context().get_actor_id()
        name = graph.encode("unicode_escape")[:_NAME_LIMIT].decode()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{_PREFIX}/{actor}/{nonce.hex()[:8]}/{name}")

    def release(self) -> None:
        """Take it back. Idempotent."""
        self._socket.close()


def claims_of_others(nonce: bytes) -> dict[str, str]:
    """Actor id -> name of the graph that has its thread (cut to 40 bytes), for all of this machine but those of graph `nonce`.

    Actors in another network namespace are not seen.
    """
    try:
        table = _TABLE.read_text(errors="replace")
    except OSError:
        return {}
    claims = {}
    for line in table.splitlines():
        _, found, name = line.partition(f"@{_PREFIX}/")
        # Anybody may bind any name: what is not one of ours is passed over.
        claim = _NAME.fullmatch(name) if found else None
        if claim is not None and claim[2] != nonce.hex()[:8]:
            claims[claim[1]] = claim[3]
    return claims


def problem(nonce: bytes) -> str | None:
    """Why a graph cannot have the thread of this actor; None if it can. Called on that thread."""
    if not on_actor_thread():
        return (
            "it is an asynchronous or threaded actor, whose calls run on several threads, so loop_thread='actor' has none to run "
            "on; compile with loop_thread='own', or make the actor of a class without 'async def', concurrency groups and "
            "max_concurrency"
        )
    other = claims_of_others(nonce).get(ray.get_runtime_context().get_actor_id() or "")
    return None if other is None else taken(other)


def taken(graph: str) -> str:
    """What is said of an actor whose thread is lent to `graph`."""
    return f"its thread is lent to graph {graph!r} (loop_thread='actor') until that is torn down; tear it down first"


class Parked(threading.Thread):
    """Keeps what `prepare` has made until the actor's thread comes for it. Ends by itself if the driver gives up or dies.

    Args:
        key: of the graph.
        arena: this process's memory in the graph.
        serve: the loop, from learning the addresses to leaving. It closes everything.
        give_up: closes everything instead.
    """

    def __init__(self, key: bytes, arena: ShmArena, serve: Callable[[], None], give_up: Callable[[], None]) -> None:
        super().__init__(name=f"raycomm:parked:{key.hex()[:8]}", daemon=True)
        self.key = key
        self._arena = arena
        self._serve = serve
        self._give_up = give_up
        self._turn = threading.Lock()  # taken once, by whoever comes first
        self._taken = threading.Event()

    def run(self) -> None:
        """Watch the driver."""
        while not self._taken.wait(_LOOK_EVERY_S):
            core = self._arena.core
            left = core.look_for_dead() or self._arena.closed[0] or core.loop_state(DRIVER) == _core.LOOP_LEFT
            if left and self._turn.acquire(blocking=False):
                self._give_up()
                return

    def serve(self) -> None:
        """Run the loop on the calling thread, unless the driver has given up."""
        if self._turn.acquire(blocking=False):
            self._taken.set()
            self.join()
            self._serve()


def lend_thread(_instance: Any, key: bytes) -> None:
    """The second call of set-up: this thread is the graph's until it is closed."""
    for thread in threading.enumerate():
        if isinstance(thread, Parked) and thread.key == key:
            thread.serve()
