"""Results at the driver: one queue per output channel, in order, until their refs take them.

`fetch` does its whole work, waiting for its turn included, in one native call. So Ctrl-C, which can strike between any two Python
instructions, never leaves a lock taken or a result lost, and any thread may call at any time.
"""

from __future__ import annotations

import asyncio
from typing import Any

from raycomm import _core
from raycomm.channel import NO_LIMIT, Deadline, ShmArena, ShmReader
from raycomm.observe.notice import Notice
from raycomm.options import Options, check_limit
from raycomm.plan.actions import FromChannel, Plan
from raycomm.runtime.blueprint import shares_tensors
from raycomm.runtime.refs import Ref

_ONE_OUTPUT_S = 1.0
_SEVERAL_OUTPUTS_S = 0.05  # then `CompiledGraph.relieve` looks whether the other outputs stand in the way


def first_part(outputs: int) -> float:
    """Seconds of the first part of a wait. Almost every wait gets by with it, so nothing is prepared for what comes after."""
    return _ONE_OUTPUT_S if outputs == 1 else _SEVERAL_OUTPUTS_S


def first_of(call: str, limit: float | None, first_s: float) -> float:
    """The first part of a wait with a limit, in seconds; `call` is the user's, for the message if that is no limit."""
    if limit is None or limit == NO_LIMIT:
        return first_s
    return min(check_limit("timeout", limit, call), first_s)


def rest_of(limit: float | None, first_s: float) -> Deadline:
    """What is left of a wait after `first_of` has passed."""
    return Deadline(None if limit is None or limit == NO_LIMIT else max(0.0, limit - first_s))


def _blocked_loop() -> str:
    """What to add in the log about a `get` that blocks an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return ""
    return ". This get blocks the event loop that it was called in: write 'await ref' there"


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
        first = graph.first_s if timeout is None else first_of("Ref.get", timeout, graph.first_s)
        late = False
        try:  # one native call, without preparing for what comes if it takes long
            self.reader.fetch(ref, self._results, self._unwanted, index, graph.options.max_buffered_results, first)
        except _core.TimedOut:
            late = True  # waited for outside this clause: Ctrl-C would show as "during handling of TimedOut"
        except (_core.Closed, _core.Overfull, _core.Misuse) as error:
            graph.raise_native(error, index)
        if late:
            self._wait(ref, index, timeout)
        self._hand_over(ref, index)

    def try_take(self, ref: Ref) -> bool:
        """Take the value for `ref` if it is there; False if not yet. Other errors are raised."""
        graph = ref._graph
        if graph._torn_down:
            graph.check_open()
        try:
            self.reader.fetch(ref, self._results, self._unwanted, ref._index, graph.options.max_buffered_results, 0.0)
        except _core.TimedOut:
            return False
        except (_core.Closed, _core.Overfull, _core.Misuse) as error:
            graph.raise_native(error, ref._index)
        self._hand_over(ref, ref._index)
        return True

    def has(self, index: int) -> bool:
        """Whether the result of execution `index` has been published: `get` would not wait for an actor."""
        return self.reader.published > index

    def take_aside(self, index: int, limit: int, timeout_s: float) -> None:
        """Move results up to execution `index` aside, until `limit` are kept; they stay for their refs.

        Raises:
            raycomm._core.Overfull: as many are kept already. TimedOut: they are not all there within `timeout_s` seconds.
        """
        if index < self.reader.taken:
            return
        if len(self._results) >= limit:
            raise _core.Overfull
        self.reader.fetch(None, self._results, self._unwanted, index, limit - 1, timeout_s)

    def clear(self) -> None:
        """After the end, when nothing can be fetched any more: forget what waits for its ref."""
        self._results.clear()

    def give_up(self, index: int) -> None:
        """The ref for `index` died. Only dictionary and set operations: may run inside a garbage collection, in any thread."""
        # First unwanted, then a look at what has been taken meanwhile: the other way round a result taken in between would stay.
        self._unwanted.add(index)
        if index < self.reader.taken:
            self._unwanted.discard(index)
            self._results.pop(index, None)

    def _wait(self, ref: Ref, index: int, limit: float | None) -> None:
        """The long way: limits, notices, and errors made into ones that say what happened."""
        graph = ref._graph
        deadline = rest_of(limit, graph.first_s)
        notice = Notice()
        graph.relieve()
        while not deadline.over:
            try:
                left = deadline.left(at_most=min(notice.left(), graph.look_every_s))
                self.reader.fetch(ref, self._results, self._unwanted, index, graph.options.max_buffered_results, left)
                return
            except _core.TimedOut:
                graph.relieve()
                notice.give(lambda: graph.reports.get_waits(index, self.channel) + _blocked_loop())
            except (_core.Closed, _core.Overfull, _core.Misuse) as error:
                graph.raise_native(error, index)
        raise graph.reports.get_timed_out(limit, index, self.channel)

    def _hand_over(self, ref: Ref, index: int) -> None:
        # Taken before it was asked for: left with the ref before it leaves the results, so between the two it is in both, never
        # in neither. (Missing there too: another thread has just done the same.)
        results = self._results
        if index in results:
            try:
                ref._value = results[index]
            except KeyError:
                return
            results.pop(index, None)


def queues_of(plan: Plan, options: Options, arena: ShmArena) -> tuple[OutputQueue, ...]:
    """One per channel that ends at the driver, in the order of the graph's outputs; `arena` is the driver's."""
    queues: dict[int, OutputQueue] = {}
    for output in plan.outputs:
        if isinstance(output, FromChannel) and output.channel not in queues:
            channel = plan.channels[output.channel]
            index, share = channel.readers.index(0), shares_tensors(channel, options)
            reader = arena.reader(channel.writer, channel.id, index, drain=True, share_tensors=share)
            queues[channel.id] = OutputQueue(channel.id, reader)
    return tuple(queues.values())
