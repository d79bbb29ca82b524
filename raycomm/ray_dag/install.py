"""`raycomm.install()`: `dag.experimental_compile(...)` gives a raycomm graph, for code that one cannot edit.

One attribute of one class is replaced, `ray.dag.DAGNode.experimental_compile`, in this process. Actors that compile graphs
themselves (a Serve replica) are other processes: call `raycomm.install()` in their constructor, or have Ray call it in each
worker with ``runtime_env={"worker_process_setup_hook": "raycomm.install"}``.
"""

from __future__ import annotations

import functools
import inspect
import uuid
from typing import Any, Final

import ray.dag.compiled_dag_node
from ray.dag import DAGContext, DAGNode, constants
from ray.experimental.channel.communicator import Communicator

from raycomm.options import Options
from raycomm.ray_dag.compat_graph import CompatGraph
from raycomm.ray_dag.compat_nodes import CompatAdapter, CompatNodes
from raycomm.ray_dag.profiling import ProfiledLoop
from raycomm.runtime.compile import compile_graph
from raycomm.runtime.refs import Ref

_METHOD: Final = "experimental_compile"
_MOST_IN_FLIGHT: Final = 4096  # of raycomm's own graphs; beyond it `execute` waits for room


def install() -> None:
    """Make `experimental_compile` return raycomm graphs in this process. Idempotent."""
    current: Any = DAGNode.experimental_compile
    if _is_ours(current):
        return

    @functools.wraps(current)
    def compile_with_raycomm(self: Any, *args: Any, **kwargs: Any) -> CompatGraph:
        known = tuple(inspect.signature(experimental_compile).parameters)[1:]
        for name in kwargs:
            if name not in known:
                raise TypeError(f"{_METHOD}() got an unexpected keyword argument {name!r}; it takes {', '.join(known)}")
        return experimental_compile(self, *args, **kwargs)

    setattr(DAGNode, _METHOD, compile_with_raycomm)


def uninstall() -> None:
    """Give Ray its method back. Graphs that were compiled stay as they are. Does nothing if it is not installed."""
    current: Any = DAGNode.experimental_compile
    if _is_ours(current):
        setattr(DAGNode, _METHOD, current.__wrapped__)


def _is_ours(method: Any) -> bool:
    # The replacement itself remembers what it replaced. wraps() gives it Ray's names; where its code is from tells whose it is.
    return hasattr(method, "__wrapped__") and getattr(method, "__globals__", None) is globals()


# By Ray's name, which is the user's when Python says that arguments do not fit.
def experimental_compile(
    node: Any,
    _submit_timeout: float | None = None,
    _buffer_size_bytes: int | None = None,
    enable_asyncio: bool = False,
    _max_inflight_executions: int | None = None,
    _max_buffered_results: int | None = None,
    _overlap_gpu_communication: bool | None = None,
    _default_communicator: Any = "create",
) -> CompatGraph:
    """Ray's signature and defaults. `_buffer_size_bytes` is checked only: raycomm's channels take messages of any size."""
    context = DAGContext.get_current()
    if node.is_cgraph_output_node:
        raise ValueError(
            "It is not allowed to call `experimental_compile` on the same DAG object multiple times no matter whether `teardown` "
            "is called or not. Please reuse the existing compiled DAG or create a new one."
        )
    size = context.buffer_size_bytes if _buffer_size_bytes is None else _buffer_size_bytes
    max_inflight = context.max_inflight_executions if _max_inflight_executions is None else _max_inflight_executions
    max_buffered = context.max_buffered_results if _max_buffered_results is None else _max_buffered_results
    for name, value in (
        ("buffer_size_bytes", size),
        ("max_inflight_executions", max_inflight),
        ("max_buffered_results", max_buffered),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ValueError(f"`{name}` must be a positive integer, found {value!r}")
    _check_communicator(_default_communicator)
    submit_timeout = context.submit_timeout if _submit_timeout is None else _submit_timeout
    node.is_cgraph_output_node = True
    try:
        nodes = CompatNodes(node)
        if _default_communicator is None:
            nodes.check_communicators()
        default = None if isinstance(_default_communicator, str) else _default_communicator
        options = Options.load(
            {
                "max_inflight": min(max_inflight, _MOST_IN_FLIGHT),
                # Room for what is moved aside; Ray's limit, which counts otherwise, is kept by the graph made here.
                "max_buffered_results": max_buffered + max_inflight,
                "submit_timeout": submit_timeout,
                # Ray knows no limit for `await`, which the option would also hold for.
                "get_timeout": None if enable_asyncio else context.get_timeout,
                "teardown_timeout": context.teardown_timeout,
            }
        )
        loop = functools.partial(ProfiledLoop, nodes.bind_indexes) if constants.RAY_CGRAPH_ENABLE_PROFILING else None
        compiled = compile_graph(node, options, CompatAdapter(default), Ref, loop=loop)
    except BaseException:
        node.is_cgraph_output_node = False  # nothing runs: the same node may be compiled again, once the reason is gone
        raise
    graph = CompatGraph(
        compiled,
        nodes,
        dag_id=uuid.uuid4().hex,
        enable_asyncio=enable_asyncio,
        max_inflight=max_inflight,
        max_buffered=max_buffered,
        submit_timeout=submit_timeout,
        get_timeout=context.get_timeout,
    )
    # What `ray.shutdown` tears down, actors included.
    ray.dag.compiled_dag_node._compiled_dags[graph.get_id()] = graph
    return graph


def _check_communicator(given: Any) -> None:
    if isinstance(given, str):
        if given != "create":
            raise ValueError(f"The only allowed string for default_communicator is 'create', got {given}")
    elif given is not None and not isinstance(given, Communicator):
        raise ValueError(f"The default_communicator must be None, a string, or a Communicator, got {type(given)}")
