"""The driver's side of a compiled graph.

    execute(x) ──► Writer.submit ──► input rings ──► actors' loops ──► output rings ──► Reader.fetch ──► results ──► ref.get()

`submit` and `fetch` each do their whole work, waiting for their turn included, in one native call. So Ctrl-C, which can strike
between any two Python instructions, never leaves a lock taken, an execution uncounted or a result lost, and any thread may call
at any time.

Each output channel has its own queue: results come in order and are kept by execution until their refs take them.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from typing import Any, NoReturn

from raycomm import _core
from raycomm.channel import NO_LIMIT, Deadline, ShmArena, ShmReader, ShmWriter
from raycomm.errors import RaycommError
from raycomm.graph import Whole
from raycomm.observe.board import Board
from raycomm.observe.notice import Notice
from raycomm.options import Options, check_limit
from raycomm.plan import FromChannel, FromInput, Plan, project, split_arguments
from raycomm.runtime import ray_errors
from raycomm.runtime.loop import shared_memory_error
from raycomm.runtime.refs import PENDING, Ref

logger = logging.getLogger("raycomm")


class OutputQueue:
    """Results of one output channel, in order, until their refs take them."""

    # Its graph comes with each ref: a graph that nobody holds must end at once, not at the next garbage collection.
    __slots__ = ("_results", "_unwanted", "channel", "reader")

    def __init__(self, channel: int, reader: ShmReader) -> None:
        self._results: dict[int, Any] = {}
        self._unwanted: set[int] = set()
        self.channel = channel
        self.reader = reader

    def take(self, ref: Ref, timeout: float | None) -> None:
        """Leave the value for `ref` with it; blocks until it is there. See `Ref.get` for limits and errors."""
        graph = ref._graph
        index = ref._index
        if timeout is None:
            timeout = graph.options.get_timeout
        if graph._torn_down:
            graph.check_open()
        first = _FIRST_S if timeout is None else first_of(timeout)
        results = self._results
        late = False
        try:  # one native call, without preparing for what comes if it takes long
            self.reader.fetch(ref, results, self._unwanted, index, graph.options.max_buffered_results, first)
        except _core.TimedOut:
            late = True  # waited for outside this clause: Ctrl-C would show as "during handling of TimedOut"
        except (_core.Closed, _core.Overfull, _core.Misuse) as error:
            graph.raise_native(error, index, self.channel)
        if late:
            self._wait(ref, index, timeout)
        # Taken before it was asked for: left with the ref before it leaves the results, so between the two it is in both, never
        # in neither. (Missing there too: another thread has just done the same.)
        if index in results:
            try:
                ref._value = results[index]
            except KeyError:
                return
            results.pop(index, None)

    def try_take(self, ref: Ref) -> bool:
        """Take the value for `ref` if it is there; False if not yet. Other errors are raised."""
        try:
            self.take(ref, 0)
        except TimeoutError:
            return False
        return True

    def _wait(self, ref: Ref, index: int, limit: float | None) -> None:
        """The long way: limits, notices, and errors made into ones that say what happened."""
        graph = ref._graph
        deadline = rest_of(limit)
        notice = Notice()
        while not deadline.over:
            try:
                left = deadline.left(at_most=notice.left())
                self.reader.fetch(ref, self._results, self._unwanted, index, graph.options.max_buffered_results, left)
                return
            except _core.TimedOut:
                notice.give(f"execution {index} of graph {graph.name!r}: {graph.board.blame(self.channel)}")
            except (_core.Closed, _core.Overfull, _core.Misuse) as error:
                graph.raise_native(error, index, self.channel)
        graph.raise_timeout(limit, index, self.channel)

    def give_up(self, index: int) -> None:
        """The ref for `index` died. Only dictionary and set operations: may run inside a garbage collection, in any thread."""
        # First unwanted, then a look at what has been taken meanwhile: the other way round a result taken in between would stay.
        self._unwanted.add(index)
        if index < self.reader.taken:
            self._unwanted.discard(index)
            self._results.pop(index, None)


_FIRST_S = 1.0


def first_of(limit: float | None) -> float:
    """The first part of a wait, in seconds. Almost every wait gets by with it, so nothing is prepared for what comes after."""
    if limit is None or limit == NO_LIMIT:
        return _FIRST_S
    return min(check_limit("timeout", limit), _FIRST_S)


def rest_of(limit: float | None) -> Deadline:
    """What is left of a wait after `first_of` has passed."""
    return Deadline(None if limit is None or limit == NO_LIMIT else max(0.0, limit - _FIRST_S))


class CompiledGraph:
    """A graph whose loops run. Made by `raycomm.compile`; ends with `teardown`, or as a context manager.

    Attributes:
        name: of the graph, in messages.
        plan: every actor's actions; `print(graph.plan)` shows them.
        options: the settings in force.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        arena: ShmArena,
        board: Board,
        ref_type: type[Ref],
        actor_ids: dict[int, str],
        handles: list[Any],
    ) -> None:
        self.name = plan.name
        self.plan = plan
        self.options = options
        self.board = board
        self._arena = arena
        self._ref_type = ref_type
        self._actor_ids = actor_ids
        self._handles = handles  # until teardown: Ray ends an actor whose last handle is gone
        self._torn_down = False
        self._writer: ShmWriter = arena.writer([item.channel for item in plan.inputs])
        self._queues: dict[int, OutputQueue] = {}
        for output in plan.outputs:
            if isinstance(output, FromChannel) and output.channel not in self._queues:
                channel = plan.channels[output.channel]
                reader = arena.reader(channel.writer, channel.id, channel.readers.index(0), drain=True)
                self._queues[channel.id] = OutputQueue(channel.id, reader)
        self._order = tuple(self._queues.values())
        self._readers = tuple(queue.reader for queue in self._order)
        # The commonest graph, one whole input and one output, takes a shorter way through `execute`.
        projections = [item.projection for item in plan.inputs]
        self._plain = plan.single_output and len(self._order) == 1 and projections == [Whole()]
        self._finalizer = weakref.finalize(self, _dropped, arena, self.name)
        self._finalizer.atexit = False

    def execute(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Submit one execution; returns at once if fewer than `max_inflight` are under way, else waits for room.

        While it waits it moves finished results aside, up to `max_buffered_results`.

        Args:
            *args, **kwargs: the graph's inputs. They are copied before this returns, and may be changed afterwards.
            timeout: seconds; None: the graph's `submit_timeout`, -1: no limit, 0: try once.

        Returns:
            A ref, or a list of refs if the graph ends in a `MultiOutputNode`.

        Raises:
            ArgumentError: wrong arguments. SerializationError: a value cannot be sent. SharedMemoryError: no memory for it.
            ChannelTimeoutError, CapacityExceededError: no room. In all these cases nothing was submitted and the graph stays
                usable.
            ActorDiedError, ChannelClosedError: the graph has ended.
        """
        plain = self._plain and len(args) == 1 and not kwargs
        values = args if plain else tuple(split_arguments(self.plan, args, kwargs))
        limit = self.options.submit_timeout if timeout is None else timeout
        refs = deadline = None
        try:
            refs = self._submit(values, _FIRST_S if limit is None else first_of(limit))
            if refs is None:
                deadline = Deadline(limit)  # turned away at once: too many are under way
        except _core.TimedOut:
            deadline = rest_of(limit)
        except (_core.Closed, _core.Misuse, _core.PoolFull) as error:
            self.raise_native(error, None, None)
        if deadline is not None:
            refs = self._submit_later(values, limit, deadline)
        assert refs is not None
        return refs[0] if plain else self._results_of(refs, args, kwargs)

    def _submit(self, values: tuple[Any, ...], limit_s: float) -> tuple[Ref, ...] | None:
        """Publish, and get a ref per output channel; None if too many executions are under way."""
        return self._writer.submit(
            values, self._ref_type, self, self._order, PENDING, self._readers, self.options.max_inflight, limit_s
        )

    def _results_of(self, refs: tuple[Ref, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What `execute` returns: the refs in the order of the graph's outputs, and parts of the input that are outputs."""
        by_channel = {queue.channel: ref for queue, ref in zip(self._order, refs, strict=True)}
        results = [
            self._ref_type(self, project(output.projection, args, kwargs))
            if isinstance(output, FromInput)
            else by_channel[output.channel]
            for output in self.plan.outputs
        ]
        return results[0] if self.plan.single_output else results

    def _submit_later(self, values: tuple[Any, ...], limit: float | None, deadline: Deadline) -> tuple[Ref, ...]:
        """The long way of `execute`: make room by moving the oldest execution's results aside, then try again."""
        notice = Notice()
        while True:
            try:
                self._make_room(deadline, notice)
                refs = self._submit(values, deadline.left(at_most=notice.left()))
                if refs is not None:
                    return refs
            except _core.TimedOut:
                waits = self.board.everyone()
                if deadline.over:
                    self._raise(
                        ray_errors.ChannelTimeoutError,
                        f"execute of graph {self.name!r} found no room within {limit} s, with "
                        f"{self.options.max_inflight} executions "
                        f"under way: {waits}. Fetch results, or give a larger timeout or max_inflight",
                        limit_s=limit,
                        waits_for=waits,
                    )
                notice.give(f"execute of graph {self.name!r} waits for room: {waits}")
            except (_core.Closed, _core.Misuse, _core.PoolFull, _core.Overfull) as error:
                self.raise_native(error, None, None)

    def _make_room(self, deadline: Deadline, notice: Notice) -> None:
        oldest_allowed = self._writer.published - self.options.max_inflight
        for queue in self._queues.values():
            if oldest_allowed >= queue.reader.taken:
                if len(queue._results) >= self.options.max_buffered_results:
                    raise _core.Overfull
                queue.reader.fetch(
                    None,
                    queue._results,
                    queue._unwanted,
                    oldest_allowed,
                    self.options.max_buffered_results - 1,
                    deadline.left(at_most=notice.left()),
                )

    def teardown(self, timeout: float | None = None) -> None:
        """End the loops. Returns within the limit whatever the actors do; idempotent, from any thread.

        Actors whose method has returned are free at once, for plain calls and for the next graph. A method that still runs is
        not interrupted: its actor is named in a warning, and its loop leaves when it returns. Results that were not fetched are
        gone; views of received arrays and tensors stay valid.

        Args:
            timeout: seconds; None: the graph's `teardown_timeout`, -1: no limit.
        """
        deadline = Deadline(self.options.teardown_timeout if timeout is None else timeout)
        self._close_now()
        late = self._wait_left(deadline)
        self._handles.clear()
        if late:
            logger.warning(
                "graph %r is torn down, but after %s s still in a method: %s. They leave it when it returns; ray.kill "
                "ends them now",
                self.name,
                deadline.limit_s,
                late,
            )

    def close_at_exit(self, limit_s: float) -> None:
        """Teardown by the interpreter's exit hook: silent, and with a short limit, since Ray ends the actors right after."""
        if not self._torn_down:
            self._close_now()
            self._wait_left(Deadline(limit_s))

    def _close_now(self) -> None:
        """Close all channels; only stores, so it may run in a signal handler or a finalizer."""
        self._torn_down = True
        self._finalizer.detach()
        self._arena.close(_core.CLOSED_TEARDOWN, 0)

    def _wait_left(self, deadline: Deadline) -> str:
        """Wait until every loop has left or its process has died; names those that had not when the deadline passed."""
        actors = [process.index for process in self.plan.processes[1:]]
        if self._arena.core.wait_left(actors, deadline.left()):
            return ""
        core = self._arena.core
        return "; ".join(self.board.doing(p) for p in actors if core.loop_state(p) == _core.LOOP_RUNNING and core.alive(p))

    def __enter__(self) -> CompiledGraph:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.teardown()

    def __repr__(self) -> str:
        state = "torn down" if self._torn_down else "closed" if self._arena.closed[0] else "running"
        return f"<CompiledGraph {self.name!r}, {len(self.plan.processes) - 1} actors, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"graph {self.name!r} cannot be pickled: it belongs to the process that compiled it")

    def check_open(self) -> None:
        """Raise `ChannelClosedError` after teardown. What had arrived is not handed out then, or it would be a matter of luck."""
        if self._torn_down:
            self._raise(
                ray_errors.ChannelClosedError,
                f"graph {self.name!r} was torn down; compile it again to go on",
                channel=None,
                reason="teardown",
            )

    def error_of(self, failure: Any) -> BaseException:
        """What `get` raises for an execution that failed."""
        return ray_errors.raised_by_method(failure, self.name)

    def raise_timeout(self, limit: float | None, execution: int, channel: int) -> NoReturn:
        """`ChannelTimeoutError` for a `get` whose limit passed."""
        waits = self.board.blame(channel)
        self._raise(
            ray_errors.ChannelTimeoutError,
            f"execution {execution} of graph {self.name!r} gave no result within {limit} s: {waits}. The ref stays "
            "usable: get it again, with a "
            f"larger timeout",
            limit_s=limit,
            execution=execution,
            channel=self.plan.channels[channel].value,
            waits_for=waits,
        )

    def raise_native(self, error: Exception, execution: int | None, channel: int | None) -> NoReturn:
        """Turn what the native part raised into an error that says what happened, where, and what to do."""
        if isinstance(error, _core.PoolFull):
            raise shared_memory_error(error, self.plan, "the input") from None
        if isinstance(error, _core.Overfull):
            limit = self.options.max_buffered_results
            self._raise(
                ray_errors.CapacityExceededError,
                f"graph {self.name!r}: {limit} results of earlier executions wait unfetched, as many as "
                "max_buffered_results allows. Fetch them or "
                f"drop their refs first, or compile with a larger max_buffered_results",
                limit=limit,
                count=limit,
            )
        if isinstance(error, _core.Misuse):
            raise RaycommError(f"graph {self.name!r}: {error}") from None
        self.check_open()
        reason, process = self._arena.closed
        label = self.plan.processes[process].label
        pid = self.board.pid(process)
        what = "died" if reason == _core.CLOSED_PEER_DIED else "left its loop (a method ended it)"
        self._raise(
            ray_errors.ActorDiedError,
            f"actor {label} (pid {pid}) of graph {self.name!r} {what}"
            + (f"; execution {execution} will give no result" if execution is not None else "")
            + ". The other actors are free; tear the graph down and compile a new one without it, or with it once it "
            "has restarted",
            actor=label,
            actor_id=self._actor_ids.get(process),
            pid=pid,
            execution=execution,
        )

    def _raise(self, kind: type[Any], message: str, **attributes: Any) -> NoReturn:
        raise kind(message, graph=self.name, **attributes) from None


def _dropped(arena: ShmArena, name: str) -> None:
    """A graph nobody holds any more was not torn down: let its loops leave, without waiting, and say so."""
    arena.close(_core.CLOSED_TEARDOWN, 0)
    warnings.warn(f"graph {name!r} was dropped without teardown(); its loops leave on their own", ResourceWarning, stacklevel=2)
