"""From a node to a running graph: build, plan, verify, set up, hand over to the driver. The one place that knows the whole
sequence.

Set-up costs two Ray calls per actor: one that only asks whether it is there, so that a restart can be waited for and a death
during set-up told from it; and one, to all at once, that makes the actor's memory and starts its loop. The loop waits for the
others' addresses on a channel in the driver's memory. If anything fails, everything made so far is closed and nothing is left
behind.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions
from ray import cloudpickle

from raycomm import _core
from raycomm.channel import Address, Deadline, ShmArena
from raycomm.channel.memory import default_limit
from raycomm.errors import CompileError
from raycomm.graph.build import build
from raycomm.graph.model import Actor, Const, Graph
from raycomm.graph.views import Adapter
from raycomm.observe.board import Board
from raycomm.options import LoopThread, Options
from raycomm.plan.actions import Plan
from raycomm.plan.devices import on_devices
from raycomm.plan.lowering import lower
from raycomm.plan.places import Place
from raycomm.plan.verify import verify
from raycomm.runtime.actor_thread import lend_thread
from raycomm.runtime.blueprint import (
    DRIVER,
    READY,
    Blueprint,
    Prepared,
    address_channel,
    read_at,
    report_channel,
    ring_slots,
    rings_of,
)
from raycomm.runtime.conversation import BUSY, Conversation
from raycomm.runtime.coroutines import on_event_loop
from raycomm.runtime.driver import CompiledGraph
from raycomm.runtime.fault_points import faults_by_actor
from raycomm.runtime.links import Meeting, meeting_point
from raycomm.runtime.places import places_of
from raycomm.runtime.refs import Ref
from raycomm.runtime.setup import prepare
from raycomm.runtime.thread_state import on_actor_thread
from raycomm.testing.faults import injected

_numbers = itertools.count()  # makes default names differ; says nothing about a graph
_DYING_S = 1.0


def compile_graph(
    node: object,
    options: Options,
    adapter: Adapter | None,
    ref_type: type[Ref],
    *,
    loop: Callable[..., Any] | None = None,
    at_shutdown: Callable[[CompiledGraph], object] | None = None,
) -> CompiledGraph:
    """Compile the graph that ends in `node` and start its loops. Blocks until every actor is ready.

    Args:
        node: the root.
        options: of the graph.
        adapter: reads nodes that are not raycomm's own.
        ref_type: of the refs that `execute` returns.
        loop: called in each actor with what `Loop` takes, makes what runs there; None: `Loop`.
        at_shutdown: has `ray.shutdown` call the graph's `close_with_ray`, while the graph keeps what it returns.

    Raises:
        CompileError: the graph is wrong, or an actor cannot take part; nothing is left running.
        ActorDiedError: an actor is dead, or died during set-up.
        ChannelTimeoutError: not all actors were ready within `options.compile_timeout`.
    """
    graph = build(node, adapter)
    name = options.name or f"graph-{os.getpid()}-{next(_numbers)}"
    plan = lower(graph, name)
    verify(plan)
    if not ray.is_initialized():
        raise CompileError(
            f"graph {name!r}: Ray is not running in this process; call ray.init() first", remedy="call ray.init() first"
        )
    processes = len(plan.processes)
    _check_free(graph, name)
    actors = Conversation(graph, [process.label for process in plan.processes], name, options)
    places: dict[int, Place] = {}
    if graph.hints or graph.collectives:
        places = places_of(graph, options.device, actors)
        plan = on_devices(
            plan,
            graph,
            places,
            policy=options.stream_policy,
            max_links=options.max_links,
            early_receives=options.overlap,
        )
        verify(plan)
    _check_memory(plan, options)
    arena = ShmArena.create(DRIVER, rings_of(plan, DRIVER, options), options, loops=processes, processes=processes)
    arena.join(DRIVER)
    try:
        with meeting_point(plan) as meeting:
            addresses = _SetUp(graph, plan, options, arena, actors, places, meeting, loop).run()
        pids = {DRIVER: os.getpid()} | {address.process: address.pid for address in addresses}
        board = Board(plan, arena, pids, ring_slots(plan, options))
        actor_ids = {actor.index + 1: actor.key for actor in graph.actors}
        handles = [actor.handle for actor in graph.actors]
        compiled = CompiledGraph(plan, options, arena, board, ref_type, actor_ids, handles)
        if at_shutdown is not None:
            compiled.at_shutdown = at_shutdown(compiled)
        _end_at_exit(compiled)
    except BaseException:
        # Closing reaches the actors whose arena is attached here; the others look at this, now or once they have begun.
        arena.core.set_loop_state(_core.LOOP_LEFT, DRIVER)
        arena.close(_core.CLOSED_FAILED, DRIVER)
        raise
    return compiled


def _check_free(graph: Graph, name: str) -> None:
    """An actor that compiles a graph through itself must be able to answer the set-up calls while compile waits."""
    here = ray.get_runtime_context().get_actor_id()
    actor = next((actor for actor in graph.actors if actor.key == here), None)
    if actor is None:
        return
    if on_actor_thread():
        blocked = "its only thread"
        remedy = "compile it in the driver or in another actor, or make this one with max_concurrency=2"
    elif on_event_loop():
        blocked = "its event loop"
        remedy = "compile it on another thread: await asyncio.to_thread(raycomm.compile, node)"
    else:
        return
    raise CompileError(
        f"graph {name!r} goes through actor {actor.label}, which is compiling it: {blocked} would wait in this call for an "
        f"answer that it has to give itself; {remedy}",
        node=actor.label,
        remedy=remedy,
    )


def _check_memory(plan: Plan, options: Options) -> None:
    """Rings are made whole at compile, beside the blocks that `shm_limit_bytes` bounds; more than that they may not take."""
    rings = [ring for process in plan.processes for ring in rings_of(plan, process.index, options)]
    total = sum(ring.slots * ring.slot_bytes for ring in rings)
    limit = options.shm_limit_bytes or default_limit()
    if total > limit:
        largest = max(rings, key=lambda ring: ring.slots * ring.slot_bytes)
        value = plan.channels[largest.channel].value if largest.channel < len(plan.channels) else "set-up messages"
        remedy = "use a smaller inline_bytes, max_inflight or slots, or a larger shm_limit_bytes"
        raise CompileError(
            f"graph {plan.name!r}: its {len(rings)} rings take {total / 2**20:.1f} MiB, more than shm_limit_bytes "
            f"({limit / 2**20:.1f} MiB) for everything; the largest has {largest.slots} slots of {largest.slot_bytes} bytes, for "
            f"{value}; {remedy}",
            argument="shm_limit_bytes",
            remedy=remedy,
        )


class _SetUp:
    """The conversation with the actors of one graph."""

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        options: Options,
        arena: ShmArena,
        actors: Conversation,
        places: dict[int, Place],
        meeting: Meeting | None,
        loop: Callable[..., Any] | None,
    ) -> None:
        self._graph = graph
        self._plan = plan
        self._arena = arena
        self._options = options
        self._actors = actors
        actors.nonce = arena.address.nonce
        self._faults = faults_by_actor(graph, plan.name, injected())
        self._meeting = meeting
        self._places = places
        self._loop = loop
        self._node = ray.get_runtime_context().get_node_id()

    def run(self) -> list[Address]:
        """Prepare all actors, tell them each other's addresses, wait until all are ready."""
        self._actors.reach()
        addresses = self._prepare()
        control = self._arena.writer([address_channel(self._plan)])
        control.write([(address.process, address.pid, address.fd, address.nonce) for address in addresses])
        self._await_ready(addresses)
        return addresses

    def _prepare(self) -> list[Address]:
        calls = {self._call(actor): actor.index + 1 for actor in self._graph.actors}
        addresses = []
        problems = []
        while calls:
            for call, process in self._actors.next_answers(calls, BUSY):
                prepared = self._answer(call, process)
                if prepared.problem is not None:
                    problems.append(f"actor {self._label(prepared.process)} on node {prepared.node}: {prepared.problem}")
                else:
                    addresses.append(self._attach(prepared, problems))
        if problems:
            raise CompileError(f"graph {self._plan.name!r} cannot be set up: {'; '.join(problems)}", node=problems[0])
        return sorted((address for address in addresses if address is not None), key=lambda address: address.process)

    def _call(self, actor: Actor) -> Any:
        """The set-up call of one actor, on its way."""
        blueprint = Blueprint(
            self._plan,
            actor.index + 1,
            self._graph.constants,
            self._options,
            self._arena.address,
            self._node,
            layout=_core.LAYOUT_VERSION,
            faults=self._faults.get(actor.index, ()),
            meeting=self._meeting,
            device=self._places[actor.index + 1].device if self._places else None,
            communicators=tuple(own.made for own in self._graph.communicators),
            loop=self._loop,
        )
        handle: Any = actor.handle
        try:
            call = handle.__ray_call__.remote(prepare, blueprint)
        except Exception as error:
            raise self._unsendable(error) from error
        if self._options.loop_thread is LoopThread.ACTOR:
            handle.__ray_call__.remote(lend_thread, self._arena.address.nonce)
        return call

    def _unsendable(self, error: Exception) -> Exception:
        """Names the constant or communicator that Ray cannot pickle; the error itself if none is to blame."""
        for own in self._graph.communicators:
            try:
                cloudpickle.dumps(own.made)  # type: ignore[no-untyped-call]
            except Exception as reason:
                remedy = "make what it uses in initialize(), or where an end is made"
                return CompileError(
                    f"graph {self._plan.name!r}: communicator {own.name} cannot be pickled ({reason}); {remedy}",
                    node=own.name,
                    argument="transport",
                    remedy=remedy,
                )
        for node in self._graph.nodes:
            operands = [(str(place), operand) for place, operand in enumerate(node.args)] + list(node.kwargs)
            for argument, operand in operands:
                if not isinstance(operand, Const):
                    continue
                try:
                    cloudpickle.dumps(self._graph.constants[operand.index])  # type: ignore[no-untyped-call]
                except Exception as reason:
                    name, value = f"{node.actor_label}.{node.method}#{node.id}", self._graph.constants[operand.index]
                    remedy = "pass it as an input, or make it in the actor"
                    return CompileError(
                        f"graph {self._plan.name!r}: argument {argument} of {name}, a constant of type {type(value).__name__}, "
                        f"cannot be pickled ({reason}); {remedy}",
                        node=name,
                        argument=argument,
                        remedy=remedy,
                    )
        return error

    def _answer(self, call: Any, process: int) -> Prepared:
        try:
            prepared = ray.get(call)
        except ray.exceptions.RayActorError as error:  # dead for good, or about to restart
            raise self._actors.died(process, str(error)) from error
        except ray.exceptions.RayError as error:
            raise self._actors.refused(process, error) from error
        assert isinstance(prepared, Prepared)
        return prepared

    def _attach(self, prepared: Prepared, problems: list[str]) -> Address | None:
        assert prepared.address is not None
        try:
            self._arena.attach(prepared.address)
        except OSError as error:
            if not self._actors.alive(prepared.process, prepared.address.pid):
                raise self._actors.died(prepared.process, str(error)) from error
            problems.append(f"actor {self._label(prepared.process)} on node {prepared.node}: {error}")
            return None
        return prepared.address

    def _await_ready(self, addresses: list[Address]) -> None:
        """Wait until all are ready. All are listened to: who sets up a link waits for its other end, which may have failed."""
        waiting = {
            address.process: self._arena.reader(address.process, report_channel(self._plan, address.process), 0, drain=True)
            for address in addresses
        }
        at: dict[int, str] = {}
        while waiting:
            first = next(iter(waiting))
            for process, report in list(waiting.items()):
                try:
                    answer = report.read(self._actors.moment() if process == first else 0.0)
                except _core.TimedOut:
                    continue
                except _core.Closed:
                    raise self._actors.died(self._arena.closed[1], "it ended during set-up") from None
                if (what := read_at(answer)) is not None:
                    at[process] = f"{self._label(process)} is in {what}"
                    continue
                if answer != READY:
                    raise self._not_ready(process, answer)
                del waiting[process]
            if waiting:
                attaching = [f"{self._label(process)} is to attach to the others" for process in waiting if process not in at]
                self._actors.still_waiting(", ".join([at[process] for process in waiting if process in at] + attaching))

    def _not_ready(self, process: int, answer: str) -> BaseException:
        # It could not reach a neighbour, perhaps one that is dying: its descriptors go some time before it counts as dead.
        patience = Deadline(_DYING_S)
        while not patience.over:
            if self._arena.core.look_for_dead() or self._arena.closed[0]:
                return self._actors.died(self._arena.closed[1], "it ended during set-up")
            time.sleep(0.01)
        return CompileError(f"graph {self._plan.name!r} cannot be set up: actor {self._label(process)}: {answer}")

    def _label(self, process: int) -> str:
        return self._plan.processes[process].label


def _end_at_exit(graph: CompiledGraph) -> None:
    """Let the loops leave before Ray's own exit hook ends the actors: hooks run last in, first out, and Ray's came first."""
    reference = weakref.ref(graph)

    def end() -> None:
        still_there = reference()
        if still_there is not None:
            still_there.close_at_exit()

    atexit.register(end)
    weakref.finalize(graph, atexit.unregister, end).atexit = False
