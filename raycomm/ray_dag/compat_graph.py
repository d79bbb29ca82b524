"""A raycomm graph that behaves as what `experimental_compile` returns in Ray: its limits, its errors, one fetch per ref.

    execute ──► pending[n] = raycomm's refs ──► get: wait for all outputs of n, or one failure ──► results[n] ──► the caller

An execution is in flight until its results were brought over (by a `get` of it or of a later one) or all its refs are gone. It is
buffered from then until each of its results was fetched or its ref is gone. Refs die in any thread, in the middle of anything:
they only leave a note, which the next call reads.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from typing import Any, Final, NoReturn

import ray
import ray.exceptions
from ray.dag import DAGContext

from raycomm.errors import RaycommError
from raycomm.options import check_limit
from raycomm.ray_dag import compat_errors
from raycomm.ray_dag.compat_nodes import CompatNodes
from raycomm.ray_dag.compat_refs import CompatFuture, CompatRef, Failed
from raycomm.ray_dag.compat_wait import wait_for_all, wait_for_all_async
from raycomm.ray_dag.visualize import ascii_text, write_picture
from raycomm.runtime.driver import CompiledGraph
from raycomm.runtime.refs import Ref

logger = logging.getLogger("raycomm")

_NO_LIMIT: Final = -1


class CompatGraph:
    """What `dag.experimental_compile()` returns under `install()`.

    Has all that is public in Ray's class and, by the same names, what raycomm's own graph has beyond it (`status`, `plan`, ...).

    Attributes:
        graph: the raycomm graph underneath.
    """

    def __init__(
        self,
        graph: CompiledGraph,
        nodes: CompatNodes,
        *,
        dag_id: str,
        enable_asyncio: bool,
        max_inflight: int,
        max_buffered: int,
        submit_timeout: float,
        get_timeout: float,
    ) -> None:
        self.graph = graph
        self._nodes = nodes
        self._dag_id = dag_id
        self._enable_asyncio = enable_asyncio
        self._max_inflight_executions = max_inflight
        self._max_buffered_results = max_buffered
        self._submit_timeout = submit_timeout
        self._get_timeout = get_timeout
        self._execution_index = -1
        self._channels = frozenset(range(len(nodes.outputs)))
        self._is_teardown = False
        self._teardown_over = threading.Event()
        self._teardown_by: int | None = None
        # Held for a few steps only, never while waiting. A signal handler that strikes in between may take it again.
        self._lock = threading.RLock()
        self._under_way: set[object] = set()  # being submitted
        self._dropped: deque[tuple[int, int]] = deque()
        # By execution: refs of all outputs; results by output; outputs fetched; outputs whose ref is gone.
        self._pending: dict[int, tuple[Ref, ...]] = {}
        self._results: dict[int, dict[int, Any]] = {}
        self._got: dict[int, set[int]] = {}
        self._gone: dict[int, set[int]] = {}
        # Dropped without teardown, the loops are let go at once, as in Ray, but without waiting for them.
        weakref.finalize(self, graph.close_at_exit, 0.0).atexit = False

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """Submit one execution; a ref, or a list of refs if the graph ends in a `MultiOutputNode`.

        Blocks only while executions whose refs were dropped have still to make room, up to the submit timeout.

        Raises:
            ValueError: the graph was compiled for asyncio, or wrong arguments.
            RayCgraphCapacityExceeded: as many executions as allowed are in flight.
            RayChannelTimeoutError, RayChannelError, ActorDiedError, TypeError: not submitted.
        """
        if self._enable_asyncio:
            raise ValueError("Use execute_async if enable_asyncio=True")
        named = self._nodes.arguments(args, kwargs)
        place = object()
        try:
            self._reserve(place)
            refs = self.graph.execute(*args, timeout=self._submit_timeout, **named)
            return self._enter(place, refs, CompatRef)
        except RaycommError as error:
            raise compat_errors.submitting(error, self._submit_timeout) from None
        finally:
            self._under_way.discard(place)

    async def execute_async(self, *args: Any, **kwargs: Any) -> Any:
        """Submit one execution; a future, or a list of futures. See `execute`."""
        if not self._enable_asyncio:
            raise ValueError("Use execute if enable_asyncio=False")
        named = self._nodes.arguments(args, kwargs)
        place = object()
        try:
            self._reserve(place)
            refs = await self.graph.execute_async(*args, timeout=self._submit_timeout, **named)
            return self._enter(place, refs, CompatFuture)
        except RaycommError as error:
            raise compat_errors.submitting(error, self._submit_timeout) from None
        finally:
            self._under_way.discard(place)

    def _reserve(self, place: object) -> None:
        """Count one execution more as in flight, until it is entered or `place` is given back."""
        with self._lock:
            trash = self._settle_dropped()
            count = len(self._pending) + len(self._under_way)
            if count < self._max_inflight_executions or self._is_teardown:
                self._under_way.add(place)
                return
        del trash
        raise compat_errors.too_many_in_flight(self.graph.name, self._max_inflight_executions, count)

    def _enter(self, place: object, made: Ref | list[Ref], kind: type[Any]) -> Any:
        refs = tuple(made) if isinstance(made, list) else (made,)
        # raycomm's own number: it also holds when two submissions come back in another order than they went.
        index = max(ref._index for ref in refs)
        with self._lock:
            self._pending[index] = refs
            self._under_way.discard(place)
            self._execution_index = max(self._execution_index, index)
        if not self._nodes.returns_list:
            return kind(self, index, None)
        return [kind(self, index, channel) for channel in range(len(refs))]

    def fetch(self, index: int, channel: int | None, timeout: float | None) -> Any:
        """The result of one output, or `Failed`; brings over this execution and all earlier ones first."""
        limit = self._get_timeout if timeout is None else check_limit("timeout", timeout, "get")
        end = None if limit == _NO_LIMIT else time.monotonic() + limit
        while True:
            with self._lock:
                trash = self._settle_dropped()
                if index in self._results:
                    return self._take(index, channel or 0)
                coming = min((pending for pending in self._pending if pending <= index), default=None)
                if coming is None:
                    raise ValueError(f"the result of execution {index} was already fetched")
                if len(self._results) >= self._max_buffered_results:
                    raise compat_errors.too_many_buffered(self.graph.name, self._max_buffered_results, len(self._results))
                refs = self._pending[coming]
            del trash
            try:
                failed = wait_for_all(refs, end)
            except RaycommError as error:
                raise compat_errors.fetching(error, self._get_timeout, limit) from None
            self._bring_over(coming, refs, failed)
            del refs

    async def fetch_async(self, index: int, channel: int | None) -> Any:
        """As `fetch`, of this execution alone; no limit. A cancelled waiter changes nothing."""
        with self._lock:
            trash = self._settle_dropped()
            refs = self._pending.get(index)
        del trash
        if refs is not None:
            try:
                failed = await wait_for_all_async(refs)
            except RaycommError as error:
                raise compat_errors.fetching(error, self._get_timeout, None) from None
            self._bring_over(index, refs, failed)
            del refs
        with self._lock:
            return self._take(index, channel or 0)

    def _bring_over(self, index: int, refs: tuple[Ref, ...], failed: Ref | None) -> None:
        """Move an execution's outcome from the refs to the results; another thread may have done it meanwhile."""
        with self._lock:
            if self._pending.get(index) is not refs:
                return
            gone = self._gone.get(index, ())
            self._results[index] = {
                channel: ref.get(0) if failed is None else Failed(failed)
                for channel, ref in enumerate(refs)
                if channel not in gone
            }
            del self._pending[index]

    def _take(self, index: int, channel: int) -> Any:
        try:
            result = self._results[index].pop(channel)
        except KeyError:
            raise ValueError(f"the result of execution {index} was already fetched") from None
        self._got.setdefault(index, set()).add(channel)
        self._forget_if_done(index)
        return result

    def give_up(self, index: int, channel: int | None) -> None:
        """A ref died unfetched. Only a store: see `_settle_dropped`."""
        self._dropped.append((index, channel or 0))

    def _settle_dropped(self) -> list[Any]:
        """Free what refs that died stood for. The caller lets go of what it returns after the lock: finalizers may call back."""
        trash: list[Any] = []
        while self._dropped:
            index, channel = self._dropped.popleft()
            if index in self._results:
                trash.append(self._results[index].pop(channel, None))
            if index in self._results or index in self._pending:
                self._gone.setdefault(index, set()).add(channel)
                trash.append(self._forget_if_done(index))
        return trash

    def _forget_if_done(self, index: int) -> Any:
        if self._got.get(index, set()) | self._gone.get(index, set()) != self._channels:
            return None
        self._got.pop(index, None)
        self._gone.pop(index, None)
        return self._results.pop(index, None), self._pending.pop(index, None)

    @property
    def is_teardown(self) -> bool:
        """Whether `teardown` was called."""
        return self._is_teardown

    def get_id(self) -> str:
        """The id that refs show."""
        return self._dag_id

    def teardown(self, kill_actors: bool = False) -> None:
        """End the loops; idempotent, from any thread. Blocks up to `DAGContext.teardown_timeout`, also if another
        thread came first.

        Args:
            kill_actors: then kill all actors of the graph, those that are still in a method included.
        """
        limit = DAGContext.get_current().teardown_timeout
        with self._lock:
            first = self._teardown_by is None
            if first:
                self._teardown_by = threading.get_ident()
            self._is_teardown = True
        if not first:
            # Not in a signal handler that has struck the first one: it would wait for itself.
            if self._teardown_by != threading.get_ident():
                self._teardown_over.wait(limit)
            if kill_actors:
                self._kill_all()
            return
        try:
            if not self.graph.is_teardown:  # by the interpreter's exit, which has waited
                self.graph.teardown(limit, kill_actors=kill_actors)
            if kill_actors:
                self._kill_all()
        finally:
            self._teardown_over.set()

    def _kill_all(self) -> None:
        for handle in self._nodes.handles:
            logger.info("graph %r: killing actor %s", self.graph.name, handle)
            ray.kill(handle)

    def visualize(
        self, filename: str = "compiled_graph", format: str = "png", view: bool = False, channel_details: bool = False
    ) -> str:
        """The graph as text for Graphviz, which also draws it to a file; or, with ``format="ascii"``, as a drawing of characters.

        Args:
            filename: without extension; not used for "ascii".
            format: one of Graphviz's, or "ascii".
            view: open the file; for "ascii", print the drawing.
            channel_details: label the edges with what carries them; not for "ascii".

        Raises:
            ValueError: `channel_details` with "ascii". ImportError: the package graphviz is not installed.
        """
        if format != "ascii":
            return write_picture(self._nodes, filename, format, view, channel_details)
        if channel_details:
            raise ValueError("Parameters 'channel_details' are not compatible with 'ascii' format.")
        text = ascii_text(self._nodes)
        if view:
            print(text)
        return text

    def __str__(self) -> str:
        return f"CompiledDAG({self._dag_id})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self} cannot be pickled: it belongs to the process that compiled it")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "graph":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.graph, name)

    # Names of Ray's bookkeeping that its own tests, and some tools, look at.

    @property
    def _result_buffer(self) -> dict[int, dict[int, Any]]:
        return self._looked_at(self._results)

    @property
    def _got_ref_idxs(self) -> dict[int, set[int]]:
        return self._looked_at(self._got)

    @property
    def _destructed_ref_idxs(self) -> dict[int, set[int]]:
        return self._looked_at(self._gone)

    def _looked_at(self, table: dict[int, Any]) -> dict[int, Any]:
        with self._lock:
            trash = self._settle_dropped()
            shown = dict(table)
        del trash
        return shown
