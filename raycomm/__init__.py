"""Static graphs of Ray actor method calls over native shared-memory channels.

    import ray, raycomm
    from ray.dag import InputNode            # or: from raycomm import InputNode

    with InputNode() as batch:
        x = w1.forward.bind(batch)           # or: raycomm.bind(w1.forward, batch)
        x = w2.forward.bind(x)
    with raycomm.compile(x) as graph:        # starts a loop in every actor
        ref = graph.execute(batch)           # returns at once
        out = ref.get(timeout=5)             # or ray.get(ref), or await ref

Importing this package loads neither Ray nor torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from raycomm.errors import (
        ActorDiedError,
        ArgumentError,
        CapacityExceededError,
        ChannelClosedError,
        ChannelError,
        ChannelTimeoutError,
        CollectiveError,
        CompileError,
        DeadlockError,
        ExecutionCancelledError,
        RaycommError,
        SerializationError,
        SharedMemoryError,
    )
    from raycomm.graph.calls import bind
    from raycomm.graph.collective import allgather, allreduce, broadcast, reducescatter
    from raycomm.graph.edges import after, with_channel_options
    from raycomm.graph.model import ReduceOp
    from raycomm.graph.nodes import InputNode, MultiOutputNode
    from raycomm.options import Options
    from raycomm.runtime.driver import CompiledGraph
    from raycomm.runtime.lending import empty
    from raycomm.runtime.refs import Ref
    from raycomm.runtime.waiting import wait

__all__ = [
    "ActorDiedError",
    "ArgumentError",
    "CapacityExceededError",
    "ChannelClosedError",
    "ChannelError",
    "ChannelTimeoutError",
    "CollectiveError",
    "CompileError",
    "CompiledGraph",
    "DeadlockError",
    "ExecutionCancelledError",
    "InputNode",
    "MultiOutputNode",
    "Options",
    "RaycommError",
    "ReduceOp",
    "Ref",
    "SerializationError",
    "SharedMemoryError",
    "__version__",
    "after",
    "allgather",
    "allreduce",
    "bind",
    "broadcast",
    "compile",
    "empty",
    "install",
    "reducescatter",
    "uninstall",
    "wait",
    "with_channel_options",
]

_HOME = {
    **dict.fromkeys(("InputNode", "MultiOutputNode"), "raycomm.graph.nodes"),
    "ReduceOp": "raycomm.graph.model",
    "bind": "raycomm.graph.calls",
    **dict.fromkeys(("after", "with_channel_options"), "raycomm.graph.edges"),
    **dict.fromkeys(("allgather", "allreduce", "broadcast", "reducescatter"), "raycomm.graph.collective"),
    "Options": "raycomm.options",
    "CompiledGraph": "raycomm.runtime.driver",
    "Ref": "raycomm.runtime.refs",
    "empty": "raycomm.runtime.lending",
    "wait": "raycomm.runtime.waiting",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(importlib.import_module(_HOME.get(name, "raycomm.errors")), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'raycomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def compile(node: Any, **options: Any) -> CompiledGraph:
    """Compile the graph that ends in `node` and start a loop in each of its actors.

    Args:
        node: from `raycomm.bind`, from `actor.method.bind`, or a `MultiOutputNode` of such; both kinds can be mixed.
        **options: settings by name, see `raycomm.options`; also from the environment as ``RAYCOMM_<NAME>``. Ray's underscored
            spellings are accepted.

    Returns:
        The running graph, ready for `execute`. It is also a context manager that tears itself down. Blocks until every actor
        has answered, which is as long as the slowest constructor takes; after 10 s it logs who is pending.

    Raises:
        CompileError: wrong graph or options, an actor on another node, a missing package. Nothing is left running.
        ActorDiedError: an actor is dead.
        ChannelTimeoutError: `compile_timeout` passed.
    """
    from raycomm.errors import CompileError
    from raycomm.options import Options

    if sys.platform != "linux":
        raise CompileError(f"raycomm runs graphs on Linux (memfd, futex, pidfd); this is {sys.platform}")
    from raycomm.runtime.compile import compile_graph

    adapter, ref_type, at_shutdown = _ray_dag()
    return compile_graph(node, Options.load(options), adapter, ref_type, at_shutdown=at_shutdown)


def install() -> None:
    """Make Ray's own `dag.experimental_compile(...)` return raycomm graphs in this process, for code that one cannot edit.

    Ray's defaults, limits and errors hold there: 10 s to submit and to get, `RayCgraphCapacityExceeded` at the in-flight limit,
    one `get` per ref. Idempotent. An actor that compiles graphs is another process: call this in its constructor, or let Ray call
    it in every worker with ``runtime_env={"worker_process_setup_hook": "raycomm.install"}``.

    Raises:
        ImportError: this Ray has no compiled graphs.
    """
    from raycomm.ray_dag.install import install

    install()


def uninstall() -> None:
    """Undo `install`: Ray's method is back. Graphs compiled meanwhile go on as they are."""
    from raycomm.ray_dag.install import uninstall

    uninstall()


def _ray_dag() -> tuple[Any, Any, Any]:
    """The adapter to Ray's graphs, the ref class that `ray.get` accepts, and what has `ray.shutdown` end a graph.

    Without Ray's Compiled Graphs `ref.get()` it is, and a graph finds out when it waits.
    """
    try:
        from raycomm.ray_dag.read import ADAPTER
        from raycomm.ray_dag.refs import RayRef
    except ImportError:
        from raycomm.runtime.refs import Ref

        return None, Ref, None
    try:
        from raycomm.ray_dag.shutdown import end_with_ray
    except ImportError:
        return ADAPTER, RayRef, None
    return ADAPTER, RayRef, end_with_ray
