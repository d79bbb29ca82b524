"""Runs in an actor: one call that makes its memory, and the thread that then loops.

The thread is the loop's own, not a pending Ray call: an actor has one thread for `_ray_system` calls, shared with Ray Direct
Transport, so a second graph's loop would wait for the first to end. It inherits the context variables of the thread the
constructor ran on.
"""

from __future__ import annotations

import contextvars
import logging
import socket
import threading
from typing import Any

import ray
from ray.exceptions import AsyncioActorExit

from raycomm import __version__, _core
from raycomm.channel import Address, ShmArena, ShmReader
from raycomm.errors import SerializationError
from raycomm.plan import Compute
from raycomm.runtime import coroutines
from raycomm.runtime.blueprint import DRIVER, READY, Blueprint, Prepared, address_channel, peers_of, report_channel, rings_of
from raycomm.runtime.loop import Loop

logger = logging.getLogger("raycomm")

_LOOK_EVERY_S = 0.2


def prepare(instance: Any, blueprint: Blueprint) -> Prepared:
    """Make this actor's arena and start its loop thread, which waits for the other addresses before it does anything.

    Args:
        instance: the actor's object.
        blueprint: from the driver.

    Returns:
        The address, or the reason why this actor cannot take part; then nothing was started.
    """
    node = f"{ray.get_runtime_context().get_node_id()} ({socket.gethostname()})"
    problem = _cannot_take_part(instance, blueprint, node)
    if problem is not None:
        return Prepared(blueprint.process, node, None, problem)
    plan, options = blueprint.plan, blueprint.options
    try:
        arena = ShmArena.create(blueprint.process, rings_of(plan, blueprint.process, options), options, loops=len(plan.processes))
        arena.attach(blueprint.driver)
    except OSError as error:
        return Prepared(blueprint.process, node, None, str(error))
    if arena.core.loop_state(DRIVER) == _core.LOOP_LEFT:
        return Prepared(blueprint.process, node, None, "the driver has given up")
    context = contextvars.copy_context()
    # A daemon: at interpreter exit nobody waits for a user's method. `_core` sees to it that a parked thread stays parked then.
    arena.core.set_loop_state(_core.LOOP_RUNNING, DRIVER)
    thread = threading.Thread(
        target=context.run, args=(_serve, instance, blueprint, arena), name=f"raycomm:{plan.name}", daemon=True
    )
    thread.start()
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


def _announced(control: ShmReader, arena: ShmArena) -> Any:
    """The driver's list of addresses. It may have given up before it knew of this arena, which it then cannot close."""
    while True:
        try:
            return control.read(_LOOK_EVERY_S)
        except _core.TimedOut:
            if arena.core.loop_state(DRIVER) == _core.LOOP_LEFT:
                raise _core.Closed(_core.CLOSED_FAILED, DRIVER) from None


def _serve(instance: Any, blueprint: Blueprint, arena: ShmArena) -> None:
    """The loop thread: learn the addresses, attach, say so, loop until the graph is closed."""
    plan, process = blueprint.plan, blueprint.process
    try:
        control = arena.reader(DRIVER, address_channel(plan), process - 1, drain=False)
        addresses = {row[0]: Address(*row) for row in _announced(control, arena)}
        arena.core.open_pool(DRIVER)
        report = arena.writer([report_channel(plan, process)])
        try:
            for peer in sorted(peers_of(plan, process)):
                arena.attach(addresses[peer])
            loop = Loop(instance, plan, process, blueprint.constants, arena)
        except (OSError, SerializationError) as error:
            report.write(f"{type(error).__name__}: {error}")
            return
        report.write(READY)
        loop.run()
    except _core.Closed:
        # Closing travels on to neighbours whom the one that closed first may not have reached.
        arena.close(*arena.closed)
    except (SystemExit, AsyncioActorExit) as error:
        # sys.exit or exit_actor in a method: the actor is going away, and so is what depends on it. No warning: it was asked
        # for, and whoever waits for a result is told.
        logger.info("graph %r: a method of %s left with %r; the graph is closed", plan.name, plan.processes[process].label, error)
        arena.close(_core.CLOSED_FAILED, process)
        if isinstance(error, AsyncioActorExit):
            # On this thread that alone ends nothing; Ray ends the actor when it runs this call, after those already queued.
            ray.get_runtime_context().current_actor.__ray_terminate__.remote()
    except BaseException:
        logger.exception("graph %r: the loop of %s failed; the graph is closed", plan.name, plan.processes[process].label)
        arena.close(_core.CLOSED_FAILED, process)
    finally:
        arena.core.set_loop_state(_core.LOOP_LEFT, DRIVER)
