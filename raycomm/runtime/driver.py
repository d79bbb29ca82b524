"""The driver's side of a compiled graph.

    execute(x) ──► Writer.submit ──► input rings ──► actors' loops ──► output rings ──► Reader.fetch ──► results ──► ref.get()

`submit` and `fetch` (`outputs.py`) each do their whole work, waiting for their turn included, in one native call. So Ctrl-C,
which can strike between any two Python instructions, never leaves a lock taken, an execution uncounted or a result lost, and any
thread may call at any time.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from raycomm import _core
from raycomm.channel import Deadline, ShmArena, ShmWriter
from raycomm.errors import SerializationError
from raycomm.graph.model import Whole
from raycomm.observe.board import Board
from raycomm.observe.notice import Notice
from raycomm.observe.stats import GraphStats, graph_stats
from raycomm.observe.status import GraphStatus, graph_status
from raycomm.options import Options, check_limit
from raycomm.plan.actions import FromInput, Plan
from raycomm.plan.arguments import project, split_arguments
from raycomm.runtime.awaiting import Line, Waker
from raycomm.runtime.connection import RayConnection
from raycomm.runtime.lending import filled_by, lent_in_time
from raycomm.runtime.memory_error import shared_memory_error
from raycomm.runtime.outputs import first_of, first_part, queues_of, rest_of
from raycomm.runtime.refs import PENDING, Ref
from raycomm.runtime.reports import Reports
from raycomm.runtime.teardown import EXIT_LIMIT_S, Teardown, dropped

_MEMORY_LOOK_S = 0.05
_LOOK_EVERY_S = 0.2
_NO_TIME_S = 1e-9  # one look, as with 0, but a shortage of memory is judged over several of them


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
        self._connection = RayConnection()
        self.at_shutdown: object = None  # kept for `ray.shutdown`, which then calls `close_with_ray`
        self.reports = Reports(plan, options, arena, board, actor_ids, self._connection)
        self._arena = arena
        self._waker = Waker(arena)
        self._line = Line(self._waker)  # execute_async calls that wait for room
        self._ref_type = ref_type
        self._torn_down = False
        self._writer: ShmWriter = arena.writer([item.channel for item in plan.inputs])
        self._order = queues_of(plan, options, arena)
        self._teardown = Teardown(plan, arena, board, handles, self._order)
        self._readers = tuple(queue.reader for queue in self._order)
        self.first_s = first_part(len(self._order))
        self.look_every_s = math.inf if len(self._order) == 1 else _LOOK_EVERY_S
        # The commonest graph, one whole input and one output, takes a shorter way through `execute`.
        projections = [item.projection for item in plan.inputs]
        self._plain = plan.single_output and len(self._order) == 1 and projections == [Whole()]
        self._finalizer = weakref.finalize(self, dropped, arena, self.name)
        self._finalizer.atexit = False

    def execute(self, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
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
            refs = self._submit(values, self.first_s if limit is None else first_of("execute", limit, self.first_s))
            if refs is None:
                deadline = Deadline(limit)  # turned away at once: too many are under way
        except _core.TimedOut:
            deadline = rest_of(limit, self.first_s)
        except _core.PoolBusy:
            deadline = Deadline(limit)
        except (_core.Closed, _core.Misuse, _core.PoolFull) as error:
            self.raise_native(error, None)
        if deadline is not None:
            refs = self._submit_later(values, limit, deadline)
        assert refs is not None
        return refs[0] if plain else self._results_of(refs, args, kwargs)

    def _submit(self, values: tuple[Any, ...], limit_s: float) -> tuple[Ref, ...] | None:
        """Publish, and get a ref per output channel; None if too many executions are under way."""
        try:
            return self._writer.submit(
                values, self._ref_type, self, self._order, PENDING, self._readers, self.options.max_inflight, limit_s
            )
        except SerializationError as error:
            raise self.reports.unsent(error, values) from error.__cause__

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
        """The long way of `execute`: make room by moving finished results aside, then try again."""
        notice = Notice()
        while True:
            part_s = min(notice.left(), self.look_every_s)
            try:
                self._make_room(deadline.left(at_most=part_s))
                refs = self._submit(values, deadline.left(at_most=part_s))
                if refs is not None:
                    return refs
            except _core.PoolBusy:
                self._free_memory(_MEMORY_LOOK_S)
            except _core.TimedOut:
                if deadline.over:
                    raise self.reports.execute_timed_out(limit) from None
                self.relieve()
                notice.give(self.reports.execute_waits)
            except (_core.Closed, _core.Misuse, _core.PoolFull, _core.Overfull) as error:
                self.raise_native(error, None)

    def _make_room(self, timeout_s: float) -> None:
        """Below the limit of executions under way again, by moving the oldest one's results aside."""
        oldest_allowed = self._writer.published - self.options.max_inflight
        for queue in self._order:
            queue.take_aside(oldest_allowed, self.options.max_buffered_results, timeout_s)

    def relieve(self) -> None:
        """In a long wait: take results aside that an actor needs to be taken.

        An actor whose results hold all memory, or fill a short ring, waits until they are taken, and what is waited for may be
        another output, or a later result, which needs that actor to go on.
        """
        rows = map(self._arena.core.doing, range(1, len(self.plan.processes)))
        if any(kind in (_core.MEMORY, _core.WRITING) and 0 in peers for kind, _, _, _, peers in rows):
            self._free_memory(0.0)

    def _free_memory(self, timeout_s: float) -> None:
        """Move every finished result aside: an actor may wait for the memory it lies in, and the input for that actor."""
        try:
            for queue in self._order:
                queue.take_aside(queue.reader.published - 1, self.options.max_buffered_results, timeout_s)
        except _core.TimedOut:  # another thread has its turn there
            return
        except (_core.Closed, _core.Overfull, _core.Misuse) as error:
            self.raise_native(error, None)

    async def execute_async(self, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """As `execute`, without blocking the event loop: waits for room in it. Calls get their turn in order.

        Cancelling the task before it has returned may or may not submit the execution; nothing is lost either way.

        Args, Returns, Raises: as `execute`.
        """
        values = tuple(split_arguments(self.plan, args, kwargs))
        limit = self.options.submit_timeout if timeout is None else timeout
        if limit is not None:
            check_limit("timeout", limit, "execute_async")
        refs = None if self._line else self._try_submit(values)
        if refs is None:
            refs = await self._line.until(
                lambda: self._try_submit(values),
                self._has_room,
                limit,
                lambda: self.reports.execute_timed_out(limit),
                self.reports.execute_waits,
                self.relieve,
            )
        return self._results_of(refs, args, kwargs)

    def _has_room(self) -> bool:
        """Whether an execution more may be submitted, or finished results moved aside so that it may."""
        oldest_allowed = self._writer.published - self.options.max_inflight
        return all(queue.reader.published > oldest_allowed for queue in self._order)

    def _try_submit(self, values: tuple[Any, ...]) -> tuple[Ref, ...] | None:
        """Submit if that is possible now; None if not yet."""
        try:
            self._make_room(0.0)
        except _core.TimedOut:
            return None
        except (_core.Closed, _core.Misuse, _core.Overfull) as error:
            self.raise_native(error, None)
        try:
            return self._submit(values, _NO_TIME_S)
        except _core.PoolBusy:
            self._free_memory(0.0)
            return None
        except _core.TimedOut:
            return None
        except (_core.Closed, _core.Misuse, _core.PoolFull) as error:
            self.raise_native(error, None)

    async def result_of(self, ref: Ref) -> None:
        """Wait in the event loop until `ref` has its value; for `Ref.__await__`."""
        queue, index = ref._queue, ref._index
        if queue.try_take(ref):
            return
        limit = self.options.get_timeout
        await self._waker.until(
            lambda: queue.try_take(ref) or None,
            lambda: ref._value is not PENDING or queue.has(index),
            limit,
            lambda: self.reports.get_timed_out(limit, index, queue.channel),
            lambda: self.reports.get_waits(index, queue.channel),
            self.relieve,
        )

    def cancel(self, execution: int) -> bool:
        """See `Ref.cancel`."""
        if self.ended or any(queue.has(execution) for queue in self._order):
            return False
        return self._arena.core.cancel(execution)

    def empty(self, shape: Sequence[int] | int, dtype: Any, timeout: float | None = None) -> Any:
        """Memory for an input that `execute` then sends without copying it; ownership as in `raycomm.empty`.

        Blocks while messages on their way hold all memory, moving finished results aside as `execute` does.

        Args:
            shape, dtype: of the tensor or array.
            timeout: seconds; None: the graph's `submit_timeout`, -1: no limit, 0: try once.

        Raises:
            SharedMemoryError: no memory for it. ChannelTimeoutError: none in time. ChannelClosedError, ActorDiedError: the graph
                has ended.
        """
        self.check_open()
        limit = self.options.submit_timeout if timeout is None else timeout
        free = partial(self._free_memory, _MEMORY_LOOK_S)

        def lend(size: int) -> _core.Buffer:
            try:
                return lent_in_time(self._arena, size, Deadline(limit, "empty"), self._readers, free, self.reports.execute_waits)
            except _core.TimedOut:
                raise self.reports.execute_timed_out(limit) from None
            except _core.PoolFull as error:
                raise shared_memory_error(error, self._arena.core, self.plan, "raycomm.empty") from None
            except (_core.Closed, _core.Misuse) as error:
                self.raise_native(error, None)

        return filled_by(lend, shape, dtype)

    def status(self) -> GraphStatus:
        """What every process of the graph does now and did last; `print` it. Does not block, and works while actors hang."""
        self.reports.check_process()
        submitted = self._writer.published
        finished = min((queue.reader.published for queue in self._order), default=submitted)
        return graph_status(self.plan, self._arena, self.board, self.state, submitted, finished, self.reports.reason)

    def stats(self) -> GraphStats:
        """Counters of every edge, call and pool since the graph was compiled. Does not block."""
        self.reports.check_process()
        return graph_stats(self.plan, self._arena)

    @property
    def ended(self) -> bool:
        """Whether the graph is torn down or has ended otherwise."""
        return self._torn_down or self._arena.closed[0] != 0

    @property
    def is_teardown(self) -> bool:
        """Whether `teardown` was called; Ray's name for it."""
        return self._torn_down

    def get_id(self) -> str:
        """The graph's name; Ray's spelling."""
        return self.name

    @property
    def state(self) -> str:
        """ "running", "torn down", or "closed" by an actor; "; Ray was shut down in this process" may stand behind it."""
        state = "torn down" if self._torn_down else "closed" if self._arena.closed[0] else "running"
        return f"{state}; Ray was shut down in this process" if self._connection.closed else state

    def teardown(self, timeout: float | None = None, *, kill_actors: bool = False) -> None:
        """End the loops. Returns within the limit whatever the actors do; idempotent, from any thread. From 1 s on it says in the
        log for whom it waits; Ctrl-C ends the wait, not the end of the graph.

        Actors whose method has returned are free at once, for plain calls and for the next graph. A method that still runs is
        not interrupted: its actor is named in a warning, and its loop leaves when it returns. Results that were not fetched are
        gone; views of received arrays and tensors stay valid.

        Args:
            timeout: seconds; None: the graph's `teardown_timeout`, -1: no limit.
            kill_actors: `ray.kill` the actors whose loops have not left within the limit, without restarting them.
        """
        limit, name = (self.options.teardown_timeout, "teardown_timeout") if timeout is None else (timeout, "timeout")
        deadline = Deadline(limit, "teardown")
        with self._teardown.to_the_end():
            self._close_now()
            self._teardown.run(deadline, name, kill_actors=kill_actors)

    def close_at_exit(self, limit_s: float = EXIT_LIMIT_S) -> None:
        """Teardown by the interpreter's exit hook: silent, and with a short limit, since Ray ends the actors right after."""
        if not self._arena.closed[0]:
            self._close_now()
            self._teardown.wait_for_exit(limit_s)

    def close_with_ray(self) -> None:
        """Teardown by `ray.shutdown`, as at exit."""
        self._connection.close()
        self.close_at_exit()

    def _close_now(self) -> None:
        """Close all channels; only stores, so it may run in a signal handler or a finalizer."""
        self._connection.graph_ends()
        self._torn_down = True
        self._arena.close(_core.CLOSED_TEARDOWN, 0)
        self._finalizer.detach()  # last: until the channels are closed somebody has to

    def __enter__(self) -> CompiledGraph:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is None or isinstance(error, Exception):
            self.teardown()
        else:  # KeyboardInterrupt, SystemExit, a cancelled task: somebody wants to leave
            with self._teardown.to_the_end():
                self._close_now()
                self._teardown.leave(self.options.teardown_timeout)

    def __repr__(self) -> str:
        return f"<CompiledGraph {self.name!r}, {len(self.plan.processes) - 1} actors, {self.state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"graph {self.name!r} cannot be pickled: it belongs to the process that compiled it")

    def check_open(self) -> None:
        """Raise `ChannelClosedError` after teardown."""
        self.reports.check_open(torn_down=self._torn_down)

    def error_of(self, failure: Any) -> BaseException:
        """What `get` raises for an execution that failed."""
        return self.reports.raised_by_method(failure)

    def raise_native(self, error: Exception, execution: int | None) -> NoReturn:
        """Turn what the native part raised into an error that says what happened, where, and what to do."""
        self.reports.raise_native(error, execution, torn_down=self._torn_down)
