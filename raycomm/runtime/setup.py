"""Runs in an actor: one call that makes its memory, and the thread that then loops.

The thread is the loop's own, not a pending Ray call: an actor has one thread for `_ray_system` calls, shared with Ray Direct
Transport, so a second graph's loop would wait for the first to end. `thread_state` says what it inherits of the thread that the
constructor ran on.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import Any

import ray
from ray.exceptions import AsyncioActorExit

from raycomm import __version__, _core
from raycomm.channel import Address, Deadline, ShmArena, ShmReader, ShmWriter
from raycomm.errors import CommunicatorError, SerializationError
from raycomm.options import LoopThread
from raycomm.plan.actions import Compute
from raycomm.runtime import actor_thread, coroutines
from raycomm.runtime.actor_thread import Claim, Parked
from raycomm.runtime.blueprint import (
    AT,
    DRIVER,
    READY,
    Blueprint,
    Prepared,
    address_channel,
    peers_of,
    report_channel,
    rings_of,
)
from raycomm.runtime.fault_points import FaultPoints
from raycomm.runtime.lending import lending
from raycomm.runtime.links import Links
from raycomm.runtime.loop import Loop
from raycomm.runtime.thread_state import ThreadState
from raycomm.testing.faults import Point

logger = logging.getLogger("raycomm")

_LOOK_EVERY_S = 0.2
_DYING_S = 0.5  # the sockets of a process that dies go before it counts as dead
_WHY_LENGTH = 1000  # of a message that fits its ring slot


def prepare(instance: Any, blueprint: Blueprint) -> Prepared:
    """Make this actor's arena and start its loop thread, which waits for the other addresses before it does anything.

    With ``loop_thread="actor"`` the arena is parked until `lend_thread` comes.

    Args:
        instance: the actor's object.
        blueprint: from the driver.

    Returns:
        The address, or the reason why this actor cannot take part; then nothing was started.
    """
    node = f"{ray.get_runtime_context().get_node_id()} ({socket.gethostname()})"
    faults = FaultPoints(blueprint.faults)
    faults.reach(Point.SETUP_BEGIN)
    problem = _cannot_take_part(instance, blueprint, node)
    if problem is not None:
        return Prepared(blueprint.process, node, None, problem)
    plan, options = blueprint.plan, blueprint.options
    try:
        rings = rings_of(plan, blueprint.process, options)
        nodes = len(plan.actors[blueprint.process - 1].actions)
        arena = ShmArena.create(blueprint.process, rings, options, loops=len(plan.processes), nodes=nodes)
        arena.attach(blueprint.driver)
    except OSError as error:
        return Prepared(blueprint.process, node, None, str(error))
    # Ray repeats a call that an actor did not survive, if the user lets it: this may be long after.
    if arena.core.loop_state(DRIVER) == _core.LOOP_LEFT:
        return Prepared(blueprint.process, node, None, "the driver has given up")
    faults.reach(Point.SETUP_ARENA)
    member = Member(instance, blueprint, arena, faults)
    arena.core.set_loop_state(_core.LOOP_RUNNING, DRIVER)
    # A daemon: at interpreter exit nobody waits for a user's method. `_core` sees to it that a parked thread stays parked then.
    if options.loop_thread is LoopThread.ACTOR:
        Parked(blueprint.driver.nonce, arena, member.serve, member.give_up).start()
    else:
        state = ThreadState()
        threading.Thread(target=state.run, args=(member.serve,), name=f"raycomm:{plan.name}", daemon=True).start()
    return Prepared(blueprint.process, node, arena.address)


def _cannot_take_part(instance: Any, blueprint: Blueprint, node: str) -> str | None:
    if (blueprint.version, blueprint.layout) != (__version__, _core.LAYOUT_VERSION):
        return (
            f"the driver has raycomm {blueprint.version} with memory layout {blueprint.layout}, this actor has "
            f"raycomm {__version__} with layout "
            f"{_core.LAYOUT_VERSION}; install the same version in both environments"
        )
    here = ray.get_runtime_context().get_node_id()
    if here != blueprint.driver_node:
        return (
            f"it runs on node {node} and the driver on node {blueprint.driver_node}; edges between nodes are not "
            "available in this version, "
            f"place all actors on the driver's node"
        )
    if blueprint.options.loop_thread is LoopThread.ACTOR:
        problem = actor_thread.problem(blueprint.driver.nonce)
        if problem is not None:
            return problem
    for action in blueprint.plan.actors[blueprint.process - 1].actions:
        if not isinstance(action, Compute):
            continue
        method = getattr(instance, action.method, None)
        if not callable(method):
            return f"its object has no method {action.method!r}"
        problem = coroutines.problem_of(method)
        if problem is not None:
            label = blueprint.plan.processes[blueprint.process].label
            return f"node {label}.{action.method}#{action.node} {problem}"
    return None


class Member:
    """This actor's part in one graph, from its set-up call to the end of its loop.

    Args:
        instance: the actor's object.
        blueprint: from the driver.
        arena: this process's memory in the graph.
        faults: what is to go wrong, for tests.

    Raises:
        OSError: the thread cannot be claimed.
    """

    def __init__(self, instance: Any, blueprint: Blueprint, arena: ShmArena, faults: FaultPoints) -> None:
        self._instance = instance
        self._blueprint = blueprint
        self._arena = arena
        self._faults = faults
        self._report: ShmWriter | None = None
        self._links = Links(blueprint.plan, blueprint.process, blueprint.meeting, blueprint.device, blueprint.communicators)
        actors_thread = blueprint.options.loop_thread is LoopThread.ACTOR
        self._claim = Claim(blueprint.plan.name, blueprint.driver.nonce) if actors_thread else None

    def serve(self) -> None:
        """The whole life of the loop: learn the addresses, attach, say so, loop until the graph is closed, leave.

        Raises:
            SystemExit: a method raised it. On a thread of our own that ends only the thread; on the actor's, Ray ends the actor.
        """
        arena = self._arena
        plan, process = self._blueprint.plan, self._blueprint.process
        label = plan.processes[process].label
        try:
            self._loop()
        except _core.Closed:
            # Closing travels on to neighbours whom the one that closed first may not have reached.
            arena.close(*arena.closed)
        except (SystemExit, AsyncioActorExit) as error:
            # sys.exit or exit_actor in a method: the actor is going away, and so is what depends on it. No warning: it was asked
            # for, and whoever waits for a result is told.
            logger.info("graph %r: a method of %s left with %r; the graph is closed", plan.name, label, error)
            arena.close(_core.CLOSED_FAILED, process)
            if isinstance(error, SystemExit):
                raise
            # On this thread that alone ends nothing. What exit_actor asks for does (Ray's main thread looks every 10 ms); it is
            # called again in case a method only raised the error. A call of the actor to itself (`__ray_terminate__`) lost: an
            # actor on its way out begins no call any more, but waits for the answers to its own, and so for that one, for ever.
            leave: Any = ray.actor.exit_actor
            with contextlib.suppress(AsyncioActorExit):
                leave()
        except BaseException as error:
            logger.exception("graph %r: the loop of %s failed; the graph is closed", plan.name, label)
            self._say_why(error)
            arena.close(_core.CLOSED_FAILED, process)
        finally:
            # After the arena is closed: who waits for a link that breaks sees by then that the graph has ended.
            try:
                self._links.close()
            finally:
                self._leave()

    def give_up(self) -> None:
        """Instead of `serve`: the driver has gone before the loop began."""
        self._arena.close(_core.CLOSED_FAILED, DRIVER)
        self._leave()

    def _loop(self) -> None:
        arena, blueprint = self._arena, self._blueprint
        plan, process = blueprint.plan, blueprint.process
        control = arena.reader(DRIVER, address_channel(plan), process - 1, drain=False)
        addresses = {row[0]: Address(*row) for row in self._announced(control)}
        arena.join(DRIVER)
        report = self._report = arena.writer([report_channel(plan, process)])
        try:
            for peer in sorted(peers_of(plan, process)):
                arena.attach(addresses[peer])
        except (OSError, SerializationError) as error:
            report.write(f"{type(error).__name__}: {error}")
            return
        kind = blueprint.loop or Loop
        self._faults.reach(Point.SETUP_LINKS)
        try:
            self._links.warm_up(self._look, self._tell)
            loop = kind(self._instance, plan, process, blueprint.constants, arena, blueprint.options, self._faults, self._links)
        except (OSError, SerializationError, CommunicatorError) as error:
            report.write(f"{type(error).__name__}: {error}")
            return
        with loop:  # from here on: the graph may be closed before it runs
            self._faults.reach(Point.SETUP_READY)
            report.write(READY)
            with lending(arena, plan), self._links.watched(self._look, self._end_for):
                loop.run()

    def _tell(self, what: str) -> None:
        """Tell the driver what set-up is at, if there is room for it."""
        if self._report is not None:
            with contextlib.suppress(_core.TimedOut):
                self._report.write((AT, what[:_WHY_LENGTH]), 0.0)

    def _say_why(self, error: BaseException) -> None:
        """Tell the driver why the loop has failed, if it can be told."""
        if self._report is not None:
            with contextlib.suppress(Exception):
                self._report.write(f"{type(error).__name__}: {error}"[:_WHY_LENGTH], 0.0)

    def _end_for(self, error: CommunicatorError) -> None:
        """End the graph because a link has failed. An actor that has died is the reason, if it is seen in time."""
        arena = self._arena
        patience = Deadline(_DYING_S)
        while not (arena.closed[0] or arena.core.look_for_dead() or patience.over):
            time.sleep(0.01)
        if not arena.closed[0]:
            self._say_why(error)
            arena.close(_core.CLOSED_FAILED, self._blueprint.process)

    def _look(self) -> None:
        """Raise `Closed` if the graph has ended, or its driver is gone."""
        arena = self._arena
        arena.core.look_for_dead()
        if arena.closed[0]:
            raise _core.Closed(*arena.closed)
        if arena.core.loop_state(DRIVER) == _core.LOOP_LEFT:
            raise _core.Closed(_core.CLOSED_FAILED, DRIVER)

    def _announced(self, control: ShmReader) -> Any:
        """The driver's list of addresses. It may have given up before it knew of this arena, which it then cannot close."""
        while True:
            try:
                return control.read(_LOOK_EVERY_S)
            except _core.TimedOut:
                # A wait as short as this one has not looked whether the driver lives.
                if not self._arena.core.look_for_dead() and self._arena.core.loop_state(DRIVER) == _core.LOOP_LEFT:
                    raise _core.Closed(_core.CLOSED_FAILED, DRIVER) from None

    def _leave(self) -> None:
        try:
            self._faults.reach(Point.LEAVING)
        finally:
            self._report = None
            # The claim first: whoever sees that the loop has left may compile the next graph at once.
            if self._claim is not None:
                self._claim.release()
            try:
                self._arena.leave(DRIVER)
            finally:
                self._arena.core.set_loop_state(_core.LOOP_LEFT, DRIVER)  # whatever happened: the driver waits for it
