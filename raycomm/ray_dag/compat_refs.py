"""The refs and futures of an installed graph: Ray's classes by name, type and text, one fetch each, over raycomm's refs.

They hold the graph and two numbers. What they refer to is the graph's, see `CompatGraph`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NoReturn

from ray.experimental.compiled_dag_ref import CompiledDAGFuture, CompiledDAGRef

from raycomm.ray_dag.refs import NotPicklable
from raycomm.runtime.refs import Ref

if TYPE_CHECKING:
    from raycomm.ray_dag.compat_graph import CompatGraph


class Failed:
    """Stands for each result of an execution one of whose outputs failed."""

    __slots__ = ("_ref",)

    def __init__(self, ref: Ref) -> None:
        self._ref = ref

    def raised(self) -> NoReturn:
        """Raise what the method raised: a new exception each time, for each has its own traceback."""
        self._ref.get(0)
        raise AssertionError("a failed ref has no value")


class CompatRef(CompiledDAGRef):
    """What `execute` returns under `install()`. `ray.get` takes it; one fetch, then the value is the caller's alone."""

    # Ray prints the class where a ref is out of place, and code compares that text.
    __module__ = CompiledDAGRef.__module__
    __qualname__ = CompiledDAGRef.__qualname__

    def __init__(self, graph: CompatGraph, execution: int, channel: int | None) -> None:
        self._dag: Any = graph
        self._execution_index = execution
        self._channel_index = channel
        self._ray_get_called = False

    def get(self, timeout: float | None = None) -> Any:
        """The value; blocks until all outputs of the execution are there, or one of them has failed.

        Args:
            timeout: seconds; None: `DAGContext.get_timeout`, 0: take it if it is there, -1: no limit.

        Raises:
            ValueError: it was fetched before.
            what a method of this execution raised, of this output or of another.
            RayChannelTimeoutError: the limit passed; the ref can be fetched again.
            RayCgraphCapacityExceeded: too many earlier results are unfetched; likewise.
            ActorDiedError, RayChannelError: the value will never come.
        """
        if self._ray_get_called:
            raise ValueError("ray.get() can only be called once on a CompiledDAGRef, and it was already called.")
        result = self._dag.fetch(self._execution_index, self._channel_index, timeout)
        self._ray_get_called = True
        return result.raised() if type(result) is Failed else result

    def __del__(self) -> None:
        # May run in any thread, in the middle of anything: only stores.
        try:
            if not self._ray_get_called:
                self._dag.give_up(self._execution_index, self._channel_index)
        except AttributeError:
            return  # half made, or at interpreter exit

    def __reduce__(self) -> NoReturn:
        raise NotPicklable("CompiledDAGRef cannot be pickled.")


class CompatFuture(CompiledDAGFuture):
    """What `execute_async` returns under `install()`: to be awaited once."""

    __module__ = CompiledDAGFuture.__module__
    __qualname__ = CompiledDAGFuture.__qualname__

    def __init__(self, graph: CompatGraph, execution: int, channel: int | None) -> None:
        self._dag: Any = graph
        self._execution_index = execution
        self._channel_index = channel
        self._awaited = False

    def __await__(self) -> Generator[Any, None, Any]:
        """The value; see `CompatRef.get`. Has no limit. If the awaiting task is cancelled, it can be awaited again."""
        if self._awaited:
            raise ValueError("CompiledDAGFuture can only be awaited upon once, and it has already been awaited upon.")
        self._awaited = True
        try:
            result = yield from self._dag.fetch_async(self._execution_index, self._channel_index).__await__()
        except BaseException:
            self._awaited = False
            raise
        return result.raised() if type(result) is Failed else result

    def __del__(self) -> None:
        try:
            if not self._awaited:
                self._dag.give_up(self._execution_index, self._channel_index)
        except AttributeError:
            return

    def __reduce__(self) -> NoReturn:
        raise NotPicklable("CompiledDAGFuture cannot be pickled.")
