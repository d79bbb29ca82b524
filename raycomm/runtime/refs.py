"""A ref: the result of one output of one execution, to be fetched now or later, once or often."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NoReturn

from raycomm.codec import Failure
from raycomm.errors import RaycommError

if TYPE_CHECKING:
    from raycomm.runtime.driver import CompiledGraph

PENDING: Any = object()


class Ref:
    """What `CompiledGraph.execute` returns. Belongs to the process that compiled the graph; any of its threads may use it.

    The value is kept until the ref dies. A ref that dies unfetched gives its place up without blocking; the value is then never
    decoded.
    """

    __slots__ = ("__weakref__", "_graph", "_index", "_queue", "_value")

    _graph: CompiledGraph
    _queue: Any  # OutputQueue; None where the value was there from the start
    _index: int
    _value: Any

    def __init__(self, graph: CompiledGraph, value: Any) -> None:
        """Of a part of the input that is also an output: it has its value from the start. `Writer.submit` makes the others."""
        self._graph = graph
        self._queue = None
        self._index = -1
        self._value = value

    def get(self, timeout: float | None = None) -> Any:
        """The value; blocks until it is there.

        Args:
            timeout: seconds; None: the graph's `get_timeout`, -1: no limit, 0: take it if it is there.

        Raises:
            the exception the method raised: also an instance of Ray's `RayTaskError`, with the remote traceback.
            ChannelTimeoutError: the limit passed; the ref stays usable.
            ActorDiedError, ChannelClosedError: the value will never come.
            CapacityExceededError: earlier executions have more unfetched results than `max_buffered_results`.
        """
        if self._value is PENDING:
            self._queue.take(self, timeout)
            while self._value is PENDING:
                # Another thread is about to leave the value here; in a forked child nobody is, its parent has taken it.
                self._graph.reports.check_process()
                self._queue.take(self, timeout)
        value = self._value
        if type(value) is Failure:
            raise self._graph.error_of(value)
        return value

    def __await__(self) -> Generator[Any, None, Any]:
        """The value, as `get` gives it, without blocking the event loop. May be awaited often, and by several tasks.

        Cancelling the awaiting task loses nothing. The limit is the graph's `get_timeout`; `asyncio.timeout` sets another.
        """
        return self._result().__await__()

    async def _result(self) -> Any:
        while self._value is PENDING:
            await self._graph.result_of(self)
            if self._value is PENDING:
                self._graph.reports.check_process()
        return self.get()

    def done(self) -> bool:
        """Whether `get` would return or raise at once. Does not block.

        Raises:
            RaycommError: in a forked child, for what had not reached this process before.
        """
        if self._value is not PENDING:
            return True
        if not self._is_aside:
            self._graph.reports.check_process()
        if self._queue.has(self._index) or self._graph.ended:
            return True
        try:
            self._graph.relieve()  # whoever asks again and again waits, too
        except RaycommError:
            return True  # as `get` would
        return False

    def cancel(self) -> bool:
        """Cancel the execution if no actor has begun it; does not block.

        Returns:
            True: no method will run for it, and all its refs raise `ExecutionCancelledError`. False: it has begun or finished,
            and goes on as if nothing had been asked.
        """
        return self._value is PENDING and self._graph.cancel(self._index)

    def __del__(self) -> None:
        # May run in any thread, in the middle of anything: only stores.
        try:
            if self._value is PENDING and self._index >= 0 and self._queue is not None:
                self._queue.give_up(self._index)
        except AttributeError:
            return  # half made, or at interpreter exit

    def __repr__(self) -> str:
        which = f"execution {self._index}" if self._index >= 0 else "a part of the input"
        return f"<Ref of graph {self._graph.name!r}, {which}, {self._state()}>"

    @property
    def _is_aside(self) -> bool:
        """Whether the value has reached this process, and waits there to be asked for."""
        return self._index in self._queue._results

    def _state(self) -> str:
        """As `done` and `get` see it, but neither raises nor changes anything."""
        graph = self._graph
        if self._value is not PENDING:
            return "there" if self._index < 0 else "failed" if type(self._value) is Failure else "fetched"
        if not self._is_aside and (owner := graph.reports.foreign):
            return f"of {owner}"
        if not graph._torn_down and self._queue.has(self._index):
            return "done, not fetched"
        return f"lost: the graph is {graph.state}" if graph.ended else "pending"

    def __copy__(self) -> NoReturn:
        raise ValueError("a Ref cannot be copied; hand over the ref itself, within this process")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ValueError("a Ref cannot be copied; hand over the ref itself, within this process")

    def __reduce__(self) -> NoReturn:
        raise ValueError("a Ref cannot be pickled: results are fetched in the process that compiled the graph. Send ref.get()")
