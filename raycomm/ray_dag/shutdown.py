"""Ends graphs when `ray.shutdown` is called: Ray keeps a table of its compiled graphs, and tears down what stands there first.

Without that, `execute` would hand out refs until somebody waits and finds the actors dead.
"""

from __future__ import annotations

import uuid
import weakref

from ray.dag import compiled_dag_node

from raycomm.runtime.driver import CompiledGraph


class ShutdownEntry:
    """Stands for one graph in Ray's table, which holds it weakly; so the graph has to keep it.

    Not the graph itself: Ray would have its actors killed, and those of a detached lifetime may serve others.
    """

    def __init__(self, graph: CompiledGraph) -> None:
        self._graph = weakref.ref(graph)

    def teardown(self, kill_actors: bool = False) -> None:
        """Called by `ray.shutdown`."""
        graph = self._graph()
        if graph is not None:
            graph.close_with_ray()


def end_with_ray(graph: CompiledGraph) -> object:
    """Have `ray.shutdown` end `graph`, for as long as what this returns is kept. A Ray without such a table leaves it to the
    graph's next wait to find out."""
    table = getattr(compiled_dag_node, "_compiled_dags", None)
    entry = ShutdownEntry(graph)
    if table is not None:
        table[uuid.uuid4().hex] = entry
    return entry
